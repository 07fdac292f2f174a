# SPDX-License-Identifier: Apache-2.0
"""Scenarios would show it if a rule of the protocol were broken. Random schedules: `tests/simulation`."""

from __future__ import annotations

import pytest

from llumlet.protocol.move.destination import Destination
from llumlet.protocol.move.source import Source
from llumlet.protocol.origin.gate import Gate
from tests.simulation import mutants

from . import transcript
from .test_transcripts import SCENARIOS
from .world import World


class UnpinnedFreeze(World):
    """Finding 6: blocks are not pinned from the freeze on."""

    pins_at_freeze = False
    checks_reads = False


class NoLeaseCheck(World):
    """Finding 6: the destination does not look at the clock after the last byte."""

    checks_lease = False
    checks_reads = False


def with_gate(gate: type[Gate]) -> type[World]:
    return type("Mutant", (World,), {"gate_class": gate})


def with_source(source: type[Source]) -> type[World]:
    return type("Mutant", (World,), {"source_class": source, "checks_reads": False})


def with_destination(destination: type[Destination]) -> type[World]:
    return type("Mutant", (World,), {"destination_class": destination})


MUTANTS: dict[str, tuple[type[World], str]] = {
    "naive gate": (with_gate(mutants.NaiveGate), "01_gate_keeps_the_sources_last_token"),
    "no fence": (with_gate(mutants.NoFence), "02b_handed_on_before_the_fence"),
    "term and hop merged": (with_gate(mutants.MergedEpochs), "02b_handed_on_before_the_fence"),
    "freeze without pins": (UnpinnedFreeze, "06a_frozen_and_preempted"),
    "no lease check": (NoLeaseCheck, "06b_stopped_destination_reads_late"),
    "pins dropped at the fence": (with_source(mutants.NoLinger), "06e_pins_outlast_the_fence"),
    "early free at the destination": (with_destination(mutants.EarlyFree), "07_abandoned_pull_drains"),
    "resume on unknown": (with_source(mutants.ResumeOnUnknown), "05h_handed_on_and_forgotten"),
    "resume on timeout": (with_source(mutants.ResumeOnTimeout), "11_stale_sender_is_dismissed"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_fails_its_scenario(name: str) -> None:
    mutant, scenario = MUTANTS[name]
    text = (SCENARIOS / f"{scenario}.txt").read_text()
    assert "VIOLATION" not in transcript.run(text)
    assert "VIOLATION" in transcript.run(text, mutant)
