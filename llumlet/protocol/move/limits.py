# SPDX-License-Identifier: Apache-2.0
"""Limits of the moves in each direction.

A direction of an instance is limited in requests, tokens, and the share of the KV cache that those tokens take. `Slots`
keeps the account: a migration takes its slot before anything else and returns it when its machine is over. Both are
keyed by the migration, so that neither can happen twice on any path.
"""

from __future__ import annotations

import msgspec

from llumlet.protocol.errors import Reason, Refused
from llumlet.protocol.ids import MigrationId


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one direction. None sets no limit."""

    max_requests: int | None = None
    max_tokens: int | None = None
    max_kv_ratio: float | None = None

    def tokens(self, capacity_tokens: int) -> int | None:
        """The tighter of the token limit and the ratio, for a KV cache of `capacity_tokens`."""
        bounds = [self.max_tokens]
        if self.max_kv_ratio is not None:
            bounds.append(int(capacity_tokens * self.max_kv_ratio))
        return min((bound for bound in bounds if bound is not None), default=None)


class Slots:
    """The slots in use in one direction. `busy` is the reason of a refusal."""

    def __init__(self, limits: Limits, capacity_tokens: int, busy: Reason) -> None:
        self.limits = limits
        self.capacity_tokens = capacity_tokens
        self._busy = busy
        self._taken: dict[MigrationId, int] = {}

    def __contains__(self, migration: MigrationId) -> bool:
        return migration in self._taken

    @property
    def num_requests(self) -> int:
        return len(self._taken)

    @property
    def num_tokens(self) -> int:
        return sum(self._taken.values())

    @property
    def available_requests(self) -> int | None:
        """Requests that may still come. None: no limit."""
        return None if self.limits.max_requests is None else max(0, self.limits.max_requests - self.num_requests)

    @property
    def available_tokens(self) -> int | None:
        """Tokens that may still come. None: no limit."""
        bound = self.limits.tokens(self.capacity_tokens)
        return None if bound is None else max(0, bound - self.num_tokens)

    def take(self, migration: MigrationId, num_tokens: int) -> None:
        """Raises Refused, having changed nothing. Taking the same slot again has no effect.

        A request that alone is larger than the token limit goes when nothing else is on its way, rather than never.
        """
        if migration in self._taken:
            return
        if self.available_requests == 0:
            raise Refused(self._busy, f"{self.num_requests} requests are on their way, as many as are allowed")
        left = self.available_tokens
        if left is not None and num_tokens > left and self._taken:
            raise Refused(self._busy, f"{self.num_tokens} tokens are on their way; {num_tokens} more are not allowed")
        self._taken[migration] = num_tokens

    def give_back(self, migration: MigrationId) -> None:
        """Giving back what was not taken has no effect."""
        self._taken.pop(migration, None)
