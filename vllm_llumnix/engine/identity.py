# SPDX-License-Identifier: Apache-2.0
"""Who this engine is, and what it is able to do."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class EngineIdentity:
    """Fixed for the life of an engine process.

    `incarnation` is new at every start: an engine that came back under its old id knows nothing of older migrations.
    `digest` names everything two engines must have in common. `unsupported` says why no request here can be moved.
    """

    instance: str
    incarnation: str
    digest: str
    unsupported: str | None
    device: str
    model_runner_v2: bool
    spec_decode: bool
