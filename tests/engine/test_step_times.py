# SPDX-License-Identifier: Apache-2.0
"""Steps are described as the model of them is told, and not too often."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engine.rig import Rig
from vllm_llumnix.engine.load.step_times import KEPT, SAMPLE_SECONDS, StepTimes, sample_of


def batch(drafts: tuple[str, ...] = (), **requests: tuple[int, int]) -> Any:
    """vLLM's description of a batch; of each request, the tokens that were computed before, and those that are."""
    number = {name: each for name, (_, each) in requests.items()}
    fresh = [SimpleNamespace(req_id=name, num_computed_tokens=done) for name, (done, _) in requests.items() if not done]
    known = {name: done for name, (done, _) in requests.items() if done}
    return SimpleNamespace(
        num_scheduled_tokens=number,
        total_num_scheduled_tokens=sum(number.values()),
        scheduled_new_reqs=fresh,
        scheduled_cached_reqs=SimpleNamespace(req_ids=list(known), num_computed_tokens=list(known.values())),
        scheduled_spec_decode_tokens={name: [1] * (number[name] - 1) for name in drafts},
    )


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (batch(a=(9, 1), b=(99, 1)), (0, 0, 2, 110)),
        (batch(a=(0, 4)), (4, 1 + 2 + 3 + 4, 0, 0)),
        (batch(a=(2, 3), b=(9, 1)), (3, 3 + 4 + 5, 1, 10)),
        (batch(a=(20, 4), b=(9, 1), drafts=("a",)), (0, 0, 2, 24 + 10)),
    ],
)
def test_batch_tells_its_computed_tokens(step: Any, said: tuple[int, ...]) -> None:
    sample = sample_of(step)
    assert (sample.prefill_tokens, sample.pairs, sample.num_decodes, sample.decode_kv) == said


def test_a_request_that_is_not_described_ends_no_engine() -> None:
    step = batch(a=(9, 1), b=(0, 4))
    step.num_scheduled_tokens["strange"] = 1
    assert (sample_of(step).num_decodes, sample_of(step).decode_kv) == (2, 10 + 1)


def test_prefills_have_a_quota_of_their_own() -> None:
    now = 0.0
    times = StepTimes(lambda: now)
    seen = []
    for number in range(200):
        now += SAMPLE_SECONDS / 10
        prefills = number % 8 == 0
        times.took(batch(a=(0, 16)) if prefills else batch(a=(20, 1)), 0.01, 1, 20)
        assert len(times.samples) <= KEPT
        seen += [sample for sample in times.samples if sample not in seen]
    assert [sample.number for sample in seen] == sorted({sample.number for sample in seen})
    of_prefills = sum(sample.prefill_tokens > 0 for sample in seen)
    assert of_prefills == pytest.approx(13, abs=1)
    assert len(seen) - of_prefills == pytest.approx(19, abs=1)
    assert times.decodes == (200, 200, 200 * 20, pytest.approx(2.0))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_of_vllm_itself(asynchronous: bool, model_dir: Path) -> None:
    """A prompt in two chunks beside a decode, under either scheduler."""
    rig = Rig(model_dir, asynchronous=asynchronous, max_num_batched_tokens=64)
    decode = rig.add("a", num_prompt=20)
    rig.turns(3)
    rig.add("b", num_prompt=100)
    for prefilled, pairs in ((63, 63 * 64 // 2), (37, 37 * 63 + 37 * 38 // 2)):
        sample = sample_of(rig.begin())
        assert (sample.prefill_tokens, sample.pairs, sample.num_decodes) == (prefilled, pairs, 1)
        # What is in flight of it is computed by then.
        assert sample.decode_kv == decode.num_computed_tokens
        rig.drain_one()
