# SPDX-License-Identifier: Apache-2.0
"""Requests that may be why their engine died, or hangs: they are tried one at a time, and one ends only if it is."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from vllm.v1.engine import FinishReason

from llumlet.protocol.recovery.suspects import TRIAL_TOKENS
from tests.shells.circumstances import recorded
from tests.shells.cluster import Cluster, Instance, Stream, cluster_of, retold, until
from tests.shells.marks import MARKS, both
from tests.support.failures import failure

pytestmark = MARKS


@contextlib.contextmanager
def poisoned(cluster: Cluster, request_id: str) -> Iterator[None]:
    """No model returns from a step in which this request is."""
    active = True
    with contextlib.ExitStack() as stack:
        for instance in cluster.instances.values():
            executor = instance.engine.model_executor
            executor.stuck.clear()

            def run(step: Any, executor: Any = executor, stock: Any = executor._run) -> Any:
                if active and request_id in step.num_scheduled:
                    executor.turns.clear()
                return stock(step)

            stack.enter_context(mock.patch.object(executor, "_run", run))
        try:
            yield
        finally:
            # Steps that are in flight come to it later.
            active = False


async def dies_of_it(instance: Instance) -> None:
    """As if it had been the model that took the engine along."""
    await until(instance.engine.model_executor.stuck.is_set, lambda: f"{instance.name} does not die", seconds=60.0)
    await instance.die()


async def ends_in_error(cluster: Cluster, poison: Stream) -> None:
    await until(lambda: poison.finish is not None, lambda: f"it goes on: {len(poison.tokens)} tokens")
    assert poison.finish is FinishReason.ERROR
    cluster.streams.remove(poison)


@failure(
    "every engine dies of a request",
    "it is in a step, beside others",
    "two do; it ends with an error, the others go on",
)
@both
@retold
async def test_a_request_of_which_engines_die(asynchronous: bool, model_dir: Path) -> list[str]:
    async with cluster_of(model_dir, asynchronous=asynchronous) as cluster:
        others = [await cluster.stream("A"), await cluster.stream("A"), await cluster.stream("B"),
                  await cluster.stream("C")]  # fmt: skip
        for stream in others:
            await stream.reaches(20)
        with poisoned(cluster, "poison"):
            dying = [asyncio.create_task(dies_of_it(instance)) for instance in cluster.instances.values()]
            poison = await cluster.stream("A", request_id="poison")
            await ends_in_error(cluster, poison)
            await others[0].reaches(len(others[0].tokens) + 20)
            assert sum(instance.dead for instance in cluster.instances.values()) == 2
            for task in dying:
                task.cancel()
            await asyncio.gather(*dying, return_exceptions=True)
        return await cluster.verdict(others[0])


@failure(
    "an engine is killed from outside",
    "several requests are in its step, one waits",
    "those in the step are tried, one at a time; the other goes on at once",
)
@retold
async def test_an_engine_that_is_killed(model_dir: Path) -> list[str]:
    async with cluster_of(model_dir) as cluster:
        engine = cluster["A"].engine
        running = [await cluster.stream("A") for _ in range(engine.scheduler.max_num_running_reqs)]
        for stream in running:
            await stream.reaches(10)
        waiting = await cluster.stream("A")
        await until(lambda: waiting.request_id in engine.scheduler.requests, lambda: "it has not arrived")
        adopted = recorded(cluster, "Adopt")
        most = 0
        engine.model_executor.turns.clear()
        await until(engine.model_executor.stuck.is_set, lambda: "no step")
        await cluster["A"].die()
        trials = cluster["A"].client.origin.core.suspects
        while trials._waiting or trials._trying or not adopted:
            most = max(most, len(trials._trying))
            await asyncio.sleep(0.001)
        assert 1 <= most <= 2
        tried = [asked.trial_tokens for asked in adopted]
        assert tried.count(0) >= 1
        assert tried.count(TRIAL_TOKENS) >= len(running)
        assert tried[0] == 0
        for stream in running:
            assert [engine.instance for engine in trials.deaths(stream.request_id)] == ["A"]
        return await cluster.verdict(waiting)


@failure("every engine hangs in the steps of a request", "on trial", "it ends with an error; the engines go on")
@retold
async def test_a_request_of_which_engines_hang(model_dir: Path) -> list[str]:
    async with cluster_of(model_dir) as cluster:
        others = [await cluster.stream(name) for name in "AB"]
        for stream in others:
            await stream.reaches(20)
        with poisoned(cluster, "poison"):
            poison = await cluster.stream("A", request_id="poison")
            await ends_in_error(cluster, poison)
        hung = [instance.name for instance in cluster.living if instance.engine.model_executor.stuck.is_set()]
        for instance in cluster.living:
            instance.engine.model_executor.turns.set()
        assert len(hung) == 2
        return await cluster.verdict(others[0])
