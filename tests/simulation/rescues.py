# SPDX-License-Identifier: Apache-2.0
"""A `World` in which an engine that adopts a request brings its KV cache from one whose loop hangs.

Modelled after `engine.rescue` and `engine.claims`: the holder's other threads answer while its loop hangs, blocks are
read one at a time, and anything may happen in between. When its loop goes on, the holder keeps the blocks of claims
that are not over and forgets their requests. Whoever has read asks whether the blocks were kept until then, and
publishes nothing otherwise.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator

from llumlet.protocol.events import Gone
from llumlet.protocol.ids import Epoch
from llumlet.protocol.ledger import Owner
from tests.protocol.world import BLOCK_SIZE, Engine, Message, Request, World, cells_of
from vllm_llumnix.engine.claims import LEASE_SECONDS
from vllm_llumnix.engine.rescue import CLAIM_SECONDS, PULL_SECONDS

MESSAGES = frozenset({"claim", "claim answer", "end claim", "end claim answer"})
"""Bodies begin with the number of the attempt, which names the rescue and the claim."""


@dataclasses.dataclass
class Holder:
    """Who may have the KV cache."""

    name: str
    incarnation: str


class State(enum.Enum):
    CLAIMING = enum.auto()
    RESERVING = enum.auto()
    COPYING = enum.auto()
    ENDING = enum.auto()
    DRAINING = enum.auto()
    """Given up, and the mover still writes."""


@dataclasses.dataclass
class Rescue:
    """At the adopting engine."""

    attempt: int
    at: str
    incarnation: str
    holder: Holder
    request: Request
    until: float
    state: State = State.CLAIMING
    blocks: list[int] = dataclasses.field(default_factory=list)
    pairs: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    copied: int = 0

    @property
    def key(self) -> str:
        """For the ledgers of both engines."""
        return f"rescue {self.attempt}"


@dataclasses.dataclass
class Claim:
    """At the engine that hangs."""

    attempt: int
    at: str
    incarnation: str
    request: Request
    expires: float
    over: bool = False
    known: bool = False
    """To the loop, which has kept the blocks and let go of the request."""

    @property
    def key(self) -> str:
        return f"rescue {self.attempt}"


class Rescues(World):
    keeps_claimed = True
    asks_at_the_end = True
    hanging: dict[str, float]
    """Engines whose loop hangs, and since when."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.rescues: dict[int, Rescue] = {}
        self.claims: dict[int, Claim] = {}
        self.num_rescued = 0
        self._called: set[tuple[str, int]] = set()
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]

    def _adopted(self, engine: Engine, attempt: int, request_id: str, *, took: bool) -> None:
        self._send(engine.name, "O", "adopt answer", (attempt, took, engine.incarnation), request=request_id)

    def forget_lives(self) -> None:
        """Of engines that have died since."""
        for table in (self.rescues, self.claims):
            for attempt, item in list(table.items()):  # type: ignore[attr-defined]
                if self.engines[item.at].incarnation != item.incarnation:
                    del table[attempt]

    # The engine that adopts

    def begin_rescue(self, engine: Engine, attempt: int, request: Request, holder: Holder) -> None:
        until = self.now + CLAIM_SECONDS
        self.rescues[attempt] = Rescue(attempt, engine.name, engine.incarnation, holder, request, until)
        body = (attempt, request.epoch, holder.incarnation)
        self._send(engine.name, holder.name, "claim", body, request=request.id)

    def is_rescued_to(self, engine: Engine, request_id: str) -> bool:
        """Whether blocks are reserved for it."""
        rescues = [rescue for rescue in self.rescues.values() if rescue.at == engine.name and rescue.blocks]
        return any(rescue.request.id == request_id for rescue in rescues)

    def _claimed(self, engine: Engine, rescue: Rescue, computed: int, blocks: list[int], output: list[int]) -> None:
        request = rescue.request
        usable = min(computed, len(request.tokens) - 1)
        if rescue.state is not State.CLAIMING or output[: request.base] != request.output or usable <= 0:
            self._end_claim(rescue)
            self._without(engine, rescue)
            return
        rescue.state, rescue.until = State.RESERVING, self.now + PULL_SECONDS
        engine.commands.append(("rescue", lambda: self._reserve_for(engine, rescue, usable, blocks)))

    def _reserve_for(self, engine: Engine, rescue: Rescue, computed: int, blocks: list[int]) -> None:
        wanted, free = len(rescue.request.tokens) // BLOCK_SIZE + 1, engine.ledger.free()
        taken = rescue.request.id in engine.requests or self.is_rescued_to(engine, rescue.request.id)
        if rescue.state is not State.RESERVING or wanted > len(free) or taken:
            self._end_claim(rescue)
            self._without(engine, rescue)
            return
        engine.ledger.hold(Owner.RESERVATION, rescue.key, free[:wanted])
        rescue.blocks, rescue.request.computed = free[:wanted], computed
        rescue.pairs = list(zip(blocks[: -(-computed // BLOCK_SIZE)], rescue.blocks, strict=False))
        rescue.state = State.COPYING

    def copying(self) -> Iterator[int]:
        """Rescues in which a mover has something to do."""
        for attempt, rescue in self.rescues.items():
            if rescue.state in (State.COPYING, State.DRAINING) and self._answers(rescue.at):
                yield attempt

    def _answers(self, name: str) -> bool:
        """Whether threads beside the loop get on there."""
        return self.engines[name].up

    def rescue_block(self, attempt: int) -> None:
        """The mover copies one more block, or is done, or quiet."""
        rescue = self.rescues[attempt]
        engine, source = self.engines[rescue.at], self.engines[rescue.holder.name]
        if rescue.copied < len(rescue.pairs) and source.incarnation == rescue.holder.incarnation:
            read, write = rescue.pairs[rescue.copied]
            if not engine.ledger.writable(rescue.key, [write]):
                self.faults.append(f"a mover of {engine.name} wrote block {write}, which is not reserved any more")
            engine.memory[write] = list(source.memory[read])
            rescue.copied += 1
        elif rescue.state is State.DRAINING:
            engine.commands.append(("free", lambda: engine.ledger.give_back(Owner.DRAINING, rescue.key)))
            del self.rescues[attempt]
        elif rescue.copied < len(rescue.pairs):
            self._abandon(engine, rescue)
        else:
            rescue.state, rescue.until = State.ENDING, self.now + CLAIM_SECONDS
            self._end_claim(rescue)

    def _end_claim(self, rescue: Rescue) -> None:
        self._send(rescue.at, rescue.holder.name, "end claim", (rescue.attempt,), request=rescue.request.id)

    def _abandon(self, engine: Engine, rescue: Rescue) -> None:
        engine.ledger.pass_on(rescue.key, Owner.DRAINING)
        rescue.state = State.DRAINING
        self._end_claim(rescue)
        self._adopted(engine, rescue.attempt, rescue.request.id, took=False)

    def _ended(self, engine: Engine, rescue: Rescue, *, intact: bool) -> None:
        if rescue.state is not State.ENDING:
            return
        if intact or not self.asks_at_the_end:
            engine.commands.append(("admit", lambda: self._admit_rescued(engine, rescue)))
        else:
            self._without(engine, rescue)

    def _admit_rescued(self, engine: Engine, rescue: Rescue) -> None:
        if self.rescues.pop(rescue.attempt, None) is None:
            return
        request = rescue.request
        request.blocks = rescue.blocks
        if engine.cells(request.blocks, request.computed) != cells_of(request.tokens)[: request.computed]:
            self.faults.append(f"{engine.name} published bytes that are not the request's")
        engine.ledger.pass_on(rescue.key, Owner.SCHEDULER, request.id)
        engine.requests[request.id] = request
        self.num_rescued += 1
        self._adopted(engine, rescue.attempt, request.id, took=True)

    def _without(self, engine: Engine, rescue: Rescue) -> None:
        """The request comes without its KV cache."""
        self.rescues.pop(rescue.attempt, None)

        def add() -> None:
            engine.ledger.give_back(Owner.RESERVATION, rescue.key)
            request = rescue.request
            took = request.id not in engine.requests and not self.is_rescued_to(engine, request.id)
            if took:
                request.blocks, request.computed = [], 0
                engine.requests[request.id] = request
            self._adopted(engine, rescue.attempt, request.id, took=took)

        engine.commands.append(("adopt", add))

    # The engine that hangs

    def _claim(self, engine: Engine, message: Message, attempt: int, epoch: Epoch, incarnation: str) -> None:
        request = engine.requests.get(message.request)
        answer = None
        if (
            request is not None
            and (engine.name in self.hanging and engine.incarnation == incarnation)
            and (request.epoch.term < epoch.term and not (request.frozen or request.leaving))
            and (request.output and request.computed)
            and not any(claim.request is request and not claim.known for claim in self.claims.values())
        ):
            expires = self.now + LEASE_SECONDS
            self.claims[attempt] = Claim(attempt, engine.name, incarnation, request, expires)
            answer = (request.computed, list(request.blocks), list(request.output))
        self._send(engine.name, message.sender, "claim answer", (attempt, answer), request=message.request)

    def goes_on(self, name: str) -> None:
        """Its loop turns again."""
        engine = self.engines[name]
        for claim in [claim for claim in self.claims.values() if claim.at == name and not claim.known]:
            claim.known = True
            if not claim.over and self.keeps_claimed:
                engine.ledger.hold(Owner.PIN, claim.key, claim.request.blocks)
            if engine.requests.get(claim.request.id) is claim.request:
                self._end(engine, claim.request, Gone.ABORTED)
            if claim.over:
                del self.claims[claim.attempt]

    def claim_ends(self, attempt: int) -> bool:
        """Nobody reads any more, or the lease is over. Whether the blocks were kept until now."""
        claim = self.claims.get(attempt)
        if claim is None or claim.over:
            return False
        claim.over = True
        if claim.known:
            engine = self.engines[claim.at]
            engine.commands.append(("unpin", lambda: engine.ledger.give_back(Owner.PIN, claim.key)))
            del self.claims[attempt]
        return True

    # Both

    def _heard(self, engine: Engine, message: Message) -> None:
        """One of `MESSAGES`. Calls and answers arrive once at most."""
        self.forget_lives()
        attempt, *rest = message.body
        if (message.kind, attempt) in self._called:
            return
        self._called.add((message.kind, attempt))
        rescue = self.rescues.get(attempt)
        if message.kind == "claim":
            self._claim(engine, message, attempt, *rest)
        elif message.kind == "end claim":
            intact = self.claim_ends(attempt)
            self._send(engine.name, message.sender, "end claim answer", (attempt, intact), request=message.request)
        elif rescue is None or rescue.at != engine.name:
            return
        elif message.kind == "end claim answer":
            self._ended(engine, rescue, intact=rest[0])
        elif rest[0] is None:
            self._without(engine, rescue)
        else:
            self._claimed(engine, rescue, *rest[0])

    def rescue_due(self, attempt: int) -> None:
        """A call's deadline, or the copy's, has passed."""
        rescue = self.rescues[attempt]
        engine = self.engines[rescue.at]
        if rescue.state is State.COPYING:
            self._abandon(engine, rescue)
        else:
            self._without(engine, rescue)

    def deadlines(self) -> Iterator[tuple[float, str, int]]:
        """When what is due: of rescues and claims."""
        for attempt, rescue in self.rescues.items():
            waits = rescue.state in (State.CLAIMING, State.COPYING, State.ENDING)
            if waits and self._answers(rescue.at):
                yield rescue.until, "rescue", attempt
        for attempt, claim in self.claims.items():
            if not claim.over and self._answers(claim.at):
                yield claim.expires, "lease", attempt
