# SPDX-License-Identifier: Apache-2.0
"""The JSON between gateways and schedulers, with Llumnix's fields.

Unknown fields are ignored; known ones must have the right type and size. Additions to Llumnix: `priority` and the other
fields of `Request` (`prompt_blocks` only after the scheduler asked for it by `prompt_block_size`),
`excluded_endpoints`, the instances that failed the request, and `dp_rank_local`, the rank within the API server if
there are several.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Self, TypeVar

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType, field
from msgspec.structs import replace

from llumlet.contract.block_hashes import HASH_BYTES, chain, root_of
from llumlet.process.addresses import Address
from llumlet.protocol.infer_type import InferType
from llumsched.causes import Cause
from llumsched.request import MOST_PROMPT_BLOCKS, Count, Milliseconds, Name, Request

SCHEDULER_PORT: Final = 8002
CMS_PORT: Final = SCHEDULER_PORT + 1
"""Default ports of a scheduler's HTTP service and of its CMS, which is at the next port."""
MAX_BODY_BYTES = 16 << 20
"""Largest body of a call. The token ids of a prompt of a million take half of it."""

MOST_EXCLUDED: Final = 10_000
"""Largest number of instances that a request may exclude: as many as a cluster has."""
NOT_IN_TIME: Final = "no endpoint in time"
"""Beginning of the refusal of a request that may wait and would be placed if it might not. The status is the same as
for no endpoint."""
MODEL_AWAY: Final = "no endpoint for the model now"
"""Beginning of the refusal of a request for a known model that no instance serves."""
MODEL_NEEDED: Final = "model is needed"
"""Beginning of the refusal of a request that names no model although there are several."""
RequestId = Annotated[str, Meta(min_length=1, max_length=1024)]
"""A request id that is not empty, as requests with equal ids count as retries."""
Port = Annotated[int, Meta(ge=0, le=65535)]
T = TypeVar("T")


class HostPort(Struct):
    host: Name
    port: Port

    def __bool__(self) -> bool:
        return bool(self.host and self.port)

    @property
    def address(self) -> Address:
        return Address(self.host, self.port)


class LLMInstance(Struct):
    id: Name
    endpoint: HostPort
    model: Name = ""
    infer_type: Name = InferType.NEUTRAL
    version: int = 0
    aux_ip: Name = ""
    aux_port: int = 0
    """Address for KV transfers (the llumlet's), for gateways of Llumnix. Ours does not read it."""
    dp_rank: int = 0
    dp_size: int = 0
    dp_rank_local: int | UnsetType = UNSET
    prompt_block_size: int | UnsetType = UNSET
    """Tokens per block of the `prompt_blocks` that this scheduler wants for the model's next requests."""
    predicted_ttft: Milliseconds | UnsetType = UNSET
    """Predictions that led to this placement: time from now to the first token, and time between two."""
    predicted_tpot: Milliseconds | UnsetType = UNSET
    refuses_late: bool | UnsetType = UNSET
    """True if this scheduler refuses a request that may wait when its objectives would be missed."""
    cached_tokens: int | UnsetType = UNSET
    """Tokens of the prompt known to be in the instance's prefix cache."""


