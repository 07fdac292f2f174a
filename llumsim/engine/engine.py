# SPDX-License-Identifier: Apache-2.0
"""vLLM's V1 scheduler over a step model: the same batches, preemptions and prefix-cache hits, without a model.

A step begins with `schedule()` as vLLM has it: running requests first, in the order of their admission, then waiting
ones while budget, slots and blocks last; a prompt is computed in chunks; a request without a block preempts the last
one of the batch, which begins anew from what the prefix cache still holds. Scheduling is synchronous, with full
attention and without speculation.

Most steps are like the one before: the same requests decode, and each gets one token (`decodes`). Such steps are one
*span*. When it ends, because a request finishes, blocks run short, or an event comes from outside, is known in closed
form, and so is the end of each of its steps: one lasts longer than the one before by a constant.

Nothing changes an engine in the middle of a step: what comes from outside (`post`) waits for its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from llumsim import PS
from llumsim.engine.blocks import Blocks, Shortage
from llumsim.engine.decodes import Decodes
from llumsim.engine.queue import Queue, QueuePlace
from llumsim.engine.requests import EngineRequest, Phase, Watcher
from llumsim.engine.step_model import EngineConfig, StepModel
from llumsim.engine.steps import Batch, Span, StepTimes, batch_of


class Engine:
    """`one_by_one` forbids every shortcut: each step is scheduled as vLLM's code does it, request by request."""

    def __init__(self, config: EngineConfig, step: StepModel, watcher: Watcher, *, one_by_one: bool = False) -> None:
        self.config = config
        self.blocks = Blocks(config.num_blocks, config.block_size, caching=config.prefix_caching)
        self.running: list[EngineRequest] = []
        """The batch, in the order of admission: the last one is preempted first."""
        self.waiting = Queue(by_priority=config.by_priority, ageing_ps=round(config.ageing_s * PS))
        self.decodes = Decodes(config.block_size)
        self.num_reserved_slots = 0
        """Slots of the batch that are kept for requests on their way in."""
        self.num_steps = 0
        """Steps that were scheduled."""
        self.num_preemptions = 0
        self.shortage = Shortage()
        self.batch = Batch()
        """Work of the step under way, or of the first step of its span."""
        self.end_ps: int | None = None
        """The end of the span under way; None while no step is."""
        self._step = step
        self._watcher = watcher
        self._one_by_one = one_by_one
        self._posted: list[Callable[[int], None]] = []
        self._is_between = False
        """True between the end of a step and the scheduling of the next."""
        self.step_times = StepTimes()
        self._span = Span(0, 1, 0, 0)
        """The one under way, or the last."""
        self._chunks: list[tuple[EngineRequest, int]] = []
        """Chunks that the span's only step computes besides its decodes."""
        self._last_end_ps = 0

    # Time

    def advance(self, now_ps: int) -> None:
        """Make all steps that have ended by now."""
        while self.end_ps is not None and self.end_ps <= now_ps:
            end_ps, self.end_ps = self.end_ps, None
            self._is_between = True  # a watcher of the end may post an action
            self._complete(end_ps)
            self._begin(end_ps)

    def settle(self, now_ps: int) -> None:
        """Account for the steps of the span that have ended by now, which is before its end."""
        if self.end_ps is not None and self._span.length > 1:
            self._settle(min(self._span.num_ended(now_ps), self._span.length))

    def next_end_after(self, now_ps: int) -> int | None:
        """The time at which the step under way ends."""
        if self.end_ps is None:
            return None
        return self._span.end_of(min(self._span.num_ended(now_ps) + 1, self._span.length))

    def step_age_ps(self, now_ps: int) -> int:
        """Time since the step under way began; 0 if none is."""
        return 0 if self.end_ps is None else self._span.age(now_ps)

    def post(self, action: Callable[[int], None], now_ps: int) -> None:
        """Call `action` with the time when no step is under way, before the next is scheduled; now, if none is."""
        self._posted.append(action)
        self._interrupt(now_ps)

    def add(self, request: EngineRequest, now_ps: int, place: QueuePlace = QueuePlace.IN_TURN) -> None:
        """Takes a request, which has been received, and waits for the next step."""
        self._enqueue(request, place)
        self._interrupt(now_ps)

    def _interrupt(self, now_ps: int) -> None:
        """The step under way is the span's last one; without one, the next begins now."""
        if self.end_ps is None:
            if not self._is_between:
                self._begin(now_ps)
            return
        length = self._span.num_ended(now_ps) + 1
        if length < self._span.length:
            self._settle(length - 1)
            self._span.length = length
            self.end_ps = self._span.end_of(length)

    # The end of steps

    def _complete(self, now_ps: int) -> None:
        self._settle(self._span.length)
        self.step_times.ended(self.batch, self.num_steps, now_ps, self._span.first_ps)
        self._last_end_ps = now_ps
        chunks, self._chunks = self._chunks, []
        for request in self.decodes.ended(self.running):
            self.decodes.leave(request, now_ps)
            self._finish(request, now_ps)
        for request, _ in chunks:
            if request.num_computed == request.num_tokens:
                self._emit(request, now_ps)
        if len(self.decodes) < len(self.running):
            for request in self.running:
                if request.phase is Phase.DECODE and request not in self.decodes:  # there was no budget or block for it
                    self._enter(request)

    def _settle(self, num_steps: int) -> None:
        span, decodes = self._span, self.decodes
        if (number := num_steps - span.num_settled) > 0:
            lasted_ps = span.end_of(num_steps) - span.end_of(span.num_settled)
            self.step_times.decoded(self.batch, len(decodes), span.num_settled, number, lasted_ps)
            if decodes:
                self._count_gaps(number)
                decodes.ticks += number
            span.num_settled = num_steps
        if (supplied := min(num_steps + 1, span.length)) > span.num_supplied:
            if decodes:
                begin = decodes.ticks + span.num_supplied - span.num_settled
                self.blocks.take(decodes.blocks_needed(begin, supplied - span.num_supplied))
            span.num_supplied = supplied

    def _count_gaps(self, num_steps: int) -> None:
        """Counts the gaps of so many steps from the first unsettled one on, before their ticks."""
        span, begin, late = self._span, self._span.num_settled, self.decodes.late
        if late:
            for request in late:
                self._told(request, span.end_of(begin + 1))
            if count := len(self.decodes) - len(late):
                self._watcher.gap(span.lasting(begin), count)
            late.clear()
            begin, num_steps = begin + 1, num_steps - 1
        if num_steps == 1:
            self._watcher.gap(span.lasting(begin), len(self.decodes))
        elif num_steps:
            self._watcher.gaps(span.lasting(begin), span.growth_ps, num_steps, len(self.decodes))

    def _told(self, request: EngineRequest, now_ps: int) -> None:
        """Notes that a request's next token has come."""
        if request.last_token_ps is not None:
            self._watcher.gap(now_ps - request.last_token_ps, 1)
            if request.has_moved:
                self._watcher.stalled(request, now_ps - request.last_token_ps)
        request.has_moved = False
        if request.preempted_ps is not None:
            request.preemption_loss_ps += now_ps - request.preempted_ps
            request.preempted_ps = None
        request.last_token_ps = now_ps
        if request.first_token_ps is None:
            request.first_token_ps = now_ps

    def _emit(self, request: EngineRequest, now_ps: int) -> None:
        """A request that was scheduled by itself has a token."""
        self._told(request, now_ps)
        request.num_tokens += 1
        if request.is_complete:
            self._finish(request, now_ps)
        else:
            self._enter(request)

    def _finish(self, request: EngineRequest, now_ps: int) -> None:
        self.running.remove(request)
        self.step_times.gone(request.num_tokens)
        request.phase = Phase.GONE
        self.blocks.release(request, request.num_computed // self.config.block_size)
        self._watcher.finished(request, now_ps)

    def _enter(self, request: EngineRequest) -> None:
        self.decodes.enter(request, self._last_end_ps)

    def _leave(self, request: EngineRequest) -> None:
        self.decodes.leave(request, self._last_end_ps)

    # The beginning of steps

    def _begin(self, now_ps: int) -> None:
        """Do what was posted, and schedule the next step, if there is anything to do."""
        self._is_between = True
        is_over = False
        while not is_over:
            while self._posted:
                posted, self._posted = self._posted, []
                for action in posted:
                    action(now_ps)
            num_preemptions = self.num_preemptions
            # A lone request that preempted itself makes an empty step.
            is_over = self._schedule(now_ps) or not (self._posted or self.num_preemptions > num_preemptions)
        self._is_between = False

    def _schedule(self, now_ps: int) -> bool:
        """Schedule a step; False if there is nothing to compute."""
        self.shortage.begin()
        if not self.running and not self.waiting:
            return False
        self.waiting.age(now_ps)
        if self._one_by_one or not self._schedule_at_once():
            is_alike = self._schedule_one_by_one(now_ps)
        else:
            num_scheduled = len(self.decodes) + sum(number for _, number in self._chunks)
            is_alike = self._schedule_waiting(self.config.max_num_batched_tokens - num_scheduled)
        self.shortage.scheduled(self.num_preemptions)
        return self._start(now_ps, is_alike and not self._one_by_one)

    def _schedule_at_once(self) -> bool:
        """Schedule the running requests if no preemption is needed; else do nothing and return False."""
        size, num_free = self.config.block_size, self.blocks.num_free
        budget = self.config.max_num_batched_tokens - len(self.decodes)
        needed = self.decodes.blocks_needed(self.decodes.ticks, 1)
        if budget < 0 or needed > num_free:
            return False
        last, number = self.running[-1] if self.running else None, 0
        num_others = len(self.running) - len(self.decodes)
        if num_others:
            num_others -= sum(one.phase is Phase.FROZEN for one in self.running)
        if last is not None and num_others:
            number = min(last.num_tokens - last.num_computed, budget)
            blocks = -(-(last.num_computed + number) // size) - last.num_blocks
            if num_others > 1 or last.phase is not Phase.PREFILL or not number or needed + blocks > num_free:
                return False
        self.blocks.take(needed)
        if last is not None and number:
            self._compute(last, number)
        return True

    def _compute(self, request: EngineRequest, number: int) -> None:
        """Compute `number` tokens of a request outside the decodes in the coming step. The blocks are free."""
        size = self.config.block_size
        request.num_computed += number
        blocks = -(-request.num_computed // size) - request.num_blocks
        if blocks > 0:
            self.blocks.take(blocks)
            request.num_blocks += blocks
        if request.content is not None:
            self.blocks.fill(request, min(request.num_computed, request.num_tokens) // size)
        self._chunks.append((request, number))

    def _schedule_one_by_one(self, now_ps: int) -> bool:
        """Makes a batch request by request, as vLLM does. Decodes keep their own counts until the step's end."""
        for request in self.decodes.requests:
            self._leave(request)
        budget, size = self.config.max_num_batched_tokens, self.config.block_size
        index, has_preempted = 0, False
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            if request.phase is Phase.FROZEN:
                index += 1
                continue
            number = min(request.num_tokens - request.num_computed, budget)
            blocks = -(-(request.num_computed + number) // size) - request.num_blocks
            lacking, is_there = blocks - self.blocks.num_free, True
            if lacking > 0 and self.shortage.waits(lacking, self.num_preemptions, now_ps):
                index += 1
                continue
            while blocks > self.blocks.num_free and is_there:
                victim = self._victim()
                if victim is None:
                    break
                at = self.running.index(victim)
                if at < index:
                    index -= 1
                for place, (one, given) in enumerate(self._chunks):
                    if one is victim:
                        budget += given
                        del self._chunks[place]
                        break
                has_preempted = True
                is_there = victim is not request
                self._preempt(victim, now_ps)
            if not is_there or blocks > self.blocks.num_free:
                break
            self._compute(request, number)
            budget -= number
            index += 1
        return not has_preempted and self._schedule_waiting(budget)

    def _victim(self) -> EngineRequest | None:
        """Choose a request to preempt. A frozen one is about to leave: its blocks are read, and preempting it would
        free none."""
        candidates = [one for one in self.running if one.phase is not Phase.FROZEN]
        if not candidates:
            return None
        if self.config.by_priority:
            return max(candidates, key=lambda one: (one.priority, one.arrived_ps))
        return candidates[-1]

    def _preempt(self, request: EngineRequest, now_ps: int) -> None:
        self.running.remove(request)
        request.num_recomputed += request.num_computed
        self.blocks.release(request, min(request.num_computed, request.num_tokens) // self.config.block_size)
        request.num_computed = 0
        request.num_preemptions += 1
        if request.preempted_ps is None:
            request.preempted_ps = now_ps
        self.num_preemptions += 1
        self._enqueue(request, QueuePlace.FIRST)
        self._watcher.preempted(request, now_ps)

    def _schedule_waiting(self, budget: int) -> bool:
        """Admit waiting requests. True if the next step will be like this one: no request was admitted, and none can be
        until blocks or slots become free."""
        size, config = self.config.block_size, self.config
        while budget > 0 and self.waiting and len(self.running) + self.num_reserved_slots < config.max_num_seqs:
            request = self.waiting.head
            hits, free_hits = self.blocks.hit(request, request.num_tokens - 1)
            if self.blocks_needed(request, hits, free_hits) > self.blocks.num_free:
                break
            self.waiting.remove(request)
            if hits:
                self.blocks.adopt(request, hits)
                request.num_computed = hits * size
                request.num_recomputed -= request.num_computed if request.num_preemptions else 0
                request.num_hits = request.num_computed if not request.num_preemptions else request.num_hits
            request.phase = Phase.PREFILL
            self.running.append(request)
            number = min(request.num_tokens - request.num_computed, budget)
            self._compute(request, number)
            budget -= number
        return not self._chunks

    def blocks_needed(self, request: EngineRequest, hits: int, free_hits: int) -> int:
        """Blocks that have to be free to admit a waiting request: vLLM asks for room for all its tokens, whatever the
        first chunk is."""
        return -(-request.num_tokens // self.config.block_size) - hits + free_hits

    def _start(self, now_ps: int, is_alike: bool) -> bool:
        """Compute when the scheduled step ends and how many similar ones follow. False if it is empty."""
        self.batch = batch_of(len(self.decodes), self.decodes.num_tokens, self._chunks)
        if not (self.batch.num_decodes or self.batch.prefill_tokens or self.shortage.has_held):
            return False
        length, growth = 1, 0
        if is_alike and self.decodes:
            most = self.decodes.num_ticks_left() - 1
            length += self.decodes.num_steps_with(self.blocks.num_free, self.decodes.ticks + 1, most)
            growth = self._step.e * len(self.decodes)
        self.num_steps += 1
        first_ps = self._step.duration(*self.batch)
        self._span = Span(now_ps, first_ps, growth, length)
        self.end_ps = self._span.end_of(length)
        return True

    def scheduled(self) -> dict[str, int]:
        """Tokens per request of the step under way."""
        return {one.id: 1 for one in self.decodes.requests} | {one.id: number for one, number in self._chunks}

    def _enqueue(self, request: EngineRequest, place: QueuePlace = QueuePlace.IN_TURN) -> None:
        request.phase = Phase.WAITING
        hits, free_hits = self.blocks.hit(request, request.num_tokens - 1)
        shared = hits - free_hits
        if request.num_preemptions:  # others take the rest first
            hits = shared
        size = self.config.block_size
        self.waiting.push(request, hits * size, shared * size, place)

    # Reading, after `settle`

    @property
    def requests(self) -> list[EngineRequest]:
        """Running ones first, as production lists them."""
        return [*self.running, *self.waiting]

    def num_tokens(self, request: EngineRequest) -> int:
        return self.decodes.tokens_of(request) or request.num_tokens

    def apart(self) -> Iterator[tuple[EngineRequest, int]]:
        """Requests of the batch that are not among the decodes, and the tokens that the step under way computes of
        each: they have counts of their own."""
        if len(self.decodes) == len(self.running):
            return iter(())
        in_step = dict(self._chunks)
        return ((one, in_step.get(one, 0)) for one in self.running if one not in self.decodes)

    # Moves. Between two steps: from what was posted.

    def reserve(self, num_blocks: int, *, slot: bool) -> bool:
        """Hold blocks and a batch slot for a request that may come, if no waiting request needs them."""
        head = self.waiting.head if self.waiting else None
        needed = 0 if head is None else self.blocks_needed(head, *self.blocks.hit(head, head.num_tokens - 1))
        if num_blocks + needed > self.blocks.num_free:
            return False
        if slot and len(self.running) + self.num_reserved_slots >= self.config.max_num_seqs:
            return False
        self.num_reserved_slots += slot
        self.blocks.take(num_blocks)
        return True

    def give_back(self, num_blocks: int) -> None:
        """A reservation, with its slot."""
        self.blocks.give_back(num_blocks)
        self.num_reserved_slots -= 1

    def admit(self, request: EngineRequest, num_blocks: int) -> None:
        """A reserved request arrives with its KV cache: it decodes in the next step, and is preempted last. Blocks
        beyond those that its tokens fill go back."""
        held = -(-request.num_computed // self.config.block_size)
        self.blocks.give_back(num_blocks - held)
        self.num_reserved_slots -= 1
        request.num_blocks = held
        self.running.insert(0, request)
        self._enter(request)

    def freeze(self, request: EngineRequest) -> None:
        """A decoding request keeps what it holds, and is not scheduled."""
        self._leave(request)
        request.phase = Phase.FROZEN

    def unfreeze(self, request: EngineRequest) -> None:
        self._enter(request)

    def park(self, request: EngineRequest) -> None:
        """A waiting request is not to be admitted. It holds nothing."""
        self.waiting.remove(request)
        request.phase = Phase.FROZEN

    def unpark(self, request: EngineRequest) -> None:
        self._enqueue(request, QueuePlace.IN_TURN if request.preempted_ps is None else QueuePlace.FIRST)

    def remove(self, request: EngineRequest) -> None:
        """Remove a request that lives elsewhere or was aborted."""
        if request.phase is Phase.WAITING:
            self.waiting.remove(request)
        elif request in self.running:
            if request.phase is Phase.DECODE:
                self._leave(request)
            self.running.remove(request)
            self.step_times.gone(request.num_tokens)
            self.blocks.release(request, request.num_computed // self.config.block_size)
        request.phase = Phase.GONE
