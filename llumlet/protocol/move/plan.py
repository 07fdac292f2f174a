# SPDX-License-Identifier: Apache-2.0
"""The parameters of a migration, and the deadlines that its destination grants."""

from __future__ import annotations

import enum

import msgspec

from llumlet.protocol.ids import Epoch


class Method(enum.StrEnum):
    """Ways of bringing the KV cache to the destination."""

    LIVE = "live"
    """Copied in rounds while the request decodes; frozen only for the rest."""
    BLOCKING = "blocking"
    """Frozen, copied, resumed."""
    RECOMPUTE = "recompute"
    """Nothing is copied: the destination computes the cache from the tokens."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters of one migration. Fields `…_s` without a comment are deadlines of states."""

    method: Method
    epoch_next: Epoch
    """The epoch under which the destination will own the request: the present one's `next_hop()`."""
    bytes_per_block: int
    """Bytes of one row of blocks, over all layers and ranks."""
    state_bytes: int = 0
    """Bytes of the states that change with every step: they are copied last, of a frozen request. 0: it has none."""
    stall_budget_s: float = 0.2
    """Longest stall of the stream by the last copy."""
    force: bool = False
    """Move although the last copy will take longer."""
    max_rounds: int = 16
    reserve_s: float = 10.0
    loop_s: float = 10.0
    """The own loop's time to pin blocks, and to freeze."""
    round_s: float = 30.0
    """A longer time than the destination's lease has no effect, as later bytes do not count."""
    commit_s: float = 2.5
    """Beside the time that a long last copy takes. The client waits: a destination in a long step is not waited for."""
    withdraw_s: float = 1.0
    """The destination decides without its loop; if it is late, the fence decides."""
    fence_s: float = 30.0
    ask_s: float = 1.0
    """Time between two questions to the origin."""


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """A destination's terms, the same for all migrations."""

    block_size: int
    """Tokens of a row."""
    has_states: bool = False
    """True if states, which change with every step, must always be copied last."""
    lease_s: float = 30.0
    admit_s: float = 2.5
    """Longest time for the loop to begin an admission."""
    tombstone_s: float = 600.0
    """Time for which a settled record is kept: longer than the sum of `Plan`'s deadlines from Commit to the end of the
    fence."""