class SchedulingRequest(Request, frozen=True, kw_only=True):
    """A request for a place. The answer is the same with its `scheduling_result`."""

    id: RequestId
    gateway_id: Name = ""
    scheduling_mode: Literal["neutral", "pd_batch", "pd_staged"] = field(default_factory=lambda: "neutral")
    """The mode, which is always written and thus has no default."""
    scheduling_stage: Literal["", "prefill", "decode"] = ""
    prompt_token_ids: Raw | UnsetType = UNSET
    """Token ids, which are echoed. They give `prompt_num_tokens` and `prompt_blocks` if those are missing."""
    scheduling_result: Annotated[list[LLMInstance], Meta(max_length=16)] | None = None
    excluded_endpoints: Annotated[list[Name], Meta(max_length=MOST_EXCLUDED)] | UnsetType = UNSET
    """Instances that failed the request. If a gateway never sends this field, retries are recognised by their ids."""

    @property
    def stages(self) -> tuple[InferType, ...]:
        """Infer types to place the request for. Raises ValueError for a staged request without its stage."""
        if self.scheduling_mode == "neutral":
            return (InferType.NEUTRAL,)
        if self.scheduling_mode == "pd_batch":
            return (InferType.PREFILL, InferType.DECODE)
        if not self.scheduling_stage:
            raise ValueError("scheduling_mode pd_staged needs a scheduling_stage, prefill or decode")
        return (InferType(self.scheduling_stage),)

    def counted(self) -> Self:
        """The same with the number of the prompt's tokens. Raises ValueError for invalid token ids or block names."""
        if len(self.prompt_blocks) % HASH_BYTES or (self.prompt_blocks and not self.prompt_block_size):
            size = self.prompt_block_size
            raise ValueError(f"prompt_blocks: {len(self.prompt_blocks)} bytes are not names of blocks of {size} tokens")
        if self.prompt_num_tokens or isinstance(self.prompt_token_ids, UnsetType):
            return self
        return replace(self, prompt_num_tokens=len(self._token_ids()))

    def named(self, block_size: int) -> Self:
        """The same with the names of the prompt's blocks, if it has token ids and no names. Raises ValueError for
        invalid token ids."""
        if self.prompt_blocks or not block_size or isinstance(self.prompt_token_ids, UnsetType):
            return self
        token_ids = self._token_ids()[: MOST_PROMPT_BLOCKS * block_size]
        names = b"".join(chain(token_ids, block_size, root_of(block_size)))
        return replace(self, prompt_blocks=names, prompt_block_size=block_size)

    def _token_ids(self) -> list[int]:
        assert not isinstance(self.prompt_token_ids, UnsetType)
        try:
            return msgspec.json.decode(self.prompt_token_ids, type=list[Count] | None) or []
        except msgspec.MsgspecError as error:
            raise ValueError(f"prompt_token_ids: {error}") from error


class Placing(Struct):
    """The fields of an answer to `/schedule` that a gateway reads."""

    scheduling_result: list[LLMInstance] = []


class Question(SchedulingRequest, frozen=True):
    """A question where a request would go."""

    id: Name = ""
    metrics: Annotated[tuple[Name, ...], Meta(max_length=64)] = ()
    """Further metrics to report beside those that the policy compares."""

    @classmethod
    def of_query(cls, query: Mapping[str, str]) -> Self:
        """The question in a URL's query, where commas separate `metrics`. Raises msgspec.ValidationError."""
        fields: dict[str, Any] = dict(query)
        if "metrics" in fields:
            fields["metrics"] = [name for part in fields["metrics"].split(",") if (name := part.strip())]
        return msgspec.convert(fields, cls, strict=False)


class Instances(Struct):
    """The answer to `/instances`: the instances that a scheduler knows."""

    instances: list[LLMInstance] = []


class Report(Struct):
    """The state of one request, by its gateway (lite mode)."""

    id: RequestId
    instance_id: Name
    kind: Literal["state_update", "prefill_done"] = "state_update"
    model: Name = ""
    infer_type: InferType = InferType.NEUTRAL
    gateway_id: Name = ""
    num_tokens: Count = 0


class Avoided(Struct):
    """An instance to which a gateway sends nothing now."""

    endpoint: HostPort
    cause: Cause
    reason: Annotated[str, Meta(max_length=1024)] = ""
    since_s: Annotated[float, Meta(ge=0)] = 0.0
    """Seconds for which it has been avoided."""


class Complaining(Struct):
    """All instances that a gateway avoids. Valid for `ttl_s` seconds or until its next message."""

    gateway_id: Annotated[str, Meta(min_length=1, max_length=1024)]
    instances: Annotated[list[Avoided], Meta(max_length=MOST_EXCLUDED)]
    ttl_s: Annotated[float, Meta(gt=0, le=3600)]
    host: Name = ""
    """The gateway's machine, whose gateways and workers have one vote together; "" gives it its own vote."""


class Attained(Struct):
    """Requests for one model with objectives that ended since a gateway began: those that met all, and those that did
    not."""

    model: Name
    num_met: Count
    num_missed: Count


class Attaining(Struct):
    """A gateway's counts of objectives. Models without objectives are left out."""

    gateway_id: Annotated[str, Meta(min_length=1, max_length=1024)]
    models: Annotated[list[Attained], Meta(max_length=10_000)]


def decode(body: bytes, of: type[T]) -> T:
    """The message in a body. Raises ValueError that locates the fault."""
    try:
        return msgspec.json.decode(body, type=of)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"bad JSON: {error or 'nested too deeply'}") from error


def encode(value: Any) -> bytes:
    return msgspec.json.encode(value)
