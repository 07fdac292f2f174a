# SPDX-License-Identifier: Apache-2.0
"""The JSON of the scheduler's API, field for field that of Llumnix. What is not known is ignored; what is known must
have the right type and size. Additions: `excluded_endpoints`, with which a second try names who failed the first, and
`dp_rank_local`, the rank among those of its API server, unless it is the only one there."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from llumlet.protocol.infer_type import InferType
from llumsched.causes import Cause
from llumsched.cluster.instance import Instance

MAX_BODY_BYTES = 16 << 20
"""Of one call. The token ids of a prompt of a million take half of it."""

Name = Annotated[str, Meta(max_length=1024)]
RequestId = Annotated[str, Meta(min_length=1, max_length=1024)]
"""Not empty: requests without one would all be the same, each a retry of the one before."""
Count = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
Port = Annotated[int, Meta(ge=0, le=65535)]
T = TypeVar("T")


class Endpoint(Struct):
    host: Name
    port: Port


class LLMInstance(Struct):
    id: Name
    endpoint: Endpoint
    model: Name = ""
    infer_type: Name = InferType.NEUTRAL
    version: int = 0
    aux_ip: Name = ""
    aux_port: int = 0
    dp_rank: int = 0
    dp_size: int = 0
    dp_rank_local: int | UnsetType = UNSET


class SchedulingRequest(Struct, omit_defaults=True):
    id: RequestId
    model: Name = ""
    gateway_id: Name = ""
    scheduling_mode: Literal["neutral", "pd_batch", "pd_staged"] = "neutral"
    scheduling_stage: Literal["", "prefill", "decode"] = ""
    prompt_num_tokens: Count = 0
    prompt_token_ids: Raw | UnsetType = UNSET
    """Echoed, and counted if `prompt_num_tokens` is missing."""
    scheduling_result: Annotated[list[LLMInstance], Meta(max_length=16)] | None = None
    excluded_endpoints: Annotated[list[Name], Meta(max_length=1024)] | UnsetType = UNSET
    """Also if there is none: a gateway that leaves it out has its retries known by their ids."""

    @property
    def stages(self) -> tuple[InferType, ...]:
        """Raises ValueError for a staged request without its stage."""
        if self.scheduling_mode == "neutral":
            return (InferType.NEUTRAL,)
        if self.scheduling_mode == "pd_batch":
            return (InferType.PREFILL, InferType.DECODE)
        if not self.scheduling_stage:
            raise ValueError("scheduling_mode pd_staged needs a scheduling_stage, prefill or decode")
        return (InferType(self.scheduling_stage),)

    def count_tokens(self) -> int:
        """Raises ValueError for token ids that are none."""
        if self.prompt_num_tokens or isinstance(self.prompt_token_ids, UnsetType):
            return self.prompt_num_tokens
        try:
            return len(msgspec.json.decode(self.prompt_token_ids, type=list[Count] | None) or ())
        except msgspec.MsgspecError as error:
            raise ValueError(f"prompt_token_ids: {error}") from error


class Question(SchedulingRequest):
    """Where a request would go: one in particular, or any such."""

    id: Name = ""


class Report(Struct):
    """Of one request, by its gateway (lite mode)."""

    id: RequestId
    instance_id: Name
    kind: Literal["state_update", "prefill_done"] = "state_update"
    model: Name = ""
    infer_type: Literal["neutral", "prefill", "decode"] = "neutral"
    gateway_id: Name = ""
    num_tokens: Count = 0


class Avoided(Struct):
    """An instance to which a gateway sends nothing now."""

    endpoint: Endpoint
    cause: Cause
    reason: Annotated[str, Meta(max_length=1024)] = ""
    since_s: Annotated[float, Meta(ge=0)] = 0.0
    """For so long."""


class Complaining(Struct):
    """All that a gateway avoids. Valid for `ttl_s` seconds, or until it says so again."""

    gateway_id: Annotated[str, Meta(min_length=1, max_length=1024)]
    instances: Annotated[list[Avoided], Meta(max_length=10_000)]
    ttl_s: Annotated[float, Meta(gt=0, le=3600)]


def decode(body: bytes, of: type[T]) -> T:
    """Raises ValueError that says where the body is wrong."""
    try:
        return msgspec.json.decode(body, type=of)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"bad JSON: {error or 'nested too deeply'}") from error


def encode(value: Any) -> bytes:
    return msgspec.json.encode(value)


def llm_instance(instance: Instance, infer_type: InferType, model: str, *, is_alone: bool = True) -> LLMInstance:
    """`is_alone`: its API server has no other rank, and refuses to be told of one."""
    metadata = instance.metadata
    return LLMInstance(
        id=metadata.instance_id,
        endpoint=Endpoint(metadata.ip, metadata.api_server_port),
        model=model or metadata.model,
        infer_type=infer_type,
        aux_ip=metadata.ip_kvt,
        aux_port=metadata.kvt_port,
        dp_rank=metadata.dp_rank,
        dp_size=metadata.data_parallel_size,
        dp_rank_local=UNSET if is_alone else metadata.dp_local_rank,
    )
