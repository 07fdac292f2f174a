# SPDX-License-Identifier: Apache-2.0
"""Read the memory of another process on this host: `process_vm_readv`.

The kernel copies straight from the source worker's pages to ours, many pieces a call, without the
source's help and with the GIL released. What protects both sides from reading the wrong thing:

- the process is identified before the first byte and after the last one (pidfd and nonce, see
  `process`);
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

from vllm_llumnix.errors import TransferFailed, TransportUnavailable
from vllm_llumnix.kv.layout import BlockLayout, Pieces, Words, pair_pieces, require_same_pages
from vllm_llumnix.kv.messages import NONCE_BYTES, PeerMemory
from vllm_llumnix.kv.process import PinnedProcess, yama_scope

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

    def __init__(self, layout: BlockLayout) -> None:
        self._layout = layout
        self._processes: OrderedDict[PeerMemory, PinnedProcess] = OrderedDict()

    def probe(self, peer: PeerMemory) -> None:
        if peer.unavailable is not None:
            raise TransportUnavailable(peer.unavailable)
        try:
            require_same_pages(self._layout, peer.layout)
        except ValueError as error:
            raise TransportUnavailable(str(error)) from error
        _require_nonce(peer, self._process(peer))

    def pull(
        self, peer: PeerMemory, src_blocks: list[int], dst_blocks: list[int], chunk_bytes: int
    ) -> Iterator[int]:
        if peer.unavailable is not None:
            raise TransportUnavailable(peer.unavailable)
        pieces = pair_pieces(peer.layout, src_blocks, self._layout, dst_blocks)
        process = self._process(peer)
        _require_nonce(peer, process)
        yield from read_pieces(peer.pid, pieces, chunk_bytes)
        _require_nonce(peer, process)

    def close(self) -> None:
        for process in self._processes.values():
            process.close()
        self._processes.clear()

    def _process(self, peer: PeerMemory) -> PinnedProcess:
        """The identified process of `peer`, kept for its next pull."""
        process = self._processes.pop(peer, None)
        if process is not None and not process.alive:
            process.close()
            process = None
        if process is None:
            process = PinnedProcess(peer)
        self._processes[peer] = process
        if len(self._processes) > MAX_PEERS:
            self._processes.popitem(last=False)[1].close()
        return process


def read_pieces(pid: int, pieces: Pieces, chunk_bytes: int) -> Iterator[int]:
    """Copy `pieces` from process `pid`, in calls of at most `chunk_bytes` bytes and IOV_MAX pieces;
    yields bytes a call.

    A call may end early (the kernel says how far it came); the next one starts there. Raises
    TransferFailed, TransportUnavailable.
    """
    ends = np.cumsum(pieces.length)
    total = int(ends[-1]) if len(ends) else 0
    done = 0
    while done < total:
        remote, local = _window(pieces, ends, done, chunk_bytes)
        copied = _call(pid, remote, local)
        done += copied
        yield copied


def _window(pieces: Pieces, ends: Words, done: int, chunk_bytes: int) -> tuple[Words, Words]:
    """The iovecs (rows of address, length) of the next call, source and destination, after `done`
    bytes.
    """
    first = int(np.searchsorted(ends, np.uint64(done), side="right"))
    last = int(np.searchsorted(ends, np.uint64(done + chunk_bytes), side="left"))
    stop = min(last + 1, first + IOV_MAX, len(ends))
    remote = np.stack((pieces.source[first:stop], pieces.length[first:stop]), axis=1)
    local = np.stack((pieces.destination[first:stop], pieces.length[first:stop]), axis=1)
    skip = done - (int(ends[first]) - int(pieces.length[first]))
    surplus = max(0, int(ends[stop - 1]) - (done + chunk_bytes))
    for iovecs in (remote, local):
        iovecs[0, 0] += np.uint64(skip)
        iovecs[0, 1] -= np.uint64(skip)
        iovecs[-1, 1] -= np.uint64(surplus)
    return remote, local


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
        return TransferFailed(
            f"the source worker (pid {pid}) has no memory at the address that it advertised"
        )
    if code == errno.EPERM:
        scope = yama_scope()
        if scope:
            return TransportUnavailable(
                f"this system forbids reading pid {pid}: kernel.yama.ptrace_scope is {scope}; "
                + (
                    "start the source with permission for readers, or set it to 0"
                    if scope == 1
                    else "set it to 1 or 0, or give the workers CAP_SYS_PTRACE"
                    if scope == 2
                    else "only a reboot lowers it"
                )
            )
        return TransportUnavailable(
            f"this system forbids reading pid {pid}: it runs as another user or is not dumpable, "
            "or a seccomp or security profile denies process_vm_readv"
        )
    if code == errno.ENOSYS:
        return TransportUnavailable("this kernel has no process_vm_readv")
    return TransferFailed(f"reading pid {pid}: {os.strerror(code)}")


def _require_nonce(peer: PeerMemory, process: PinnedProcess) -> None:
    """Raise unless the live process of `peer` still holds the nonce at the advertised place."""
    found = np.zeros(NONCE_BYTES, np.uint8)
    remote = np.array([[peer.nonce_address, NONCE_BYTES]], np.uint64)
    local = np.array([[found.ctypes.data, NONCE_BYTES]], np.uint64)
    process.require_alive()
    copied = _call(peer.pid, remote, local)
    if copied != NONCE_BYTES or found.tobytes() != peer.nonce:
        raise TransferFailed(
            f"the memory of worker {peer.rank} of {peer.instance} is no longer what it advertised"
        )
    process.require_alive()
