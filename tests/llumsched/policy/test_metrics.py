# SPDX-License-Identifier: Apache-2.0
"""The formulas, the directions, and metrics of other packages."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from llumsched.cluster.columns import Cluster, Columns, Values
from llumsched.cluster.providers.in_flight import Counters
from llumsched.policy.candidates import Candidates, Context
from llumsched.policy.expression import Expression
from llumsched.policy.metrics import METRICS, Metric, all_metrics, metric_fault
from llumsched.request import Request
from tests.llumsched import cases

SENT = Counters(
    num_requests=3,
    num_prefill_requests=3,
    num_decode_requests=2,
    num_uncomputed_prefill_tokens=300,
    num_decode_tokens=200,
    num_tokens=310,
    num_urgent_requests=0,
)
LOADED = cases.instance(
    "a",
    num_total_gpu_tokens=10_000,
    num_used_gpu_tokens=1_000,
    num_uncomputed_tokens_all_waiting_prefills=400,
    num_unallocated_tokens_all_waiting_requests=450,
    num_unallocated_tokens_first_waiting_request=200,
    num_unallocated_tokens_scheduler_running_prefills=50,
    num_unallocated_tokens_hybrid_scheduler_waiting_decodes=7,
    num_uncomputed_tokens_scheduler_running_prefills=60,
    hybrid_scheduler_waiting_to_decode_requests_num=1,
    num_loading_requests=2,
    scheduler_waiting_to_decode_requests_num=4,
    scheduler_running_to_decode_requests_num=8,
    num_waiting_requests=5,
    num_running_requests=9,
    hybrid_scheduler_waiting_to_decode_tokens_num=11,
    scheduler_waiting_to_decode_tokens_num=13,
    scheduler_running_to_decode_tokens_num=17,
    num_tokens_loading_requests=19,
)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kv_cache_usage_ratio_projected", (1_000 + 450 + 50 + 7 + 310) / 10_000),
        ("decode_batch_size", 1 + 2 + 4 + 8 + 2),
        ("num_waiting_requests", 5 + 3),
        ("all_prefills_tokens_num", 400 + 60 + 300),
        ("num_requests", 5 + 2 + 9 + 3),
        ("all_decodes_tokens_num", 11 + 13 + 17 + 19 + 200),
        ("num_tokens", 310),
        ("urgent_headroom", 0),
        ("virtual_usage", (1_000 + 200 + 50 + 7 + 310) / 10_000),
        ("freeness", (10_000 - 1_000 - 200 - 50 - 7 - 310) / (5 + 2 + 9 + 3)),
    ],
)
def test_formula(name: str, value: float) -> None:
    table = cases.table(cases.instance("0"), LOADED, sent={"a": SENT})
    assert METRICS[name].values(table)[1] == pytest.approx(value)
    assert METRICS[name].at(table, 1) == pytest.approx(value)


def test_an_instance_that_does_not_say_what_will_be_allocated_needs_what_it_computes() -> None:
    before = cases.instance("a", num_total_gpu_tokens=1_000, num_uncomputed_tokens_all_waiting_prefills=400)
    assert METRICS["kv_cache_usage_ratio_projected"].values(cases.table(before))[0] == pytest.approx(0.4)


def test_without_a_status_only_what_was_sent_counts() -> None:
    table = cases.table(cases.starting("a"), sent={"a": Counters(num_requests=2, num_tokens=8)})
    assert METRICS["num_requests"].values(table).tolist() == [2]
    for name in ("kv_cache_usage_ratio_projected",):
        assert METRICS[name].values(table).tolist() == [math.inf]
        assert METRICS[name].at(table, 0) == math.inf


def test_added_weight_counts_and_values_stay_positive() -> None:
    table, usage = cases.table(LOADED), METRICS["kv_cache_usage_ratio_projected"]
    assert usage.at(table, 0, {"num_used_gpu_tokens": 1000}) == pytest.approx(0.2507)
    assert usage.at(table, 0, {"num_used_gpu_tokens": -5000}) == pytest.approx(0.0507)
    of_another = Metric("doubled", lambda columns: 2 * columns["num_used_gpu_tokens"])
    assert of_another.at(table, 0, {"num_used_gpu_tokens": 1000}) == 4000


@pytest.mark.parametrize(
    ("there", "sent", "priority", "headroom"),
    [(0, 0, 0, 0), (0, 0, -1, 1 / 2), (2, 0, 5, 1 / 2), (2, 0, -1, 1 / 2), (0, 1, 0, 1 / 2)],
)
def test_urgent_requests_and_their_neighbours_need_headroom(
    there: int, sent: int, priority: int, headroom: float
) -> None:
    one = cases.instance("a", num_urgent_requests=there)
    columns = cases.candidates(one, sent={"a": Counters(num_urgent_requests=sent)}, priority=priority)
    assert METRICS["urgent_headroom"].values(columns).tolist() == [headroom]
    assert METRICS["virtual_usage"].values(columns).tolist() == [headroom]


def test_where_nobody_asks_for_a_place_urgent_requests_alone_need_headroom() -> None:
    """As in rescheduling: what happens to the others there."""
    table = cases.table(cases.instance("a", num_urgent_requests=1), cases.instance("b"))
    assert METRICS["virtual_usage"].values(table).tolist() == [1 / 2, 0]
    assert METRICS["virtual_usage"].at(table, 0, {"num_used_gpu_tokens": 500}) == pytest.approx(1 / 2 + 0.05)


def test_instance_to_be_emptied_is_infinitely_full() -> None:
    """And never the better for its free memory."""
    table = cases.table(cases.instance("a", schedulable=False), cases.instance("b", num_used_gpu_tokens=20_000))
    assert METRICS["virtual_usage"].values(table).tolist() == [math.inf, 2]
    assert METRICS["freeness"].values(table)[0] == -math.inf


def test_direction_and_not_a_number() -> None:
    table = cases.table(LOADED)
    less, more = (Metric(name, Expression("0 * num_used_gpu_tokens / 0"), name == "less") for name in ("less", "more"))
    assert less.better(1, 2)
    assert more.better(2, 1)
    assert not less.better(1, 1)
    assert not more.better(1, 1)
    assert less.values(table).tolist() == [less.at(table, 0)] == [math.inf]
    assert more.values(table).tolist() == [more.at(table, 0)] == [-math.inf]


def test_a_metric_that_raises_ranks_all_last_and_is_said_to_once(caplog: pytest.LogCaptureFixture) -> None:
    def broken(columns: Columns) -> Values:
        return columns["no_such_column"]

    table, metric = cases.table(LOADED, cases.instance("b")), Metric("broken", broken)
    for _ in range(3):
        assert metric.values(table).tolist() == [math.inf, math.inf]
        assert metric.at(table, 0) == math.inf
    assert [record.getMessage().split(",")[0] for record in caplog.records] == ["Metric broken raises"]
    assert "no column is called 'no_such_column'" in caplog.text


def test_metrics_of_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases.distribution(
        tmp_path,
        "[llumnix.metrics]\nfree_blocks = tiny_extension:FREE\n",
        "from llumsched.policy.metrics import Metric\n"
        "FREE = Metric('free_blocks', lambda columns: columns['num_free_blocks'], less_is_better=False)\n",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    table = cases.table(cases.instance("a", num_free_blocks=12), cases.instance("b", num_free_blocks=3))
    assert np.array_equal(all_metrics()["free_blocks"].values(table), [12, 3])


def test_faults_of_installed_packages_are_all_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases.distribution(
        tmp_path,
        "[llumnix.metrics]\nnum_requests = broken_extension:MINE\nnone = broken_extension:NONE\n"
        "gone = no_such_module_at_all:X\nother = broken_extension:MINE\n",
        "from llumsched.policy.metrics import Metric\nMINE = Metric('num_requests', len)\nNONE = 5\n",
        "broken_extension",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match="has a name that is in use already") as error:
        all_metrics()
    for said in ("is int, not a Metric", "does not load: ModuleNotFoundError", "calls itself 'num_requests'"):
        assert said in str(error.value)


def test_a_hit_saves_its_tokens_and_nothing_more() -> None:
    class Hits:
        columns = ("kv_cache_hit_len",)

        def of_request(self, request: Request, cluster: Cluster) -> list[Values]:
            return [np.array([0.0, 64.0])]

    table = cases.table(cases.instance("0", num_uncomputed_tokens_all_waiting_prefills=10), LOADED, sent={"a": SENT})
    asked = Candidates(table, Context(0.0, Request(prompt_num_tokens=100)), [Hits()])
    assert METRICS["kv_cache_hit_len"].values(asked).tolist() == [0, 64]
    assert METRICS["cache_aware_all_prefills_tokens_num"].values(asked).tolist() == [110, 400 + 60 + 300 + 36]
    unknown = Candidates(table, Context(0.0, Request(prompt_num_tokens=100)))
    assert METRICS["kv_cache_hit_len"].values(unknown).tolist() == [0, 0]
    assert METRICS["kv_cache_hit_len"].better(64, 0)
    for name in ("kv_cache_hit_len", "cache_aware_all_prefills_tokens_num"):
        assert "is no load of a status" in metric_fault(name)
