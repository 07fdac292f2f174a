# SPDX-License-Identifier: Apache-2.0
"""A `World` whose engines adopt requests, and bring their KV cache from one whose loop hangs.

What decides is production's: `Adoption`, `Rescue`, `Claim`, `Trials`. Here their effects are carried out: what concerns
the scheduler waits for the loop, building a request takes as long as the schedule likes, blocks are read one at a time,
and anything may happen in between. Calls and their answers arrive once at most.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

from llumlet.protocol import events as ev
from llumlet.protocol.effects import ClearTimer, SetTimer
from llumlet.protocol.errors import Reason, Refused
from llumlet.protocol.events import Gone, Settlement
from llumlet.protocol.ids import Epoch
from llumlet.protocol.move.ledger import BlockOwner
from llumlet.protocol.origin import replay_words as words
from llumlet.protocol.recovery import adoption, claim, rescue
from llumlet.protocol.recovery.adoption import Adoption, Life, require_former
from llumlet.protocol.recovery.claim import Claim
from llumlet.protocol.recovery.rescue import Rescue
from llumlet.protocol.recovery.trials import Trials
from tests.protocol.world import BLOCK_SIZE, NOTHING, Engine, Message, Request, Row, World, cells_of

ORIGIN = "O"
CALLS = frozenset({"adopt", "identify", "claim", "end claim"})
"""Their bodies, and their answers', begin with the number of the call or of the attempt."""
MESSAGES = CALLS | {"claim answer", "end claim answer", "call off"}


class Holder(NamedTuple):
    """Who may have the KV cache."""

    name: str
    incarnation: str


class Former(NamedTuple):
    """A life of a request that is at an engine."""

    epoch: Epoch
    origin: str | None = ORIGIN


@dataclasses.dataclass(eq=False)
class Attempt:
    """At the adopting engine; a `Life`, and a `Tried`."""

    call: int
    engine: Engine
    request: Request
    holder: Holder | None
    trial_tokens: int
    machine: Adoption
    origin: str | None = ORIGIN
    building: bool = False
    added: bool = False
    rescue: Rescue | None = None
    due: tuple[float, rescue.RescueEvent] | None = None
    """What is to be taken for the answer that is waited for, and when."""
    rows: list[Row] = dataclasses.field(default_factory=list)
    source_rows: list[Row] = dataclasses.field(default_factory=list)
    pairs: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    copied: int = 0

    @property
    def key(self) -> str:
        """For the ledgers of both engines."""
        return f"attempt {self.call}"

    @property
    def epoch(self) -> Epoch:
        return self.request.epoch

    @property
    def shows(self) -> bool:
        """Whether it is in heartbeats, although the scheduler does not have the request."""
        return self.machine.state in (adoption.State.BUILDING, adoption.State.FETCHING, adoption.State.ADDING)

    @property
    def request_id(self) -> str:
        return self.request.id

    @property
    def num_output_tokens(self) -> int:
        return len(self.request.output)

    def is_finished(self) -> bool:
        return self.added and self.engine.requests.get(self.request.id) is not self.request


@dataclasses.dataclass(eq=False)
class Held:
    """A request of which there is a claim, at the engine that hangs."""

    attempt: int
    request: Request
    epoch: Epoch
    machine: Claim
    expires: float | None = None
    woken: bool = False

    @property
    def key(self) -> str:
        return f"attempt {self.attempt}"


class Desk:
    """What one life of an engine has to do with adoptions."""

    def __init__(self) -> None:
        self.on_trial: str | None = None
        self.trials = Trials(self._note)
        self.attempts: dict[int, Attempt] = {}
        self.preparing: dict[str, Attempt] = {}
        self.claims: dict[int, Held] = {}

    def _note(self, request_id: str | None) -> None:
        self.on_trial = request_id


