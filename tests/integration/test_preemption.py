# SPDX-License-Identifier: Apache-2.0
"""Two real engines with small KV caches, and streams at one of them that do not fit there. In float32: what is computed
again, because it was preempted, says the same."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from llumlet.contract.client import LlumletClient
from llumlet.contract.types import InstanceStatus
from llumsched.up.ports import free_port
from tests.integration.test_metrics import grown, sample
from tests.support.client import Client
from tests.support.conservation import wait_idle
from tests.support.control import Control, rescheduling
from tests.support.harness import Fleet, Server, ServerSpec

pytestmark = pytest.mark.asyncio

PROMPT = [100 + index * 7 % 900 for index in range(100)]
LENGTH = 500
NUM_STREAMS = 6
NUM_BLOCKS = 70
"""Of 32 tokens: four of the streams fill it in the end."""
POLICY = "neutral_preemption"
MOVES = ("--enable-rescheduling", "--colocated-rescheduling-mode", "--rescheduling-policies", POLICY)


@dataclasses.dataclass
class Pair:
    hot: Server
    cold: Server
    cms: str
    logs: Path


@pytest.fixture(scope="module")
def pair(model_dir: Path, log_dir: Path) -> Iterator[Pair]:
    logs, cms = log_dir / "preemption", f"127.0.0.1:{free_port()}"
    spec = ServerSpec(
        model_dir,
        max_model_len=1024,
        num_kv_blocks=NUM_BLOCKS,
        flags=("--dtype", "float32", "--llumlet-cms", cms, "--llumlet-ask-before-preemption"),
    )
    with Fleet(logs) as fleet:
        specs = [dataclasses.replace(spec, name=name, instance_id=name) for name in ("hot", "cold")]
        yield Pair(*fleet.start(*specs), cms, logs)


async def tokens_of(server: Server, number: int) -> list[list[int]]:
    """What so many streams at once say, past the gateway."""
    async with Client(server.base_url) as client:
        streams = [
            await client.complete(PROMPT, LENGTH, ignore_eos=True, cache_salt=uuid.uuid4().hex) for _ in range(number)
        ]
        return [(await stream.result()).token_ids for stream in streams]


async def status_of(server: Server) -> InstanceStatus:
    async with LlumletClient(str(server.llumlet)) as client:
        return await client.get_instance_status()


async def test_request_moves_instead_of_being_preempted(pair: Pair) -> None:
    """With nobody who moves anything engines preempt, and say what it costs; with the policy alone they hardly do."""
    [alone] = await tokens_of(pair.hot, 1)
    share = sample(pair.hot, "recomputed_share")
    before = await status_of(pair.hot)
    assert all(tokens == alone for tokens in await tokens_of(pair.hot, NUM_STREAMS))
    stock = await status_of(pair.hot)
    preemptions = stock.num_preemptions - before.num_preemptions
    recomputed = stock.num_recomputed_tokens - before.num_recomputed_tokens
    assert preemptions > 0
    assert recomputed > len(PROMPT)
    assert stock.num_computed_tokens - before.num_computed_tokens >= NUM_STREAMS * (len(PROMPT) + LENGTH - 1)
    assert await grown(pair.hot, share, "recomputed_share") > 0
    await wait_idle(pair.hot)

    async with Control(pair.logs, f"listen://{pair.cms}", schedulers=[MOVES]) as control:
        await control.knows(2)
        assert all(tokens == alone for tokens in await tokens_of(pair.hot, NUM_STREAMS))
        moves = (await rescheduling(control.scheduler_url))["moves"]
    assert {move["policy"] for move in moves} == {POLICY}
    assert sum(move["num_moved"] for move in moves) >= 2
    after = await status_of(pair.hot)
    assert after.num_preemptions - stock.num_preemptions < preemptions
    assert after.num_recomputed_tokens - stock.num_recomputed_tokens < recomputed
    for server in (pair.hot, pair.cold):
        await wait_idle(server)
