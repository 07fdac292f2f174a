# SPDX-License-Identifier: Apache-2.0
"""The file of clients' keys and their allowances.

{"team-a": {"keys": ["sk-…", "sha256:9f86…"], "requests_per_minute": 600, "concurrent_requests": 32},
     "batch": {"keys": ["sha256:60fd…"], "requests_per_second": 5, "tokens_in_flight": 200000},
     "chat": {"keys": ["sha256:2c26…"], "ttft_slo_ms": 500, "tpot_slo_ms": 50}}

A missing limit means no limit, except for `best_priority`, which is then 0. Several keys of one name share its limits,
so that a new key can be added before the old one is removed.
"""

from __future__ import annotations

from typing import Final

import msgspec

from llumlet.process.hashed_keys import faults_of
from llumlet.process.secret_files import read_secret

_LEAST_CHARACTERS: Final = 16
_POSITIVE: Final = (
    "requests_per_second",
    "requests_per_minute",
    "concurrent_requests",
    "tokens_in_flight",
    "ttft_slo_ms",
    "tpot_slo_ms",
)


class Allowance(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The entry of one name."""

    keys: list[str]
    requests_per_second: float | None = None
    requests_per_minute: float | None = None
    concurrent_requests: int | None = None
    tokens_in_flight: int | None = None
    """Limit of the tokens of all its requests in flight: prompts, and the most that they may generate. Output without a
    limit counts as at most a quarter of this limit."""
    best_priority: int | None = 0
    """The lowest `priority` that its requests may ask for (as in vLLM, lower numbers come first); null allows any."""
    ttft_slo_ms: float | None = None
    """Objectives of its requests that name none."""
    tpot_slo_ms: float | None = None


def read_keys(path: str) -> dict[str, Allowance]:
    """Allowances by name. Raises ValueError, which never holds a key."""
    try:
        found = msgspec.json.decode(read_secret(path), type=dict[str, Allowance])
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}: {error}") from None
    faults = faults_of({name: allowance.keys for name, allowance in found.items()}, _LEAST_CHARACTERS)
    for name, allowance in found.items():
        if not allowance.keys:
            faults.append(f"{name!r} has no keys")
        for limit in _POSITIVE:
            if (value := getattr(allowance, limit)) is not None and not value > 0:
                faults.append(f"{limit} of {name!r} must be positive")
    if faults:
        raise ValueError(f"{path}: {'; '.join(faults)}")
    if not found:
        raise ValueError(f"{path} holds no keys")
    return found
