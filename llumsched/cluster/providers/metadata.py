# SPDX-License-Identifier: Apache-2.0
"""Columns of an instance's metadata. Equal names become equal numbers, "" is -1."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from llumlet.contract.types import InstanceMetadata
from llumlet.protocol.infer_type import InferType
from llumsched.cluster.instance import Instance

NO_LIMIT: Final = 1e9
"""Number of simultaneous moves of an instance that does not tell its limit."""
_STALL_BUDGET_MS: Final = 200.0
"""Default of an engine."""
_TYPES: Final = {str(infer_type): code for code, infer_type in enumerate(InferType)} | {"": 0}


def type_code(infer_type: str) -> int:
    """The number of an infer type in its column. No type means neutral."""
    return _TYPES.get(infer_type, -1)


def type_of(instance: Instance) -> str:
    return instance.metadata.instance_type or InferType.NEUTRAL


class MetadataColumns:
    columns: Final[Sequence[str]] = (
        "infer_type",
        "node",
        "unit",
        "engine",
        "exchange_group",
        "cache_group",
        "max_model_len",
        "max_num_batched_tokens",
        "max_num_seqs",
        "movable",
        "max_migrations_out",
        "max_migrations_in",
        "bytes_per_token",
        "stall_budget_s",
    )
    """`engine`: the unit, if it has more than one data-parallel rank: they fail together. `exchange_group`: equal where
    requests can be exchanged, `cache_group` where they bring their KV cache along. `movable`: 1 if they can go
    elsewhere at all."""

    def __init__(self) -> None:
        self._codes: dict[str, int] = {"": -1}
        """Numbers of all names of nodes, units and compatibility digests ever seen, some bytes each."""

    def row(self, instance: Instance, before: Instance | None) -> Sequence[float] | None:
        data = instance.metadata
        if before is not None and before.metadata is data:
            return None
        unit = self._code(data.unit_id)
        group = f"{type_of(instance)}\n{data.compatibility_digest}"
        return (
            type_code(data.instance_type),
            self._code(data.node_id),
            unit,
            unit if data.data_parallel_size > 1 else -1,
            self._code(group),
            self._code(f"{group}\n{data.cache_digest}"),
            data.max_model_len,
            data.max_num_batched_tokens,
            data.max_num_seqs or NO_LIMIT,
            not data.unsupported,
            data.max_migrations_out or NO_LIMIT,
            data.max_migrations_in or NO_LIMIT,
            _bytes_per_token(data),
            (data.stall_budget_ms or _STALL_BUDGET_MS) / 1000,
        )

    def on_change(self, listener: Callable[[str], None]) -> None:
        """Keeps no listener: changes come with reports only."""

    def _code(self, name: str) -> int:
        return self._codes.setdefault(name, len(self._codes) - 1)


def _bytes_per_token(data: InstanceMetadata) -> float:
    return data.bytes_per_block / max(data.block_size, 1)
