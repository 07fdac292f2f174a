# SPDX-License-Identifier: Apache-2.0
"""What an instance tells of its load, to who asks it and to a CMS, against the load that there is."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio

from llumlet.contract.client import LlumletClient
from llumlet.contract.types import InstanceStatus
from llumsched.cluster.instance import Instance
from llumsched.cluster.view import View
from llumsched.cms.embedded import EmbeddedStore
from tests.integration.conftest import StartServer
from tests.support.client import Client, Stream
from tests.support.cms import embedded_store
from tests.support.harness import Server

pytestmark = pytest.mark.asyncio

BLOCK = 32
PREFIX = [100 + index % 90 for index in range(10 * BLOCK)]
NUM_SLOTS = 2
SECONDS = 20.0
SOON_SECONDS = 2.0
"""An engine that answers, on a core that others use too."""


@pytest_asyncio.fixture
async def store() -> AsyncIterator[EmbeddedStore]:
    async with embedded_store() as store:
        yield store


async def until(view: View, name: str, holds: Callable[[Instance], bool], seconds: float = SECONDS) -> Instance:
    deadline = time.monotonic() + seconds
    while (instance := view.get(name)) is None or instance.status is None or not holds(instance):
        assert time.monotonic() < deadline, f"the view shows {instance}"
        await asyncio.sleep(0.005)
    return instance


async def asked(server: Server) -> InstanceStatus:
    async with LlumletClient(str(server.llumlet)) as client:
        return await client.get_instance_status()


def numbers(status: InstanceStatus) -> dict[str, int]:
    """What follows from the requests alone."""
    return {
        "running": status.num_running_requests,
        "waiting": status.num_waiting_requests,
        "waiting to decode": status.scheduler_waiting_to_decode_requests_num,
        "waiting tokens": status.scheduler_waiting_to_decode_tokens_num,
        "waiting prefill": status.num_uncomputed_tokens_scheduler_waiting_prefills,
        "all waiting prefill": status.num_uncomputed_tokens_all_waiting_prefills,
        "running to decode": status.scheduler_running_to_decode_requests_num,
        "running prefill": status.num_uncomputed_tokens_scheduler_running_prefills,
    }


def pairs(computed: int, uncomputed: int) -> int:
    """Of a query and a key, of tokens behind others."""
    return sum(range(computed + 1, computed + uncomputed + 1))


def assert_steps_told(status: InstanceStatus, elapsed_s: float) -> None:
    """Of an engine on which the requests of `fill` decode."""
    number = [sample.number for sample in status.steps]
    assert number == sorted(set(number))
    latest = status.steps[-1]
    assert (status.profiling_id, status.step_duration) == (latest.number, latest.seconds * 1e3)
    assert (latest.num_decodes, latest.prefill_tokens, latest.pairs) == (NUM_SLOTS, 0, 0)
    prompts = NUM_SLOTS * 3 * BLOCK
    assert prompts < latest.decode_kv <= status.scheduler_running_to_decode_tokens_num
    assert status.num_decode_steps > 0
    assert status.num_decode_steps <= status.decode_steps_requests <= NUM_SLOTS * status.num_decode_steps
    assert status.decode_steps_kv > prompts * status.num_decode_steps * 0.5
    assert 0 < status.decode_steps_s < elapsed_s


async def fill(client: Client) -> list[Stream]:
    """Requests that have every slot of the batch, for as long as they are wanted."""
    prompts = [[200 + slot] * (3 * BLOCK) for slot in range(NUM_SLOTS)]
    streams = [await client.complete(prompt, 7000, ignore_eos=True) for prompt in prompts]
    for stream in streams:
        await stream.wait_for(3)
    return streams


async def test_status_is_the_load(store: EmbeddedStore, start_server: StartServer) -> None:
    flags = ("--llumlet-cms", str(store.address))
    server = await asyncio.to_thread(start_server, name="told", max_num_seqs=NUM_SLOTS, flags=flags)
    view = store.view
    idle = await until(view, "told", lambda instance: not instance.status.num_running_requests)
    metadata = idle.metadata
    assert (metadata.api_server_port, list(metadata.served_models)) == (server.port, ["model"])
    assert (metadata.data_parallel_size, metadata.dp_rank, metadata.dp_local_rank) == (1, 0, 0)
    assert metadata.node_id
    assert metadata.unit_id
    began = time.monotonic()
    async with Client(server.base_url) as client:
        await (await client.complete([*PREFIX, 7], 2)).result()
        running = await fill(client)
        waiting = [await client.complete([*PREFIX, *[300 + index] * 40], 50, ignore_eos=True) for index in range(3)]
        waiting.append(await client.complete([*PREFIX, *[400] * 9], 50, ignore_eos=True, n=2, temperature=1))
        names = [stream.request_id for stream in waiting]
        seen = await until(view, "told", lambda instance: instance.status.num_waiting_requests == 5)
        expected = {
            "running": NUM_SLOTS,
            "waiting": 5,
            "waiting to decode": 5,
            "waiting tokens": 3 * (len(PREFIX) + 40) + 2 * (len(PREFIX) + 9),
            # The prefix is held already.
            "waiting prefill": 3 * 40 + 2 * 9,
            "all waiting prefill": 3 * 40 + 2 * 9,
            "running to decode": NUM_SLOTS,
            "running prefill": 0,
        }
        for status in (seen.status, await asked(server)):
            assert numbers(status) == expected
            assert status.num_uncomputed_pairs == 3 * pairs(len(PREFIX), 40) + 2 * pairs(len(PREFIX), 9)
            assert list(status.waiting_requests) == names
            assert set(names) | {stream.request_id for stream in running} <= set(status.recent_waiting_requests)
            used = status.num_total_blocks - status.num_free_blocks
            assert status.num_used_gpu_tokens == used * BLOCK
            # The newest token of each has no place yet.
            assert status.scheduler_running_to_decode_tokens_num <= status.num_used_gpu_tokens + NUM_SLOTS
        seen = await until(view, "told", lambda instance: instance.status.steps[-1].num_decodes == NUM_SLOTS)
        assert_steps_told(seen.status, time.monotonic() - began)
        before = [len(stream.token_ids) for stream in running]
        status = await asked(server)
        after = [len(stream.token_ids) for stream in running]
        prompts = NUM_SLOTS * 3 * BLOCK
        # The engine is ahead of the client.
        assert prompts + sum(before) <= status.scheduler_running_to_decode_tokens_num <= prompts + sum(after) + 400
        # One who leaves is gone for the scheduler at once, and so is the work.
        left = time.monotonic()
        await waiting[0].disconnect()
        seen = await until(view, "told", lambda instance: instance.status.num_waiting_requests == 4, SOON_SECONDS)
        print(f"an abort was in the view after {1e3 * (time.monotonic() - left):.1f} ms")
        assert names[0] not in seen.status.waiting_requests
        assert names[0] in seen.status.recent_waiting_requests
        for stream in running:
            await stream.disconnect()
        # Four sequences through two slots.
        for stream in waiting[1:]:
            await stream.result()
        seen = await until(view, "told", lambda instance: not instance.status.num_running_requests)
        assert not any(numbers(seen.status).values())
        assert seen.status.num_free_blocks == seen.status.num_total_blocks
        assert seen.status.schedulable

        chat = await client.chat([{"role": "user", "content": "hello"}], 4)
        await chat.result()
        await until(view, "told", lambda instance: chat.request_id in instance.status.recent_waiting_requests)
        await client.complete(PREFIX, 7000, ignore_eos=True)
        assert await new_request_in_view(client, view) < SOON_SECONDS

    os.kill(server.pid, signal.SIGTERM)
    deadline = time.monotonic() + SECONDS
    while "told" in view:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def new_request_in_view(client: Client, view: View) -> float:
    """Seconds from sending a request until its id is in the view."""
    sent = time.monotonic()
    stream = await client.complete([9] * 40, 2)
    await until(view, "told", lambda instance: stream.request_id in instance.status.recent_waiting_requests)
    seconds = time.monotonic() - sent
    print(f"a request was in the view after {1e3 * seconds:.1f} ms")
    return seconds
