# SPDX-License-Identifier: Apache-2.0
"""Outputs of requests that moved, from this engine to the API servers that hold their streams. Llumlet thread only.

One DEALER socket per origin, so that a dead or slow origin holds up nobody else. Sending never waits: what an origin's
queue does not take is dropped, and the origin, which counts tokens, notices. Heartbeats tell every origin how the
engine is and which requests it reports. An origin that stops answering them is dead, and so are its requests; but for
our own front-end, which dies only with the engine: if it is silent it is stopped, or cut off. From an origin of which
there has been nothing here for a while the engine parts, in so many words, and knows it no more.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, cast

import zmq
import zmq.asyncio
from vllm.v1.engine import EngineCoreOutputs

from llumlet.process.addresses import Address
from llumlet.process.credentials import Credentials
from llumlet.protocol import wire
from llumlet.protocol.errors import Reason, Refused
from llumlet.protocol.ids import Epoch
from vllm_llumnix.engine.loop import FOREIGN_CLIENT
from vllm_llumnix.engine.requests.request_state import Residence
from vllm_llumnix.wire.addresses import RelayAddress
from vllm_llumnix.wire.relay_convert import token_output_from
from vllm_llumnix.wire.relay_keys import connect

logger = logging.getLogger("vllm.llumnix")

HEARTBEAT_SECONDS = 0.5
ORIGIN_SECONDS = 30.0
"""An origin that has answered no heartbeat of so many seconds is dead. Time in which the engine itself was stopped does
not count: it has sent none."""
LINGER_MS = 1000
"""Time for the last message to an origin."""
QUEUED_MESSAGES = 100_000
IDLE_SECONDS = 60.0
"""Seconds for which an origin without requests here is kept: its next request need not connect again."""
MAX_ORIGINS = 256
"""Origins of others' requests at a time: each is a socket, and a peer can name as many as it likes. Idle ones make
way."""


class OriginUnreachable(Exception):
    """The origin API server did not answer a question in time."""


class Relay:
    """All origins of the requests this engine runs for others."""

    def __init__(
        self,
        hello: wire.Hello,
        on_dismissal: Callable[[str, list[tuple[str, Epoch]]], None],
        on_part: Callable[[str, wire.InputPart], None],
        health: Callable[[], wire.Health],
        credentials: Credentials,
    ) -> None:
        """`on_dismissal` is told which origin wants nothing more of which requests; `on_part`, which one has more input
        for one of them."""
        self._hello = hello
        self._credentials = credentials
        self._on_dismissal = on_dismissal
        self._on_part = on_part
        self._health = health
        self._context = zmq.asyncio.Context()
        self._origins: dict[str, _Origin] = {}
        self._by_index: dict[int, _Origin] = {}
        self._indices = itertools.count()
        """Client indices, of which none is used again: outputs for a dead origin may still be on their way."""
        self._guests: dict[str, tuple[Residence, _Origin]] = {}
        self._questions: dict[tuple[str, int], asyncio.Future[wire.FenceAnswer]] = {}
        self._numbers = itertools.count(1)
        self._heartbeat = asyncio.create_task(self._beat(), name="llumnix-heartbeat")

    def client_index(self, address: str) -> int:
        """The client index that stands for this origin in the engine. Raises Refused(destination_busy)."""
        if address not in self._origins and len(self._origins) >= MAX_ORIGINS:
            idle = min(self._idle_origins(), key=lambda origin: origin.used_at, default=None)
            if idle is None:
                raise Refused(Reason.DESTINATION_BUSY, f"requests of {MAX_ORIGINS} API servers are here already")
            self._part(idle)
        return FOREIGN_CLIENT + self._origin(address).index

    def meet(self, address: str) -> None:
        """Our own front-end: say hello, and send it heartbeats for as long as the engine lives."""
        self._origin(address).is_own = True

    def welcome(self, request_id: str, residence: Residence) -> None:
        """Outputs of this request go to its origin from now on, under `residence.epoch`.

        Raises Refused(handover_open) while they go there for another life of the request.
        """
        assert residence.origin is not None
        present = self.residence_of(request_id)
        if present is not None and present is not residence:
            raise Refused(Reason.HANDOVER_OPEN, "another life of the request is here, or on its way")
        self._guests[request_id] = (residence, self._origin(residence.origin))

    def farewell(self, request_id: str, residence: Residence | None = None) -> None:
        """The request has left this engine or ended; `residence`: if this is the life that reports."""
        if residence is None or self.residence_of(request_id) is residence:
            self._guests.pop(request_id, None)

    def residence_of(self, request_id: str) -> Residence | None:
        """The residence of a request that reports by relay."""
        guest = self._guests.get(request_id)
        return guest[0] if guest else None

    def send(self, client_index: int, outputs: EngineCoreOutputs) -> None:
        """Relay the outputs of one engine step."""
        origin = self._by_index.get(client_index - FOREIGN_CLIENT)
        batch = []
        for output in outputs.outputs:
            guest = self._guests.get(output.request_id)
            if guest is None:
                continue
            residence = guest[0]
            if residence.repeat:
                first = residence.base - len(residence.repeat)
                batch.append(
                    wire.TokenOutput(output.request_id, residence.epoch, residence.base, first, residence.repeat)
                )
                residence.repeat = []
            batch.append(token_output_from(output, residence.epoch, residence.base, residence.next_index))
            residence.next_index += len(output.new_token_ids)
            # The source has let go, or will on hearing that we have: from here the request may move on.
            residence.handover_open = False
            if output.finish_reason is not None and not residence.num_parts:
                self.farewell(output.request_id)
        if not batch or origin is None:
            return
        origin.send(
            wire.TokenBatch(
                instance=self._hello.instance,
                incarnation=self._hello.incarnation,
                llumlet=self._hello.llumlet,
                outputs=batch,
                weight_version=outputs.weight_version,
            )
        )

    def hand_over(self, address: str, message: wire.HandedOver) -> None:
        """Tell the origin who has its request now; before that one's first token, which may never come."""
        self._origin(address).send(message)

    async def fence(self, address: str, request_id: str, epoch: Epoch, seconds: float) -> wire.FenceAnswer:
        """Ask the origin whether `epoch` has started. Raises OriginUnreachable after `seconds`."""
        number = next(self._numbers)
        answer = self._questions[address, number] = asyncio.get_running_loop().create_future()
        self._origin(address).send(wire.FenceQuestion(number, request_id, epoch))
        try:
            return await asyncio.wait_for(answer, seconds)
        except TimeoutError as error:
            raise OriginUnreachable(address) from error
        finally:
            del self._questions[address, number]

    async def close(self) -> None:
        self._heartbeat.cancel()
        for origin in self._origins.values():
            origin.close()
        self._context.destroy(linger=0)

    def _origin(self, address: str) -> _Origin:
        origin = self._origins.get(address)
        if origin is None:
            origin = _Origin(self._context, address, next(self._indices), self._receive, self._credentials)
            logger.debug("relay: reporting to the API server at %s", address)
            self._origins[address] = self._by_index[origin.index] = origin
            origin.send(self._hello)
        origin.used_at = time.monotonic()
        return origin

    def _idle_origins(self) -> list[_Origin]:
        """Origins of others with no request here and no question open."""
        used = {origin.address for _, origin in self._guests.values()}.union(address for address, _ in self._questions)
        return [origin for origin in self._origins.values() if not origin.is_own and origin.address not in used]

    def _part(self, origin: _Origin) -> None:
        """Parts from an origin of which nothing is here. Late outputs of requests that have ended may be: nobody waits
        for them."""
        origin.send(wire.Parting(self._hello.instance, self._hello.incarnation))
        self._forget(origin, linger_ms=LINGER_MS)

    def _forget(self, origin: _Origin, linger_ms: int = 0) -> None:
        del self._origins[origin.address], self._by_index[origin.index]
        origin.close(linger_ms)

    def _receive(self, address: str, message: wire.ToEngine) -> None:
        match message:
            case wire.Dismissal():
                self._on_dismissal(address, message.requests)
            case wire.FenceAnswer():
                question = self._questions.get((address, message.question))
                if question is not None and not question.done():
                    question.set_result(message)
            case wire.HeartbeatAck():
                origin = self._origins[address]
                origin.num_unanswered = 0
                claimed = origin.claimed
                self._on_dismissal(address, [(one, claimed[one]) for one in message.unknown if one in claimed])
            case wire.InputPart():
                self._on_part(address, message)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            health = self._health()
            guests: dict[_Origin, dict[str, Residence]] = {origin: {} for origin in self._origins.values()}
            for request_id, (residence, origin) in self._guests.items():
                guests[origin][request_id] = residence
            idle = set(self._idle_origins())
            for origin, residences in guests.items():
                if origin not in idle:
                    origin.used_at = time.monotonic()
                elif time.monotonic() - origin.used_at > IDLE_SECONDS:
                    self._part(origin)
                    continue
                if origin.is_dead:
                    self._bury(origin, residences)
                    continue
                self._report(origin, health, residences)

    def beat(self, address: str) -> None:
        """Tell this origin now what of its requests is here."""
        origin = self._origin(address)
        residences = {name: residence for name, (residence, theirs) in self._guests.items() if theirs is origin}
        self._report(origin, self._health(), residences)

    def _report(self, origin: _Origin, health: wire.Health, residences: dict[str, Residence]) -> None:
        here = {name: residence for name, residence in residences.items() if not residence.admitting}
        origin.claimed = {name: residence.epoch for name, residence in here.items()}
        num_parts = {name: residence.num_parts for name, residence in here.items() if residence.num_parts}
        claims = list(origin.claimed.items())
        origin.send(wire.Heartbeat(self._hello.instance, self._hello.incarnation, health, claims, num_parts))
        origin.num_unanswered += 1

    def _bury(self, origin: _Origin, residences: dict[str, Residence]) -> None:
        requests = [(request_id, residence.epoch) for request_id, residence in residences.items()]
        if requests:
            logger.warning("the API server at %s is gone; ending %d of its requests", origin.address, len(requests))
        self._forget(origin)
        self._on_dismissal(origin.address, requests)
        for request_id, _ in requests:
            self.farewell(request_id)


