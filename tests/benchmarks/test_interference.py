# SPDX-License-Identifier: Apache-2.0
"""The interference benchmark: its servers, its moves without engines, its figures from windows that never were."""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, Self, cast

import pytest
from rich.console import Console

from benchmarks import interference
from benchmarks.interference import (
    ATTEMPTS,
    BLOCK_TOKENS,
    MIN_BLOCKS,
    MOVES,
    QUIET,
    SETTLE_SECONDS,
    WINDOW_SECONDS,
    Case,
    Group,
    Lane,
    Traffic,
    Window,
    gaps_in,
    is_good,
    parse,
    result,
    table_of,
)
from benchmarks.mover import MoveFailed, Mover
from tests.support.client import Stream
from tests.support.harness import Server
from tests.support.moves import Move
from tests.support.timelines import move, stream

MIB = 1 << 20
A, B = cast(Server, "a"), cast(Server, "b")
GROUPS = [group for groups in parse([]).cases for group in groups]


def test_default_cases_take_25_minutes() -> None:
    cases = {case for group in GROUPS for case in group.cases}
    for count in (1, 2, 4, 8):
        for limit in ("none", "25%", "1.25G", "3.125G"):
            assert Case(count, limit, 1024) in cases
    assert Case(1, "none", 32768) in cases
    seconds = (len(MOVES) + len(QUIET)) * (WINDOW_SECONDS + SETTLE_SECONDS)
    assert parse([]).minutes <= 25
    assert len(cases) * MIN_BLOCKS * seconds < parse([]).minutes * 60 * 0.6, (
        "there is time to start servers and streams"
    )


@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_servers_hold_what_is_measured(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interference, "build", lambda model: Path("model"))
    spec = group.server(2, "tcp")
    assert group.context + BLOCK_TOKENS <= spec.max_model_len <= group.model.max_position
    most = 2 * math.ceil(max(group.at_once) / 2)
    tokens = 2 * BLOCK_TOKENS + most * (group.context + BLOCK_TOKENS)
    assert spec.kv_cache_gib << 30 > tokens * group.model.kv_bytes_per_token
    assert spec.max_num_seqs >= 2 + most
    flags = " ".join(spec.flags)
    assert "--no-enable-prefix-caching" in flags, "a move would find in the cache what it has to copy"
    assert "--llumlet-transport tcp" in flags
    assert f"--llumlet-max-migrations-out {max(group.at_once)}" in flags
    assert ("--llumlet-bandwidth-limit " in flags) == ("--llumlet-bandwidth-limit-local " in flags)
    assert ("--llumlet-bandwidth-limit " in flags) == (group.limit != "none")


