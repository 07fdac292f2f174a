# SPDX-License-Identifier: Apache-2.0
"""Instances that could take requests of others, and their room. Pure, for every kind of store."""

from __future__ import annotations

from typing import Final

from llumlet.contract.types import NOT_WELL, InstanceMetadata, InstanceStatus, PeerInfo
from llumlet.process.addresses import Address

MAX_PEERS: Final = 64
"""Largest number of peers in an answer."""
LEAST_ROOM: Final = 0.05
"""Share of its KV cache that counts as room in an engine that is full: others may be full, too."""


def takes_requests(status: InstanceStatus) -> bool:
    return status.schedulable and status.health not in NOT_WELL


def usage(status: InstanceStatus) -> float:
    """Share of the KV cache; the freest has the least."""
    return status.num_used_gpu_tokens / max(1, status.num_total_gpu_tokens)


def peer_of(metadata: InstanceMetadata, status: InstanceStatus) -> PeerInfo:
    return PeerInfo(
        instance_id=metadata.instance_id,
        address=str(Address(metadata.ip, metadata.llumlet_port)),
        room_tokens=_room_of(status),
    )


def _room_of(status: InstanceStatus) -> int:
    total = status.num_total_gpu_tokens
    taken = status.num_used_gpu_tokens + status.num_unallocated_tokens_all_waiting_requests
    return max(total - taken, int(total * LEAST_ROOM))
