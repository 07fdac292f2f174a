# SPDX-License-Identifier: Apache-2.0
"""The paper's motivating experiment on the shipped model of its engines, from which the model's scale was taken."""

from __future__ import annotations

import random
import statistics

import pytest

from llumsim.cluster.control import ControlConfig
from llumsim.cluster.member import Cadence
from llumsim.cluster.run import ClusterConfig, run
from llumsim.cluster.workload import LENGTHS, clipped, made_up
from llumsim.engine.step_model import load_hardware


@pytest.mark.full
def test_memory_use_and_preemptions_of_one_instance() -> None:
    """LLaMA-7B on an A10, 2,000 requests of mean 256, 0.42 a second: 62 % of the memory, 8 % of requests preempted."""
    hardware = load_hardware("a10-llama-7b")
    lengths = LENGTHS["medium"], LENGTHS["medium"]
    seldom = Cadence(tokens_s=10.0, keepalive_s=10.0)  # nobody has to choose
    config = ClusterConfig(groups=[("", hardware, 1)], control=ControlConfig(rescheduling=None), cadence=seldom)
    used, preempted = [], []
    for seed in range(6):
        arrivals = clipped(made_up(0.42, 2000, lengths, random.Random(seed)), hardware.engine.max_model_len)
        summary, _ = run(config, arrivals)
        used.append(summary.kv_used)
        preempted.append(summary.preempted_share)
    assert statistics.mean(used) == pytest.approx(0.62, abs=0.04)
    assert statistics.mean(preempted) == pytest.approx(0.08, abs=0.02)
