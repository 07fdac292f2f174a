# SPDX-License-Identifier: Apache-2.0
"""The named points of the production code at which tests make an engine fail (`tests/support/faults.py`)."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.support.faults import POINTS, FaultInjected, arm, with_faults
from tests.support.warm import ROOT
from vllm_llumnix import faults

BY_TESTS = {"worker.model", "worker.compile"}
"""Points that `worker.started` adds."""


def test_tests_know_every_point_of_the_code() -> None:
    texts = (path.read_text() for path in (ROOT / "vllm_llumnix").rglob("*.py"))
    named = {name for text in texts for name in re.findall(r'faults\.hit\(\s*"([a-z._]+)"', text)}
    assert named | BY_TESTS == POINTS


def test_without_the_variable_no_point_does_anything() -> None:
    assert faults.inject is None


def test_unknown_points_and_actions_are_refused_together() -> None:
    with pytest.raises(ValueError, match=r"no point 'nowhere'; no action 'hope': points are"):
        arm(json.dumps([{"point": "nowhere", "action": "kill"}, {"point": "loop.step", "action": "hope"}]))


def test_fault_happens_as_often_as_it_says_and_only_in_its_context() -> None:
    inject = arm(json.dumps([{"point": "mover.pulled", "action": "raise", "final": True, "times": 2}]))
    inject("mover.pulled", final=False)
    for _ in range(2):
        with pytest.raises(FaultInjected):
            inject("mover.pulled", final=True)
    inject("mover.pulled", final=True)


def test_token_marks_the_requests_that_fail() -> None:
    inject = arm(json.dumps([{"point": "loop.model", "action": "raise", "token": 7}]))
    others = [SimpleNamespace(prompt_token_ids=tokens) for tokens in ([1, 2], None)]
    inject("loop.model", requests=[*others, None])
    with pytest.raises(FaultInjected):
        inject("loop.model", requests=[*others, SimpleNamespace(prompt_token_ids=[6, 7])])


def test_variable_reaches_a_process_from_its_first_import() -> None:
    code = "from vllm_llumnix import faults; faults.hit('loop.step')"
    env = {"PYTHONPATH": str(ROOT)} | with_faults([{"point": "loop.step", "action": "kill"}])
    assert subprocess.run([sys.executable, "-c", code], env=env, check=False).returncode == -9
