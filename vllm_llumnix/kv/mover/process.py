# SPDX-License-Identifier: Apache-2.0
"""Identity of the process that an address belongs to.

A pid alone names nothing: after a restart it may be another process, in another pid namespace or on
another host it is one at once. A worker therefore describes itself by boot id, pid namespace, pid,
start time, and a random nonce in its memory. The kernel's pidfd then tells whether the process that
was identified is still there. Beside the nonce stands a digest of the layout, and of how a GPU's
memory is mapped: only a process that offers exactly this memory has both, so a peer cannot make us
read anything else of anybody.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import mmap
import os
import secrets
import select
from pathlib import Path

import msgspec

from vllm_llumnix.errors import TransferFailed, TransportUnavailable
from vllm_llumnix.kv.memory.layout import BlockLayout
from vllm_llumnix.kv.mover.messages import NONCE_BYTES, CudaShare, NixlMemory, PeerMemory, Thread

_PR_SET_NAME = 15
_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)
_NOT_SHOWN = "/proc does not show this process"
_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")


@functools.cache
def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@functools.cache
def pid_namespace() -> str:
    return os.readlink("/proc/self/ns/pid")


def start_time(pid: int, thread: int | None = None) -> int | None:
    """The time at which the process, or that thread of it, was started, in clock ticks since boot; None if there is
    none."""
    directory = Path("/proc", str(pid), *(() if thread is None else ("task", str(thread))))
    try:
        stat = (directory / "stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # Field 22; the command name before it is in parentheses and may hold anything.
    return int(stat[stat.rindex(b")") + 2 :].split()[19])


def describe_thread(thread: int) -> Thread:
    """A living thread of this process. Raises TransportUnavailable."""
    started = start_time(os.getpid(), thread)
    if started is None:
        raise TransportUnavailable(_NOT_SHOWN)
    return Thread(thread, started)


def has_ended(thread: Thread, process: PeerMemory) -> bool:
    """True if that thread of that process certainly runs no more. False where this process cannot see it."""
    if (process.boot_id, process.pid_ns) != (boot_id(), pid_namespace()):
        return False
    return start_time(process.pid, thread.id) != thread.start_time


def yama_scope() -> int:
    """Yama's ptrace_scope, 0 where the kernel has no Yama: who may read a process's memory."""
    try:
        return int(_YAMA.read_text())
    except FileNotFoundError:
        return 0


def allow_readers() -> bool:
    """Let all processes of this user read our memory, where Yama would let only ancestors do it.

    Under scope 1 (the default of several distributions) an engine cannot read its neighbour's KV
    blocks otherwise. The permission is what scope 0 gives to all processes, it ends with this
    process, and shared-memory paths of MPI and UCX ask for the same. Under scopes 2 and 3 only an
    administrator can grant it. Returns whether anything was changed.
    """
    if yama_scope() != 1:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    return int(libc.prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)) == 0


def yield_cores(politely: bool) -> None:
    """Sets whether the calling thread, when it wakes up, leaves a core to the model that it finds there.

    A batch thread still gets its share. With a lower nice value it would get almost nothing beside a spinning engine,
    and it could not return without privileges.
    """
    with contextlib.suppress(OSError):  # a wish, no condition
        os.sched_setscheduler(0, os.SCHED_BATCH if politely else os.SCHED_OTHER, os.sched_param(0))


def name_thread(name: str) -> None:
    """Names the calling thread for tools that look at it from outside; 15 bytes of the name."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def offer_of(nonce: bytes, layout: BlockLayout, cuda: CudaShare | None) -> bytes:
    """Offer in the memory of a process that lets peers read `layout`: OFFER_BYTES bytes."""
    return nonce + hashlib.blake2b(msgspec.msgpack.encode((layout, cuda)), key=nonce, digest_size=32).digest()


OFFER_BYTES = NONCE_BYTES + 32


class NoncePage:
    """A page of this process's memory that holds an offer, from `describe_memory` until `revoke`."""

    def __init__(self) -> None:
        self.value = secrets.token_bytes(NONCE_BYTES)
        self._page = mmap.mmap(-1, mmap.PAGESIZE)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._page))

    def offer(self, layout: BlockLayout, cuda: CudaShare | None) -> None:
        """Lets peers from now on read `layout`, and nothing else."""
        self._page[:OFFER_BYTES] = offer_of(self.value, layout, cuda)

    def revoke(self) -> None:
        """Has readers find from now on that this memory is no longer what they were told."""
        self._page[:OFFER_BYTES] = bytes(OFFER_BYTES)


def describe_memory(
    layout: BlockLayout,
    nonce: NoncePage,
    instance: str,
    rank: int,
    unavailable: str | None = None,
    tcp: str | None = None,
    mooncake: str | None = None,
    cuda: CudaShare | None = None,
    nixl: NixlMemory | None = None,
) -> PeerMemory:
    """The description of this process that peers need in order to read `layout`; offers it to them."""
    started = start_time(os.getpid())
    if started is None:
        raise TransportUnavailable(_NOT_SHOWN)
    nonce.offer(layout, cuda)
    return PeerMemory(
        instance=instance,
        rank=rank,
        pid=os.getpid(),
        start_time=started,
        boot_id=boot_id(),
        pid_ns=pid_namespace(),
        nonce_address=nonce.address,
        nonce=nonce.value,
        layout=layout,
        unavailable=unavailable,
        tcp=tcp,
        mooncake=mooncake,
        cuda=cuda,
        nixl=nixl,
    )


class PinnedProcess:
    """The process that a description names, held by a pidfd.

    The start time is compared once, while the pidfd is already held: from then on "the pidfd's
    process lives" implies "the pid is that process".
    """

    def __init__(self, peer: PeerMemory) -> None:
        if peer.boot_id != boot_id():
            raise TransportUnavailable(f"{peer.instance} runs on another host, or this one was restarted since")
        if peer.pid_ns != pid_namespace():
            raise TransportUnavailable(
                f"{peer.instance} runs in another pid namespace: "
                "let the containers share one (--pid=container:NAME or --pid=host)"
            )
        self.name = f"worker {peer.rank} of {peer.instance} (pid {peer.pid})"
        try:
            self._pidfd = os.pidfd_open(peer.pid)
        except ProcessLookupError:
            raise TransferFailed(f"{self.name} has ended") from None
        except OSError as error:
            raise TransportUnavailable(f"pidfd_open: {error.strerror}") from error
        self._poll = select.poll()
        self._poll.register(self._pidfd, select.POLLIN)
        found = start_time(peer.pid)
        if found != peer.start_time or not self.alive:
            self.close()
            raise TransferFailed(f"{self.name} has ended, and its pid belongs to another process")

    @property
    def alive(self) -> bool:
        return not self._poll.poll(0)

    def require_alive(self) -> None:
        if not self.alive:
            raise TransferFailed(f"{self.name} has ended")

    def close(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
