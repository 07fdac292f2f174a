# SPDX-License-Identifier: Apache-2.0
"""Identity of this engine, its abilities, and the facts that another engine must share.

    tokens   facts that decide which tokens come: equal, or the request stays. An operator may accept some differences.
    cache    layout of the KV cache in memory: equal, or the request comes with its tokens alone

With an accepted difference (`--llumlet-accept`) the same numbers are computed but for rounding: a greedy answer goes on
as the second engine would have it, which may be another token than the first one's, some time after the move.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Iterable, Mapping

import msgspec

from vllm_llumnix.config import ACCEPTABLE

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


PARAMETERS = "parameters"
"""Fact: cut and packing of the model's parameters in memory, and a sample of their values."""
_PACKED_BY = {"device", "parallel"}
"""Facts that decide how parameters are cut and packed: with one of them accepted, `PARAMETERS` is not compared."""
STAGES, TENSOR_PARALLEL, PAGES = "pipeline_and_context_parallel", "tensor_parallel", "pages"
BLOCK_SIZE = "block_size"
LAYOUT = "layout"
ARRANGEMENT = "arrangement"
"""Facts about a KV cache. Without stages, another number of workers is no matter: movers know which heads a page has,
and copy those that they need (`movers.routes`); or they say that they cannot."""
_MOST_SHOWN = 200
"""Characters of what a peer says."""


class EngineFacts(msgspec.Struct, frozen=True):
    """Facts by name. A value that begins with # is a digest, which means nothing to people."""

    tokens: dict[str, str]
    cache: dict[str, str]

    @classmethod
    def of(cls, tokens: Mapping[str, object], cache: Mapping[str, object], accepted: Iterable[str] = ()) -> EngineFacts:
        """accepted: which of ACCEPTABLE may differ. Two engines must accept the same."""
        accepted = sorted(accepted)
        left_out = {*accepted} if _PACKED_BY.isdisjoint(accepted) else {*accepted, PARAMETERS}
        kept = {name: str(value) for name, value in tokens.items() if name not in left_out}
        return cls({**kept, "accept": ",".join(accepted)}, {name: str(value) for name, value in cache.items()})

    @property
    def digest(self) -> str:
        """Equal where requests can go on."""
        return _digest(self.tokens)

    @property
    def cache_digest(self) -> str:
        """Equal where KV caches lie alike."""
        return _digest(self.cache)

    def why_not_tokens(self, theirs: EngineFacts) -> str | None:
        """Why a request of theirs does not go on here; None if it does."""
        return _difference(self.tokens, theirs.tokens)

    def why_not_cache(self, theirs: EngineFacts, *, of_any_block_size: bool = False) -> str | None:
        """The reason why their KV cache cannot be used here; None if no fact forbids it. `of_any_block_size`: movers
        decide about other block sizes, as they do about another order of a page's dimensions; only kernels with their
        own arrangement require equal orders."""
        ours, of_others = dict(self.cache), dict(theirs.cache)
        if not ours.get(STAGES):
            may_differ = [TENSOR_PARALLEL, BLOCK_SIZE] if of_any_block_size else [TENSOR_PARALLEL]
            if differing := [name for name in may_differ if ours.get(name) != of_others.get(name)]:
                for facts in (ours, of_others):
                    for name in (*differing, PAGES):
                        facts.pop(name, None)
            if not (ours.get(ARRANGEMENT) or of_others.get(ARRANGEMENT)):
                for facts in (ours, of_others):
                    facts.pop(LAYOUT, None)
        return _difference(ours, of_others)


def named(value: object) -> str:
    """A digest of something too long to be told."""
    return "#" + hashlib.sha256(msgspec.json.encode(value)).hexdigest()[:16]


def _digest(facts: Mapping[str, str]) -> str:
    return hashlib.sha256(msgspec.json.encode(sorted(facts.items()))).hexdigest()[:16]


def _difference(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str | None:
    differing = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    return "; ".join(_said(name, ours.get(name, ""), theirs.get(name, "")) for name in differing) or None


def _said(name: str, ours: str, theirs: str) -> str:
    words = name[:_MOST_SHOWN].replace("_", " ")
    if "#" in (ours[:1], theirs[:1]):
        return f"{words} differ"
    flag = f", see --llumlet-accept {name}" if name in ACCEPTABLE else ""
    return f"{words}: {ours or 'none'} here, {theirs[:_MOST_SHOWN] or 'none'} at the source{flag}"
