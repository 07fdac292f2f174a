# SPDX-License-Identifier: Apache-2.0
"""The gateway's processes: one, or several that share a port, between which the kernel distributes connections."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import glob
import logging
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

import uvloop
from prometheus_client import values
from prometheus_client.multiprocess import mark_process_dead

from llumsched import descriptors
from llumsched.gateway.config import Config
from llumsched.gateway.lines import LineHandler
from llumsched.gateway.metric_files import is_whole

_WATCH_S = 0.2
_ONE_SIGNAL_S = 1.0
_END_S = 5.0
"""Time for a worker to end after its last stream."""
_COLLECT_AFTER = 20_000
"""New objects before Python looks for cycles; its default of 700 would be every few requests."""
_SHORT_LIFE_S = 10.0
"""Lifetime below which a worker is likely to die again: from the second short life in a row on, its successor waits."""
_LONGEST_PAUSE_S = 30.0
_CANNOT_SERVE = 71
"""Exit code of a worker that could not begin; Python's own, for an uncaught exception, is 1."""
_METRICS_DIRECTORY = "PROMETHEUS_MULTIPROC_DIR"


def run(config: Config) -> int:
    """Serves until SIGTERM or SIGINT. Returns the exit code."""
    if shortage := descriptors.shortage(descriptors.raise_limit(), config.max_requests):
        print(f"llumnix gateway: {shortage}", file=sys.stderr)
    if config.workers == 1:
        return _work(config)
    try:
        directory = tempfile.TemporaryDirectory(prefix="llumnix-gateway-")
    except OSError as error:
        print(f"llumnix gateway: --workers needs a directory for metrics (TMPDIR): {error}", file=sys.stderr)
        return 1
    with directory as name:
        os.environ[_METRICS_DIRECTORY] = name
        return _supervise(config)


def _work(config: Config) -> int:
    try:
        with _logging():
            uvloop.run(_serve(config))
    except OSError as error:
        print(f"llumnix gateway: {config.host}:{config.port}: {error.strerror or error}", file=sys.stderr)
        return 1
    except ValueError as error:
        print(f"llumnix gateway: {error}", file=sys.stderr)
        return 1
    return 0


async def _serve(config: Config) -> None:
    from llumsched.gateway.server import Gateway  # after the environment of the metrics is set

    stop = _Stop()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.signalled)
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER, 20, 50)
    async with Gateway(config) as gateway:
        metrics = f", metrics at {config.metrics_host}:{gateway.metrics_port}" if gateway.metrics_port else ""
        print(f"llumnix gateway: listening at {config.host}:{gateway.port}{metrics}", file=sys.stderr, flush=True)
        await stop.first.wait()
        gateway.leave()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.second.wait(), config.shutdown_delay_s)


class _Stop:
    """The stops that signals ask for. Two within a second count once: systemd and terminals signal workers and their
    parent, which passes the signal on."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self._first_s = 0.0

    def signalled(self) -> None:
        now_s = time.monotonic()
        if not self.first.is_set():
            self._first_s = now_s
            self.first.set()
        elif now_s - self._first_s > _ONE_SIGNAL_S:
            self.second.set()


@contextlib.contextmanager
def _logging() -> Iterator[None]:
    """Logs as Python does by default, but without blocking on stderr."""
    handler = LineHandler()
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()


def _child(config: Config, place: int) -> None:
    """Runs a worker. Its metrics are in the files of its place, in which its successor continues, so that the number of
    files does not grow."""
    for file in glob.glob(f"{os.environ[_METRICS_DIRECTORY]}/*_{place}.db"):
        if not is_whole(file):
            os.unlink(file)
    values.ValueClass = values.MultiProcessValue(lambda: place)  # type: ignore[no-untyped-call]
    sys.exit(_CANNOT_SERVE if _work(config) else 0)


class Worker:
    """A place for a process. A process that dies is replaced at once; after several short lives, after 1 s, 2 s, 4 s
    and so on."""

    def __init__(self, start: Callable[[], BaseProcess], now: Callable[[], float] = time.monotonic) -> None:
        self._start = start
        self._now = now
        self._num_short = 0
        """Number of short lives in a row."""
        self._due_s: float | None = None
        """Time when the next process starts, if `process` is dead."""
        self._begin()

    def _begin(self) -> None:
        self.process = self._start()
        self._started_s = self._now()
        self._due_s = None

    def look(self) -> int | None:
        """The exit code of a process that has ended, once. Starts the next one when it is due."""
        if self._due_s is not None:
            if self._now() >= self._due_s:
                self._begin()
            return None
        code = self.process.exitcode
        if code is not None:
            is_short = self._now() - self._started_s < _SHORT_LIFE_S
            self._num_short = self._num_short + 1 if is_short else 0
            self._due_s = self._now() + self.pause_s
        return code

    @property
    def pause_s(self) -> float:
        """Seconds until the next process starts."""
        return min(2.0 ** min(self._num_short - 2, 10), _LONGEST_PAUSE_S) if self._num_short > 1 else 0.0


def _check_that_free(host: str, port: int, flag: str) -> None:
    """Raises ValueError if the port is in use. Workers share theirs (SO_REUSEPORT), and would also share it with
    another gateway's."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ValueError(f"{host}:{port}: {error.strerror or error}; see {flag}") from None


def _supervise(config: Config) -> int:
    """Starts the workers and restarts those that die. A worker that cannot listen ends all."""
    try:
        _check_that_free(config.host, config.port, "--port")
        _check_that_free(config.metrics_host, config.metrics_port, "--metrics-port")
    except ValueError as error:
        print(f"llumnix gateway: {error}", file=sys.stderr)
        return 1
    context = multiprocessing.get_context("spawn")
    num_signals = 0

    def stop(*_: object) -> None:
        nonlocal num_signals
        num_signals += 1

    def start(place: int) -> BaseProcess:
        process = context.Process(target=_child, args=(config, place))
        process.start()
        return process

    with _handling(stop):
        workers = [Worker(functools.partial(start, place)) for place in range(config.workers)]
        code = 0
        while not (num_signals or code):
            time.sleep(_WATCH_S)
            for place, worker in enumerate(workers):
                exit_code = worker.look()
                if exit_code == _CANNOT_SERVE:
                    code = 1
                elif exit_code is not None:
                    mark_process_dead(place)  # type: ignore[no-untyped-call]
                    then = f"another starts in {worker.pause_s:g} s" if worker.pause_s else "another starts"
                    print(f"llumnix gateway: a worker died ({exit_code}); {then}", file=sys.stderr)
        processes = [worker.process for worker in workers]
        num_passed, due_s = 0, time.monotonic() + config.shutdown_delay_s + config.shutdown_timeout_s + _END_S
        while (living := [one for one in processes if one.is_alive()]) and time.monotonic() < due_s:
            if num_passed < (num := max(1, num_signals)):
                num_passed = num
                for process in living:
                    process.terminate()
            wait([process.sentinel for process in living], _WATCH_S)
        for process in processes:
            process.kill()
            process.join()
    return code


@contextlib.contextmanager
def _handling(stop: object) -> Iterator[None]:
    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}  # type: ignore[arg-type]
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
