# SPDX-License-Identifier: Apache-2.0
"""The streams that an API server holds, and what of the arriving outputs belongs to them.

Every generation request has a `Stream` from before it is sent to its engine until it ends. As long as the request has
not moved, a stream is a counter: the home engine's path has no index, so its tokens are counted here, where the client
receives them. The first word about the request on the relay turns the counter into a gate (`gate`), and from
then on both paths go through it.

Each stream keeps what was delivered of its request: should its owner be lost, that is what another engine starts from
(`replay`). `orphans` says which streams have lost theirs.

Whoever calls enqueues what is released before anything else happens, so that the gate's order is the queue's order.

No record is kept of streams that have ended. A request this process does not know has ended or never was here, and
either way the answer is the same: nobody wants its outputs (Dismissal), nobody waits for it ("finished" to a fence).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from llumlet.protocol import wire
from llumlet.protocol.errors import RemoteProtocolError
from llumlet.protocol.ids import HOME, Epoch
from llumlet.protocol.origin.gate import Arrival, Delivery, Gate
from llumlet.protocol.origin.owners import Owner

GAP_SECONDS = 1.0
"""Time for which tokens may be missing while later ones are here."""
HOPELESS_SECONDS = 30.0
"""After that they do not come, and if no engine can produce them again the client gets an error."""
GRACE_SECONDS = 3.0
"""Time for other engines to be heard of after an owner's death, as this process may itself have been stopped."""
PATIENCE_SECONDS = 5.0
"""After one replay a hang has to last three times this before it counts again, after two 15 times, and so on."""
WEIGHTS_SECONDS = 5.0
"""Time for which a lost request waits for an engine with the same weight version, before it takes any."""
CONFIRM_SECONDS = 3.0
"""Time for which the owner of a moved request may omit it from its heartbeats: six of them."""


class HomeOutput(Protocol):
    """A home engine's output of one step for one request, as vLLM delivers it."""

    request_id: str
    new_token_ids: list[int]

    @property
    def finish_reason(self) -> int | None: ...


@dataclasses.dataclass(eq=False, slots=True)
class Input:
    """An input that comes in parts: vLLM's streaming input. Each part is answered before the next is looked at, and the
    end of an answer is the end of the stream only if no more input comes.

    Unanswered parts are kept: the request may have left its engine, and they are then sent to the new one.
    """

    count: int = 0
    """Number of parts that have come, without the end of the input."""
    is_over: bool = False
    kept: dict[int, object] = dataclasses.field(default_factory=dict)
    """Parts by number, from the first that is not answered on."""

    def add(self, part: object) -> int:
        """Keeps the next part; returns its number."""
        self.kept[self.count] = part
        self.count += 1
        return self.count - 1

    def end(self) -> int:
        self.is_over = True
        return self.count

    def answered(self, num_ends: int) -> None:
        """Drops the first parts: so many have been answered."""
        for number in [number for number in self.kept if number < num_ends]:
            del self.kept[number]

    def numbers_from(self, first: int) -> range:
        """Numbers of the parts from `first` on, including the end of the input."""
        return range(first, self.count + self.is_over)


