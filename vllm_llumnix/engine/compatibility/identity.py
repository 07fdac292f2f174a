# SPDX-License-Identifier: Apache-2.0
"""Who this engine is, and what it is able to do."""

from __future__ import annotations

import dataclasses
import logging

from vllm_llumnix.engine.compatibility.likeness import EngineFacts

logger = logging.getLogger("vllm.llumnix")


@dataclasses.dataclass(slots=True)
class EngineIdentity:
    """Fixed for the life of an engine process, but for `kv_unsupported`: see `stop_carrying_kv`.

    `incarnation` is new at every start: an engine that came back under its old id knows nothing of older migrations.
    `facts`: what other engines must have in common with it. `unsupported` says why no request here can be moved or
    started again at all, `kv_unsupported` why it cannot bring its KV cache along: its tokens it always can.
    """

    instance: str
    incarnation: str
    facts: EngineFacts
    unsupported: str | None
    kv_unsupported: str | None
    device: str
    model_runner_v2: bool
    spec_decode: bool
    features_stay: str | None = None
    """Why requests with images or the like stay here."""

    @property
    def kv_stays(self) -> str | None:
        """Why a request that has a KV cache cannot be carried with it; None if it can."""
        return self.unsupported or self.kv_unsupported

    def stop_carrying_kv(self, reason: str) -> None:
        """Has requests leave and come with their tokens alone, for the first reason given.

        Moves that are on their way end as their copies do. Llumlet thread.
        """
        if self.kv_unsupported is None:
            self.kv_unsupported = reason
            logger.warning("llumlet: requests leave this engine without their KV cache: %s", reason)
