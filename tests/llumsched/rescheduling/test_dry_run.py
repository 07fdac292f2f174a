# SPDX-License-Identifier: Apache-2.0
"""What a pass would do, asked without having it done: of the planner, and over real sockets by `llumnix explain`."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry, generate_latest

from llumlet.contract.types import Health
from llumsched.cluster.instance import Instance
from llumsched.cluster.view import View
from llumsched.policy.document import Mode, load_policy
from llumsched.rescheduling import standalone as process
from llumsched.rescheduling.planning.draft import Draft
from llumsched.rescheduling.planning.moves import Purpose
from llumsched.rescheduling.planning.pairs import Ends
from llumsched.rescheduling.rescheduler import Rescheduler
from llumsched.rescheduling.rescheduling_config import LoadTarget, ReschedulingConfig
from llumsched.scheduler.process import SchedulerConfig, serve
from tests.llumlet.fake_agent import until
from tests.llumsched.conftest import Llumnix
from tests.llumsched.rescheduling.cluster import instance
from tests.support.cms import embedded_store

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(180)]

BALANCING = ReschedulingConfig(policies=("neutral_load",), interval_ms=0.0)
"""No passes but those that are asked for."""
FAILED = {"by": "failoverFilter", "reason": "failed itself"}


def put(view: View, *instances: Instance) -> None:
    for one in instances:
        view.put_metadata(one.metadata)
        assert view.put_status(one.status)


def cluster(**of_hot: Any) -> list[Instance]:
    """A hot one, a cold one, and one that takes nothing new."""
    return [
        instance("cold", 0.1, incarnation="x"),
        instance("hot", 0.9, incarnation="x", **of_hot),
        instance("sick", 0.5, incarnation="x", schedulable=False),
    ]


@dataclass
class World:
    rescheduler: Rescheduler
    view: View
    registry: CollectorRegistry

    def asked(self) -> dict[str, dict[str, Any]]:
        """What is told of each policy, by its name."""
        dry_run = self.rescheduler.dry_run()
        assert not dry_run.skipped
        return {policy["policy"]: policy | {"instances": list(found)} for policy, found in dry_run.of_policies()}

    def state(self) -> tuple[object, ...]:
        records = self.rescheduler.records
        return (
            copy.deepcopy(vars(self.rescheduler._history)),
            list(records.passes),
            len(records.moves),
            (generate_latest(self.registry)),
        )


@asynccontextmanager
async def world(config: ReschedulingConfig, instances: Iterable[Instance]) -> AsyncIterator[World]:
    view, registry = View(), CollectorRegistry()
    put(view, *instances)
    rescheduler = Rescheduler(view, config, registry=registry)
    try:
        yield World(rescheduler, view, registry)
    finally:
        await rescheduler.close()


def by_id(policy: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {one["instance_id"]: one for one in policy["instances"]}


async def test_each_instance_s_load_and_why_it_neither_gives_nor_takes() -> None:
    async with world(BALANCING, cluster()) as asked:
        [policy] = asked.asked().values()
    assert (policy["selector"], policy["metric"]) == ("metricBalanceSelector", "kv_cache_usage_ratio_projected")
    assert (policy["num_sources"], policy["num_destinations"], policy["num_moves"]) == (2, 2, 1)
    found = by_id(policy)
    assert list(found) == ["cold", "hot", "sick"]
    assert [one["load"] for one in found.values()] == [0.1, 0.9, 0.5]
    for name in ("cold", "hot"):
        assert found[name]["failed_by"] == []
        assert found[name]["source"] == found[name]["destination"] == {"able": True, "refused_by": []}
    assert found["sick"]["failed_by"] == [{"by": "schedulabilityFilter", "reason": "takes no new requests"}]
    assert found["sick"]["source"] == found["sick"]["destination"] == {"able": False, "refused_by": [FAILED]}
    [move] = policy["moves"]
    assert (move["source"], move["destination"], move["policy"]) == ("hot", "cold", "neutral_load")
    assert move["expected_tokens"] == pytest.approx(40_000, abs=4_500)
    assert move["expected_requests"] == pytest.approx(move["expected_tokens"] / 4_500)
    assert move["gain"] > move["cost"] > 0


async def test_dry_run_shows_the_selector_s_own_conditions() -> None:
    idle = instance("idle", incarnation="x", max_migrations_in=1, num_migrate_in_reqs=1)
    config = replace(BALANCING, neutral=LoadTarget(threshold=0.7))
    async with world(config, [*cluster(), idle, instance("decode", instance_type="decode", incarnation="x")]) as asked:
        [policy] = asked.asked().values()
    found, by = by_id(policy), "metricBalanceSelector"
    assert found["cold"]["source"]["refused_by"] == [{"by": by, "reason": "its load is below 0.7"}]
    assert found["hot"]["destination"]["refused_by"] == [{"by": by, "reason": "its load is not below 0.7"}]
    assert [one["reason"] for one in found["idle"]["source"]["refused_by"]] == [
        "has no request that could move", "its load is below 0.7"
    ]  # fmt: skip
    assert [one["reason"] for one in found["idle"]["destination"]["refused_by"]] == [
        "has as many moves to it as it may have"
    ]
    assert found["decode"]["source"]["refused_by"][0] == {"by": "inferTypeFilter", "reason": "is decode, not neutral"}
    assert (policy["num_sources"], policy["num_destinations"]) == (1, 1)


async def test_why_pairs_are_not_chosen_is_counted() -> None:
    full = [instance(name, 0.9 + number / 100, incarnation="x") for number, name in enumerate("ab")]
    async with world(replace(BALANCING, balance_threshold=0.5), full) as asked:
        [policy] = asked.asked().values()
    assert policy["moves"] == []
    assert policy["refused"] == {"below_threshold": 1}


async def test_failover_has_its_turn_first_and_the_next_policy_sees_what_it_has_chosen() -> None:
    hung = instance("hung", 0.4, incarnation="x", health=Health.HUNG, loop_age_ms=9_000.0)
    async with world(ReschedulingConfig(interval_ms=0.0), [*cluster(), hung]) as asked:
        policies = asked.asked()
    assert list(policies)[:3] == ["prefill_failover", "decode_failover", "neutral_failover"]
    failover, load = policies["neutral_failover"], by_id(policies["neutral_load"])
    assert failover["metric"] is None
    assert {(move["source"], move["destination"]) for move in failover["moves"]} == {("sick", "cold"), ("sick", "hot")}
    found = by_id(failover)
    assert found["sick"]["source"] == {"able": True, "refused_by": []}
    assert found["hot"]["source"]["refused_by"] == [
        {"by": "failoverMigrationSrcFilter", "reason": "shares its instance with no failed instance"}
    ]
    assert {"by": "roundRobinSelector", "reason": "cannot be asked: its loop hangs"} in (
        found["hung"]["source"]["refused_by"]
    )
    assert load["cold"]["load"] > 0.1, "with what the failover sends there"
    for end in ("source", "destination"):
        assert load["hot"][end]["refused_by"] == [
            {"by": "metricBalanceSelector", "reason": "has a move of this pass already"}
        ]


async def test_asking_changes_nothing_and_the_next_pass_plans_the_same() -> None:
    async with world(BALANCING, cluster()) as asked:
        rescheduler = asked.rescheduler
        before = asked.state()
        first = asked.asked()
        assert asked.asked() == first
        assert asked.state() == before
        rescheduler.run_pass()
        [record] = rescheduler.records.moves
        assert [record.move.to_dict()] == first["neutral_load"]["moves"]
        # Its source does not answer: what was asked for counts, and the pair and its ends are left alone.
        await until(lambda: record.error)
        moved = asked.state()
        after = asked.asked()["neutral_load"]
        assert after["moves"] == []
        assert asked.state() == moved
        said = [one for found in after["instances"] for one in found["source"]["refused_by"] if one["by"] == "history"]
        assert said == [{"by": "history", "reason": "is left alone for a while: it gave nothing, or failed"}]


async def test_dry_run_forgets_nothing() -> None:
    async with world(BALANCING, cluster()) as asked:
        history = asked.rescheduler._history
        history.moved("cold", "a request", now_s=-1e9)
        before = asked.state()
        asked.asked()
        assert asked.state() == before
        assert history._requests
        asked.rescheduler.run_pass()
        assert not history._requests


@dataclass(frozen=True)
class Foreign:
    """Says nothing of what it goes by, or fails."""

    fails: bool
    purpose: Purpose = Purpose.BALANCE
    name: str = "foreign"

    def pair(self, draft: Draft, policy: str, ends: Ends) -> tuple[int, int]:
        if self.fails:
            raise ZeroDivisionError("nothing to share")
        return 0, 0


@pytest.mark.parametrize("fails", [True, False])
async def test_of_a_selector_of_others_the_filters_are_told_at_least(fails: bool) -> None:
    async with world(BALANCING, cluster()) as asked:
        [policy] = asked.rescheduler._policies
        asked.rescheduler._policies = (replace(policy, selector=Foreign(fails)),)
        told = asked.asked()["neutral_load"]
    assert told["error"] == ("ZeroDivisionError('nothing to share')" if fails else "")
    assert (told["selector"], told["metric"]) == ("foreign", None)
    assert by_id(told)["sick"]["source"]["refused_by"] == [FAILED]


async def test_while_nothing_is_planned_the_reason_is_told() -> None:
    async with world(BALANCING, cluster()) as asked:
        asked.view.connected, asked.view.heard_s = False, asked.view.heard_s - 60.0
        dry_run = asked.rescheduler.dry_run()
    assert dry_run.skipped.endswith("its store is lost")
    assert list(dry_run.of_policies()) == []


# Over real sockets


@asynccontextmanager
async def colocated() -> AsyncIterator[tuple[str, Rescheduler]]:
    policy = load_policy("load-balance", Mode.FULL)
    running = await serve(SchedulerConfig(policy, port=0, cms="listen://127.0.0.1:0", rescheduling=BALANCING))
    try:
        put(running.view, *cluster())
        assert running.rescheduler is not None
        yield f"127.0.0.1:{running.port}", running.rescheduler
    finally:
        await running.close()


@asynccontextmanager
async def standalone() -> AsyncIterator[tuple[str, Rescheduler]]:
    async with embedded_store() as store:
        running = await process.serve(str(store.address), BALANCING, port=0)
        try:
            put(store.view, *cluster())
            seen = running.store.view
            await until(lambda: len(seen) == 3 and all(one.status for one in seen.values()))
            yield f"127.0.0.1:{running.port}", running.rescheduler
        finally:
            await running.close()


@pytest_asyncio.fixture(params=[colocated, standalone], ids=["colocated", "standalone"])
async def served(request: pytest.FixtureRequest) -> AsyncIterator[tuple[str, Rescheduler]]:
    async with request.param() as found:
        yield found


async def _post(address: str, body: bytes) -> tuple[int, str]:
    url = f"http://{address}/debug/rescheduling/plan"
    async with aiohttp.ClientSession() as client, client.post(url, data=body) as answer:
        return answer.status, await answer.text()


async def test_it_is_asked_over_http(served: tuple[str, Rescheduler], llumnix: Llumnix) -> None:
    address, rescheduler = served
    asked = "explain", "--rescheduling", "--scheduler", address
    shown = await llumnix(*asked)
    assert shown.code == 0, shown.err
    said, _, _, head, *rows = shown.out.splitlines()
    assert said == "neutral_load: 1 move (metricBalanceSelector)"
    assert head.split() == ["INSTANCE", "projected", "GIVES", "TAKES", "FAILED"]
    assert [row.split()[0] for row in rows] == ["cold", "hot", "sick", "FROM", "hot"]
    assert rows[2].split("  ")[-1] == "takes no new requests"
    document = await llumnix(*asked, "--policy", "neutral_load", "--json")
    [answer] = document.lines
    [move] = answer["policies"][0]["moves"]
    assert (move["source"], move["destination"]) == ("hot", "cold")
    assert not rescheduler.records.moves


async def test_a_question_that_is_wrong_is_refused(served: tuple[str, Rescheduler], llumnix: Llumnix) -> None:
    address, _ = served
    assert (await _post(address, b""))[0] == 200
    for body, said in (
        (b'{"policy": "decode_load"}', "policy 'decode_load' is none of the rescheduler's: neutral_load"),
        (b'{"policy": 7}', "bad JSON: Expected `str`, got `int` - at `$.policy`"),
        (b"[" * 100_000, "bad JSON: "),
        (b"\xff", "bad JSON: "),
    ):
        status, text = await _post(address, body)
        assert (status, text[: len(said)]) == (400, said)
    wrong = await llumnix("explain", "--rescheduling", "--policy", "decode_load", "--scheduler", address)
    assert wrong.code == 2
    assert "known" not in wrong.out
    assert "is none of the rescheduler's: neutral_load" in wrong.err


async def test_where_no_rescheduler_runs_that_is_said(llumnix: Llumnix) -> None:
    running = await serve(SchedulerConfig(load_policy("load-balance", Mode.FULL), port=0, cms="listen://127.0.0.1:0"))
    try:
        found = await llumnix("explain", "--rescheduling", "--scheduler", f"127.0.0.1:{running.port}")
    finally:
        await running.close()
    assert found.code == 5
    assert "no rescheduler runs there" in found.err
