# SPDX-License-Identifier: Apache-2.0
"""The network between the parties, in the hands of a test: real sockets, and something in the middle of each way.

gRPC calls pass an interceptor in the caller's channel, messages of the relay a proxy between the engines' sockets and
the origin's. Both look at what a message is and do with it what the armed faults say. A call whose request or answer is
lost ends as it would at its deadline, only sooner: `PATIENCE_SECONDS` after it was made.

Parties are instances, and `ORIGIN`: the API servers, and whoever else calls from the test's own event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import functools
import threading
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator
from typing import Any
from unittest import mock

import grpc
import zmq
import zmq.asyncio
from grpc import aio

from llumlet.contract import channels
from llumlet.process.addresses import Address
from llumlet.process.credentials import Credentials
from llumlet.protocol import wire

ORIGIN = "O"
PATIENCE_SECONDS = 0.15
"""After which a call that gets no answer is given up."""
LATE_SECONDS = 0.3
"""By how much a delayed message comes late: after its sender has given it up and acted on that."""


class Kind(enum.StrEnum):
    """What happens to a message."""

    DROPPED = "dropped"
    DELAYED = "delayed"
    """Past its deadline: it arrives when its sender has given it up, or acted on its absence."""
    TWICE = "twice"
    OVERTAKEN = "overtaken"
    """By the next message the same way."""


@dataclasses.dataclass
class Fault:
    """Armed for `times` messages of this name; an answer's name is its call's, with ` answer`.

    `sender` narrows it down; `only` looks at the message itself.
    """

    message: str
    kind: Kind
    times: int = 1
    sender: str = ""
    only: Callable[[Any], bool] = lambda message: True
    hits: int = 0

    def takes(self, message: str, sender: str, content: Any) -> bool:
        if self.hits >= self.times or message != self.message or self.sender not in ("", sender):
            return False
        if not self.only(content):
            return False
        self.hits += 1
        return True


class Network:
    """All ways between the parties of one cluster. On the event loop of the test, which is the origins'."""

    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self.seen: Counter[str] = Counter()
        """Messages by name, as they were sent."""
        self.cut_off: Counter[str] = Counter()
        """Those of them that a cut way swallowed."""
        self._loops: dict[Any, str] = {}
        self._cuts: set[str] = set()
        self._planned: dict[str, tuple[str, ...]] = {}
        self._late: set[asyncio.Task[None]] = set()
        self._lock = threading.Lock()

    def name(self, party: str, loop: Any, port: int) -> None:
        """`party` calls from `loop` and listens at `port`."""
        self._loops[loop] = party
        _listeners[port] = (self, party)

    def forget(self) -> None:
        """Nobody listens here any more."""
        for port in [port for port, (network, _) in _listeners.items() if network is self]:
            del _listeners[port]

    def arm(self, message: str, kind: Kind, times: int = 1, **more: Any) -> Fault:
        fault = Fault(message, kind, times, **more)
        self.faults.append(fault)
        return fault

    def cut(self, *ways: str, at: str = "") -> None:
        """Nothing gets through `ways`, each `A>B`, until `heal`; from the first message `at` on, or from now on."""
        if at:
            self._planned[at] = ways
        else:
            self._cuts.update(ways)

    def heal(self) -> None:
        self._cuts.clear()
        self._planned.clear()

    def fault(self, message: str, sender: str, receiver: str, content: Any) -> Kind | None:
        """What happens to this message."""
        with self._lock:
            self.seen[message] += 1
            self._cuts.update(self._planned.pop(message, ()))
            if f"{sender}>{receiver}" in self._cuts:
                self.cut_off[message] += 1
                return Kind.DROPPED
            return next((fault.kind for fault in self.faults if fault.takes(message, sender, content)), None)

    def caller(self) -> str:
        return self._loops.get(asyncio.get_running_loop(), ORIGIN)

    def later(self, seconds: float, action: Callable[[], Awaitable[Any]]) -> None:
        """Deliver something late; what becomes of it is nobody's concern any more."""

        async def deliver() -> None:
            await asyncio.sleep(seconds)
            with contextlib.suppress(aio.AioRpcError, asyncio.CancelledError):
                await action()

        task = asyncio.get_running_loop().create_task(deliver())
        self._late.add(task)
        task.add_done_callback(self._late.discard)

    @property
    def quiet(self) -> bool:
        """Nothing is on its way, and nothing kept from it."""
        return not (self._late or self._cuts)


_listeners: dict[int, tuple[Network, str]] = {}
"""Who listens at a port, and in which network; several clusters can live side by side."""


