# SPDX-License-Identifier: Apache-2.0
"""Messages between an engine and the origin API server of a request that moved (the relay), as msgpack.

Engine to origin: `Hello`, `TokenBatch`, `Heartbeat`, `HandedOver`, `FenceQuestion`, `Parting`. Origin to engine:
`Dismissal`, `FenceAnswer`, `HeartbeatAck`, `InputPart`. Structs of our own, not vLLM's: decoding them can neither
unpickle anything nor set fields of a vLLM object that a peer has no business to set.
"""

from __future__ import annotations

import enum
from typing import Annotated, TypeAlias

import msgspec

from llumlet.protocol.ids import Epoch

RELAY_VERSION = 4
MAX_MESSAGE_BYTES = 16 << 20
"""Larger messages are dropped before they are decoded."""
ABORT = 2
"""The finish reason of a request that its engine gave up, or was told to: vLLM's `FinishReason.ABORT`."""


Name: TypeAlias = Annotated[str, msgspec.Meta(max_length=512)]
"""The name of an engine, or its address: kept for as long as its API servers run."""


class Logprobs(msgspec.Struct, frozen=True, array_like=True):
    """Logprobs of the tokens of one output: a row per token, the sampled token first."""

    token_ids: list[list[int]]
    logprobs: list[list[float]]
    ranks: list[int]


class TokenOutput(msgspec.Struct, frozen=True, array_like=True):
    """An engine step's output for one request."""

    request_id: str
    epoch: Epoch
    base: int
    """Number of output tokens of the request when this epoch began."""
    first: int
    """Index, among the request's output tokens, of the first token here."""
    token_ids: list[int]
    finish_reason: int | None = None
    stop_reason: int | str | None = None
    logprobs: Logprobs | None = None
    num_nans_in_logits: int = 0
    sampling_masks: list[list[int]] | None = None
    """For each token the ids from which it was drawn; only of engines that report them."""
    routed_experts: bytes | None = None
    """The experts of every layer for each token that was computed for those here, and for the prompt before the first:
    the bytes of vLLM's array. Only of engines that tell it."""


class Health(enum.StrEnum):
    """An engine's report about its loop, from a thread that lives while the loop hangs."""

    OK = "ok"
    SUSPECT = "suspect"
    """A step takes much longer than it should: send it nothing new."""
    HUNG = "hung"
    """So long that it counts as lost."""


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The first message of an engine: to the origin of every request that comes to it, before its first output."""

    version: int
    instance: Name
    incarnation: Name
    llumlet: Name
    digest: Name = ""
    """Digest of everything that engines must have in common to go on with each other's requests."""


class TokenBatch(msgspec.Struct, frozen=True, tag="tokens"):
    """Outputs of one engine step for requests of one origin."""

    instance: Name
    incarnation: Name
    llumlet: Name
    """gRPC address of the llumlet that owns the requests: aborts go there."""
    outputs: list[TokenOutput]
    weight_version: str | None = None


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """Twice a second, to every origin that it has not parted from. `requests` are those it reports by relay."""

    instance: Name
    incarnation: Name
    health: Health
    requests: list[tuple[str, Epoch]]
    num_parts: dict[str, int] = {}
    """Parts received so far, for requests whose input comes in parts: the origin sends the missing ones again."""


class HandedOver(msgspec.Struct, frozen=True, tag="handed_over"):
    """The sender has released the request: `instance` owns it under `epoch`, or no engine does."""

    request_id: str
    epoch: Epoch
    instance: Name
    incarnation: Name
    llumlet: Name


class FenceQuestion(msgspec.Struct, frozen=True, tag="fence"):
    """A former owner asks whether `epoch` has started; if not, it is barred for good."""

    question: int
    request_id: str
    epoch: Epoch


class Parting(msgspec.Struct, frozen=True, tag="parting"):
    """The engine has had nothing of this origin's for a while and falls silent until it has: that it does says nothing
    of how it is."""

    instance: Name
    incarnation: Name


class Dismissal(msgspec.Struct, frozen=True, tag="release"):
    """The origin does not want these requests from this sender: they are finished, aborted or owned elsewhere."""

    requests: list[tuple[str, Epoch]]


class FenceAnswer(msgspec.Struct, frozen=True, tag="fence_answer"):
    """`finished`: the request has no client any more. Otherwise `raised` is the epoch to continue under; None: the
    asked epoch has started."""

    question: int
    request_id: str
    finished: bool
    raised: Epoch | None = None


class HeartbeatAck(msgspec.Struct, frozen=True, tag="heartbeat_ack"):
    """`unknown` are requests of the heartbeat that this origin does not know."""

    unknown: list[str]


class InputPart(msgspec.Struct, frozen=True, tag="input"):
    """A part of the input of a request that the engine has under `epoch`, if it is the next one there. It has to
    arrive: until a heartbeat says that it has, it is sent again."""

    request_id: str
    epoch: Epoch
    number: int
    """From 0: that of the first part, with which the request came."""
    state: bytes | None
    """Input of an arriving request; None ends the input."""


ToOrigin = Hello | TokenBatch | Heartbeat | HandedOver | FenceQuestion | Parting
ToEngine = Dismissal | FenceAnswer | HeartbeatAck | InputPart

_encoder = msgspec.msgpack.Encoder()
_to_origin: msgspec.msgpack.Decoder[ToOrigin] = msgspec.msgpack.Decoder(ToOrigin)
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)


def encode(message: ToOrigin | ToEngine) -> bytes:
    return _encoder.encode(message)


MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors of msgspec for malformed bytes."""


def decode_to_origin(data: bytes) -> ToOrigin:
    """Raises one of `MALFORMED` for anything that is not a message to an origin."""
    return _to_origin.decode(data)


def decode_to_engine(data: bytes) -> ToEngine:
    """Raises one of `MALFORMED` for anything that is not a message to an engine."""
    return _to_engine.decode(data)
