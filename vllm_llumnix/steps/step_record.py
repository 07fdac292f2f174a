# SPDX-License-Identifier: Apache-2.0
"""Record of the requests in an engine's steps under way, in shared memory, which outlives it.

A request that makes its engine die does so in a step, or while its grammar is compiled. So the engine's loop writes
down whom it gives to its model, for every batch in flight, and an origin on the same machine that finds the engine dead
reads who was there (`read`). The file is named by the engine's incarnation: nobody has to be told where it is, and no
path comes from a peer.

    header     who is on trial, whether the loop is scheduling, whether the engine is on its way out
    slots      one for every batch that can be in flight and one more, used in turn:
               number of requests, when the model was given them, under way or not, their names
    grammars   whose, under way or not: of the oldest that are not compiled yet
    workers    when each last compiled a kernel: written by the workers themselves (`compiles`)

A name is a hash of the request's id. Whoever reads a dead engine's file sees what the loop wrote last; a slot counts
from the moment that its last word, `under way`, is written, and the model has the batch after that only. A batch of the
same requests as the one that had the slot before is not written again.

The next engine that starts on this machine removes the file of one that was killed: the lock that a living engine holds
on its own is free then.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import re
import stat
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from llumlet.protocol.recovery.steps import NAME_BYTES, NOBODY, LastSteps, name_of
from vllm_llumnix.steps.compiles import PLACE, RecordPlace, Workers

if TYPE_CHECKING:
    from vllm_llumnix.kv.vllm_worker_types import SchedulerOutput

logger = logging.getLogger("vllm.llumnix")

DIRECTORY = Path("/dev/shm")
PREFIX = "llumnix-step-"
SWEEP_SECONDS = 60.0
"""A younger file is left alone: its engine may not hold the lock yet, or somebody may want to read it."""
MAX_BYTES = 16 << 20
KEPT_NAMES = 16384
"""Hashing costs twenty times what looking up does."""

_INCARNATION = re.compile(r"[0-9a-f]{32}")
_MAGIC = b"LLXSTEP2"
_HEADER = struct.Struct("<8sII8sBB6x")
"""Magic, slots, requests that a slot has room for; then who is on trial, `scheduling`, `leaving`."""
_TRIAL, _SCHEDULING, _LEAVING = 16, 24, 25
_SLOT = struct.Struct("<dII")
"""A batch: when it was given to the model (seconds of the machine's monotonic clock), number of requests, `under
way`."""
_UNDER_WAY = 12
_GRAMMAR = struct.Struct("<8sB7x")
"""Name of the request, `under way`."""
_COMPILING = 8
NUM_GRAMMARS = 64
"""More than vLLM has threads for them on most machines; it takes them in the order in which they came."""


class _Names(dict[str, bytes]):
    """Hashed names by request id, made when they are first needed."""

    def __missing__(self, request_id: str) -> bytes:
        name = self[request_id] = name_of(request_id)
        return name


class StepRecord:
    """Written by the engine's loop thread. `capacity`: requests in one batch; `depth`: batches in flight."""

    def __init__(self, incarnation: str, capacity: int, depth: int, num_workers: int = 0) -> None:
        self._capacity = capacity
        self._num_slots = depth + 1
        stride = _stride(capacity)
        self._offsets = [_HEADER.size + index * stride for index in range(self._num_slots)]
        self._ids: list[list[str]] = [[] for _ in self._offsets]
        self._names = _Names()
        self._next = 0
        self._slots: dict[int, int] = {}
        """Slots by the address of the batch, which is alive until it has been processed."""
        self._leaving = False
        first = _HEADER.size + self._num_slots * stride
        size = first + NUM_GRAMMARS * _GRAMMAR.size
        self._grammars = deque(range(first, size, _GRAMMAR.size))
        """Offsets of places for grammars that are free. Any thread gives them back."""
        places = range(size, size + num_workers * PLACE.size, PLACE.size)
        self._path, self._file, self._map = _create(incarnation, places.stop)
        self.workers = Workers(self._map, places)
        self.place_of_workers = RecordPlace(str(self._path), size, num_workers)
        _HEADER.pack_into(self._map, 0, _MAGIC, self._num_slots, capacity, NOBODY, False, False)

    def scheduling(self) -> None:
        """The loop begins to choose whom to give to its model: until `begin` or `idle` it can be anybody's fault."""
        self._map[_SCHEDULING] = 1

    def begin(self, scheduled: SchedulerOutput) -> None:
        """The model is about to be given `scheduled`, as in `end`."""
        index = self._next
        self._next = (index + 1) % self._num_slots
        self._slots[id(scheduled)] = index
        offset = self._offsets[index]
        ids = list(scheduled.num_scheduled_tokens)
        if ids != self._ids[index]:
            self._ids[index] = ids
            if len(self._names) > KEPT_NAMES:
                self._names.clear()
            names = b"".join(map(self._names.__getitem__, ids[: self._capacity]))
            self._map[offset + _SLOT.size : offset + _SLOT.size + len(names)] = names
        _SLOT.pack_into(self._map, offset, time.monotonic(), len(ids), True)
        self._map[_SCHEDULING] = 0

    def end(self, scheduled: SchedulerOutput) -> None:
        """The batch has been processed."""
        index = self._slots.pop(id(scheduled), None)
        if index is not None:
            self._map[self._offsets[index] + _UNDER_WAY] = 0

    def idle(self) -> None:
        """The loop has nothing to choose from."""
        self._map[_SCHEDULING] = 0

    def compile(self, request_id: str) -> Callable[[], None]:
        """The compilation of the request's grammar begins; what is returned is to be called, once, when it has ended.
        One thread at a time."""
        if self._map.closed or not self._grammars:
            return lambda: None
        offset = self._grammars.popleft()
        _GRAMMAR.pack_into(self._map, offset, name_of(request_id), True)

        def end() -> None:
            if not self._map.closed:
                self._map[offset + _COMPILING] = 0
            self._grammars.append(offset)

        return end

    def leave(self) -> None:
        """The engine is on its way out. Again is nothing."""
        if not self._leaving:
            self._leaving = True
            self._map[_LEAVING] = 1

    def try_out(self, request_id: str | None) -> None:
        """Notes that this request is on trial here from now on; None: nobody is."""
        self._map[_TRIAL : _TRIAL + NAME_BYTES] = NOBODY if request_id is None else name_of(request_id)

    def close(self) -> None:
        """The engine ends in peace: nobody is to read this."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        self._map.close()
        if self._file is not None:
            os.close(self._file)


def read(incarnation: str) -> LastSteps | None:
    """The record of that life of an engine; None if it is not on this machine, not ours to read, or no record."""
    if _INCARNATION.fullmatch(incarnation) is None:
        return None
    try:
        file = os.open(DIRECTORY / (PREFIX + incarnation), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_size > MAX_BYTES:
            return None
        return _parse(os.pread(file, found.st_size, 0))
    except OSError:
        return None
    finally:
        os.close(file)


def _parse(data: bytes) -> LastSteps | None:
    if len(data) < _HEADER.size:
        return None
    magic, num_slots, capacity, on_trial, scheduling, leaving = _HEADER.unpack_from(data)
    stride = _stride(capacity)
    grammars = _HEADER.size + num_slots * stride
    if magic != _MAGIC or len(data) < grammars + NUM_GRAMMARS * _GRAMMAR.size:
        return None
    names: set[bytes] = set()
    began: list[float] = []
    anybody = bool(scheduling)
    for offset in range(_HEADER.size, grammars, stride):
        at, count, under_way = _SLOT.unpack_from(data, offset)
        if under_way:
            began.append(at)
            anybody |= count > capacity
            first = offset + _SLOT.size
            ends = first + min(count, capacity) * NAME_BYTES
            names.update(data[start : start + NAME_BYTES] for start in range(first, ends, NAME_BYTES))
    entries = _GRAMMAR.iter_unpack(data[grammars : grammars + NUM_GRAMMARS * _GRAMMAR.size])
    compiling = frozenset(name for name, is_compiled_now in entries if is_compiled_now)
    return LastSteps(frozenset(names), compiling, anybody, min(began, default=0.0), on_trial, bool(leaving))


def _stride(capacity: int) -> int:
    return _SLOT.size + capacity * NAME_BYTES


def _create(incarnation: str, size: int) -> tuple[Path | None, int | None, mmap.mmap]:
    """A new file under lock, mapped. Without room for one: memory of this process, which nobody else reads."""
    _sweep(DIRECTORY.glob(f"{PREFIX}*"))
    path = DIRECTORY / (PREFIX + incarnation)
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Room that is missing is an error here, and a signal that ends the engine later.
            os.posix_fallocate(file, 0, size)
            return path, file, mmap.mmap(file, size)
        except OSError:
            path.unlink()
            os.close(file)
            raise
    except OSError as error:
        logger.warning("llumlet: what is in a step is written down for nobody: %s", error)
        return None, None, mmap.mmap(-1, size)


def _sweep(paths: Iterable[Path]) -> None:
    """Remove the records of engines of ours that are dead."""
    for path in paths:
        with contextlib.suppress(OSError):
            file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                found = os.fstat(file)
                if found.st_uid == os.geteuid() and time.time() - found.st_ctime > SWEEP_SECONDS:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
            finally:
                os.close(file)
