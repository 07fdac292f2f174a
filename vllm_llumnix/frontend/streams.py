# SPDX-License-Identifier: Apache-2.0
"""The streams that this API server holds, and what of the arriving outputs belongs to them.

Every generation request has a `Stream` from before it is sent to its engine until it ends. As long as the request has
not moved, a stream is a counter: the home engine's path has no index, so its tokens are counted here, where the client
receives them. The first word about the request on the relay turns the counter into a gate (`migration.gate`), and from
then on both paths go through it.

Each stream keeps the request and what was delivered of it: should its owner be lost, that is what another engine starts
from (`frontend.replay`). `orphans` says which streams have lost theirs.

Nothing here waits or sends: whoever calls enqueues what is released before the next `await`, so that the gate's order
is the queue's order.

No record is kept of streams that have ended. A request this process does not know has ended or never was here, and
either way the answer is the same: nobody wants its outputs (Release), and nobody waits for it ("finished" to a fence).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason

from llumlet.protocol import wire
from llumlet.protocol.errors import RemoteProtocolError
from llumlet.protocol.gate import Arrival, Delivery, Gate
from llumlet.protocol.ids import HOME, Epoch
from vllm_llumnix.frontend.owners import Owner
from vllm_llumnix.relay_convert import check, engine_output_from, sliced

Complain = Callable[[str, str], None]
"""Count and log something that went wrong: its kind, and a sentence."""
IsLost = Callable[["Stream"], bool]


GAP_SECONDS = 1.0
"""How long tokens may be missing while later ones are here."""
HOPELESS_SECONDS = 30.0
"""After that they do not come, and if no engine can produce them again the client gets an error."""
GRACE_SECONDS = 3.0
"""How long other engines have to be heard of again when an owner is dead: this process may itself have been stopped."""
PATIENCE_SECONDS = 5.0
"""After one replay a hang has to last three times this before it counts again, after two 15 times, and so on."""
WEIGHTS_SECONDS = 5.0
"""How long a lost request waits for an engine whose weights are of the same version, before it takes any."""
CLAIM_SECONDS = 3.0
"""How long the owner of a request that moved may leave it out of its heartbeats: six of them."""


class Stream:
    """One request whose client is here. `home` is the engine it was sent to (None: the only one)."""

    __slots__ = (
        "claimed_at",
        "delivered",
        "deposed_at",
        "epoch",
        "gap_since",
        "gate",
        "home",
        "num_home",
        "opened_at",
        "owner",
        "replaying",
        "replays",
        "request",
        "wants_logprobs",
        "weight_version",
    )

    def __init__(self, request: EngineCoreRequest) -> None:
        params = request.sampling_params
        self.request = request
        self.wants_logprobs = params is not None and params.num_logprobs is not None
        self.opened_at = 0.0
        self.home: bytes | None = None
        self.num_home = 0
        """Tokens that have come from the home engine, in vLLM's own path."""
        self.delivered: list[int] = []
        """Tokens that have gone to vLLM's output queue."""
        self.weight_version: str | None = None
        """Of the weights that the last of them are of, as their engine said."""
        self.gate: Gate | None = None
        self.owner: Owner | None = None
        """Who runs the request, once it has moved; learnt from its outputs. None: the home engine, or unknown yet."""
        self.epoch = HOME
        """The owner's epoch."""
        self.claimed_at = 0.0
        """When the owner last said that it has the request; matters once the request has moved."""
        self.gap_since: float | None = None
        """Since when later tokens wait for missing ones."""
        self.replaying = False
        self.deposed_at = 0.0
        """When the replay began, or its turn came."""
        self.replays = 0

    def weights_wanted(self, now: float) -> str:
        """The weight version that an engine must have to go on with this request; empty if any will do.

        Weights are updated engine by engine, and soon no engine may have the former ones. Then the request goes on with
        others, as vLLM's own do that are running when weights change: vLLM's answer says which tokens are of which
        version (`weight_versions`). Better so than an error.
        """
        return (self.weight_version or "") if now - self.deposed_at < WEIGHTS_SECONDS else ""

    @property
    def patience(self) -> float:
        """Seconds for an owner that hangs or is silent. A request that makes any engine hang for a while, because it is
        the first there to need something compiled, must not wander through all of them.
        """
        return PATIENCE_SECONDS * (4**self.replays - 1)

    @property
    def request_id(self) -> str:
        return self.request.request_id

    def owned_by(self, owner: Owner | None, epoch: Epoch, now: float) -> None:
        self.owner, self.epoch, self.claimed_at = owner, epoch, now


