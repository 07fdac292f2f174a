# SPDX-License-Identifier: Apache-2.0
"""The formulas, the directions, and metrics of other packages."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from llumsched.cms.view import Instance
from llumsched.scheduling.load import Context, Counters, Load, Request
from llumsched.scheduling.metrics import METRICS, Metric, all_metrics
from tests.llumsched import scheduling_cases as cases

LOAD = cases.load(
    "a",
    Counters(
        num_requests=3,
        num_prefill_requests=3,
        num_decode_requests=2,
        num_uncomputed_prefill_tokens=300,
        num_decode_tokens=200,
        num_tokens=310,
    ),
    num_total_gpu_tokens=10_000,
    num_used_gpu_tokens=1_000,
    num_uncomputed_tokens_all_waiting_prefills=400,
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
        ("kv_cache_usage_ratio_projected", (1_000 + 400 + 50 + 7 + 310) / 10_000),
        ("decode_batch_size", 1 + 2 + 4 + 8 + 2),
        ("num_waiting_requests", 5 + 3),
        ("all_prefills_tokens_num", 400 + 60 + 300),
        ("num_requests", 5 + 2 + 9 + 3),
        ("all_decodes_tokens_num", 11 + 13 + 17 + 19 + 200),
        ("num_tokens", 310),
    ],
)
def test_formula(name: str, value: float) -> None:
    assert METRICS[name].value(LOAD) == pytest.approx(value)


def test_without_a_status_only_what_was_sent_counts() -> None:
    bare = Load(Instance(cases.metadata("a"), None, 0.0), Counters(num_requests=2, num_tokens=8))
    assert METRICS["num_requests"].value(bare) == 2
    assert METRICS["kv_cache_usage_ratio_projected"].value(bare) == math.inf


def test_direction_and_not_a_number() -> None:
    less, more = Metric("x", True, lambda _: math.nan), Metric("y", False, lambda _: math.nan)
    assert less.better(1, 2)
    assert more.better(2, 1)
    assert not less.better(1, 1)
    assert not more.better(1, 1)
    assert less.value(LOAD) == math.inf
    assert more.value(LOAD) == -math.inf


def test_a_metric_that_raises_ranks_last_and_is_said_to_once(caplog: pytest.LogCaptureFixture) -> None:
    ratio = Metric(
        "ratio_that_raises", False, lambda load: load.status.num_free_blocks / load.status.num_waiting_requests
    )
    of_request = Metric("fit_that_raises", True, lambda _: 0, of_request=lambda *_: {}["gone"])
    assert ratio.value(Load(Instance(cases.metadata("new"), None, 0.0))) == -math.inf
    assert not caplog.records
    for _ in range(3):
        assert ratio.value(cases.load("a")) == -math.inf
        assert of_request.value(LOAD, Context(0.0)) == math.inf
    assert [record.getMessage().split(",")[0] for record in caplog.records] == [
        "Metric ratio_that_raises raises", "Metric fit_that_raises raises",
    ]  # fmt: skip
    assert "ZeroDivisionError" in caplog.text


def test_a_metric_of_the_request() -> None:
    metric = Metric("fit", True, lambda _: 0, of_request=lambda _, context: context.request.prompt_num_tokens)
    assert metric.value(LOAD, Context(0.0, Request(prompt_num_tokens=9))) == 9
    assert metric.value(LOAD) == 0


def test_metrics_of_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases.distribution(
        tmp_path,
        "[llumnix.metrics]\nfree_blocks = tiny_extension:FREE\n",
        "from llumsched.scheduling.metrics import Metric\n"
        "FREE = Metric('free_blocks', False, lambda load: load.status.num_free_blocks)\n",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    free = all_metrics()["free_blocks"]
    assert free.value(cases.load("a", num_free_blocks=12)) == 12


def test_faults_of_installed_packages_are_all_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases.distribution(
        tmp_path,
        "[llumnix.metrics]\nnum_requests = broken_extension:MINE\nnone = broken_extension:NONE\n"
        "gone = no_such_module_at_all:X\nother = broken_extension:MINE\n",
        "from llumsched.scheduling.metrics import Metric\nMINE = Metric('num_requests', True, len)\nNONE = 5\n",
        "broken_extension",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match="takes a name that is taken") as error:
        all_metrics()
    for said in ("is int, not a Metric", "does not load: ModuleNotFoundError", "calls itself 'num_requests'"):
        assert said in str(error.value)
