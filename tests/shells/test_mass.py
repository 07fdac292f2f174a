# SPDX-License-Identifier: Apache-2.0
"""An engine dies with many streams: they are spread over the others, and nobody computes anything in vain."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from llumlet.protocol.origin import placement, replay
from tests.shells.circumstances import recorded_requests, stopped
from tests.shells.cluster import HURRIED, Cluster, Stream, cluster_of, retold
from tests.shells.marks import MARKS
from tests.support.failures import failure

pytestmark = MARKS

NUM_STREAMS = 150
OTHERS = "BCDEF"
CALL_SECONDS = 1.0


@pytest.fixture(autouse=True)
def in_no_hurry() -> Iterator[None]:
    """Six engines share one interpreter here; who is asked in vain is found out soon all the same."""
    with contextlib.ExitStack() as stack:
        for (module, name), value in HURRIED.items():
            stack.enter_context(mock.patch.object(module, name, 10 * value))
        stack.enter_context(mock.patch.object(replay, "CALL_SECONDS", CALL_SECONDS))
        yield


@failure(
    "the engine dies, with 150 streams", "decoding or queued", "spread evenly over five others, each computed once"
)
@retold
async def test_replays_spread_evenly(model_dir: Path) -> list[str]:
    async with cluster_of(model_dir, "A" + OTHERS) as cluster:
        streams = await crowd(cluster)
        # The one that the origin has heard of.
        await cluster.migrate(streams[0])
        taken = {name: recorded_requests(cluster[name]) for name in OTHERS}
        await cluster.lose("A")
        return unevenness(taken) + await cluster.verdict(streams[-1])


@failure(
    "the engine dies, with 150 streams, and one of the others is stopped, later it goes on",
    "decoding or queued",
    "the rest share them evenly; what the stopped one was asked in vain it does not begin",
)
@retold
@pytest.mark.rest
async def test_replays_skip_a_stopped_engine(model_dir: Path) -> list[str]:
    async with cluster_of(model_dir, "A" + OTHERS) as cluster:
        streams = await crowd(cluster)
        taken = {name: recorded_requests(cluster[name]) for name in OTHERS}
        with stopped(cluster[OTHERS[-1]]):
            await cluster.lose("A")
        asked = cluster.network.seen["Adopt"] - sum(map(len, taken.values()))
        found = await cluster.verdict(streams[-1])
        found += [f"it has begun {requests}" for requests in [taken.pop(OTHERS[-1])] if requests]
        if not 0 < asked <= placement.IN_FLIGHT:
            found.append(f"{asked} attempts were in vain")
        return found + unevenness(taken)


async def crowd(cluster: Cluster) -> list[Stream]:
    """Of which some have received tokens, some are in their prefill, and most are queued."""
    streams = [await cluster.stream("A", num_prompt=40, max_tokens=30) for _ in range(NUM_STREAMS)]
    await streams[0].reaches(2)
    return streams


def unevenness(taken: dict[str, list[str]]) -> list[str]:
    counts = {name: len(requests) for name, requests in taken.items()}
    found = [] if sum(counts.values()) <= NUM_STREAMS else [f"some were begun twice: {counts}"]
    if max(counts.values()) > 1.2 * NUM_STREAMS / len(counts):
        found.append(f"more than a share and a fifth: {counts}")
    return found
