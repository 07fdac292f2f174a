# SPDX-License-Identifier: Apache-2.0
"""The column `kv_cache_hit_len`: tokens of a request's prompt in an instance's prefix cache.

Engines report the contents (`watches`). In lite mode they are guessed from the requests sent there, the oldest being
dropped when a cache's size is exceeded. A request names its prompt's blocks (`llumlet.contract.block_hashes`); without
names, or with another block size, it has no hits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from llumlet.contract.block_hashes import adapter_mask
from llumsched.cluster.columns import Cluster, IdOrder, Values
from llumsched.cluster.instance import Instance
from llumsched.cluster.providers import HIT_COLUMN
from llumsched.prefix.index import Names, PrefixIndex
from llumsched.request import Request

SENT_BLOCK_SIZE: Final = 16
"""Assumed tokens per block in lite mode: vLLM's default."""
_NOBODY: Final = -1
_FIELD: Final = "<u8"


@dataclass(slots=True)
class _Member:
    """An instance with known contents. `number` is its own in the index."""

    number: int
    block_size: int
    num_sent: int = 0
    """Blocks known from sent requests."""
    older: int = _NOBODY
    """A second number, for the blocks sent before, which are as many again."""


class PrefixHits:
    """A request provider and its index, on one event loop."""

    columns: Sequence[str] = (HIT_COLUMN,)

    def __init__(self, index: PrefixIndex, *, sent_blocks: int = 0) -> None:
        """`sent_blocks`: blocks assumed to be held from sent requests; 0: engines report them."""
        self.index = index
        self._sent_blocks = sent_blocks
        self.num_resyncs = 0
        """Times that an instance repeated everything because a message was missing."""
        self._members: dict[str, _Member] = {}
        self._adapters: dict[str, frozenset[str]] = {}
        """Names of the LoRA adapters of each instance that has any."""
        self._masks: dict[str, np.uint64] = {}
        """Masks for the names of blocks, by adapter."""
        self._rows: tuple[IdOrder | None, NDArray[np.intp], Values] = None, np.empty(0, np.intp), np.empty(0)
        """Numbers and block sizes by row, valid while the order and the members stay the same."""

    # What instances hold

    def holds(self, instance_id: str, names: Names, block_size: int) -> None:
        """Notes blocks that an instance holds."""
        member = self._members.get(instance_id)
        if member is None or member.block_size != block_size:
            self.forget(instance_id)
            member = self._members[instance_id] = _Member(self.index.join(), block_size)
            self._rows = None, *self._rows[1:]
        self.index.store(member.number, names)

    def lacks(self, instance_id: str, names: Names) -> None:
        """Notes blocks that an instance no longer holds."""
        if member := self._members.get(instance_id):
            self.index.remove(member.number, names)

    def forget(self, instance_id: str) -> None:
        """Forgets the contents of an instance."""
        member = self._members.pop(instance_id, None)
        if member is not None:
            self.index.forget(member.number)
            if member.older != _NOBODY:
                self.index.forget(member.older)
            self._rows = None, *self._rows[1:]

    def sent(self, request: Request, instance_id: str) -> None:
        """Notes a request sent to an instance, which will hold its prompt."""
        if not self._sent_blocks or not request.prompt_blocks:
            return
        names = self.names_of(request)
        member = self._members.get(instance_id)
        if member is not None and member.num_sent >= self._sent_blocks // 2:
            # Whatever is asked for again is among the newer ones by then.
            if member.older != _NOBODY:
                self.index.forget(member.older)
            member.older, member.number, member.num_sent = member.number, self.index.join(), 0
            self._rows = None, *self._rows[1:]
        self.holds(instance_id, names[:0], request.prompt_block_size)
        member = self._members[instance_id]
        member.num_sent += self.index.store(member.number, names)

    # From the view

    def appeared(self, instance: Instance) -> None:
        self.changed(instance)

    def changed(self, instance: Instance) -> None:
        self._adapters_of(instance.id, instance.metadata.adapters)

    def left(self, instance: Instance) -> None:
        self._adapters_of(instance.id, ())
        self.forget(instance.id)

    def _adapters_of(self, instance_id: str, names: Collection[str]) -> None:
        if len(names) == len(known := self._adapters.get(instance_id, frozenset())) and known.issuperset(names):
            return  # as with nearly every status
        self._adapters.pop(instance_id, None)
        if names:
            self._adapters[instance_id] = frozenset(names)
        every = frozenset().union(*self._adapters.values())
        self._masks = {name: np.uint64(adapter_mask(name)) for name in every}

    # For moves

    def shares(self, instance_id: str) -> dict[str, float] | None:
        """Shares of an instance's blocks that others hold too, by id, without zeros. None if the instance is
        unknown."""
        member = self._members.get(instance_id)
        if member is None:
            return None
        by_number = self.index.shares(member.number)
        found = {other_id: float(by_number[other.number]) for other_id, other in self._members.items()}
        return {other_id: share for other_id, share in found.items() if share and other_id != instance_id}

    # For a request

    @property
    def usual_block_size(self) -> int:
        """Tokens per block at most instances; 0 if unknown."""
        sizes = Counter(member.block_size for member in self._members.values())
        return max(sizes, key=sizes.__getitem__, default=SENT_BLOCK_SIZE if self._sent_blocks else 0)

    @property
    def num_instances(self) -> int:
        """Number of instances with known contents."""
        return len(self._members)

    def block_size_of(self, instance: Instance) -> int:
        """Tokens per block for the names in requests for this instance; 0 if it needs none."""
        return SENT_BLOCK_SIZE if self._sent_blocks else instance.metadata.cache_block_size

    def of_request(self, request: Request, cluster: Cluster) -> Sequence[Values]:
        size = request.prompt_block_size
        names = self.names_of(request)
        if not len(names) or not self._members:
            return [np.zeros(len(cluster))]
        numbers, sizes = self._by_row(cluster)
        depths = np.append(self.index.depths(names), 0)[numbers].max(axis=0)
        # Of a prompt that is all there, the last block is computed again, for the logits of its last token.
        most = (request.prompt_num_tokens - 1) // size * size
        return [np.where(sizes == size, np.minimum(depths * size, max(most, 0)), 0).astype(np.float64)]

    def names_of(self, request: Request) -> Names:
        """Names of the blocks of its prompt, as the engines have them."""
        names = names_in(request.prompt_blocks)
        return names ^ self._masks[request.model] if request.model in self._masks else names

    def _by_row(self, cluster: Cluster) -> tuple[NDArray[np.intp], Values]:
        known, numbers, sizes = self._rows
        if known is not cluster.order:
            members = [self._members.get(instance.id) for instance in cluster.instances]
            pairs = [(_NOBODY, _NOBODY) if one is None else (one.number, one.older) for one in members]
            numbers = np.array(pairs, np.intp).reshape(-1, 2).T
            sizes = np.array([0 if one is None else one.block_size for one in members], np.float64)
            self._rows = cluster.order, numbers, sizes
        return numbers, sizes


def names_in(content: bytes) -> Names:
    """Decodes names. Raises ValueError for a partial name."""
    return np.frombuffer(content, _FIELD).astype(np.uint64)