@dataclasses.dataclass(eq=False, slots=True)
class Stream:
    """A request whose client is here. `home` names the engine it was sent to."""

    request_id: str
    num_prompt_tokens: int
    home: str
    _: dataclasses.KW_ONLY
    wants_logprobs: bool = False
    never: str = ""
    """Why the request can never be started again somewhere else; empty if it can."""
    owes_prompt_logprobs: bool = False
    """True if its first output must bring the log probabilities of its prompt, which only the engine has that computed
    it."""
    input: Input | None = None
    """Its input, if that comes in parts."""
    opened_at: float = 0.0
    num_home: int = 0
    """Tokens that have come from the home engine, in vLLM's own path."""
    num_ends: int = 0
    """Ends that have gone to vLLM's output queue: with an input in parts, one for each that was answered."""
    delivered: list[int] = dataclasses.field(default_factory=list)
    """Tokens that have gone to vLLM's output queue."""
    weight_version: str | None = None
    """The version of the weights that the last of them are of, as their engine said."""
    gate: Gate | None = None
    owner: Owner | None = None
    """The engine that runs the request, once it has moved, from its outputs. None: the home engine, or not known
    yet."""
    epoch: Epoch = HOME
    """The owner's epoch."""
    confirmed_at: float = 0.0
    """The time at which the owner last said that it has the request; matters once the request has moved."""
    gap_since: float | None = None
    """Since when later tokens wait for missing ones."""
    replaying: bool = False
    deposed_at: float = 0.0
    """The time at which the replay began, or its turn came."""
    replays: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + len(self.delivered)

    @property
    def why_not_elsewhere(self) -> str:
        """Why this request cannot be started again somewhere else; empty if it can."""
        if not self.never and self.owes_prompt_logprobs and not self.delivered:
            return "its prompt logprobs are not there yet"
        return self.never

    def weights_wanted(self, now: float) -> str:
        """The weight version that an engine must have to continue this request; "" if any will do.

        Weights are updated engine by engine, and soon no engine may have the former ones. Then the request continues
        with others, as vLLM's own running requests do: the answer says which tokens are of which version
        (`weight_versions`).
        """
        return (self.weight_version or "") if now - self.deposed_at < WEIGHTS_SECONDS else ""

    @property
    def patience(self) -> float:
        """Seconds for an owner that hangs or is silent. A request that makes any engine hang for a while, because it is
        the first there to need something compiled, must not wander through all of them.
        """
        return PATIENCE_SECONDS * (4.0**self.replays - 1.0)

    @property
    def ends_left(self) -> int | None:
        """See `Gate.ends_left`."""
        if self.input is None:
            return 1 - self.num_ends
        return self.input.count - self.num_ends if self.input.is_over else None

    def ended(self) -> bool:
        """Count an end that has gone to vLLM's output queue. Returns whether it is that of the stream."""
        self.num_ends += 1
        if self.input is not None:
            self.input.answered(self.num_ends)
        return self.ends_left == 0

    def owned_by(self, owner: Owner | None, epoch: Epoch, now: float) -> None:
        self.owner, self.epoch, self.confirmed_at = owner, epoch, now


@dataclasses.dataclass(frozen=True, slots=True)
class Orphan:
    """A stream without an owner. `lost`: the engine that must not be asked. `hopeless`: waiting longer is of no use."""

    stream: Stream
    reason: str
    lost: Owner | None
    hopeless: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """Tokens `[skip, skip + count)` of the payload go to the client, with its end only if `finished`.

    The payload is a `wire.TokenOutput`, or the `HomeOutput` of which it is a part. One of no stream passes as it is.
    """

    stream: Stream | None
    payload: object
    skip: int
    count: int
    finished: bool


@dataclasses.dataclass(slots=True)
class Taken:
    """`delivered` goes to vLLM, in this order; `unwanted` back to the sender as a Dismissal."""

    delivered: list[Part] = dataclasses.field(default_factory=list)
    unwanted: dict[str, Epoch] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(slots=True)
class TakenHome:
    """`parts` go to vLLM in place of what came, in this order. `ended` are the moved streams that end with them."""

    parts: list[Part] = dataclasses.field(default_factory=list)
    ended: list[Stream] = dataclasses.field(default_factory=list)


Check = Callable[[wire.TokenOutput, Stream], None]
"""Raises RemoteProtocolError for an output that would break the front-end."""
Complain = Callable[[str, str], None]
"""Count and log something that went wrong: its kind, and a sentence."""
IsLost = Callable[[Stream], bool]


