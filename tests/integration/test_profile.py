# SPDX-License-Identifier: Apache-2.0
"""`llumnix profile` of a real engine, by its llumlet and by its API alone; and a scheduler that begins with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llumsched.latency.profile import Profile, read_profile
from tests.integration.conftest import Engines
from tests.integration.test_command_line import llumnix

SHORT = ("--most-prompt-tokens", "512", "--most-requests", "4")


def step_s(profile: Profile) -> float:
    """Seconds of a step of two requests of a hundred tokens each."""
    one = profile.coefficients
    return one.a + 2 * one.d + 200 * one.e


@pytest.mark.asyncio
@pytest.mark.usefixtures("conserved")
@pytest.mark.rest
async def test_an_engine_is_measured(engines: Engines, tmp_path: Path) -> None:
    ours = tmp_path / "ours.json"
    code, text = await llumnix("profile", "--llumlet", str(engines.a.llumlet), "--output", str(ours), *SHORT, "--json")
    assert code == 0, text
    told = json.loads(next(line for line in text.splitlines() if line.startswith("{")))
    found = read_profile(str(ours))
    assert (found.model, told["file"], told["steps"]) == ("model", str(ours), found.num_steps)
    assert found.num_steps > 20

    code, text = await llumnix("profile", "--endpoint", engines.a.base_url, "--output", str(ours), *SHORT)
    assert code == 0, text
    seen = read_profile(str(ours))
    # What a client sees of a step is more than the step. How fast this machine is may change: it is measured again.
    code, text = await llumnix("profile", "--llumlet", str(engines.a.llumlet), "--output", str(ours), *SHORT)
    assert code == 0, text
    steps_s = sorted([step_s(found), step_s(read_profile(str(ours)))])
    assert steps_s[0] / 2 < step_s(seen) < 2 * steps_s[1] + 0.02, steps_s

    code, text = await llumnix("profile", "--endpoint", engines.a.base_url, "--model", "another", "--output", str(ours))
    assert code == 5, text
    assert "does not serve 'another', but model" in text
