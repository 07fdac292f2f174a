# SPDX-License-Identifier: Apache-2.0
"""The streams that this API server holds, and what of the arriving outputs belongs to them.

Every generation request has a `Stream` from before it is sent to its engine until it ends. As long as the request has
not moved, a stream is a counter: the home engine's path has no index, so its tokens are counted here, where the client
receives them. The first word about the request on the relay turns the counter into a gate (`migration.gate`), and from
then on both paths go through it.

Nothing here waits or sends: whoever calls enqueues what is released before the next `await`, so that the gate's order
is the queue's order.

No record is kept of streams that have ended. A request this process does not know has ended or never was here, and
either way the answer is the same: nobody wants its outputs (Release), and nobody waits for it ("finished" to a fence).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

from vllm_llumnix.errors import RemoteProtocolError
from vllm_llumnix.frontend.owners import Owner
from vllm_llumnix.ids import HOME, Epoch
from vllm_llumnix.migration import wire
from vllm_llumnix.migration.gate import Arrival, Delivery, Gate
from vllm_llumnix.relay_convert import check, engine_output_from, sliced

Complain = Callable[[str, str], None]
"""Count and log something that went wrong: its kind, and a sentence."""


class Stream:
    """One request whose client is here. `home` is the engine it was sent to (None: the only one)."""

    __slots__ = ("epoch", "gate", "home", "num_home", "owner", "request_id", "trace_headers", "wants_logprobs")

    def __init__(
        self,
        request_id: str,
        wants_logprobs: bool = False,
        trace_headers: Mapping[str, str] | None = None,
    ) -> None:
        self.request_id = request_id
        self.wants_logprobs = wants_logprobs
        self.trace_headers = trace_headers
        self.home: bytes | None = None
        self.num_home = 0
        """Tokens that have come from the home engine, in vLLM's own path."""
        self.gate: Gate | None = None
        self.owner: Owner | None = None
        """Who runs the request, once it has moved; learnt from its outputs. None: the home engine, or unknown yet."""
        self.epoch = HOME
        """The owner's epoch."""


@dataclasses.dataclass(slots=True)
class Taken:
    """`delivered` goes to vLLM, in this order; `unwanted` back to the sender as a Release."""

    delivered: list[tuple[Stream, EngineCoreOutput]] = dataclasses.field(default_factory=list)
    unwanted: dict[str, Epoch] = dataclasses.field(default_factory=dict)


class Streams:
    """All streams of one API server process."""

    def __init__(self, vocab_size: int, complain: Complain) -> None:
        self._vocab_size = vocab_size
        self._complain = complain
        self._streams: dict[str, Stream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._streams

    def get(self, request_id: str) -> Stream | None:
        return self._streams.get(request_id)

    def open(self, stream: Stream) -> None:
        """Called before the request is sent."""
        self._streams[stream.request_id] = stream

    def close(self, request_ids: Iterable[str]) -> list[Stream]:
        """The client left, or a stop string was found: nothing more is wanted. Returns the streams that were open."""
        closed = [self._streams.pop(request_id, None) for request_id in request_ids]
        return [stream for stream in closed if stream is not None]

    def take_home(self, outputs: EngineCoreOutputs) -> list[Stream]:
        """Keep in `outputs` what the gates release; outputs of requests that never moved pass untouched.

        Returns the moved streams that end here. Called for every engine step: without moved requests it costs one
        look-up and one addition for each output.
        """
        streams = self._streams
        any_moved = False
        for output in outputs.outputs:
            stream = streams.get(output.request_id)
            if stream is None:
                continue
            if stream.gate is not None:
                any_moved = True
                continue
            stream.num_home += len(output.new_token_ids)
            if output.finish_reason is not None:
                del streams[output.request_id]
        if not any_moved:
            return []
        ended: list[Stream] = []
        outputs.outputs = [part for output in outputs.outputs for part in self._home_parts(output, ended)]
        return ended

    def take_batch(self, batch: wire.TokenBatch, owner: Owner) -> Taken:
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
            self._take_token(stream, token, owner, taken)
        return taken

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
            stream.owner, stream.epoch = owner, decision.raised
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
            stream.owner, stream.epoch = owner, token.epoch
        if verdict.overflow:
            # Tokens are missing and will not come. An error that the client sees is better than silence.
            self._complain("overflow", f"{token.request_id} waits for token {gate.next_index} in vain")
            taken.unwanted[token.request_id] = token.epoch
            failed = EngineCoreOutput(token.request_id, [], finish_reason=FinishReason.ERROR)
            taken.delivered.append((stream, failed))
            gate.finish()
        taken.delivered += [(stream, _as_output(stream, part)) for part in verdict.deliver]
        if gate.finished:
            del self._streams[stream.request_id]

    def _home_parts(self, output: EngineCoreOutput, ended: list[Stream]) -> Iterator[EngineCoreOutput]:
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
        yield from (_as_output(stream, part) for part in verdict.deliver)


def _gate_of(stream: Stream) -> Gate:
    """The stream's gate; a new one begins behind what the home engine has delivered."""
    gate = stream.gate
    if gate is None:
        gate = stream.gate = Gate()
        gate.offer(Arrival(HOME, base=0, first=0, count=stream.num_home, finished=False, payload=None))
    return gate


def _as_output(stream: Stream, part: Delivery) -> EngineCoreOutput:
    payload = part.payload
    if isinstance(payload, EngineCoreOutput):
        return sliced(payload, part.skip, part.count, part.finished)
    assert isinstance(payload, wire.TokenOutput)
    output = engine_output_from(payload, part.skip, part.count, part.finished)
    output.trace_headers = stream.trace_headers
    return output
