# SPDX-License-Identifier: Apache-2.0
"""Statuses that are moved on, within bounds whatever was told."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from llumsched.cluster.instance import Instance
from llumsched.cluster.providers.in_flight import Counters, InFlight
from llumsched.cluster.table import Table, standard_table
from llumsched.foresight.moved_on import MOVED, moved_on
from llumsched.foresight.outlook import Outlook
from llumsched.latency.fitting import Coefficients
from tests.llumsched import cases
from tests.llumsched.latency.test_fitting import TRUE
from tests.llumsched.policy.test_predictions import Known

UNKNOWN = Coefficients(*[math.nan] * 5)
USED = "num_used_gpu_tokens"
DECODES = "scheduler_running_to_decode_requests_num"

numbers = st.integers(0, 300)
tokens = st.integers(0, 20_000)
statuses = st.fixed_dictionaries(
    {
        "num_total_gpu_tokens": st.integers(0, 30_000),
        "num_total_blocks": st.integers(0, 3000),
        "num_used_gpu_tokens": tokens,
        "num_running_requests": numbers,
        "scheduler_running_to_decode_requests_num": numbers,
        "scheduler_running_to_decode_tokens_num": tokens,
        "num_waiting_requests": numbers,
        "scheduler_waiting_to_decode_requests_num": numbers,
        "scheduler_waiting_to_decode_tokens_num": tokens,
        "num_uncomputed_tokens_all_waiting_prefills": tokens,
        "num_unallocated_tokens_all_waiting_requests": tokens,
        "num_uncomputed_tokens_scheduler_running_prefills": tokens,
        "num_unallocated_tokens_scheduler_running_prefills": tokens,
        "num_uncomputed_pairs": st.integers(0, 10**9),
        "loop_age_ms": st.floats(0, 1e6),
        "max_num_batched_tokens": st.integers(0, 4096),
        "coming_blocks": st.lists(st.integers(-500, 500), max_size=80),
        "coming_ends": st.lists(st.integers(-500, 500), max_size=80),
    }
)
sent = st.builds(Counters, *[st.integers(0, 20) for _ in range(3)], *[tokens for _ in range(4)], st.integers(0, 10**7))
coefficients = st.builds(Coefficients, *[st.one_of(st.floats(0, 1), st.just(math.nan)) for _ in range(5)])
ages = st.one_of(st.floats(0, 2), st.floats(-1e3, 1e9))


def told(fields: dict[str, object], on_its_way: Counters, known: Coefficients, ends_per_token: float = 0.0) -> Table:
    in_flight, outlook = InFlight(), Outlook(lambda: 0.0)
    in_flight.add("a", on_its_way)
    batch = fields.get("max_num_batched_tokens", 0)
    of_status = {name: value for name, value in fields.items() if name != "max_num_batched_tokens"}
    instance = Instance(cases.metadata("a", max_num_batched_tokens=batch), cases.status("a", **of_status), 0.0)
    outlook.appeared(instance)
    if ends_per_token:
        outlook._told["a"].ends.add(0.0, ends_per_token, 1.0, ends_per_token, 1000.0 * ends_per_token)
    table = standard_table(in_flight, Known(known), outlook)
    table.appeared(instance)
    return table


@settings(max_examples=400, deadline=None)
@given(statuses, sent, coefficients, ages, st.floats(0, 1))
def test_whatever_is_told_nothing_is_beyond_its_bounds(
    fields: dict[str, object], on_its_way: Counters, known: Coefficients, now_s: float, ends_per_token: float
) -> None:
    table = told(fields, on_its_way, known, ends_per_token)
    moved = {name: float(values[0]) for name, values in moved_on(table, now_s).items()}
    assert set(moved) == set(MOVED)
    assert all(math.isfinite(value) and value >= 0 for value in moved.values()), moved
    total, used = float(table["num_total_gpu_tokens"][0]), float(table[USED][0])
    assert moved[USED] <= max(total, used)
    block = max(total / max(table["num_total_blocks"][0], 1), 1)
    assert moved["num_free_blocks"] <= table["num_free_blocks"][0] + used / block + 1e-9
    for of in ("num_waiting_requests", "num_uncomputed_tokens_all_waiting_prefills", "sent_requests", "sent_tokens"):
        assert moved[of] <= table[of][0], f"{of}: nothing comes that nobody knows of"
    whole = ("num_running_requests", "num_waiting_requests", "sent_requests")
    assert sum(moved[name] for name in whole) <= sum(float(table[name][0]) for name in whole) + 1e-9


def test_no_more_is_given_back_than_is_in_use() -> None:
    fields: dict[str, object] = {
        "num_total_gpu_tokens": 1600, "num_total_blocks": 100, USED: 160, "num_free_blocks": 90,
        "num_running_requests": 1, DECODES: 1, "coming_blocks": [-50] * 64,
    }  # fmt: skip
    moved = moved_on(told(fields, Counters(), TRUE), 1.0)
    assert (moved[USED][0], moved["num_free_blocks"][0]) == (0, 100)


@settings(max_examples=100, deadline=None)
@given(statuses, sent, st.sampled_from(["unknown", "now", "earlier"]), st.floats(0, 1e3))
def test_without_knowledge_and_without_age_a_status_is_what_it_says(
    fields: dict[str, object], on_its_way: Counters, why: str, age_s: float
) -> None:
    table = told(fields, on_its_way, UNKNOWN if why == "unknown" else TRUE, 5.0)
    now_s = {"unknown": age_s, "now": 0.0, "earlier": -age_s}[why]
    before = {name: table[name].copy() for name in MOVED}
    for name, values in moved_on(table, now_s).items():
        assert values[0] == before[name][0], name
