# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import itertools
import json
import random
import statistics
from pathlib import Path

import pytest

from llumsim.cluster.workload import (
    LENGTHS,
    Arrival,
    assigned,
    clipped,
    made_up,
    prioritized,
    read_trace,
    scaled,
    waved,
)

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2000000,0,0
"""


@pytest.mark.parametrize("name", LENGTHS)
def test_lengths_have_the_papers_mean_and_percentiles(name: str) -> None:
    lengths = LENGTHS[name]
    draw = random.Random(1)
    drawn = sorted(lengths.draw(draw) for _ in range(100_000))
    for share, wanted in zip((0.5, 0.8, 0.95, 0.99), lengths.knots[1:5], strict=True):
        assert lengths.at(share) == pytest.approx(wanted)
        assert drawn[int(share * len(drawn))] == pytest.approx(wanted, rel=0.2)
    assert statistics.mean(drawn) == pytest.approx(lengths.mean, rel=0.12)
    assert lengths.knots[0] <= drawn[0] <= drawn[-1] <= lengths.knots[-1]


def test_azure_traces_are_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(AZURE)
    first, second, third = read_trace(path)
    assert (first.at_s, first.num_prompt, first.num_output) == (0.0, 374, 44)
    assert second.at_s == pytest.approx(4.314579, abs=1e-5)
    assert (third.num_prompt, third.num_output) == (1, 1)


def test_mooncake_traces_keep_their_prefixes(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 1000, "input_length": 1100, "output_length": 6, "hash_ids": [7, 8, 9]},
        {"timestamp": 500, "input_length": 600, "output_length": 2, "hash_ids": [7, 10]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second = read_trace(path)
    assert (first.at_s, second.at_s) == (0.0, 0.5)
    one, other = first.content(16), second.content(16)
    assert one is not None
    assert other is not None
    assert (len(one), len(other)) == (600 // 16, 1100 // 16)
    shared = [a == b for a, b in zip(one, other, strict=False)]
    assert shared == [True] * 32 + [False] * 5


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "TIMESTAMP,ContextTokens,GeneratedTokens\n"])
def test_invalid_trace_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match="trace"):
        read_trace(path)


@pytest.mark.parametrize("factor", [0.25, 1.0, 3.5])
def test_scaling_keeps_the_course_of_the_rate(factor: float) -> None:
    trace = [Arrival(second + step / 100, 10 + step, 5) for second in (10, 11, 40) for step in range(100)]
    found = scaled(trace, factor, random.Random(3))
    assert len(found) == pytest.approx(factor * len(trace), rel=0.2)
    early = sum(arrival.at_s < 25 for arrival in found)
    assert early == pytest.approx(len(found) * 2 / 3, rel=0.15)
    assert found == sorted(found, key=lambda arrival: arrival.at_s)
    assert {arrival.num_prompt for arrival in found} <= {arrival.num_prompt for arrival in trace}


def test_repetitions_share_prefixes_among_themselves_only() -> None:
    trace = [Arrival(float(number), 600, 5, prefix=(1, number)) for number in range(4)]
    found = scaled(trace, 2, random.Random(0))
    firsts = {arrival.prefix[0] for arrival in found}
    assert firsts == {1, (1, 1)}


@pytest.mark.parametrize("cv", [1.0, 4.0])
def test_arrivals_have_their_rate_and_variation(cv: float) -> None:
    found = made_up(8.0, 40_000, (LENGTHS["short"], LENGTHS["short"]), random.Random(5), cv=cv)
    gaps = [b.at_s - a.at_s for a, b in itertools.pairwise(found)]
    assert statistics.mean(gaps) == pytest.approx(1 / 8, rel=0.1)
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(cv, rel=0.1)


def test_a_wave_begins_in_its_valley_and_keeps_the_requests() -> None:
    flat = made_up(8.0, 40_000, (LENGTHS["short"], LENGTHS["short"]), random.Random(5))
    found = waved(flat, 0.25, 1000.0)
    assert [(one.num_prompt, one.num_output) for one in found] == [(one.num_prompt, one.num_output) for one in flat]
    assert all(a.at_s < b.at_s for a, b in itertools.pairwise(found))

    def rate(begin_s: float, end_s: float) -> float:
        return sum(begin_s <= one.at_s < end_s for one in found) / (end_s - begin_s)

    for period in (0.0, 1000.0, 3000.0):
        assert rate(period, period + 50) == pytest.approx(2, rel=0.2)
        assert rate(period + 475, period + 525) == pytest.approx(8, rel=0.2)
    assert rate(0, 4000) == pytest.approx(8 * (1 + 0.25) / 2, rel=0.05)


def test_bursts_are_bursts_on_a_wave() -> None:
    lengths = LENGTHS["short"], LENGTHS["short"]
    gaps = [
        b.at_s - a.at_s
        for a, b in itertools.pairwise(waved(made_up(8.0, 40_000, lengths, random.Random(5), cv=4.0), 0.9, 500.0))
    ]
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(4, rel=0.1)


def test_without_a_valley_there_is_no_wave() -> None:
    flat = made_up(8.0, 100, (LENGTHS["short"], LENGTHS["short"]), random.Random(5))
    assert waved(flat, 1.0, 50.0) == flat


@pytest.mark.parametrize(("valley", "period_s"), [(-0.1, 10.0), (1.1, 10.0), (0.5, 0.0)])
def test_invalid_wave_is_refused(valley: float, period_s: float) -> None:
    with pytest.raises(ValueError, match="no wave"):
        waved([Arrival(1.0, 10, 10)], valley, period_s)


def test_same_seed_makes_same_load() -> None:
    lengths = LENGTHS["medium"], LENGTHS["long"]
    assert made_up(3, 50, lengths, random.Random(9)) == made_up(3, 50, lengths, random.Random(9))


def test_oversized_requests_are_dropped_or_cut() -> None:
    found = clipped([Arrival(0, 100, 10), Arrival(1, 90, 30), Arrival(2, 10, 20)], 100)
    assert [(one.num_prompt, one.num_output) for one in found] == [(90, 10), (10, 20)]


def test_priorities_and_models_are_dealt_by_share() -> None:
    arrivals = [Arrival(float(number), 1, 1) for number in range(2000)]
    urgent = prioritized(arrivals, 0.1, random.Random(1))
    assert sum(one.priority < 0 for one in urgent) == pytest.approx(200, rel=0.3)
    dealt = assigned(arrivals, {"big": 3.0, "small": 1.0}, random.Random(1))
    assert sum(one.model == "big" for one in dealt) == pytest.approx(1500, rel=0.1)
