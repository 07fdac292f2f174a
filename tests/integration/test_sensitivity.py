# SPDX-License-Identifier: Apache-2.0
"""The tests above can fail: one wrong byte in what a move copies changes the tokens.

A destination is started with a fault that flips one byte of one copied block. If the tokens came out the same, the
comparison of the other tests would prove nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Engines
from tests.support.client import Client
from tests.support.faults import with_faults
from tests.support.moves import move_stream

pytestmark = [pytest.mark.asyncio, pytest.mark.rest]

PROMPT = [100 + index * 7 % 900 for index in range(400)]
LENGTH = 250
LAYERS = 4


CELLS = [
    # Which block of which pull: the first round copies the full blocks from 0 on, the last pull the partly filled one.
    {"tag": "from 0", "final": False, "which": "first"},
    {"tag": "from 0", "final": False, "which": "middle"},
    {"final": True, "which": "last"},
]


def arm(spec: dict[str, Any]) -> None:
    Path(spec["file"]).touch()


async def test_corrupted_byte_changes_the_tokens(engines: Engines, start_server: Any, tmp_path: Path) -> None:
    """In the first, a middle and the last block, in every layer, one in each move."""
    specs = [
        {
            "point": "mover.pulled",
            "action": "corrupt",
            "layer": layer,
            "file": str(tmp_path / f"{cell['which']}-{layer}"),
            **cell,
        }
        for cell in CELLS
        for layer in range(LAYERS)
    ]
    corrupting = start_server(name="corrupting", env=with_faults(specs), flags=("--no-enable-prefix-caching",))
    unchanged = []
    async with Client(engines.a.base_url) as client:
        expected = (await (await client.complete(PROMPT, LENGTH, ignore_eos=True)).result()).token_ids

        async def is_changed() -> bool:
            stream = await client.complete(PROMPT, LENGTH, ignore_eos=True)
            await stream.wait_for(10)
            move = await move_stream(engines.a, corrupting, stream)
            assert move.live, f"{move.phase} {move.reason} {move.detail}"
            for count in range(20, LENGTH + 1, 10):
                await stream.wait_for(count)
                if stream.token_ids[:count] != expected[:count]:
                    await stream.disconnect()
                    return True
            return False

        for spec in specs:
            arm(spec)
            if not await is_changed():
                unchanged.append(spec)
        # Each fault fires once: the same move is right now.
        assert not await is_changed()
    assert not unchanged, f"a corrupted byte went unnoticed: {unchanged}"