class Streams:
    """All streams of one API server process."""

    def __init__(self, check: Check, complain: Complain) -> None:
        self._check = check
        self._complain = complain
        self._streams: dict[str, Stream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._streams

    def get(self, request_id: str) -> Stream | None:
        return self._streams.get(request_id)

    def all(self) -> list[Stream]:
        return list(self._streams.values())

    def is_open(self, stream: Stream) -> bool:
        return self._streams.get(stream.request_id) is stream

    def open(self, stream: Stream, now: float) -> None:
        """Called before the request is sent."""
        stream.opened_at = now
        self._streams[stream.request_id] = stream

    def close(self, request_ids: Iterable[str]) -> list[Stream]:
        """The client left, or a stop string was found: nothing more is wanted. Returns the streams that were open."""
        closed = [self._streams.pop(request_id, None) for request_id in request_ids]
        return [stream for stream in closed if stream is not None]

    def take_home(self, outputs: Sequence[HomeOutput], weight_version: str | None, is_lost: IsLost) -> TakenHome | None:
        """The released outputs of an engine's step; None: all of them, unchanged.

        Called for every step: without moved requests it costs a look-up and a list extension per output. `is_lost` is
        called for requests that their engine gave up unasked, and returns true if they continue elsewhere.
        """
        streams = self._streams
        any_gated, failed = False, set[str]()
        for output in outputs:
            stream = streams.get(output.request_id)
            if stream is None:
                continue
            if stream.gate is not None:
                any_gated = True
                continue
            if output.finish_reason == wire.ABORT:
                if is_lost(stream):
                    any_gated = True
                    continue
                if output.request_id not in streams:
                    # It can go on nowhere, and its client hears of an error.
                    any_gated = True
                    failed.add(output.request_id)
                    continue
            stream.num_home += len(output.new_token_ids)
            stream.delivered += output.new_token_ids
            stream.weight_version = weight_version
            if output.finish_reason is not None and stream.ended():
                del streams[output.request_id]
        if not any_gated:
            return None
        taken = TakenHome()
        for output in outputs:
            if output.request_id not in failed:
                taken.parts += self._home_parts(output, weight_version, taken.ended)
        return taken

    def take_batch(self, batch: wire.TokenBatch, owner: Owner, is_lost: IsLost, now: float) -> Taken:
        """The released outputs of those that came over the relay."""
        taken = Taken()
        for token in batch.outputs:
            stream = self._streams.get(token.request_id)
            if stream is None:
                taken.unwanted[token.request_id] = token.epoch
                continue
            try:
                self._check(token, stream)
            except RemoteProtocolError as error:
                self._complain("bad_output", f"{token.request_id} from {owner.instance}: {error}")
                continue
            given_up = token.finish_reason == wire.ABORT and token.epoch >= stream.epoch
            if given_up and (is_lost(stream) or not self.is_open(stream)):
                continue
            self._take_token(stream, token, owner, taken, now)
        for part in taken.delivered:
            assert part.stream is not None
            part.stream.weight_version = batch.weight_version
        return taken

    def confirm(self, owner: Owner, requests: Iterable[tuple[str, Epoch]], now: float) -> list[str]:
        """`owner` says that it has these requests. Returns those that it should not have."""
        unknown = []
        for request_id, epoch in requests:
            stream = self._streams.get(request_id)
            if stream is None or (stream.gate is not None and stream.gate.is_barred(epoch)):
                unknown.append(request_id)
            elif epoch >= stream.epoch and not stream.replaying:
                stream.owned_by(owner, epoch, now)
        return unknown

    def hand_over(self, message: wire.HandedOver, owner: Owner, now: float) -> None:
        """The present owner has let the request go, to `owner`: watch that one, even before its first token."""
        stream = self._streams.get(message.request_id)
        if stream is None or message.epoch <= stream.epoch or stream.replaying:
            return
        if stream.gate is None or not stream.gate.is_barred(message.epoch):
            stream.owned_by(owner, message.epoch, now)

    def orphans(self, home_of: Callable[[Stream], Owner | None], now: float) -> list[Orphan]:
        """Streams without an owner. `home_of` returns the engine that a stream's request was sent to."""
        orphans = (self._orphan(stream, home_of, now) for stream in self._streams.values() if not stream.replaying)
        return [orphan for orphan in orphans if orphan is not None]

    def _orphan(self, stream: Stream, home_of: Callable[[Stream], Owner | None], now: float) -> Orphan | None:
        owner = stream.owner or home_of(stream)
        if owner is not None and (reason := owner.why_lost(now, stream.patience, stream.opened_at)) is not None:
            hopeless = bool(owner.dead) and now - owner.dead_since > GRACE_SECONDS
            return Orphan(stream, reason, owner, hopeless)
        gate = stream.gate
        if gate is None or not gate.num_buffered:
            stream.gap_since = None
        elif stream.gap_since is None:
            stream.gap_since = now
        elif now - stream.gap_since > GAP_SECONDS:
            hopeless = now - stream.gap_since > HOPELESS_SECONDS
            return Orphan(stream, f"token {gate.next_index} is missing", None, hopeless)
        if stream.owner is not None and (missing := stream.owner.last_heard - stream.confirmed_at) > CONFIRM_SECONDS:
            hopeless = missing > HOPELESS_SECONDS
            return Orphan(stream, f"{stream.owner.instance} does not have it", None, hopeless)
        return None

    def depose(self, stream: Stream, now: float) -> Epoch:
        """Bars all former owners of the request. Returns the epoch that continues after `delivered`."""
        if not stream.replaying:
            stream.deposed_at = now
        stream.replaying = True
        stream.gap_since = None
        stream.owner = None
        stream.epoch = _gate_of(stream).depose()
        return stream.epoch

    def give_up(self, stream: Stream) -> None:
        """Ends a stream of which nothing more comes."""
        self._streams.pop(stream.request_id, None)
        if stream.gate is not None:
            stream.gate.finish()

    def fence(self, question: wire.FenceQuestion, owner: Owner | None, now: float) -> wire.FenceAnswer:
        """Answers `owner`, who asks if the epoch after its own has begun; if not, it continues itself."""
        stream = self._streams.get(question.request_id)
        if stream is None:
            return wire.FenceAnswer(question.question, question.request_id, finished=True)
        gate = _gate_of(stream)
        raised = gate.fence(question.epoch)
        if raised is not None:
            stream.owned_by(owner, raised, now)
        return wire.FenceAnswer(question.question, question.request_id, gate.finished, raised)

    def _take_token(self, stream: Stream, token: wire.TokenOutput, owner: Owner, taken: Taken, now: float) -> None:
        gate = _gate_of(stream)
        verdict = gate.offer(
            Arrival(
                epoch=token.epoch,
                base=token.base,
                first=token.first,
                count=len(token.token_ids),
                finished=token.finish_reason is not None,
                payload=token,
            )
        )
        if verdict.stale:
            taken.unwanted[token.request_id] = token.epoch
        elif token.epoch >= stream.epoch:
            stream.owned_by(owner, token.epoch, now)
        if verdict.overflow:
            # What is dropped here is missing later, if the request is not started again before that.
            self._complain("overflow", f"{token.request_id} waits for token {gate.next_index} in vain")
        taken.delivered += [_deliver(stream, delivery) for delivery in verdict.deliver]
        if gate.finished:
            del self._streams[stream.request_id]

    def _home_parts(self, output: HomeOutput, weight_version: str | None, ended: list[Stream]) -> Iterator[Part]:
        """The replacement that vLLM gets for one output of the home engine."""
        stream = self._streams.get(output.request_id)
        if stream is None or stream.gate is None:
            yield Part(None, output, 0, len(output.new_token_ids), output.finish_reason is not None)
            return
        verdict = _gate_of(stream).offer(
            Arrival(
                epoch=HOME,
                base=0,
                first=stream.num_home,
                count=len(output.new_token_ids),
                finished=output.finish_reason is not None,
                payload=output,
            )
        )
        stream.num_home += len(output.new_token_ids)
        if stream.gate.finished:
            del self._streams[stream.request_id]
            ended.append(stream)
        if verdict.deliver:
            stream.weight_version = weight_version
        for delivery in verdict.deliver:
            yield _deliver(stream, delivery)


def _gate_of(stream: Stream) -> Gate:
    """The stream's gate; a new one begins behind what the home engine has delivered."""
    gate = stream.gate
    if gate is None:
        gate = stream.gate = Gate()
        gate.offer(Arrival(HOME, base=0, first=0, count=stream.num_home, finished=False, payload=None))
    gate.ends_left = stream.ends_left
    return gate


def _deliver(stream: Stream, delivery: Delivery) -> Part:
    payload: wire.TokenOutput | HomeOutput = delivery.payload  # type: ignore[assignment]  # as it was offered
    tokens = payload.token_ids if isinstance(payload, wire.TokenOutput) else payload.new_token_ids
    stream.delivered += tokens[delivery.skip : delivery.skip + delivery.count]
    if delivery.finished:
        stream.ended()
    return Part(stream, payload, delivery.skip, delivery.count, delivery.finished)
