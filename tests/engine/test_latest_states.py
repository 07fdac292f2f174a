# SPDX-License-Identifier: Apache-2.0
"""States beside speculative decoding, moved between two of vLLM's real schedulers. Of each block it is written down
behind how many tokens the recurrent state in it is, and where the inputs of the convolution begin: what vLLM's workers
do with drafts, by their own rules (`vllm.v1.worker.mamba_utils`)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.kv_cache_interface import KVCacheSpec, MambaSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import RequestStatus

from tests.engine.rig import Rig, full, ring, states
from vllm_llumnix.engine.blocks.block_rows import NULL_ID
from vllm_llumnix.engine.moves.source_request import SourceRequest

NUM_DRAFTS = 3
SIZE = 32
GROUPS: dict[str, list[KVCacheSpec]] = {
    "kept": [full(), states("align", SIZE, NUM_DRAFTS), states("align", SIZE, NUM_DRAFTS)],
    "one at a time": [full(), states("none", 2048, NUM_DRAFTS)],
    "beside a ring": [full(), states("align", SIZE, NUM_DRAFTS), ring(16)],
}


class State(NamedTuple):
    """What lies in a block: tokens behind which the recurrent state is, and behind which the inputs begin."""

    recurrent: int = -1
    inputs: int = -1


class Step(NamedTuple):
    """What a step in flight has of one request."""

    num_tokens: int
    tables: list[list[int]]
    """Of the groups with states."""


class DraftRig(Rig):
    """One whose runner drafts, and accepts of its drafts what a die says. `content`: of each block of a state."""

    def __init__(
        self, model: Path, groups: Sequence[KVCacheSpec], asynchronous: bool, seed: int, *, runner_v2: bool = True
    ) -> None:
        speculation = {"method": "ngram", "num_speculative_tokens": NUM_DRAFTS, "prompt_lookup_max": 4}
        super().__init__(
            model,
            num_blocks=128,
            groups=groups,
            asynchronous=asynchronous,
            runner_v2=runner_v2,
            speculative_config=speculation,
        )
        self.content: dict[int, State] = {}
        self.state_groups = [index for index, spec in enumerate(groups) if isinstance(spec, MambaSpec)]
        self.is_aligned = groups[1].mamba_cache_mode == "align"  # type: ignore[attr-defined]
        self.dice = random.Random(seed)
        self.accepted = self.most_accepted = 0
        self._steps: list[dict[str, Step]] = []

    def begin(self) -> SchedulerOutput:
        output = super().begin()
        tables = {
            name: [self.block_ids(self.scheduler.requests[name], group) for group in self.state_groups]
            for name in output.num_scheduled_tokens
        }
        self._steps.append({name: Step(count, tables[name]) for name, count in output.num_scheduled_tokens.items()})
        return output

    def drain_one(self) -> list[EngineCoreOutput]:
        output, chunks = self._in_flight.popleft()
        steps, requests = self._steps.pop(0), self.scheduler.requests
        made = self.runner.run(output, chunks)
        drafts = output.scheduled_spec_decode_tokens
        for index, name in enumerate(made.req_ids):
            accepted = self.dice.randint(0, len(drafts.get(name, ())))
            self.accepted, self.most_accepted = accepted, max(self.most_accepted, accepted)
            if made.sampled_token_ids[index]:
                made.sampled_token_ids[index] *= 1 + accepted
            if name in requests:
                self._compute(steps[name].tables, self._end_of(name), len(drafts.get(name, ())), accepted)
        emitted = self.scheduler.update_from_output(output, made)
        self._draft(made)
        return [one for outputs in emitted.values() for one in outputs.outputs]

    def _end_of(self, name: str) -> int:
        """The last token that the oldest step in flight has been given, which knows what came out of those before."""
        later = sum(step[name].num_tokens for step in self._steps if name in step)
        return int(self.scheduler.requests[name].num_computed_tokens) - later

    def _compute(self, tables: Sequence[list[int]], end: int, num_drafts: int, accepted: int) -> None:
        """As the workers do with a step that was given the tokens to `end`, drafts last."""
        column = (end - 1) // SIZE if self.is_aligned else 0
        first = end - num_drafts
        for table in tables:
            for draft in range(1 + num_drafts):
                block = table[column + draft]
                assert block != NULL_ID
                self.content[block] = State(first + draft, first if draft == 0 else -1)
            if self.is_aligned and accepted and first + accepted == SIZE * (column + 1):
                # On its way to the first place, and nobody is told when it is there.
                self.content[table[column]] = State()

    def _draft(self, made: ModelRunnerOutput) -> None:
        if self.depth == 1:
            names = [name for name in made.req_ids if name in self.scheduler.requests]
            drafts = [[7] * self.dice.randint(0, NUM_DRAFTS) for _ in names]
            self.scheduler.update_draft_token_ids(DraftTokenIds(names, drafts))


def moved(source: DraftRig, destination: DraftRig, old: Any) -> Any:
    """By a blocking move."""
    computed = old.num_computed_tokens - old.num_in_flight_tokens
    new = destination.request("a", num_prompt=old.num_prompt_tokens, max_tokens=old.max_tokens)
    new.append_output_token_ids(list(old.output_token_ids))
    destination.port.reservations.make(new, use_prefix_cache=False, computed_tokens=computed)
    known = old.num_output_tokens
    source.port.freeze(old)
    for _ in range(10):
        if (frozen := source.port.drained(old, known)) is not None:
            break
        source.turn()
    assert frozen is not None
    new.append_output_token_ids(list(old.output_token_ids)[known:])
    held = destination.port.reservations.grow(new, new.num_tokens)
    recurrent = frozen.accepted_ids if frozen.num_accepted else frozen.state_ids
    of_each = list(zip(held.state_ids, frozen.state_ids, recurrent, strict=True))
    for place in source.port.rows.ring_places:
        here, there, also_there = of_each.pop(place)
        assert there == also_there, "of a ring the whole block is copied"
        assert here == destination.block_ids(new, 1 + place)[0]
    for here, of_inputs, of_recurrent in of_each:
        inputs, there = source.content[of_inputs].inputs, source.content[of_recurrent].recurrent
        assert inputs >= 0
        destination.content[here] = State(there, inputs + frozen.num_accepted)
        assert destination.content[here] == State(frozen.computed_tokens, frozen.computed_tokens)
    destination.port.reservations.admit(new, frozen.computed_tokens)
    for table, (here, _, _) in zip(destination.state_groups, of_each, strict=True):
        column = (frozen.computed_tokens - 1) // SIZE if destination.is_aligned else 0
        blocks = destination.block_ids(new, table)
        assert blocks[column] == here
        assert len(blocks) == len({*blocks[column:]}) + column >= column + 1 + NUM_DRAFTS
    source.port.release(old)
    source.port.unpin(frozen.pin)
    return new


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS.keys())
def test_the_latest_state_arrives(model_dir: Path, groups: Sequence[KVCacheSpec], asynchronous: bool) -> None:
    """There and back, again and again, after as many steps as a die says: whatever was accepted in the last, the state
    that comes is that behind the last computed token, and is where a step without drafts looks for it."""
    most_accepted = 0
    for seed in range(3):
        rigs = [DraftRig(model_dir, groups, asynchronous, seed), DraftRig(model_dir, groups, asynchronous, 100 + seed)]
        free = [rig.free_blocks for rig in rigs]
        request = rigs[0].add("a", num_prompt=rigs[0].dice.randint(1, 130), max_tokens=1200)
        rigs[0].turns(3)
        while request.num_output_tokens < 700:
            rigs[0].turns(rigs[0].dice.randint(0, 9))
            for _ in range(rigs[0].dice.choice((0, 60))):
                # There the request takes one more step.
                if request.num_computed_tokens % SIZE == 0 and rigs[0].accepted:
                    break
                rigs[0].turn()
            before = request.num_output_tokens
            request = moved(*rigs, request)
            assert request.num_output_tokens >= before
            rigs.reverse()
            free.reverse()
            rigs[0].turns(2)
            rigs[1].turns(2)
        while rigs[0].scheduler.requests:
            rigs[0].turn()
        rigs[1].turns(2)
        assert not any(rig.scheduler.requests for rig in rigs)
        assert [rig.free_blocks for rig in rigs] == free
        assert [rig.port.audit_idle() for rig in rigs] == [[], []]
        most_accepted = max(most_accepted, *(rig.most_accepted for rig in rigs))
    assert most_accepted == NUM_DRAFTS, "nothing was accepted: the test shows nothing"


@pytest.mark.parametrize("runner_v2", [False, True], ids=["v1", "v2"])
def test_staying_request_restarts_if_workers_forget_its_state(model_dir: Path, runner_v2: bool) -> None:
    """The V1 runner does, of whoever is left out of a step, as one that is frozen is."""
    rig = DraftRig(model_dir, GROUPS["kept"], False, 1, runner_v2=runner_v2)
    request = rig.add("a", num_prompt=40, max_tokens=100)
    rig.turns(4)
    rig.port.freeze(request)
    rig.turn()
    loop: Any = SimpleNamespace(unwatch=lambda _: None)
    leaving: Any = SimpleNamespace(_loop=loop, _port=rig.port, request=request)
    SourceRequest.unfreeze(leaving, 0, is_in_doubt=False)
    assert request.status == (RequestStatus.RUNNING if runner_v2 else RequestStatus.PREEMPTED)
    rig.turns(100)
    assert request.is_finished()
