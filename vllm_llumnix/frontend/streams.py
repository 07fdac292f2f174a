# SPDX-License-Identifier: Apache-2.0
"""Every live request of one API server process, and the gate through which its tokens pass.

Nothing here waits. A caller that hands outputs in and enqueues what comes back without an `await` in between delivers
every token once and in order, whichever socket it came over.

A request that has never moved costs a dictionary look-up and an addition per output: its gate is made when the first
message about it arrives over the relay.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from vllm.v1.engine import EngineCoreOutput, FinishReason

from vllm_llumnix.ids import HOME, Epoch
from vllm_llumnix.migration import wire
from vllm_llumnix.migration.gate import Arrival, Gate, Verdict
from vllm_llumnix.relay_convert import engine_output_from, sliced

logger = logging.getLogger("vllm.llumnix")

Sender = bytes
"""ZMQ identity of an engine's relay socket."""


class Stream:
    """One request whose tokens a client waits for."""

    __slots__ = ("engine_index", "gate", "home_tokens", "owner")

    def __init__(self) -> None:
        self.gate: Gate | None = None
        self.home_tokens = 0
        self.engine_index = 0
        self.owner: Sender | None = None


class Streams:
    """See the module docstring. `relayed`, `fence` and `unknown` are for messages from engines that are not our own."""

    def __init__(self) -> None:
        self._streams: dict[str, Stream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def open(self, request_id: str) -> None:
        self._streams[request_id] = Stream()

    def home(self, outputs: Iterable[EngineCoreOutput], engine_index: int) -> list[EngineCoreOutput]:
        """Outputs that came over vLLM's own path: those that go on to the client."""
        released: list[EngineCoreOutput] = []
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                released.append(output)
                continue
            first, count = stream.home_tokens, len(output.new_token_ids)
            stream.home_tokens += count
            if stream.gate is None:
                stream.engine_index = engine_index
                released.append(output)
                if output.finish_reason is not None:
                    del self._streams[output.request_id]
                continue
            finished = output.finish_reason is not None
            verdict = stream.gate.offer(Arrival(HOME, 0, first, count, finished, output))
            self._release(verdict, output.request_id, released)
        return released

    def relayed(
        self, sender: Sender, batch: wire.TokenBatch
    ) -> tuple[dict[int, list[EngineCoreOutput]], list[tuple[str, Epoch]]]:
        """Outputs of another engine: what goes on, by the engine index of the home engine, and what it should stop."""
        released: dict[int, list[EngineCoreOutput]] = {}
        unwanted: list[tuple[str, Epoch]] = []
        for output in batch.outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                unwanted.append((output.request_id, output.epoch))
                continue
            gate = self._gate(stream)
            finished = output.finish_reason is not None
            verdict = gate.offer(
                Arrival(output.epoch, output.base, output.first, len(output.token_ids), finished, output)
            )
            if verdict.stale:
                unwanted.append((output.request_id, output.epoch))
            elif output.epoch == gate.highest:
                stream.owner = sender
            self._release(verdict, output.request_id, released.setdefault(stream.engine_index, []))
        return released, unwanted

    def fence(self, question: wire.FenceQuestion) -> wire.FenceAnswer:
        stream = self._streams.get(question.request_id)
        if stream is None:
            return wire.FenceAnswer(question.question, question.request_id, False, True, None, 0)
        decision = self._gate(stream).fence(question.epoch)
        return wire.FenceAnswer(
            question.question,
            question.request_id,
            decision.started,
            decision.finished,
            decision.raised,
            decision.delivered,
        )

    def unknown(self, request_ids: Iterable[str]) -> list[str]:
        return [request_id for request_id in request_ids if request_id not in self._streams]

    def close(self, request_ids: Iterable[str]) -> dict[Sender, list[tuple[str, Epoch]]]:
        """The client left, or a stop string was found. Returns whom to tell, for requests that have moved.

        An owner that is not known yet is told when its first output comes: the request is unknown here from now on.
        """
        tell: dict[Sender, list[tuple[str, Epoch]]] = {}
        for request_id in request_ids:
            stream = self._streams.pop(request_id, None)
            if stream is not None and stream.owner is not None and stream.gate is not None:
                tell.setdefault(stream.owner, []).append((request_id, stream.gate.highest))
        return tell

    def has_moved(self, request_id: str) -> bool:
        stream = self._streams.get(request_id)
        return stream is not None and stream.gate is not None

    def _gate(self, stream: Stream) -> Gate:
        if stream.gate is None:
            stream.gate = Gate()
            stream.gate.next_index = stream.home_tokens
        return stream.gate

    def _release(self, verdict: Verdict, request_id: str, released: list[EngineCoreOutput]) -> None:
        if verdict.overflow:
            # Tokens are missing and more than the buffer holds came after them: they will not come any more.
            logger.error("request %s: output tokens were lost on their way here; ending it", request_id)
            released.append(EngineCoreOutput(request_id, [], finish_reason=FinishReason.ERROR))
            self._streams.pop(request_id, None)
            return
        for delivery in verdict.deliver:
            payload: Any = delivery.payload
            make = engine_output_from if isinstance(payload, wire.TokenOutput) else sliced
            released.append(make(payload, delivery.skip, delivery.count, delivery.finished))
            if delivery.finished:
                self._streams.pop(request_id, None)
