# SPDX-License-Identifier: Apache-2.0
"""An account of who holds each block of an engine. A fault of `protocol.move.ledger` raises.

Such a change raises `LocalProtocolError`, with the ledger unchanged.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from llumlet.protocol.errors import LocalProtocolError
from llumlet.protocol.move.ledger import BlockOwner, audit


class Ledger:
    """Holders of blocks `0 … num_blocks - 1`. A holder is an owner kind and a key: a request id or migration id."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._held: dict[tuple[BlockOwner, str], set[int]] = {}

    def held(self, owner: BlockOwner, key: str) -> frozenset[int]:
        return frozenset(self._held.get((owner, key), ()))

    def of(self, owner: BlockOwner) -> set[int]:
        """Every block that owners of this kind hold."""
        return {block for (kind, _), blocks in self._held.items() if kind is owner for block in blocks}

    def free(self) -> list[int]:
        taken = set().union(*self._held.values())
        return [block for block in range(self.num_blocks) if block not in taken]

    def hold(self, owner: BlockOwner, key: str, blocks: Iterable[int]) -> None:
        """Let a holder hold (more) blocks. Prefix-cache hits are held for the SCHEDULER, not as RESERVATION."""
        added = set(blocks)
        self._expect(all(0 <= block < self.num_blocks for block in added), owner, key, "no such blocks", added)
        self._expect(not added & self.of(BlockOwner.RESERVATION), owner, key, "reserved blocks", added)
        self._expect(not added & self.of(BlockOwner.DRAINING), owner, key, "draining blocks", added)
        if owner is BlockOwner.PIN:
            pinnable = self.of(BlockOwner.SCHEDULER) | self.of(BlockOwner.PIN)
            self._expect(added <= pinnable, owner, key, "blocks that nobody owns", added)
        elif owner is not BlockOwner.SCHEDULER:
            self._expect(added <= set(self.free()), owner, key, "blocks that are not free", added)
        self._held.setdefault((owner, key), set()).update(added)

    def let_go(self, owner: BlockOwner, key: str, blocks: Iterable[int]) -> None:
        """The holder lets go of some."""
        if (owner, key) in self._held:
            self._held[owner, key] -= set(blocks)

    def give_back(self, owner: BlockOwner, key: str) -> None:
        """The holder lets go of everything. Letting go of nothing has no effect."""
        self._held.pop((owner, key), None)

    def pass_on(self, key: str, to: BlockOwner, new_key: str | None = None) -> None:
        """A reservation becomes the SCHEDULER's (admitted) or DRAINING (barred while a mover may write).

        The scheduler knows it as `new_key`, the request's id.
        """
        self._expect((BlockOwner.RESERVATION, key) in self._held, BlockOwner.RESERVATION, key, "nothing to pass on", ())
        self._expect(to in (BlockOwner.SCHEDULER, BlockOwner.DRAINING), to, key, "as a former reservation", ())
        blocks = self._held.pop((BlockOwner.RESERVATION, key))
        self._held.setdefault((to, new_key or key), set()).update(blocks)

    def writable(self, key: str, blocks: Collection[int]) -> bool:
        """Whether the movers of migration `key` may write these blocks."""
        ours = self.held(BlockOwner.RESERVATION, key) | self.held(BlockOwner.DRAINING, key)
        return ours.issuperset(blocks)

    def counts(self) -> dict[str, int]:
        """A partition of all blocks: a block that the scheduler and a pin hold counts as the scheduler's."""
        scheduler = self.of(BlockOwner.SCHEDULER)
        return {
            "free": len(self.free()),
            "scheduler": len(scheduler),
            "pin": len(self.of(BlockOwner.PIN) - scheduler),
            "reservation": len(self.of(BlockOwner.RESERVATION)),
            "draining": len(self.of(BlockOwner.DRAINING)),
        }

    def check(self) -> None:
        """Conservation: free and owned blocks add up. Raises LocalProtocolError."""
        faults = audit(self.num_blocks, self.free(), {owner: self.of(owner) for owner in BlockOwner})
        if faults or sum(self.counts().values()) != self.num_blocks:
            raise LocalProtocolError("; ".join(faults) or f"blocks do not add up: {self.counts()}")

    def check_idle(self) -> None:
        """No migration is under way, so none may hold a block. Raises LocalProtocolError."""
        self.check()
        ours = (holder for holder, held in self._held.items() if held and holder[0] is not BlockOwner.SCHEDULER)
        left = sorted(f"{owner} {key}" for owner, key in ours)
        if left:
            raise LocalProtocolError(f"blocks are still held by {', '.join(left)}")

    def _expect(self, holds: bool, owner: BlockOwner, key: str, what: str, blocks: Iterable[int]) -> None:
        if not holds:
            raise LocalProtocolError(f"{owner} of {key}: {what} {sorted(blocks)}")
