# SPDX-License-Identifier: Apache-2.0
"""Profiles in Llumnix's form, as its benchmark writes them: grids of milliseconds."""

from __future__ import annotations

import json
from typing import Any

from llumsched.latency.fitting import pairs
from llumsched.latency.profile import Profile

PROMPTS = (1, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
LENGTHS = (8, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768)


def for_llumnix(profile: Profile) -> tuple[str, str]:
    """Texts of the two files that a profile stands for: of first tokens, and of decodes."""
    a, b, c, d, e = profile.coefficients
    ttft = [{"tokens_num": n, **_times(a + b * n + c * pairs(0, n))} for n in PROMPTS]
    tpot = [
        {"batch_size": batch, "tokens_per_request": length, **_times(a + d * batch + e * batch * length)}
        for batch in BATCHES
        for length in LENGTHS
    ]
    metadata = {"model": profile.model, "timestamp": "2026-01-01T00:00:00Z", "description": "of a test"}
    first, later = ({"metadata": metadata, "results": results} for results in (ttft, tpot))
    return json.dumps(first), json.dumps(later)


def _times(seconds: float) -> dict[str, Any]:
    value = round(seconds * 1e3, 6)
    return dict.fromkeys(("mean", "min", "max", "p50", "p95", "p99"), value) | {"std": 0.0, "raw_data": []}
