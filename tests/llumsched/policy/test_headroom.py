# SPDX-License-Identifier: Apache-2.0
"""The room beside urgent requests: a constant that is built in, the same for all formulas."""

from __future__ import annotations

import random

import pytest

from llumlet.protocol.infer_type import InferType
from llumsched.policy.document import Mode, Overrides, load_policy, parse_policy
from llumsched.policy.pipeline import run
from llumsched.policy.reader import PolicyError
from llumsched.policy.selectors import Draw
from tests.llumsched import cases

HEADROOM = """
define:
  metrics:
    crowding: {value: virtual_usage * 2}
    spare: {value: crowding + priority_headroom}
  filters: {crowdedFilter: {refuse: urgent_headroom > 0.3}}
full:
  neutral: {metrics: [spare, urgent_headroom], filters: [crowdedFilter], selector: metricBasedSelector}
"""


@pytest.mark.parametrize(("constants", "headroom"), [({}, 0.5), ({"priority_headroom": 0.25}, 0.25)])
def test_the_headroom_is_one_number_in_all_formulas(constants: dict[str, float], headroom: float) -> None:
    policy = parse_policy(HEADROOM, "test", Mode.FULL, Overrides(constants=constants))
    stage = policy.stages[InferType.NEUTRAL]
    candidates = cases.candidates(cases.instance("one", num_urgent_requests=1))
    assert [candidates.values(metric).tolist() for metric in stage.metrics] == [[3 * headroom], [headroom]]
    (refuses,) = (one for one in stage.filters.singles if one.name == "crowdedFilter")
    assert refuses.refuse(candidates).tolist() == [headroom > 0.3]


@pytest.mark.parametrize(("headroom", "chosen"), [(0.5, "b"), (0.1, "a")])
def test_virtual_usage_keeps_the_headroom_free(headroom: float, chosen: str) -> None:
    policy = load_policy("virtual-usage", Mode.FULL, Overrides(constants={"priority_headroom": headroom}))
    urgent = cases.instance("a", num_used_gpu_tokens=4_000, num_urgent_requests=1)
    candidates = cases.candidates(urgent, cases.instance("b", num_used_gpu_tokens=6_000))
    choice = run(policy.stages[InferType.NEUTRAL], candidates, Draw(random.Random(0)))
    assert candidates.cluster.instances[choice.row].id == chosen


def test_a_file_does_not_define_what_is_built_in() -> None:
    text = "{define: {constants: {priority_headroom: 0.2}}, full: {neutral: {selector: roundRobinSelector}}}"
    with pytest.raises(PolicyError, match=r"define\.constants\.priority_headroom: has a name that is in use already"):
        parse_policy(text, "test", Mode.FULL, Overrides())
