# SPDX-License-Identifier: Apache-2.0
"""Who waits for long is let in, on vLLM's real scheduler, however many urgent requests come."""

from __future__ import annotations

import itertools
from pathlib import Path

from vllm.v1.request import Request

from tests.engine.rig import Rig
from vllm_llumnix.engine.queue.turns import Ageing

AFTER_S = 30.0
STEP_S = 0.5


class Busy:
    """A scheduler to which there come more urgent requests than it can do: one each step, of four steps, for one
    place."""

    def __init__(self, model_dir: Path, after_s: float, policy: str = "priority") -> None:
        self.rig = Rig(model_dir, scheduling_policy=policy, max_num_seqs=1)
        self.now_s = 0.0
        self._ageing = Ageing(self.rig.scheduler, after_s, lambda: self.now_s)
        self._numbers = itertools.count()

    def add(self, name: str, priority: int) -> Request:
        request = self.rig.request(name, num_prompt=40, max_tokens=4)
        request.arrival_time, request.priority = self.now_s, priority
        self.rig.scheduler.add_request(request)
        return request

    def turn(self) -> None:
        self.add(f"urgent{next(self._numbers)}", -1)
        self._ageing.before_step()
        self.rig.turn()
        self.now_s += STEP_S

    def until_begun(self, request: Request) -> float:
        """Seconds until it has a token; infinite if it has none after ten times `AFTER_S`."""
        while not request.num_output_tokens:
            self.turn()
            if self.now_s - request.arrival_time > 10 * AFTER_S:
                return float("inf")
        return self.now_s - request.arrival_time


def test_long_waiting_request_gets_its_turn(model_dir: Path) -> None:
    """After the time, a look and the one that runs. Without ageing it never begins."""
    busy = Busy(model_dir, AFTER_S)
    busy.turn()
    assert AFTER_S < busy.until_begun(busy.add("patient", 5)) < AFTER_S + 5
    starving = Busy(model_dir, 0.0)
    starving.turn()
    assert starving.until_begun(starving.add("patient", 5)) == float("inf")


def test_aged_requests_keep_their_order_and_arrival_counts(model_dir: Path) -> None:
    busy = Busy(model_dir, AFTER_S)
    busy.turn()
    patient = [busy.add("batch", 9)]
    busy.now_s += STEP_S
    patient.append(busy.add("normal", 0))
    before = busy.rig.port.load.snapshot().load.num_urgent
    busy.now_s += AFTER_S + 1
    busy.turn()
    assert [one.request_id for one in busy.rig.scheduler.waiting] == ["batch", "normal", "urgent1"]
    assert {one.priority for one in patient} == {-1}
    assert busy.rig.port.load.snapshot().load.num_urgent == before + 1


def test_first_come_first_served_is_left_alone(model_dir: Path) -> None:
    busy = Busy(model_dir, AFTER_S, policy="fcfs")
    busy.turn()
    patient = busy.add("patient", 5)
    assert busy.until_begun(patient) < AFTER_S
    assert patient.priority == 5
