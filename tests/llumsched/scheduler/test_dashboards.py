# SPDX-License-Identifier: Apache-2.0
"""Every metric that a dashboard asks for is one that a process of the cluster shows, and every panel has its place;
every metric of Llumnix is shown, or docs/reference/defaults.md says why not."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llumsched.gateway.gateway_metrics import Metrics, Record
from llumsched.policy.document import Mode
from tests.support.metrics import scheduler

ROOT = Path(__file__).parents[3]
DIRECTORY = ROOT / "deploy" / "grafana"
DASHBOARDS = sorted(DIRECTORY.glob("*.json"))
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
_NOT_A_METRIC = {"by", "le", "sum", "min", "max", "rate", "histogram_quantile"}

OF_LLUMNIX = {
    "": "uptime_seconds gateway_pending_requests gateway_current_requests",
    "request_": """total retry_total fallback_total fallback_retry_success_total input_tokens_total output_tokens_total
        e2e_latency_seconds ttft_milliseconds itl_milliseconds tpot_milliseconds queue_duration_milliseconds
        schedule_duration_milliseconds preprocess_duration_milliseconds postprocess_duration_milliseconds input_tokens
        output_tokens full_mode_schedule_duration_milliseconds query_prefix_cache_hit_duration_milliseconds
        calc_prefix_cache_hit_duration_milliseconds prefix_cache_hit_percent max_prefix_cache_hit_percent""",
    "scheduler_": """scheduling_total scheduling_failed_total rescheduling_total rescheduling_failed_total
        cms_refresh_metadata_duration_milliseconds cms_refresh_status_duration_milliseconds""",
    "instance_lrs_": """total_tokens waiting_tokens running_tokens total_requests waiting_requests running_requests""",
    "instance_cms_": """used_gpu_tokens waiting_requests loading_requests running_requests
        scheduler_waiting_to_decode_requests scheduler_running_to_decode_requests
        hybrid_scheduler_waiting_to_decode_requests uncomputed_tokens_all_waiting_prefills
        uncomputed_tokens_scheduler_running_prefills unallocated_tokens_scheduler_running_prefills
        unallocated_tokens_hybrid_scheduler_waiting_decodes hybrid_scheduler_waiting_to_decode_tokens
        scheduler_waiting_to_decode_tokens scheduler_running_to_decode_tokens tokens_loading_requests
        inflight_dispatch_requests inflight_dispatch_prefill_requests inflight_dispatch_decode_requests
        uncomputed_tokens_inflight_dispatch_prefill_requests tokens_inflight_dispatch_decode_requests
        kv_cache_usage_ratio_projected decode_batch_size all_prefills_tokens_num all_decodes_tokens_num""",
    "selected_instance_": """predicted_ttft predicted_tpot kv_cache_usage_ratio_projected decode_batch_size
        all_prefills_tokens_num all_decodes_tokens_num""",
}
"""By the beginning of their names."""


def shown(text: bytes) -> set[str]:
    # Families are told of before anything was counted in them, too.
    families = re.findall(r"^# TYPE (\w+) (\w+)$", text.decode(), re.M)
    suffixes = {"histogram": ("_bucket", "_sum", "_count")}
    return {f"{name}{suffix}" for name, kind in families for suffix in suffixes.get(kind, ("",))}


def of_the_gateway() -> set[str]:
    metrics = Metrics()
    metrics.ended(Record("1", "/v1/completions", model="m", status=200))
    return shown(metrics.text())


def of_a_scheduler(mode: Mode) -> set[str]:
    return shown(asyncio.run(scheduler(mode)[0].exposition()))


def of_an_engine() -> set[str]:
    from vllm_llumnix.frontend.metrics import families

    ours = {
        f"{family.name}{suffix}"
        for metric in families()
        for family in metric.describe()
        for suffix in SUFFIXES[family.type]
    }
    spec = importlib.util.find_spec("vllm.v1.metrics.loggers")
    assert spec is not None
    assert spec.origin is not None
    of_vllm = set(re.findall(r'"(vllm:\w+)"', Path(spec.origin).read_text()))
    return ours | {name + suffix for name in of_vllm for suffix in ("", "_total", "_bucket", "_sum", "_count")}


def expressions(dashboard: dict[str, Any]) -> Iterator[str]:
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            yield target["expr"]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"].removeprefix("label_values(").split(",")[0]


def metrics_in(expression: str) -> set[str]:
    without_labels = re.sub(r"\{[^}]*\}|\[[^\]]*\]|by \([^)]*\)", " ", expression)
    return set(re.findall(r"[a-z][a-z0-9_:]*", without_labels)) - _NOT_A_METRIC


@pytest.fixture(scope="module")
def known() -> set[str]:
    return of_the_gateway() | of_a_scheduler(Mode.FULL) | of_a_scheduler(Mode.LITE) | of_an_engine()


@pytest.mark.parametrize("file", DASHBOARDS, ids=lambda file: file.stem)
def test_every_metric_exists(file: Path, known: set[str]) -> None:
    for expression in expressions(json.loads(file.read_text())):
        asked = metrics_in(expression)
        assert asked, expression
        assert asked <= known, f"{sorted(asked - known)} in {expression}"


@pytest.mark.parametrize("file", DASHBOARDS, ids=lambda file: file.stem)
def test_panels_have_a_place_of_their_own(file: Path) -> None:
    dashboard = json.loads(file.read_text())
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24, panel["title"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not taken & cells, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    assert file.stem == dashboard["uid"]


def test_metrics_of_llumnix_are_there_or_excused(known: set[str]) -> None:
    named = {beginning + end for beginning, ends in OF_LLUMNIX.items() for end in ends.split()}
    missing = {name for name in named if not {name, f"{name}_bucket"} & known}
    _, _, section = (ROOT / "docs" / "reference" / "defaults.md").read_text().partition("\n## Metrics\n")
    rows = [line.split("|")[1] for line in section.partition("\n## ")[0].splitlines() if line.startswith("| `")]
    excused = [name for names in rows for name in re.findall(r"`(\w+)`", names)]
    assert sorted(missing) == sorted(excused)


def test_an_unknown_metric_would_be_found(known: set[str]) -> None:
    assert metrics_in('sum by (x) (rate(never_shown_total{model=~"a"}[5m]))') == {"never_shown_total"}
    assert "never_shown_total" not in known
    assert len(DASHBOARDS) == 3
