# SPDX-License-Identifier: Apache-2.0
"""What selectors choose among those who may be chosen."""

from __future__ import annotations

import random
from collections import Counter

from llumlet.protocol.infer_type import InferType
from llumsched.policy.document import Mode, load_policy
from llumsched.policy.pipeline import run
from llumsched.policy.selectors import Draw, RandomSelector
from tests.llumsched import cases


def test_random_takes_each_that_may_be_chosen_equally_often_and_nobody_else() -> None:
    """Whatever was chosen last, and however much each of them has to do."""
    stage = load_policy("random", Mode.FULL).stages[InferType.NEUTRAL]
    among = cases.candidates(
        cases.instance("a", num_used_gpu_tokens=9_000),
        cases.instance("b", schedulable=False),
        cases.instance("c"),
        cases.starting("d"),
        cases.instance("e", num_waiting_requests=7),
    )
    assert stage.selector == RandomSelector()
    draw = Draw(random.Random(0), last="c")
    chosen = Counter(run(stage, among, draw).row for _ in range(600))
    assert chosen.keys() == {0, 2, 4}
    assert min(chosen.values()) > 150
