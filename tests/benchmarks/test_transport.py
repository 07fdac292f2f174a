# SPDX-License-Identifier: Apache-2.0
"""The transport benchmark: every path on a few small blocks, and figures from copies that never were."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from benchmarks import transport
from benchmarks.transport import AGAIN, BASELINES, Taken, copy_pieces, is_good, kv_memory, main, row, table_of
from vllm_llumnix.kv.memory.layout import pair_pieces
from vllm_llumnix.kv.networks import mooncake, nixl_process

PATHS = ["memcpy", "cma", "tcp_raw", "mooncake_raw", "mooncake_pieces", "nixl_raw", "local", "tcp", "mooncake", "nixl"]


def test_all_paths_on_a_few_small_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each brings the right bytes, which the benchmark checks itself, and has its baselines and their controls."""
    monkeypatch.setattr(transport, "MIN_ROUNDS", 1)
    file = tmp_path / "rows.jsonl"
    main(["--blocks", "3", "--page-bytes", "512,4096", "--layers", "2", "--minutes", "0", "--json", str(file)])
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    missing = [
        name for name, it in (("mooncake", mooncake), ("nixl", nixl_process)) if it.why_not_installed() is not None
    ]
    expected = [name for name in PATHS if not name.startswith(tuple(missing))]
    sizes = [(512, 3), (4096, 3)]
    assert [(each["page_bytes"], each["blocks"], each["path"]) for each in rows] == [
        (*size, name) for size in sizes for name in expected
    ]
    for each in rows:
        assert (each["bench"], each["block_bytes"], each["rounds"]) == ("transport", 2 * each["page_bytes"], 1)
        assert each["gb_s"] >= 0
        assert each["p50_ms"] > 0
        for baseline in BASELINES.get(each["path"], ()):
            assert each[f"of_{baseline}"] > 0
            assert len(each[f"of_{baseline}_bounds"]) == len(each[f"aa_{baseline}_bounds"]) == 2
            assert f"{baseline}_verdict" not in each, "so few bytes have no target"


def test_every_share_of_the_issue_has_a_target() -> None:
    assert {path for path, _ in transport.TARGETS} == {"local", "tcp", "mooncake"}
    assert all(baseline in BASELINES[path] for path, baseline in transport.TARGETS)


def taken(milliseconds: float, seed: int) -> Taken:
    rng = random.Random(seed)
    rounds = [(milliseconds / 1e3 * rng.gauss(1, 0.01), milliseconds / 1e3 * rng.gauss(1, 0.01)) for _ in range(20)]
    return Taken(rounds, cpu_seconds=sum(map(sum, rounds)))


@pytest.mark.parametrize(
    ("milliseconds", "verdict"), [(2.1, "within"), (2.35, "not distinguishable"), (2.6, "outside")]
)
def test_a_share_and_its_target(milliseconds: float, verdict: str) -> None:
    """A copy of 2 ms is compared, so 2.35 ms are 0.85 of it."""
    times = {"memcpy": taken(2.0, 1), "memcpy" + AGAIN: taken(2.0, 2), "cma": taken(2.0, 3), "cma" + AGAIN: taken(2, 4)}
    times["local"] = taken(milliseconds, 5)
    made = row("local", 32, 16, 16 << 10, times)
    assert made["p50_ms"] == pytest.approx(milliseconds, rel=0.01)
    assert made["gb_s"] == pytest.approx((8 << 20) / milliseconds / 1e6, rel=0.01)
    assert made["cores"] == 1.0
    assert made["of_memcpy"] == pytest.approx(2 / milliseconds, rel=0.01)
    low, high = made["of_memcpy_bounds"]
    assert low < made["of_memcpy"] < high
    assert made["aa_memcpy"] == pytest.approx(1.0, abs=0.01)
    assert (made["memcpy_target"], made["memcpy_verdict"]) == (0.85, verdict)
    assert is_good(made) == (verdict != "outside")
    Console(quiet=True).print(table_of([made]))
    assert "memcpy_target" not in row("local", 8, 16, 16 << 10, times), "2 MiB"
    assert "memcpy_target" not in row("local", 32, 16, 64 << 10, times), "pages of 64 KiB"


def test_the_baseline_copies_all_pieces() -> None:
    source, sources = kv_memory(6, num_layers=3, page_bytes=1000, seed=1)
    destination, destinations = kv_memory(6, num_layers=3, page_bytes=1000, seed=2)
    before = destination.copy()
    copy_pieces(pair_pieces(sources, [4, 0, 1], destinations, [2, 3, 5]))
    pages, found, untouched = (data.reshape(3, 6, 1000) for data in (source, destination, before))
    np.testing.assert_array_equal(found[:, [2, 3, 5]], pages[:, [4, 0, 1]])
    np.testing.assert_array_equal(found[:, [0, 1, 4]], untouched[:, [0, 1, 4]])