class _Origin:
    """The socket to one origin API server."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        address: str,
        index: int,
        receive: Callable[[str, wire.ToEngine], None],
        credentials: Credentials,
    ) -> None:
        self.address = address
        self.index = index
        self._receive = receive
        self._socket: zmq.asyncio.Socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, QUEUED_MESSAGES)
        self._socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_MESSAGE_BYTES)
        connect(self._socket, RelayAddress.parse(address), credentials)
        self.is_own = False
        """True for the engine's own front-end."""
        self.claimed: dict[str, Epoch] = {}
        """Requests and epochs that the last heartbeat named: an answer that calls one unknown means this epoch."""
        self.num_unanswered = 0
        """Heartbeats since its last answer to one."""
        self.used_at = time.monotonic()
        """The time at which something of it was here last."""
        self._task = asyncio.create_task(self._read(), name=f"llumnix-relay-{address}")
        self._dropping = False

    @property
    def is_dead(self) -> bool:
        return not self.is_own and self.num_unanswered * HEARTBEAT_SECONDS > ORIGIN_SECONDS

    def send(self, message: wire.ToOrigin) -> None:
        if self._socket.closed:
            return
        # pyzmq's own future, though its types say less.
        sent = cast("asyncio.Future[Any]", self._socket.send(wire.encode(message)))
        full = not sent.done()
        if full:
            sent.cancel()
            if not self._dropping:
                logger.warning("the API server at %s takes no messages; dropping outputs for it", self.address)
        self._dropping = full

    async def _read(self) -> None:
        while True:
            data = await self._socket.recv()
            try:
                message = wire.decode_to_engine(data)
            except wire.MALFORMED as error:
                logger.warning("ignoring a malformed message from the API server at %s: %s", self.address, error)
                continue
            self._receive(self.address, message)

    def close(self, linger_ms: int = 0) -> None:
        self._task.cancel()
        self._socket.close(linger=linger_ms)


ENTRIES = 65_536
"""Requests that are remembered, those that left last: to send late aborts after them."""


class Forwarding:
    """The llumlet to which each request has gone from here, by the request's id."""

    def __init__(self) -> None:
        self._left: OrderedDict[str, Address] = OrderedDict()

    def remember(self, request_id: str, address: Address) -> None:
        self._left[request_id] = address
        self._left.move_to_end(request_id)
        if len(self._left) > ENTRIES:
            self._left.popitem(last=False)

    def came_back(self, request_id: str) -> None:
        self._left.pop(request_id, None)

    def owner_of(self, request_id: str) -> Address | None:
        """The instance that a request went to; None for one that has not left, or is forgotten."""
        return self._left.get(request_id)
