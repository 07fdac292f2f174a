# SPDX-License-Identifier: Apache-2.0
"""Strangers keep the gateway's event loop for no long turn. The benchmark compares gaps, on a machine of
its own."""

from __future__ import annotations

import argparse

import pytest

from benchmarks import front_door


@pytest.mark.rest
def test_no_stranger_keeps_the_event_loop() -> None:
    rows = front_door.run(argparse.Namespace(streams=4, rate=40.0, seconds=2.0, rounds=1))
    assert [row["kind"] for row in rows] == list(front_door.KINDS)
    for row in rows:
        assert row["longest_turn_ms"] < front_door.MOST_TURN_MS, row
        assert row["gap_p50_ms"] > 0
