# SPDX-License-Identifier: Apache-2.0
"""What does not move says so: in the answer of `Migrate` and in `llumnix ps`; and it goes on where it is."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.client import Client
from benchmarks.harness import Fleet, Server, ServerSpec
from benchmarks.moves import migrate
from llumlet.errors import LlumletError
from llumlet.types import reason_word
from tests.exactness.cells import CONFIGURATIONS
from tests.exactness.test_matrix import PROMPT, held_by
from tests.support.conservation import wait_idle


async def stays_visibly(source: Server, destination: Server, reason: str, **parameters: Any) -> None:
    """The move of one request is refused for `reason`, `llumnix ps` says why, and the request ends as asked."""
    async with Client(source.base_url) as client:
        expected = await (await client.complete(PROMPT, 200, ignore_eos=True, cache_salt="x", **parameters)).result()
        stream = await client.complete(PROMPT, 600, ignore_eos=True, cache_salt="y", **parameters)
        held = await held_by(source, stream, 20)
        command = [sys.executable, "-m", "llumsched.cli", "ps", "--llumlet", str(source.llumlet), "--json"]
        shown = (await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=True)).stdout
        try:
            (move,) = await migrate(source, destination, request_ids=[held.request_id])
            answer = (move.phase, move.reason, move.detail)
        except LlumletError as refusal:
            answer = ("stayed", reason_word(refusal.reason), refusal.detail)
        result = await stream.result()
    assert answer == ("stayed", "not_portable", reason)
    assert reason in shown, shown
    assert not held.movable
    assert len(result.token_ids) == 600
    assert result.token_ids[:200] == expected.token_ids
    await wait_idle(source)


@pytest.mark.parametrize("fleet_of", CONFIGURATIONS[-1:], ids=str, indirect=True, scope="package")
@pytest.mark.asyncio
async def test_another_kv_connector(fleet_of: dict[str, Server], model_dir: Path, tmp_path: Path) -> None:
    # The offloading connector does not start on CPUs.
    connector = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "kv")},
    }
    flags = ("--kv-transfer-config", json.dumps(connector))
    with Fleet(tmp_path) as fleet:
        (source,) = fleet.start(ServerSpec(model_dir, name="connector", instance_id="connector", flags=flags))
        await stays_visibly(source, fleet_of["b"], "another KV connector is configured (--kv-transfer-config)")
