# SPDX-License-Identifier: Apache-2.0
"""What a test can do to the instances of a cluster, beside what it does to their messages."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from llumlet.contract.types import AdoptRequest
from tests.shells.cluster import Cluster, Instance, Stream
from tests.shells.network import Kind
from vllm_llumnix.kv.mover.messages import Pull


@contextlib.contextmanager
def hanging(instance: Instance) -> Iterator[None]:
    """Its loop is stuck in the next model step."""
    executor = instance.engine.model_executor
    executor.stuck.clear()
    executor.turns.clear()
    try:
        yield
    finally:
        executor.turns.set()


def slow_copies(instance: Instance, seconds: float) -> contextlib.AbstractContextManager[None]:
    """Every copy of this instance's mover begins so late, whatever the mover is told meanwhile."""
    return before_copies(instance, lambda: time.sleep(seconds))


@contextlib.contextmanager
def copying(instance: Instance, *, final: bool = False) -> Iterator[threading.Event]:
    """Its mover stands still in the first copy; with `final`, in the first for which a stream waits. The event: it has
    begun that."""
    begun, go_on = threading.Event(), threading.Event()

    def stand_still(pull: Pull) -> None:
        if pull.final is final or not final:
            begun.set()
            go_on.wait()

    with before_copies(instance, stand_still, of_pull=True):
        try:
            yield begun
        finally:
            go_on.set()


@contextlib.contextmanager
def before_copies(instance: Instance, action: Callable[..., Any], *, of_pull: bool = False) -> Iterator[None]:
    """Before it copies anything, this instance's mover does that; `of_pull`: with what it is to copy."""
    transport = instance.engine.model_executor.mover.mover.transports[0]
    stock = transport.pull

    def pull(*args: Any) -> Iterator[int]:
        action(*args[:of_pull])
        yield from stock(*args)

    with mock.patch.object(transport, "pull", pull):
        yield


@contextlib.contextmanager
def replays_only_at(cluster: Cluster, stream: Stream, names: str) -> Iterator[None]:
    """The origin knows of nobody else; in this order."""
    addresses = [str(cluster[name].address) for name in names]
    core = stream.at.client.origin.core
    with (
        mock.patch.object(core, "targets", return_value=addresses),
        mock.patch.object(core.placement, "choose", lambda _id, _tokens, left, *_: left[0]),
    ):
        yield


@contextlib.contextmanager
def outputs_held(instance: Instance) -> Iterator[None]:
    """The engine's output thread stands still."""
    go_on = threading.Event()
    stock = instance.engine.kvconn.divert

    def divert(*args: Any) -> bool:
        go_on.wait()
        return stock(*args)

    with mock.patch.object(instance.engine.kvconn, "divert", divert):
        try:
            yield
        finally:
            go_on.set()


def recorded(cluster: Cluster, message: str) -> list[AdoptRequest]:
    """Every message of this name from now on; nothing happens to them."""
    seen: list[AdoptRequest] = []

    def record(content: AdoptRequest) -> bool:
        seen.append(content)
        return False

    cluster.network.arm(message, Kind.DROPPED, only=record)
    return seen


def recorded_requests(instance: Instance) -> list[str]:
    """Requests that its scheduler is given from now on."""
    scheduler = instance.engine.scheduler
    stock, given = scheduler.add_request, list[str]()

    def add_request(request: Any) -> None:
        given.append(request.request_id)
        stock(request)

    scheduler.add_request = add_request
    return given


@contextlib.contextmanager
def stopped(instance: Instance) -> Iterator[None]:
    """As by SIGSTOP: its llumlet's thread does nothing, what is sent to it waits in its sockets."""
    go_on = threading.Event()
    instance.engine.kvconn.thread.post(go_on.wait)
    try:
        yield
    finally:
        go_on.set()


@contextlib.contextmanager
def building_slowly(instance: Instance) -> Iterator[threading.Event]:
    """It builds no request meanwhile. The event: it has begun to."""
    begun, go_on = threading.Event(), threading.Event()
    builder = instance.engine.agent.adoptions.builder
    stock = builder._build

    def build(*args: Any) -> Any:
        begun.set()
        go_on.wait()
        return stock(*args)

    with mock.patch.object(builder, "_build", build):
        try:
            yield begun
        finally:
            go_on.set()