@pytest.mark.parametrize("text", ["1024", "1024:0:none", "0:1:none", "1024:x:none", "65536:1:none"])
def test_cases_that_cannot_be(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--cases", text])
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(("case", "every"), [("1024:2:none", "-1"), ("1024:2:none", "2.5"), ("1024:1,2:none", "0.5")])
def test_pauses_that_cannot_be(case: str, every: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--cases", case, "--every", every])
    assert "--every" in capsys.readouterr().err
    assert parse(["--cases", "1024:2:none", "--every", "0.5"]).every == 0.5


class Journey(NamedTuple):
    source: str
    destination: str
    request_id: str


class FakeMover:
    """Moves come from `outcomes`, in turn, then succeed."""

    def __init__(self, outcomes: Sequence[Move | MoveFailed] = ()) -> None:
        self.outcomes = list(outcomes)
        self.made: list[Journey] = []
        self.under_way = self.most = 0

    async def move(self, source: Any, destination: Any, stream: Stream) -> Move:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await asyncio.sleep(0)
        self.under_way -= 1
        outcome = self.outcomes.pop(0) if self.outcomes else moved()
        if isinstance(outcome, MoveFailed):
            raise outcome
        self.made.append(Journey(source, destination, stream.request_id))
        return outcome


def moved(**changes: Any) -> Move:
    return move(21, 0.0, 1.0, **{"copied_bytes": 32 * MIB, **changes})


async def swapped(mover: FakeMover, lanes: Sequence[bool]) -> tuple[list[Lane], Traffic]:
    """The streams of each lane have changed places once."""
    traffic = Traffic(cast(Mover, mover), (A, B), least_bytes=32 * MIB)
    made = [
        Lane({A: Stream(f"{number}a", "cmpl"), B: Stream(f"{number}b", "cmpl")}, together)
        for number, together in enumerate(lanes)
    ]
    await asyncio.gather(*(traffic.swap(lane) for lane in made))
    return made, traffic


@pytest.mark.asyncio
@pytest.mark.parametrize("at_once", [1, 2, 3, 8])
async def test_lanes(at_once: int) -> None:
    """As many moves as wanted, half of them in each direction; each instance ends with as many streams as before."""
    lanes = Case(at_once, "none", 1024).lanes
    assert sum(2 if together else 1 for together in lanes) == at_once
    mover = FakeMover()
    made, traffic = await swapped(mover, lanes)
    assert mover.most == at_once
    for number, lane in enumerate(made):
        assert {server: stream.request_id for server, stream in lane.streams.items()} == {
            A: f"{number}b",
            B: f"{number}a",
        }
    there = [journey for journey in mover.made if journey.source == "a"]
    assert 2 * len(there) == len(mover.made) == 2 * len(lanes)
    moves, refusals, balanced = traffic.taken()
    assert (len(moves), refusals) == (2 * len(lanes), ())
    assert balanced == [(0.0, 1.0)] * (at_once % 2), "on the way back, one instance has a stream more"
    assert traffic.taken() == ((), (), [])


@pytest.mark.asyncio
@pytest.mark.parametrize(("every_s", "swaps"), [(0.02, 5), (0.05, 2), (1.0, 1)])
async def test_pauses_are_between_beginnings(every_s: float, swaps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += max(0.0, seconds)

    mover = FakeMover()
    monkeypatch.setattr(interference, "time", SimpleNamespace(monotonic=lambda: now))
    traffic = Traffic(cast(Mover, mover), (A, B), least_bytes=32 * MIB, every_s=every_s)
    lane = Lane({A: Stream("a", "cmpl"), B: Stream("b", "cmpl")}, together=True)
    monkeypatch.setattr(interference, "asyncio", SimpleNamespace(sleep=sleep, gather=asyncio.gather))
    await traffic.flow(lane, until=0.1)
    assert len(mover.made) == 2 * swaps
    assert now == pytest.approx(0.1)


@pytest.mark.asyncio
async def test_a_refused_move_is_tried_again_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interference, "RETRY_SECONDS", 0)
    full = MoveFailed("stayed: destination_full, 9 blocks", "destination_full")
    _, traffic = await swapped(FakeMover([full, full]), [False])
    moves, refusals, _ = traffic.taken()
    assert (len(moves), refusals) == (2, ("destination_full",) * 2)
    with pytest.raises(MoveFailed, match="destination_full"):
        await swapped(FakeMover([full] * ATTEMPTS), [False])


@pytest.mark.asyncio
@pytest.mark.parametrize("changes", [{"copied_bytes": 32 * MIB - 1}, {"hit_tokens": 32}, {"mode": "blocking"}])
async def test_a_move_that_copies_little_measures_nothing(changes: dict[str, Any]) -> None:
    with pytest.raises(MoveFailed, match="measures nothing"):
        await swapped(FakeMover([moved(**changes)]), [False])


def test_gaps_that_overlap_the_window_are_counted() -> None:
    streams = [stream([1.0, 2.0, 4.0, 8.0]), stream([3.0, 5.0])]
    assert gaps_in(streams, [(0.5, 3.0)]) == [2.0]
    assert gaps_in(streams, [(0.5, 3.5)]) == [2.0, 4.0, 5.0]
    assert gaps_in(streams, [(0.0, 0.5), (7.0, 7.5)]) == [1.0, 8.0, 3.0]


def blocks(factor: float, seed: int, **moving: Any) -> list[list[Window]]:
    rng = random.Random(seed)

    def window(cost: float, **more: Any) -> Window:
        noise = rng.gauss(1.0, 0.002)
        return Window(p50=0.010 * cost * noise, p99=0.015 * cost * cost * noise, **more)

    return [[window(1), window(factor, **moving), window(factor, **moving), window(1)] for _ in range(6)]


def test_moves_that_cost_nothing() -> None:
    row = result(Case(2, "25%", 1024), 0.0, blocks(1.0, 1), blocks(1.0, 2))
    assert row["itl_p50_ratio"] == pytest.approx(1.0, abs=0.005)
    assert row["p50_verdict"] in ("within", "not distinguishable")
    assert {"bench", "moves_at_once", "limit", "itl_p50_ratio", "itl_p99_ratio", "aa_p50_ratio"} <= row.keys()
    assert (row["moves_at_once"], row["limit"], row["moves"]) == (2, "25%", 0)
    Console(quiet=True).print(table_of([row]))


def test_five_percent_are_found() -> None:
    row = result(Case(1, "none", 1024), 0.0, blocks(1.05, 1), blocks(1.0, 2))
    assert row["itl_p50_ratio"] == pytest.approx(1.05, abs=0.005)
    assert row["itl_p99_ratio"] == pytest.approx(1.05**2, abs=0.005)
    assert row["aa_p50_ratio"] == pytest.approx(1.0, abs=0.005)
    assert row["p50_verdict"] == "outside"
    assert not is_good(row)
    assert is_good(row | {"limit": "1.25G"}), "a bar there is for the default only"


def test_the_rate_is_that_of_the_time_it_took() -> None:
    """A window lasts until its last move is settled."""
    moving = {"moves": (moved(copied_bytes=10**9), moved(copied_bytes=10**9)), "seconds": 4.0, "refusals": ("full",)}
    row = result(Case(2, "none", 1024), 0.5, blocks(1.0, 1, **moving), blocks(1.0, 2))
    assert row["copied_gb_s"] == pytest.approx(0.5)
    assert (row["moves"], row["refused"], row["transport"], row["blocks"]) == (24, {"full": 12}, "local", 6)
    assert (row["moves_per_s"], row["every_s"]) == (0.5, 0.5)


class FakeFleet:
    def __init__(self, logs: Path | None) -> None:
        del logs

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def start(self, *specs: Any) -> Sequence[Any]:
        return specs

    def stop(self, *servers: Any) -> None:
        pass


def test_rows_are_written_as_they_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A case that fails leaves its reason and does not stop the others."""
    file = tmp_path / "rows.jsonl"
    before: list[int] = []

    async def measure(pair: Any, case: Case, neighbours: int, every_s: float, until: float) -> dict[str, Any]:
        before.append(len(file.read_text().splitlines()))
        if case.at_once == 2:
            raise MoveFailed("stayed: destination_full")
        return result(case, every_s, blocks(1.0, 1), blocks(1.0, 2))

    monkeypatch.setattr(interference, "Fleet", FakeFleet)
    monkeypatch.setattr(interference, "build", lambda model: Path("model"))
    monkeypatch.setattr(interference, "measure", measure)
    assert interference.main(["--cases", "1024:1,2:none", "512:1:25%", "--json", str(file)]) == 1
    assert before == [0, 1, 2]
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert rows == [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row.get("failed") for row in rows] == [None, "stayed: destination_full", None]
    assert interference.main(["--cases", "1024:1:none", "--json", str(file)]) == 0
