# SPDX-License-Identifier: Apache-2.0
"""From a release of vLLM to the next and back, with `--llumlet-accept vllm`: requests move live, and go on when the
former is drained or dies.

Runs where the next release is installed (`make test-next`), over the same kernels, so that tokens are the same ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.exactness.test_matrix import held_by
from tests.integration.test_lost_owner import engine_of
from tests.support.client import Client
from tests.support.conservation import wait_idle
from tests.support.harness import Fleet, Server, ServerSpec, free_port
from tests.support.moves import move_stream

ROOT = Path(__file__).resolve().parents[2]
NEXT = next(iter(sorted((ROOT / ".venv").glob("vllm-*"))), None)
PROMPT = [100 + index * 37 % 900 for index in range(300)]
LENGTH = 400
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"ignore_eos": True},
    "seeded": {"ignore_eos": True, "temperature": 1.0, "seed": 7},
    "guided": {"temperature": 1.0, "seed": 7, "structured_outputs": {"regex": "[ab]{380}"}},
}

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.skipif(NEXT is None, reason="there is no other release of vLLM, see make test-next"),
]


class Releases(NamedTuple):
    former: Server
    next: Server


@pytest.fixture
def releases(log_dir: Path, model_dir: Path) -> Iterator[Releases]:
    ports = (free_port(), free_port())
    specs = []
    for name, path, port, peer in zip(Releases._fields, ("", str(NEXT)), ports, ports[::-1], strict=True):
        flags = ("--llumlet-accept", "vllm", "--llumlet-port", str(port), "--llumlet-peers", f"127.0.0.1:{peer}")
        specs.append(ServerSpec(model_dir, name=name, instance_id=name, flags=flags, env={"PYTHONPATH": path}))
    with Fleet(log_dir / "releases") as fleet:
        yield Releases(*fleet.start(*specs))


async def test_updated_and_rolled_back(releases: Releases) -> None:
    """With their KV cache, and no token is another one."""
    for server, version in zip(releases, ("0.32", "0.33"), strict=True):
        assert f"version {version}" in server.log_text() or f"v{version}" in server.log_text()
    for parameters in KINDS.values():
        for source, destination in (releases, releases[::-1]):
            async with Client(source.base_url) as client:
                expected = await (await client.complete(PROMPT, LENGTH, **parameters, cache_salt="alone")).result()
                stream = await client.complete(PROMPT, LENGTH, **parameters, cache_salt="moved")
                for here, there in ((source, destination), (destination, source)):
                    await held_by(here, stream, 20)
                    move = await move_stream(here, there, stream, force=True)
                    assert (move.phase, move.mode) == ("moved", "live"), move
                    await stream.wait_for(len(stream.token_ids) + 20)
                assert (await stream.result()).token_ids == expected.token_ids
    for server in releases:
        await wait_idle(server)


async def test_the_former_is_drained(releases: Releases) -> None:
    """As a rolling update does it: SIGTERM, and what runs there goes on where the next release runs."""
    async with Client(releases.former.base_url) as client:
        expected = await (await client.complete(PROMPT, LENGTH, **KINDS["greedy"])).result()
        stream = await client.complete(PROMPT, LENGTH, **KINDS["greedy"])
        await held_by(releases.former, stream, 20)
        ended = asyncio.create_task(asyncio.to_thread(releases.former.stop, 60.0))
        await held_by(releases.next, stream, 20)
        assert (await stream.result()).token_ids == expected.token_ids
        await ended


async def test_the_former_dies(releases: Releases) -> None:
    """The next release starts its requests again."""
    async with Client(releases.former.base_url) as client:
        expected = await (await client.complete(PROMPT, LENGTH, **KINDS["greedy"])).result()
        stream = await client.complete(PROMPT, LENGTH, **KINDS["greedy"])
        await held_by(releases.former, stream, 20)
        engine_of(releases.former).kill()
        assert (await stream.result()).token_ids == expected.token_ids
