# SPDX-License-Identifier: Apache-2.0
"""Settings of the prefix caches that a rescheduler in its own process follows. Inside a scheduler it shares
dispatch's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from llumlet.process import kinds
from llumlet.process.setting_sources import Reading
from llumlet.process.settings import Group
from llumsched.prefix.index import USUAL_BLOCKS

_AWARE: Final = "--enable-cache-aware-scheduling"
_INDEX_BLOCKS: Final = "--cache-index-blocks"
_caches = Group("prefix caches")


@dataclass(frozen=True, slots=True)
class CacheSettings:
    aware: bool = _caches.setting(
        False,
        kinds.SWITCH,
        "follow what prefix caches hold, and weigh what a move saves or loses of it",
        flag=_AWARE,
        common=True,
    )
    index_blocks: int = _caches.setting(
        USUAL_BLOCKS,
        kinds.integer(at_least=1),
        "largest number of distinct prefix-cache blocks to follow; each takes 16 bytes",
        flag=_INDEX_BLOCKS,
    )

    @property
    def num_known_blocks(self) -> int:
        """Largest number of known blocks; 0 if no cache is followed."""
        return self.index_blocks if self.aware else 0


def prepare(reading: Reading) -> CacheSettings:
    """The settings. Contradictions are added to the faults."""
    settings = reading.make(CacheSettings)
    reading.check(_faults, settings, _INDEX_BLOCKS in reading.given)
    return settings


def _faults(settings: CacheSettings, is_size_given: bool) -> Iterator[str]:
    if is_size_given and not settings.aware:
        yield f"{_INDEX_BLOCKS} has no effect without {_AWARE}"
