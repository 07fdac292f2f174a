# SPDX-License-Identifier: Apache-2.0
"""`llumnix` against real engines."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import pytest

from tests.integration.conftest import Engines
from tests.support.client import Client


async def llumnix(*arguments: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "llumsched.cli", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode or 0, out.decode() + err.decode()


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.asyncio
async def test_list_move_and_status(engines: Engines, conserved: object) -> None:
    at_a, at_b = str(engines.a.llumlet), str(engines.b.llumlet)
    async with Client(engines.a.base_url) as client:
        stream = await client.complete(list(range(100, 180)), 8000, ignore_eos=True)
        await stream.wait_for(20)
        code, text = await llumnix("ps", "--llumlet", at_a, "--json")
        assert code == 0
        assert "decode" in text
        code, text = await llumnix("migrate", "--from", at_a, "--to", at_b, "--all", "--json")
        assert code == 0, text
        assert any("moved" in json.dumps(event) for event in lines(text))
        code, text = await llumnix("ps", "--llumlet", f"{at_a},{at_b}")
        assert code == 0
        assert "decode" in text
        code, text = await llumnix(
            *("migrate", "--from", at_b, "--to", at_a, "--rule", "NUM_REQ", "--order", "SR", "--value", "1")
        )
        assert code == 0, text
        await stream.disconnect()
    code, text = await llumnix("status", "--llumlet", f"{at_a},{at_b}", "--json")
    assert code == 0
    assert len(lines(text)) >= 1


@pytest.mark.asyncio
async def test_request_that_is_not_there(engines: Engines) -> None:
    at_a, at_b = str(engines.a.llumlet), str(engines.b.llumlet)
    code, text = await llumnix("migrate", "--from", at_a, "--to", at_b, "--request", "nobody")
    assert code != 0
    assert "nobody" in text
