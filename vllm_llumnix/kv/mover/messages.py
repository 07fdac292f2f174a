# SPDX-License-Identifier: Apache-2.0
"""Messages between a mover and its engine: msgpack, tagged by type, one message a frame."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec

from vllm_llumnix.kv.memory.layout import WHOLE, BlockLayout, Cut, Cuts
from vllm_llumnix.kv.serving.grants import CAPABILITY_BYTES
from vllm_llumnix.kv.settings import UNLIMITED, Limit

NONCE_BYTES = 32
KEY_BYTES = 16
GREETING_BYTES = 32
MAX_NIXL_METADATA = 64 << 10
"""Some hundred bytes for each network device and each of its rails."""
DEPTH = 4
"""Buffers of one pull by way of a staging area: while one is on its way, others are filled and emptied."""

NetworkName: TypeAlias = Literal["mooncake", "nixl"]
"""Networks that read staging areas."""

SealKind: TypeAlias = Literal["gmac", "multilinear"]
"""See `seal`: for bytes in main memory, and on a GPU."""

_BlockId: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
_Pid: TypeAlias = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
_Nonce: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
Capability: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=CAPABILITY_BYTES, max_length=CAPABILITY_BYTES)]
_Address: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class CudaShare(msgspec.Struct, frozen=True):
    """Data with which another process of this host maps a GPU's memory: its name, and torch's own description."""

    gpu: str
    handle: bytes
    num_bytes: int
    offset: int
    counter: bytes
    counter_offset: int
    event: bytes
    event_required: bool


class NixlMemory(msgspec.Struct, frozen=True):
    """Data with which a peer reads a worker's staging area by NIXL.

    agent: the name of the NIXL agent beside the worker. metadata: NIXL's own opaque description of it: how UCX connects
    to it, and keys of the area. address, num_bytes: the area in the agent's process. greeting: its first bytes.
    """

    agent: Annotated[str, msgspec.Meta(pattern=r"^llumnix-[0-9a-f]{32}$")]
    metadata: Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_NIXL_METADATA)]
    address: Annotated[int, msgspec.Meta(ge=0, lt=2**57)]
    num_bytes: Annotated[int, msgspec.Meta(ge=GREETING_BYTES, lt=2**48)]
    greeting: Annotated[bytes, msgspec.Meta(min_length=GREETING_BYTES, max_length=GREETING_BYTES)]


class PeerMemory(msgspec.Struct, frozen=True):
    """The KV memory of one worker process, in words that identify the process beyond its pid.

    Sent to peers, which treat it as a claim: the reader checks boot, pid namespace, start time and
    the process's own offer (the nonce and a digest of the layout) before it believes an address.
    `unavailable` says why this memory cannot be read at all; then `layout` has no regions. `tcp` is
    the HOST:PORT where the process sends blocks to those who may have them, if it does; `mooncake`
    the name of its Mooncake segment, HOST:PORT as well, if it runs one; `nixl` how to find its NIXL
    agent, if it runs one; `cuda` how to map the memory if it is a GPU's.
    """

    instance: str
    rank: int
    pid: _Pid
    start_time: int
    boot_id: str
    pid_ns: str
    nonce_address: _Address
    nonce: _Nonce
    layout: BlockLayout
    unavailable: str | None = None
    tcp: str | None = None
    mooncake: str | None = None
    cuda: CudaShare | None = None
    nixl: NixlMemory | None = None


class Thread(msgspec.Struct, frozen=True):
    """A thread of a process, as the kernel names it. Ids come again, but not with the same start: ticks since boot."""

    id: int
    start_time: int


class MoverInfo(msgspec.Struct, frozen=True):
    """Description that a worker gives of itself when its mover has started.

    endpoint: where the mover listens (`ipc://…`, this host and user only). thread: the mover itself. isa: how the
    attention kernels arrange the inside of a page; bytes mean the same only between equal values. weights: fingerprint
    of this rank's part of the model's parameters; common_weights: this rank's part of one that does not depend on how
    the model is split. config: a name for the model's configuration. caches: what each layer keeps of a token, see
    `vllm_cache`. attention: the backends that keep it. copied_by: the backend of `kernels` that proved right here,
    empty if no block can be moved; passed_over: earlier choices, and why they were not taken.
    """

    rank: int
    endpoint: str
    thread: Thread
    memory: PeerMemory
    isa: str
    device: str
    weights: str
    common_weights: int = 0
    config: str = ""
    caches: str = ""
    attention: str = ""
    copied_by: str = ""
    passed_over: tuple[str, ...] = ()


# Engine to mover. `job` is chosen by the engine and names the answer's question.


class BlockCopy(msgspec.Struct, frozen=True, kw_only=True):
    """Order to copy blocks from one engine to another, the same for each of its ranks.

    job: the caller's name of the copy, unique at the time. src_blocks, dst_blocks: block ids, of the same number; block
    `src_blocks[i]` goes to block `dst_blocks[i]`, and none is written twice. cuts: which parts of these. transport: its
    name. deadline_s: seconds from the mover's receipt of it to the end of the copy. final: a stream waits for it, so
    that it goes before all others. tag: for traces and fault points.
    """

    job: int
    src_blocks: list[_BlockId]
    dst_blocks: list[_BlockId]
    cuts: Cuts = WHOLE
    transport: str = "local"
    deadline_s: float
    final: bool = False
    tag: str = ""


class Pull(BlockCopy, frozen=True, kw_only=True, tag="pull"):
    """The part of one rank in a copy: from `peer`, which has granted the blocks under `capability`.

    Pulls over the same `link` with the same `limit` share it.
    """

    peer: PeerMemory
    capability: bytes = b""
    limit: Limit = UNLIMITED
    link: str = ""


class StopPull(msgspec.Struct, frozen=True, tag="stop"):
    """End a pull.

    Answered with `Stopped` when nothing of it will be written any more; the pull reports, too.
    """

    job: int


class Probe(msgspec.Struct, frozen=True, tag="probe"):
    """Does `transport` reach `peer`, and do pages that are cut so fit ours?"""

    job: int
    peer: PeerMemory
    transport: str
    cuts: Cuts = WHOLE


class Grant(msgspec.Struct, frozen=True, tag="grant"):
    """Peers who show `capability` may have these blocks of ours, too. Not answered."""

    job: int
    capability: Capability
    blocks: list[_BlockId]


class Revoke(msgspec.Struct, frozen=True, tag="revoke"):
    """End a grant. Answered with `Revoked` when nothing is sent under it any more."""

    job: int
    capability: Capability


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


class Revoked(msgspec.Struct, frozen=True, tag="revoked"):
    job: int


class ProbeReport(msgspec.Struct, frozen=True, tag="probed"):
    """`obstacle` says why the transport does not reach the peer; None if it does."""

    job: int
    obstacle: str | None


class Rejected(msgspec.Struct, frozen=True, tag="rejected"):
    """A command that the mover does not obey; without `job` if it made no sense at all."""

    reason: str
    job: int | None = None


# Mover to mover, over TCP: a request, then an answer. If blocks are to be sent, and there is no
# error, the bytes follow, and a second answer, which says whether all of them were what was granted.


class BlockRequest(msgspec.Struct, frozen=True, tag="send"):
    """Send these blocks, or none to find out whether this is the process with the nonce.

    layers_outermost: the order of the bytes, see `BlockLayout.pieces`. final: a stream waits for them. cut: of each
    page, this part.
    """

    nonce: _Nonce
    capability: bytes
    blocks: list[_BlockId]
    layers_outermost: bool
    final: bool = False
    cut: Cut | None = None


class BlockAnswer(msgspec.Struct, frozen=True):
    error: str | None = None


class StageRequest(msgspec.Struct, frozen=True, tag="stage"):
    """Put these blocks, in the order of `kernels.gather`, where a network can read them.

    slot: into which of the connection's buffers; the peer reads it no more. key, number, kind: what to
    seal the bytes with. final: a stream waits for them. network: the one that reads, the same for all of a connection.
    cut: of each page, this part. Without blocks, not answered: the peer reads none of the buffers any more.
    """

    nonce: _Nonce
    capability: bytes
    blocks: list[_BlockId]
    slot: Annotated[int, msgspec.Meta(ge=0, lt=DEPTH)]
    key: Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
    number: Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
    final: bool = False
    kind: SealKind = "gmac"
    network: NetworkName = "mooncake"
    cut: Cut | None = None


class StageAnswer(msgspec.Struct, frozen=True):
    """The place where the bytes lie, for the network, and what their seal is."""

    error: str | None = None
    address: _Address = 0
    seal: bytes = b""


Command: TypeAlias = Pull | StopPull | Probe | Grant | Revoke
Answer: TypeAlias = PullReport | Stopped | ProbeReport | Revoked | Rejected

encode = msgspec.msgpack.Encoder().encode
decode_command = msgspec.msgpack.Decoder(Command).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode
decode_request = msgspec.msgpack.Decoder(BlockRequest | StageRequest).decode
decode_block_answer = msgspec.msgpack.Decoder(BlockAnswer).decode
decode_stage_answer = msgspec.msgpack.Decoder(StageAnswer).decode