@contextlib.contextmanager
def intercepted() -> Iterator[None]:
    """Every channel to a party of a network, made meanwhile, leads through that network."""

    def open_channel(address: Address, _: Credentials) -> aio.Channel:
        interceptors: Any = [_Calls(*_listeners[address.port])]
        return aio.insecure_channel(f"dns:///{address}", options=channels._OPTIONS, interceptors=interceptors)

    with mock.patch.object(channels, "open_channel", open_channel):
        yield


class _Calls(aio.UnaryUnaryClientInterceptor):  # type: ignore[type-arg]  # not generic at run time
    """In the channels to one party. Runs on the caller's event loop, the engines' llumlets' threads among them."""

    def __init__(self, network: Network, receiver: str) -> None:
        self._network = network
        self._receiver = receiver

    async def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        network = self._network
        name = _name_of(details.method)
        sender, receiver = network.caller(), self._receiver
        patience = min(details.timeout or PATIENCE_SECONDS, PATIENCE_SECONDS)

        async def call() -> Any:
            made = await continuation(details, request)
            await made
            return made

        match network.fault(name, sender, receiver, request):
            case Kind.DROPPED:
                await _give_up(patience)
            case Kind.DELAYED:
                network.later(patience + LATE_SECONDS, call)
                await _give_up(patience)
            case Kind.TWICE:
                network.later(0.0, call)
            case Kind.OVERTAKEN:
                raise ValueError("calls are not overtaken by the next one: they wait for their answers")
        made = await call()
        match network.fault(f"{name} answer", receiver, sender, await made):
            case Kind.DROPPED:
                await _give_up(patience)
            case Kind.DELAYED:
                await asyncio.sleep(LATE_SECONDS)
        return made


def _name_of(method: bytes | str) -> str:
    """`Commit` of the peers' service; calls of operators with their service's name before."""
    service, call = (method.decode() if isinstance(method, bytes) else method).strip("/").split("/")
    return call if service.endswith("Peer") else f"{service.rpartition('.')[2]}.{call}"


async def _give_up(seconds: float) -> None:
    await asyncio.sleep(seconds)
    details = "Deadline Exceeded"
    raise aio.AioRpcError(grpc.StatusCode.DEADLINE_EXCEEDED, aio.Metadata(), aio.Metadata(), details, "")


class RelayProxy:
    """Between one origin's relay and the engines that report to it; `address` is what engines are told."""

    def __init__(self, network: Network, context: zmq.asyncio.Context, origin: str) -> None:
        self._network = network
        self._context = context
        self._origin = origin
        self._front: zmq.asyncio.Socket = context.socket(zmq.ROUTER)
        self._front.setsockopt(zmq.LINGER, 0)
        self._front.bind("tcp://127.0.0.1:*")
        self.address = self._front.getsockopt_string(zmq.LAST_ENDPOINT)
        self._ways: dict[bytes, _Way] = {}
        self._tasks = [asyncio.create_task(self._read(), name="relay-proxy")]

    async def _read(self) -> None:
        while True:
            identity, data = await self._front.recv_multipart()
            way = self._ways.get(identity)
            if way is None:
                way = self._ways[identity] = _Way(self._context, self._origin)
                self._tasks.append(asyncio.create_task(self._read_back(identity, way), name="relay-proxy-back"))
            message = wire.decode_to_origin(data)
            if isinstance(message, wire.Hello):
                way.engine = message.instance
            await self._pass_on(way, way.engine, ORIGIN, message, functools.partial(way.back.send, data))

    async def _read_back(self, identity: bytes, way: _Way) -> None:
        while True:
            data = await way.back.recv()
            message = wire.decode_to_engine(data)
            frames = [identity, data]
            await self._pass_on(way, ORIGIN, way.engine, message, functools.partial(self._front.send_multipart, frames))

    async def _pass_on(
        self, way: _Way, sender: str, receiver: str, message: Any, send: Callable[[], Awaitable[Any]]
    ) -> None:
        network = self._network
        held, way.held[sender] = way.held[sender], None
        match network.fault(type(message).__name__, sender, receiver, message):
            case Kind.DROPPED:
                pass
            case Kind.DELAYED:
                network.later(LATE_SECONDS, send)
            case Kind.OVERTAKEN:
                way.held[sender] = send
            case Kind.TWICE:
                await send()
                await send()
            case None:
                await send()
        if held is not None:
            await held()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for way in self._ways.values():
            way.back.close()
        self._front.close()


class _Way:
    """Of one engine's socket: what the origin sees as that engine, and what is held back in each direction."""

    def __init__(self, context: zmq.asyncio.Context, origin: str) -> None:
        self.back: zmq.asyncio.Socket = context.socket(zmq.DEALER)
        self.back.setsockopt(zmq.LINGER, 0)
        self.back.connect(origin)
        self.engine = ""
        self.held: dict[str, Callable[[], Awaitable[Any]] | None] = defaultdict(lambda: None)