@dataclasses.dataclass(frozen=True, slots=True)
class Orphan:
    """A stream that nobody goes on with. `lost`: who is not to be asked to. `hopeless`: waiting longer is no use."""

    stream: Stream
    reason: str
    lost: Owner | None
    hopeless: bool = False


@dataclasses.dataclass(slots=True)
class Taken:
    """`delivered` goes to vLLM, in this order; `unwanted` back to the sender as a Release."""

    delivered: list[tuple[Stream, EngineCoreOutput]] = dataclasses.field(default_factory=list)
    unwanted: dict[str, Epoch] = dataclasses.field(default_factory=dict)


class Streams:
    """All streams of one API server process."""

    def __init__(self, vocab_size: int, complain: Complain, clock: Callable[[], float] = time.monotonic) -> None:
        self._vocab_size = vocab_size
        self._complain = complain
        self._clock = clock
        self._streams: dict[str, Stream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._streams

    def get(self, request_id: str) -> Stream | None:
        return self._streams.get(request_id)

    def all(self) -> list[Stream]:
        return list(self._streams.values())

    def open(self, stream: Stream) -> None:
        """Called before the request is sent."""
        stream.opened_at = self._clock()
        self._streams[stream.request_id] = stream

    def close(self, request_ids: Iterable[str]) -> list[Stream]:
        """The client left, or a stop string was found: nothing more is wanted. Returns the streams that were open."""
        closed = [self._streams.pop(request_id, None) for request_id in request_ids]
        return [stream for stream in closed if stream is not None]

    def take_home(self, outputs: EngineCoreOutputs, is_lost: IsLost) -> list[Stream]:
        """Keep in `outputs` what the gates release; outputs of requests that never moved pass untouched.

        Returns the moved streams that end here. Called for every engine step: without moved requests it costs one
        look-up and one list extension for each output. `is_lost` is told of requests that their engine gave up although
        nobody asked it to, and says whether they go on elsewhere.
        """
        streams = self._streams
        any_gated = False
        for output in outputs.outputs:
            stream = streams.get(output.request_id)
            if stream is None:
                continue
            if stream.gate is not None:
                any_gated = True
                continue
            if output.finish_reason is FinishReason.ABORT and is_lost(stream):
                any_gated = True
                continue
            stream.num_home += len(output.new_token_ids)
            stream.delivered += output.new_token_ids
            stream.weight_version = outputs.weight_version
            if output.finish_reason is not None:
                del streams[output.request_id]
        if not any_gated:
            return []
        ended: list[Stream] = []
        version = outputs.weight_version
        outputs.outputs = [part for output in outputs.outputs for part in self._home_parts(output, version, ended)]
        return ended

    def take_batch(self, batch: wire.TokenBatch, owner: Owner, is_lost: IsLost) -> Taken:
        """What the gates release of outputs that came over the relay."""
        taken = Taken()
        for token in batch.outputs:
            stream = self._streams.get(token.request_id)
            if stream is None:
                taken.unwanted[token.request_id] = token.epoch
                continue
            try:
                check(token, vocab_size=self._vocab_size, wants_logprobs=stream.wants_logprobs)
            except RemoteProtocolError as error:
                self._complain("bad_output", f"{token.request_id} from {owner.instance}: {error}")
                continue
            if token.finish_reason == FinishReason.ABORT and token.epoch >= stream.epoch and is_lost(stream):
                continue
            self._take_token(stream, token, owner, taken)
        for stream, _ in taken.delivered:
            stream.weight_version = batch.weight_version
        return taken

    def claim(self, owner: Owner, requests: Iterable[tuple[str, Epoch]]) -> list[str]:
        """`owner` says that it has these requests. Returns those that it should not have."""
        now, unknown = self._clock(), []
        for request_id, epoch in requests:
            stream = self._streams.get(request_id)
            if stream is None or (stream.gate is not None and stream.gate.is_barred(epoch)):
                unknown.append(request_id)
            elif epoch >= stream.epoch and not stream.replaying:
                stream.owned_by(owner, epoch, now)
        return unknown

    def hand_over(self, message: wire.HandedOver, owner: Owner) -> None:
        """The present owner has let the request go, to `owner`: watch that one, even before its first token."""
        stream = self._streams.get(message.request_id)
        if stream is None or message.epoch <= stream.epoch or stream.replaying:
            return
        if stream.gate is None or not stream.gate.is_barred(message.epoch):
            stream.owned_by(owner, message.epoch, self._clock())

    def orphans(self, home_of: Callable[[Stream], Owner | None]) -> list[Orphan]:
        """Streams that nobody goes on with. `home_of` knows the engine that a stream's request was sent to."""
        now = self._clock()
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
        if stream.owner is not None and (unclaimed := stream.owner.last_heard - stream.claimed_at) > CLAIM_SECONDS:
            hopeless = unclaimed > HOPELESS_SECONDS
            return Orphan(stream, f"{stream.owner.instance} does not have it", None, hopeless)
        return None

    def depose(self, stream: Stream) -> Epoch:
        """Nobody who had the request counts any more. Returns the epoch of whoever goes on after `delivered`."""
        if not stream.replaying:
            stream.deposed_at = self._clock()
        stream.replaying = True
        stream.gap_since = None
        stream.owner = None
        stream.epoch = _gate_of(stream).depose()
        return stream.epoch

    def fail(self, stream: Stream) -> EngineCoreOutput:
        """Give the stream up: an error that the client sees is better than silence."""
        self._streams.pop(stream.request_id, None)
        if stream.gate is not None:
            stream.gate.finish()
        return EngineCoreOutput(stream.request_id, [], finish_reason=FinishReason.ERROR)

    def fence(self, question: wire.FenceQuestion, owner: Owner | None) -> wire.FenceAnswer:
        """`owner` asks whether the epoch after its own has begun; if not, it goes on itself."""
        stream = self._streams.get(question.request_id)
        if stream is None:
            return wire.FenceAnswer(
                question.question,
                question.request_id,
                started=False,
                finished=True,
                raised=None,
                delivered=0,
            )
        decision = _gate_of(stream).fence(question.epoch)
        if decision.raised is not None:
            stream.owned_by(owner, decision.raised, self._clock())
        return wire.FenceAnswer(
            question.question,
            question.request_id,
            started=decision.started,
            finished=decision.finished,
            raised=decision.raised,
            delivered=decision.delivered,
        )

    def _take_token(self, stream: Stream, token: wire.TokenOutput, owner: Owner, taken: Taken) -> None:
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
            stream.owned_by(owner, token.epoch, self._clock())
        if verdict.overflow:
            # What is dropped here is missing later, if the request is not started again before that.
            self._complain("overflow", f"{token.request_id} waits for token {gate.next_index} in vain")
        taken.delivered += [(stream, _deliver(stream, part)) for part in verdict.deliver]
        if gate.finished:
            del self._streams[stream.request_id]

    def _home_parts(
        self, output: EngineCoreOutput, weight_version: str | None, ended: list[Stream]
    ) -> Iterator[EngineCoreOutput]:
        """What vLLM gets in place of one output of the home engine."""
        stream = self._streams.get(output.request_id)
        if stream is None or stream.gate is None:
            yield output
            return
        verdict = stream.gate.offer(
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
        yield from (_deliver(stream, part) for part in verdict.deliver)


def _gate_of(stream: Stream) -> Gate:
    """The stream's gate; a new one begins behind what the home engine has delivered."""
    gate = stream.gate
    if gate is None:
        gate = stream.gate = Gate()
        gate.offer(Arrival(HOME, base=0, first=0, count=stream.num_home, finished=False, payload=None))
    return gate


def _deliver(stream: Stream, part: Delivery) -> EngineCoreOutput:
    payload = part.payload
    if isinstance(payload, EngineCoreOutput):
        output = sliced(payload, part.skip, part.count, part.finished)
    else:
        assert isinstance(payload, wire.TokenOutput)
        output = engine_output_from(payload, part.skip, part.count, part.finished)
        output.trace_headers = stream.request.trace_headers
    stream.delivered += output.new_token_ids
    return output
