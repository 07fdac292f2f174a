# SPDX-License-Identifier: Apache-2.0
"""Read the memory of another process on this host: `process_vm_readv`.

The kernel copies straight from the source worker's pages to ours, many pieces a call, without the
source's help and with the GIL released. What protects both sides from reading the wrong thing:

- the process is identified before the first byte and after the last one (pidfd and offer, see
  `process`), and offers exactly the memory that is read;
- every range lies within the storage that the peer advertised, and within ours (`layout` checks
  both).

The kernel permits the call where it would permit a debugger to attach.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections import OrderedDict
from collections.abc import Iterator

import numpy as np

from vllm_llumnix.errors import TransferFailed, TransportError, TransportUnavailable
from vllm_llumnix.kv.memory.layout import WHOLE, BlockLayout, Cuts, Pieces, Words, pair_pieces
from vllm_llumnix.kv.mover.messages import PeerMemory, Pull
from vllm_llumnix.kv.mover.process import OFFER_BYTES, PinnedProcess, offer_of, yama_scope
from vllm_llumnix.kv.transport.base import require_readable

IOV_MAX = 1024
MAX_PEERS = 64

_libc = ctypes.CDLL(None, use_errno=True)
_readv = getattr(_libc, "process_vm_readv", None)
if _readv is not None:
    _readv.restype = ctypes.c_ssize_t
    _readv.argtypes = [
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_ulong,
    ]


class LocalTransport:
    """Implements `base.Transport` for peers on this host. `layout` is our own KV memory."""

    name = "local"
    asks_peers = False

    def __init__(self, layout: BlockLayout) -> None:
        self._layout = layout
        self._peers: OrderedDict[PeerMemory, _Peer] = OrderedDict()

    def probe(self, peer: PeerMemory, cuts: Cuts = WHOLE) -> None:
        require_readable(self._layout, peer, cuts)
        self.verify(peer)

    def pull(self, pull: Pull, chunk_bytes: int) -> Iterator[int]:
        peer = pull.peer
        if peer.unavailable is not None:
            raise TransportUnavailable(peer.unavailable)
        source, destination = peer.layout.cut(pull.cuts.source), self._layout.cut(pull.cuts.destination)
        pieces = pair_pieces(source, pull.src_blocks, destination, pull.dst_blocks)
        identified = self.verify(peer)
        yield from read_pieces(peer.pid, pieces, chunk_bytes)
        identified.verify()

    def close(self) -> None:
        for identified in self._peers.values():
            identified.process.close()
        self._peers.clear()

    def tidy(self) -> None:
        for peer, identified in list(self._peers.items()):
            try:
                identified.verify()
            except TransportError:
                identified.process.close()
                del self._peers[peer]

    def knows(self, peer: PeerMemory) -> bool:
        """True if `peer` offered what it says when it was last looked at, and has not been forgotten since."""
        return peer in self._peers

    def verify(self, peer: PeerMemory) -> _Peer:
        """The process of `peer`, kept for its next pull.

        Raises TransferFailed, TransportUnavailable unless it lives and offers what `peer` says.
        """
        identified = self._peers.pop(peer, None)
        if identified is not None and not identified.process.alive:
            identified.process.close()
            identified = None
        if identified is None:
            identified = _Peer(peer)
        try:
            identified.verify()
        except TransportError:
            identified.process.close()
            raise
        self._peers[peer] = identified
        if len(self._peers) > MAX_PEERS:
            self._peers.popitem(last=False)[1].process.close()
        return identified


class _Peer:
    """An identified process and the place of its offer."""

    def __init__(self, memory: PeerMemory) -> None:
        self.process = PinnedProcess(memory)
        self._memory = memory
        self._offer = offer_of(memory.nonce, memory.layout, memory.cuda)
        self._found = np.zeros(OFFER_BYTES, np.uint8)
        self._remote = np.array([[memory.nonce_address, OFFER_BYTES]], np.uint64)
        self._local = np.array([[self._found.ctypes.data, OFFER_BYTES]], np.uint64)

    def verify(self) -> None:
        """Raise TransferFailed unless the process lives and offers this memory where it was advertised.

        Alive after the read means that it was this process, and no later one of its pid, that was
        read then and before.
        """
        copied = _call(self._memory.pid, self._remote, self._local)
        self.process.require_alive()
        if copied != OFFER_BYTES or self._found.tobytes() != self._offer:
            raise TransferFailed(f"the memory of {self.process.name} is not what was advertised")


def read_pieces(pid: int, pieces: Pieces, chunk_bytes: int) -> Iterator[int]:
    """Copy `pieces` from process `pid`, a call at a time; yields the bytes of each call.

    A call reads at most `chunk_bytes` bytes and IOV_MAX pieces. The kernel may end it early and
    says how far it came; the next one starts there. Raises TransferFailed, TransportUnavailable.
    """
    remote, local = (
        _iovecs(pieces.source, pieces.length),
        _iovecs(pieces.destination, pieces.length),
    )
    ends = np.cumsum(pieces.length)
    total = int(ends[-1]) if len(ends) else 0
    first = done = 0
    while done < total:
        stop, surplus = len(ends), 0
        if total - done > chunk_bytes:
            stop = int(np.searchsorted(ends, np.uint64(done + chunk_bytes))) + 1
            surplus = int(ends[stop - 1]) - (done + chunk_bytes)
        if stop - first > IOV_MAX:
            stop, surplus = first + IOV_MAX, 0
        _shorten(stop - 1, surplus, remote, local)
        copied = _call(pid, remote[first:stop], local[first:stop])
        _shorten(stop - 1, -surplus, remote, local)
        done += copied
        yield copied
        if done < total:
            # Cut what has been read of the piece in which the next call starts.
            at = int(np.searchsorted(ends, np.uint64(done), side="right"))
            read = int(pieces.length[at]) - (int(ends[at]) - done)
            for iovecs, start in ((remote, pieces.source[at]), (local, pieces.destination[at])):
                iovecs[at] = int(start) + read, int(pieces.length[at]) - read
            first = at


def _iovecs(addresses: Words, lengths: Words) -> Words:
    """`struct iovec[]`: rows of address and length."""
    iovecs = np.empty((len(addresses), 2), np.uint64)
    iovecs[:, 0] = addresses
    iovecs[:, 1] = lengths
    return iovecs


def _shorten(row: int, num_bytes: int, *iovecs: Words) -> None:
    if num_bytes:
        for rows in iovecs:
            rows[row, 1] = int(rows[row, 1]) - num_bytes


def _call(pid: int, remote: Words, local: Words) -> int:
    if _readv is None:
        raise TransportUnavailable("the C library has no process_vm_readv")
    copied = int(_readv(pid, local.ctypes.data, len(local), remote.ctypes.data, len(remote), 0))
    if copied <= 0:
        raise _failure(pid, ctypes.get_errno() if copied < 0 else errno.EFAULT)
    return copied


def _failure(pid: int, code: int) -> TransferFailed | TransportUnavailable:
    if code == errno.ESRCH:
        return TransferFailed(f"the source worker (pid {pid}) has ended")
    if code == errno.EFAULT:
        return TransferFailed(f"the source worker (pid {pid}) has no memory at the address that it advertised")
    if code == errno.EPERM:
        return TransportUnavailable(f"this system forbids reading pid {pid}: {_obstacle()}")
    if code == errno.ENOSYS:
        return TransportUnavailable("this kernel has no process_vm_readv")
    return TransferFailed(f"reading pid {pid}: {os.strerror(code)}")


def _obstacle() -> str:
    """Likely cause of EPERM, and its remedy."""
    remedies = {
        1: "start the source with permission for readers, or set it to 0",
        2: "set it to 1 or 0, or give the workers CAP_SYS_PTRACE",
        3: "only a reboot lowers it",
    }
    scope = yama_scope()
    if scope in remedies:
        return f"kernel.yama.ptrace_scope is {scope}; {remedies[scope]}"
    return "it runs as another user or is not dumpable, or a seccomp or security profile denies process_vm_readv"
