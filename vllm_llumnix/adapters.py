# SPDX-License-Identifier: Apache-2.0
"""The LoRA adapters that this process was told of, by name, and what tells two of one name apart.

An engine learns them from its own front-end alone: from what that has it load, and from the requests that it sends. A
peer says a name and a digest, never a path. An API server learns those of its requests, for the day it has to start
them again elsewhere.

The digest is of the adapter's files and of the settings that decide what is computed with them. The files are read in
a thread of their own when the adapter is learnt, one adapter at a time: as much again as vLLM reads to load it, and
usually from the page cache. Files may lie on a disk that does not answer; then only requests with adapters wait.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from vllm.lora.request import LoRARequest
from vllm.lora.utils import get_adapter_absolute_path

from llumlet.protocol.errors import Reason, Refused

logger = logging.getLogger("vllm.llumnix")

READ_SECONDS = 4.0
"""Seconds that a move waits for an adapter whose files are still being read."""
CONFIG_FILE = "adapter_config.json"
WEIGHT_FILES = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""vLLM loads the first of these that is there."""
SETTINGS = (
    "max_lora_rank",
    "lora_dtype",
    "fully_sharded_loras",
    "target_modules",
    "enable_mixed_moe_lora_format",
    "enable_moe_shared_loras",
)
"""Settings that decide the arithmetic. Not --max-loras and --max-cpu-loras, which say how many adapters there is room
for."""

T = TypeVar("T")
Stamp = tuple[tuple[str, int, int, int], ...]
"""Path, inode, size and time of change of each file."""


@dataclasses.dataclass(frozen=True, slots=True)
class Contents:
    """Content of an adapter when its files were read."""

    digest: str
    stamp: Stamp


@dataclasses.dataclass(frozen=True, slots=True)
class _Known:
    request: LoRARequest
    reading: asyncio.Task[Contents | str]
    """Ends with the contents, or with what is wrong with them."""


class Adapters:
    """The LoRA adapters that a process was told of. On one event loop. `lora_config` is vLLM's, None without
    --enable-lora."""

    def __init__(self, lora_config: object | None) -> None:
        self.on_change: Callable[[], None] = lambda: None
        """Called when `names` has become another one."""
        self._settings = settings_of(lora_config)
        self._known: dict[str, _Known] = {}
        self._one_at_a_time = asyncio.Lock()
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="llumnix-adapters")
        """Two threads: one reads, the other checks whether what was read is still there."""

    @property
    def names(self) -> list[str]:
        return list(self._known)

    def learn(self, request: LoRARequest, *, reloaded: bool = False) -> None:
        """The front-end has named this adapter. Again: no effect, unless its files were loaded anew."""
        known = self._known.get(request.lora_name)
        if known is not None and not reloaded and _is_same(known.request, request) and not _has_failed(known):
            return
        reading = asyncio.get_running_loop().create_task(self._read(request), name="llumnix-adapter")
        self._known[request.lora_name] = _Known(request, reading)
        if known is None:
            self.on_change()

    def forget(self, lora_int_id: int) -> None:
        """The front-end has had it removed."""
        for name, known in list(self._known.items()):
            if known.request.lora_int_id == lora_int_id:
                del self._known[name]
                self.on_change()

    async def resolve(self, name: str, digest: str | None) -> LoRARequest:
        """Our own adapter of that name, with our own id and path. Raises Refused(lora_not_available)."""
        known = self._known.get(name)
        if known is None:
            raise _not_available(name, "is not known here")
        if await self._digest(known) != digest:
            raise _not_available(name, "has other contents here, or other LoRA settings")
        # What its front-end wanted loaded anew has been; a request that arrives does not want that again.
        return msgspec.structs.replace(known.request, load_inplace=False)

    async def digest_of(self, request: LoRARequest) -> str:
        """Digest that tells a request's adapter from others of its name. Raises Refused(lora_not_available)."""
        known = self._known.get(request.lora_name)
        if known is None or not _is_same(known.request, request):
            raise _not_available(request.lora_name, "was replaced or removed after the request had begun")
        return await self._digest(known)

    async def _digest(self, known: _Known) -> str:
        name, number = known.request.lora_name, known.request.lora_int_id
        try:
            contents = await asyncio.wait_for(asyncio.shield(known.reading), READ_SECONDS)
        except TimeoutError:
            raise _not_available(name, "is still being read") from None
        if isinstance(contents, str):
            raise _not_available(name, contents)
        # vLLM loads an adapter again that its caches have dropped, and what it would find then is something else.
        if await self._in_thread(_is_stale, contents.stamp):
            raise _not_available(name, "has files that have changed since they were loaded")
        if self._known.get(name) is not known:
            raise _not_available(name, "was replaced or removed just now")
        if any(other.request.lora_int_id == number for other in self._known.values() if other is not known):
            # Several API servers count from 1 each; vLLM's workers take equal ids for equal adapters.
            raise _not_available(name, f"shares its id {number} with another adapter")
        return contents.digest

    async def _read(self, request: LoRARequest) -> Contents | str:
        async with self._one_at_a_time:
            try:
                return await self._in_thread(read_contents, request, self._settings)
            except Exception as error:
                # The path may name a hub: whatever that raises. Where our files lie is no peer's business.
                logger.warning("llumlet: adapter %s cannot be read", request.lora_name, exc_info=True)
                return f"cannot be read: {type(error).__name__}"

    def _in_thread(self, function: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._threads, function, *args)


def settings_of(lora_config: object | None) -> list[str]:
    """The settings of --enable-lora that change the last bits of what an adapter adds, or which layers it adds to."""
    return [str(getattr(lora_config, name, None)) for name in SETTINGS]


def read_contents(request: LoRARequest, settings: list[str]) -> Contents:
    """Reads every byte of the adapter's configuration and weights. Raises OSError and what a hub raises."""
    directory = Path(get_adapter_absolute_path(request.lora_path))
    weights = next((name for name in WEIGHT_FILES if (directory / name).is_file()), WEIGHT_FILES[0])
    paths = [str(directory / name) for name in (CONFIG_FILE, weights)]
    stamp = _stamp(paths)
    facts: list[Any] = [*settings, request.is_3d_lora_weight]
    for path in paths:
        with open(path, "rb") as file:
            facts += [Path(path).suffix, hashlib.file_digest(file, "sha256").hexdigest()]
    if _is_stale(stamp):
        raise OSError("its files changed while they were read")
    return Contents(hashlib.sha256(msgspec.json.encode(facts)).hexdigest(), stamp)


def _stamp(paths: list[str]) -> Stamp:
    stats = [(path, os.stat(path)) for path in paths]
    return tuple((path, stat.st_ino, stat.st_size, stat.st_mtime_ns) for path, stat in stats)


def _is_stale(stamp: Stamp) -> bool:
    try:
        return _stamp([path for path, *_ in stamp]) != stamp
    except OSError:
        return True


def _is_same(one: LoRARequest, other: LoRARequest) -> bool:
    return (one.lora_int_id, one.lora_path) == (other.lora_int_id, other.lora_path)


def _has_failed(known: _Known) -> bool:
    return known.reading.done() and isinstance(known.reading.result(), str)


def _not_available(name: str, problem: str) -> Refused:
    return Refused(Reason.LORA_NOT_AVAILABLE, f"adapter {name[:80]!r} {problem}")
