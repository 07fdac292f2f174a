# SPDX-License-Identifier: Apache-2.0
"""What a mover and its engine say to each other: msgpack, tagged by type, one message a frame."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from vllm_llumnix.kv.layout import BlockLayout

NONCE_BYTES = 32

_BlockId: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
_Pid: TypeAlias = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
_Address: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class PeerMemory(msgspec.Struct, frozen=True):
    """The KV memory of one worker process, in words that identify the process beyond its pid.

    Sent to peers, which treat it as a claim: the reader checks boot, pid namespace, start time and
    the process's own offer (the nonce and a digest of the layout) before it believes an address.
    `unavailable` says why this memory cannot be read at all; then `layout` has no regions.
    """

    instance: str
    rank: int
    pid: _Pid
    start_time: int
    boot_id: str
    pid_ns: str
    nonce_address: _Address
    nonce: Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
    layout: BlockLayout
    unavailable: str | None = None


class MoverInfo(msgspec.Struct, frozen=True):
    """What a worker says about itself when its mover has started.

    endpoint: where the mover listens (`ipc://…`, this host and user only). isa: how the attention
    kernels arrange the inside of a page; bytes mean the same only between equal values. weights:
    fingerprint of the model's parameters.
    """

    rank: int
    endpoint: str
    memory: PeerMemory
    isa: str
    device: str
    weights: str


# Engine to mover. `job` is chosen by the engine and names the answer's question.


class Pull(msgspec.Struct, frozen=True, tag="pull"):
    """Copy block `src_blocks[i]` of `peer` to our block `dst_blocks[i]`, for all i.

    `max_bytes_per_s` limits everything this mover copies while the pull runs. `final` marks a pull
    that a stream waits for: it goes before all others. `tag` is for traces and fault points.
    """

    job: int
    peer: PeerMemory
    src_blocks: list[_BlockId]
    dst_blocks: list[_BlockId]
    transport: str
    deadline_s: float
    max_bytes_per_s: float | None = None
    final: bool = False
    tag: str = ""


class StopPull(msgspec.Struct, frozen=True, tag="stop"):
    """End a pull.

    Answered with `Stopped` when nothing of it will be written any more; the pull reports, too.
    """

    job: int


class Probe(msgspec.Struct, frozen=True, tag="probe"):
    """Which transport reaches `peer`?"""

    job: int
    peer: PeerMemory


# Mover to engine


class PullReport(msgspec.Struct, frozen=True, tag="pulled"):
    """The end of a pull: nothing of it will be written any more.

    All bytes have arrived if and only if `error` is None.
    seconds: from the first byte to the last, waits for the pace included, waits for other pulls
    before it not.
    """

    job: int
    bytes: int
    seconds: float
    error: str | None = None


class Stopped(msgspec.Struct, frozen=True, tag="stopped"):
    job: int


class ProbeReport(msgspec.Struct, frozen=True, tag="probed"):
    """`transport` reaches the peer; or none does, and `reason` says why."""

    job: int
    transport: str | None
    reason: str = ""


class Rejected(msgspec.Struct, frozen=True, tag="rejected"):
    """A command that the mover does not obey; without `job` if it made no sense at all."""

    reason: str
    job: int | None = None


Command: TypeAlias = Pull | StopPull | Probe
Answer: TypeAlias = PullReport | Stopped | ProbeReport | Rejected

encode = msgspec.msgpack.Encoder().encode
decode_command = msgspec.msgpack.Decoder(Command).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode
