# SPDX-License-Identifier: Apache-2.0
"""An engine and its own API server hear nothing of each other for longer than an engine waits for other API servers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

from tests.shells.cells import company
from tests.shells.cluster import Cluster, cluster_of, side_by_side, until
from tests.shells.marks import MARKS
from tests.shells.test_cuts import ways
from tests.support.failures import failure
from vllm_llumnix.engine.service import relay_sender as relay

pytestmark = MARKS

Silence = Callable[[Cluster], AbstractContextManager[None]]


@contextmanager
def cut_off(cluster: Cluster) -> Iterator[None]:
    """A, from all API servers."""
    cluster.network.cut(*ways("A", "O", "both"))
    yield
    cluster.network.heal()


@contextmanager
def stopped(cluster: Cluster) -> Iterator[None]:
    """The thread of A that speaks with API servers and peers."""
    go_on = threading.Event()
    cluster["A"].engine.kvconn.thread.post(_wait_for, go_on)
    yield
    go_on.set()


@failure("an engine and its API server are cut off from each other for 40 s", "not moving", "replayed; then as before")
@failure("an engine hears and says nothing for 40 s", "not moving", "the same")
async def test_an_engine_is_heard_of_again(model_dir: Path) -> None:
    """What its API server sends it from then on stays with it."""

    async def play(silence: Silence) -> list[str]:
        async with cluster_of(model_dir) as cluster:
            stream = await company(cluster)
            client = cluster["A"].client
            with silence(cluster):
                await asyncio.sleep(4 / 3 * relay.ORIGIN_SECONDS)
            replayed = client.origin.core.num_replayed
            assert replayed, "the silence was too short"

            def is_well() -> bool:
                owner = client.origin.core.owners.named("A")
                return owner is not None and owner.takes_requests(time.monotonic())

            await until(is_well, lambda: "A is not heard of again")
            later = await cluster.stream("A")
            await later.reaches(100)
            faults = await cluster.verdict(stream)
            return faults + ["replayed without need"] * (client.origin.core.num_replayed - replayed)

    assert not await side_by_side(partial(play, silence) for silence in (cut_off, stopped))


def _wait_for(event: threading.Event) -> None:
    event.wait()