class Adopting(World):
    adoption_class: type[Adoption] = Adoption
    rescue_class: type[Rescue] = Rescue
    claim_class: type[Claim] = Claim
    hanging: dict[str, float]
    """Engines whose loop hangs, and since when."""

    def __init__(self, engines: str, **kwargs: int) -> None:
        self.desks = {name: Desk() for name in engines}
        self.num_rescued = 0
        self._called: set[tuple[str, int]] = set()
        super().__init__(engines, **kwargs)

    def _answers(self, name: str) -> bool:
        """Whether threads beside the loop get on there."""
        return self.engines[name].up

    def attempts(self) -> Iterator[Attempt]:
        for name, desk in self.desks.items():
            if desk.attempts and self._answers(name):
                yield from desk.attempts.values()

    # Adoption

    def _adopt(self, engine: Engine, message: Message) -> None:
        call, epoch, delivered, holder, trial_tokens = message.body
        client = self.clients[message.request]
        request = Request(message.request, client.prompt, client.num_output, list(delivered), epoch, len(delivered))
        machine = self.adoption_class(may_fetch=holder is not None)
        attempt = Attempt(call, engine, request, holder, trial_tokens, machine)
        self.desks[engine.name].attempts[call] = attempt
        self._tell(attempt, adoption.AdoptRequested())

    def _tell(self, attempt: Attempt, event: adoption.AdoptionEvent) -> None:
        self.note(f"{attempt.engine.name} {attempt.key}: {event}")
        for effect in attempt.machine.on(event):
            self._do_for_adoption(attempt, effect)

    def _do_for_adoption(self, attempt: Attempt, effect: adoption.AdoptionEffect) -> None:
        engine, desk = attempt.engine, self.desks[attempt.engine.name]
        match effect:
            case adoption.MakeWay():
                for incoming in list(engine.into.values()):
                    if incoming.request_id == attempt.request_id and incoming.machine.settlement is Settlement.PENDING:
                        self._tell_destination(engine, incoming.move, ev.CancelRequested())
                engine.commands.append(("make way", lambda: self._tell(attempt, self._make_way(attempt))))
            case adoption.BuildRequest():
                attempt.building = True
            case adoption.FetchCache():
                request = attempt.request
                attempt.rescue = self.rescue_class(len(request.tokens), request.output, BLOCK_SIZE)
                self._tell_rescue(attempt, rescue.RescueStarted())
            case adoption.AddRequest(with_cache=with_cache):
                if desk.preparing.get(attempt.request_id) is attempt:
                    del desk.preparing[attempt.request_id]
                engine.commands.append(("add", lambda: self._tell(attempt, self._add(attempt, with_cache))))
            case adoption.FreeCache():
                engine.commands.append(("free", lambda: engine.ledger.give_back(BlockOwner.RESERVATION, attempt.key)))
            case adoption.AnswerAdopt():
                self._answer(attempt, words.Adopted(engine.name, engine.incarnation))
            case adoption.RefuseAdopt(reason=reason):
                desk.trials.close(attempt)
                if desk.preparing.get(attempt.request_id) is attempt:
                    del desk.preparing[attempt.request_id]
                self._answer(attempt, words.AdoptRefused(reason))

    def _answer(self, attempt: Attempt, answer: words.ReplayEvent) -> None:
        engine = attempt.engine
        self._send(engine.name, ORIGIN, "adopt answer", (attempt.call, answer), request=attempt.request_id)
        if attempt.rescue is None or attempt.rescue.state is not rescue.State.DRAINING:
            del self.desks[engine.name].attempts[attempt.call]

    def _make_way(self, attempt: Attempt) -> adoption.AdoptionEvent:
        engine, request_id = attempt.engine, attempt.request_id
        preparing = self.desks[engine.name].preparing
        here = engine.requests.get(request_id)
        present: Life | None = Former(here.epoch) if here is not None else preparing.get(request_id)
        if present is not None:
            try:
                require_former(present, attempt)
            except Refused as error:
                return adoption.AttemptFailed(error.reason)
        if here is not None:
            self._abort(engine, request_id)
            return adoption.FormerLifeEnded()
        if request_id in preparing:
            self._tell(preparing[request_id], adoption.CalledOff())
        preparing[request_id] = attempt
        return adoption.WayMade()

    def build(self, attempt: Attempt) -> None:
        """A helper thread has built the request."""
        attempt.building = False
        if attempt.trial_tokens:
            try:
                self.desks[attempt.engine.name].trials.open(attempt, attempt.trial_tokens)
            except Refused as error:
                self._tell(attempt, adoption.AttemptFailed(error.reason))
                return
        self._tell(attempt, adoption.RequestBuilt())

    def _add(self, attempt: Attempt, with_cache: bool) -> adoption.AdoptionEvent:
        engine, request = attempt.engine, attempt.request
        if request.id in engine.requests or (not with_cache and self._is_reserved(engine, request.id)):
            return adoption.AttemptFailed(Reason.HANDOVER_OPEN)
        if with_cache:
            assert attempt.rescue is not None
            request.rows, request.computed = attempt.rows, attempt.rescue.computed_tokens
            if self.read(engine, request) != cells_of(request.tokens)[: request.computed]:
                self.faults.append(f"{engine.name} published bytes that are not the request's")
            engine.ledger.pass_on(attempt.key, BlockOwner.SCHEDULER, request.id)
            self.num_rescued += 1
        engine.requests[request.id] = request
        attempt.added = True
        return adoption.RequestAdded()

    def _is_reserved(self, engine: Engine, request_id: str) -> bool:
        """Whether blocks are held for it, or still written."""
        moves = engine.into.values()
        pending = (move.request_id for move in moves if move.machine.settlement is Settlement.PENDING)
        attempts = (one for one in self.desks[engine.name].attempts.values() if one.request_id == request_id)
        return request_id in pending or any(
            engine.ledger.held(owner, one.key)
            for one in attempts
            for owner in (BlockOwner.RESERVATION, BlockOwner.DRAINING)
        )

    # Rescue

    def _tell_rescue(self, attempt: Attempt, event: rescue.RescueEvent) -> None:
        machine = attempt.rescue
        assert machine is not None
        self.note(f"{attempt.engine.name} {attempt.key} rescue: {event}")
        for effect in machine.on(event):
            self._do_for_rescue(attempt, effect)
        if machine.answered and attempt.machine.state is adoption.State.FETCHING:
            match machine.state:
                case rescue.State.FETCHED:
                    self._tell(attempt, adoption.CacheFetched())
                case rescue.State.WITHOUT:
                    self._tell(attempt, adoption.CacheLost())
                case _:
                    self._tell(attempt, adoption.AttemptFailed(Reason.TRANSFER_FAILED))

    def _do_for_rescue(self, attempt: Attempt, effect: rescue.RescueEffect) -> None:
        engine, holder = attempt.engine, attempt.holder
        assert holder is not None
        match effect:
            case rescue.AskClaim(seconds=seconds):
                body = (attempt.call, attempt.epoch, holder.incarnation)
                self._send(engine.name, holder.name, "claim", body, request=attempt.request_id)
                attempt.due = (self.now + seconds, rescue.ClaimFailed("no answer"))
            case rescue.TakeRoom():
                engine.commands.append(("reserve", lambda: self._tell_rescue(attempt, self._take_room(attempt))))
            case rescue.CopyBlocks(from_block=first, to_block=end, seconds=seconds):
                rows = zip(attempt.source_rows[first:end], attempt.rows[first:end], strict=True)
                pairs = [pair for there, here in rows for pair in zip(there, here, strict=True)]
                attempt.pairs = [pair for pair in pairs if NOTHING not in pair]
                attempt.due = (self.now + seconds, rescue.CopyFailed("too long"))
            case rescue.StopCopy():
                engine.ledger.pass_on(attempt.key, BlockOwner.DRAINING)
            case rescue.EndClaim(seconds=seconds):
                self._send(engine.name, holder.name, "end claim", (attempt.call,), request=attempt.request_id)
                attempt.due = (self.now + seconds, rescue.ClaimSettled(intact=False))
            case rescue.FreeRoom():
                engine.commands.append(("free", lambda: self._free(engine, attempt.key)))

    def _take_room(self, attempt: Attempt) -> rescue.RescueEvent:
        engine, request = attempt.engine, attempt.request
        if request.id in engine.requests or self._is_reserved(engine, request.id):
            return rescue.RoomRefused("it is here")
        assert attempt.rescue is not None
        computed = attempt.rescue.computed_tokens
        first = max(0, computed - self.window) if self.window is not None else computed
        if any(attempt.source_rows[position // BLOCK_SIZE][1] == NOTHING for position in range(first, computed)):
            return rescue.RoomRefused("a window has gone on")
        wanted, left = len(request.tokens) // BLOCK_SIZE + 1, first // BLOCK_SIZE
        taken = self._take(engine, BlockOwner.RESERVATION, attempt.key, wanted, left)
        if taken is None:
            return rescue.RoomRefused("no room")
        attempt.rows = taken[0]
        return rescue.RoomTaken(hit_blocks=0)

    def copying(self) -> list[Attempt]:
        """Rescues in which a mover has something to do."""
        busy = (rescue.State.COPYING, rescue.State.DRAINING)
        return [one for one in self.attempts() if one.rescue is not None and one.rescue.state in busy]

    def rescue_block(self, attempt: Attempt) -> None:
        """The mover copies one more block, or is done, or quiet."""
        machine, holder, engine = attempt.rescue, attempt.holder, attempt.engine
        assert machine is not None
        assert holder is not None
        source, left = self.engines[holder.name], attempt.copied < len(attempt.pairs)
        if left and source.incarnation == holder.incarnation:
            read, write = attempt.pairs[attempt.copied]
            if not engine.ledger.writable(attempt.key, [write]):
                self.faults.append(f"a mover of {engine.name} wrote block {write}, which is not reserved any more")
            engine.memory[write] = list(source.memory[read])
            attempt.copied += 1
        elif machine.state is rescue.State.DRAINING:
            self._tell_rescue(attempt, rescue.CopyQuiet())
            del self.desks[engine.name].attempts[attempt.call]
        elif left:
            self._tell_rescue(attempt, rescue.CopyFailed("another process"))
        else:
            attempt.due = None
            self._tell_rescue(attempt, rescue.CopyDone(len(attempt.pairs)))

    def rescue_due(self, attempt: Attempt) -> None:
        """A call's deadline, or the copy's, has passed."""
        assert attempt.due is not None
        _, event = attempt.due
        attempt.due = None
        self._tell_rescue(attempt, event)

    # The engine that hangs

    def _claim(self, engine: Engine, message: Message) -> None:
        attempt, epoch, incarnation = message.body
        request = engine.requests.get(message.request)
        answer = None
        if request is not None and engine.incarnation == incarnation:
            claims = self.desks[engine.name].claims
            held = Held(attempt, request, epoch, self.claim_class())
            asked = claim.ClaimRequested(
                epoch=epoch,
                in_model=engine.name in self.hanging,
                problem=(Reason.ALREADY_MIGRATING, "") if request.frozen or request.leaving else None,
                present=request.epoch,
                # A state may be in the middle of the step that hangs.
                has_cache=bool(request.output and request.computed) and not self.has_states,
                claimed=any(one.request is request and not one.woken for one in claims.values()),
            )
            claims[attempt] = held
            if self._tell_claim(engine, held, asked) is claim.AnswerClaim:
                answer = (request.computed, [list(row) for row in request.rows], list(request.output))
        self._send(engine.name, message.sender, "claim answer", (attempt, answer), request=message.request)

    def _tell_claim(self, engine: Engine, held: Held, event: claim.ClaimEvent) -> Any:
        """Returns the kind of the answer, or whether the blocks were intact."""
        self.note(f"{engine.name} {held.key} claim: {event}")
        answer: Any = None
        for effect in held.machine.on(event):
            match effect:
                case SetTimer(seconds=seconds):
                    held.expires = self.now + seconds
                case ClearTimer():
                    held.expires = None
                case claim.AnswerClaim() | claim.RefuseClaim():
                    answer = type(effect)
                case claim.KeepBlocks():
                    engine.ledger.hold(BlockOwner.PIN, held.key, held.request.held)
                case claim.EndSilently():
                    if engine.requests.get(held.request.id) is held.request:
                        self._end(engine, held.request, Gone.ABORTED)
                case claim.GiveBack():
                    engine.commands.append(("unpin", lambda: engine.ledger.give_back(BlockOwner.PIN, held.key)))
                case claim.AnswerEnd(intact=intact):
                    answer = intact
        if held.machine.over:
            self.desks[engine.name].claims.pop(held.attempt)
        return answer

    def goes_on(self, name: str) -> None:
        """Its loop turns again."""
        for held in list(self.desks[name].claims.values()):
            if not held.woken:
                held.woken = True
                self._tell_claim(self.engines[name], held, claim.LoopWoke())

    def _claim_ends(self, engine: Engine, message: Message) -> None:
        (attempt,) = message.body
        held = self.desks[engine.name].claims.get(attempt)
        intact = held is not None and self._tell_claim(engine, held, claim.ClaimEnded())
        self._send(engine.name, message.sender, "end claim answer", (attempt, intact), request=message.request)

    def claim_expires(self, name: str, attempt: int) -> None:
        held = self.desks[name].claims[attempt]
        held.expires = None
        self._tell_claim(self.engines[name], held, ev.TimerFired(claim.LEASE))

    # Both

    def _heard(self, engine: Engine, message: Message) -> None:
        """One of `MESSAGES`."""
        number, *rest = message.body
        if (message.kind, number) in self._called:
            return
        self._called.add((message.kind, number))
        attempt = self.desks[engine.name].attempts.get(number)
        match message.kind:
            case "adopt":
                self._adopt(engine, message)
            case "identify":
                answer = words.Identified(engine.name, engine.incarnation)
                self._send(engine.name, ORIGIN, "identify answer", (number, answer), request=message.request)
            case "claim":
                self._claim(engine, message)
            case "end claim":
                self._claim_ends(engine, message)
            case _ if attempt is None:
                pass
            case "call off":
                self._tell(attempt, adoption.CalledOff())
            case "end claim answer":
                attempt.due = None
                self._tell_rescue(attempt, rescue.ClaimSettled(rest[0]))
            case "claim answer" if attempt.rescue is not None and attempt.rescue.state is rescue.State.CLAIMING:
                attempt.due = None
                if rest[0] is None:
                    self._tell_rescue(attempt, rescue.ClaimFailed("refused"))
                else:
                    computed, attempt.source_rows, output = rest[0]
                    granted = rescue.ClaimGranted(computed, len(attempt.source_rows), output)
                    self._tell_rescue(attempt, granted)

    def _call_off_attempts(self, engine: Engine, request_id: str, epoch: Epoch | None) -> None:
        """The origin wants nothing of the request, whatever its epoch or under this one alone."""
        for attempt in list(self.desks[engine.name].attempts.values()):
            if attempt.request_id == request_id and attempt.shows and epoch in (None, attempt.epoch):
                self._tell(attempt, adoption.CalledOff())

    def deadlines(self) -> Iterator[tuple[float, str, Any]]:
        """When what is due: of rescues and claims."""
        for attempt in self.attempts():
            if attempt.due is not None:
                yield attempt.due[0], "rescue", attempt
        for name, desk in self.desks.items():
            if desk.claims and self._answers(name):
                for held in desk.claims.values():
                    if held.expires is not None:
                        yield held.expires, "lease", (name, held.attempt)
