# SPDX-License-Identifier: Apache-2.0
"""`llumnix status`: load and settings of instances."""

from __future__ import annotations

import asyncio
from typing import Final

from llumlet.contract.client import LlumletClient
from llumlet.contract.types import NOT_WELL, Health, InstanceMetadata, InstanceStatus, word
from llumsched.commands.instances import Listing
from llumsched.console import output

_DESCRIPTION = """Show the load and the settings of instances.

BLOCKS counts KV blocks in use / in all. HELD counts the blocks of moves: pinned for a move out + reserved for a move
in + draining after a copy that is being stopped. OUT and IN count moves now / at most. MOVES shows how requests move:
live with their KV cache, recompute as tokens, or none.
--json prints one object per instance, with its status and metadata or the error."""

_COLUMNS = (
    "INSTANCE",
    "TYPE",
    "LLUMLET",
    "MODEL",
    "STATE",
    ">RUNNING",
    ">WAITING",
    ">BLOCKS",
    ">KV",
    ">HELD",
    ">OUT",
    ">IN",
    "MOVES",
    "TRANSPORTS",
    "VERSION",
)


async def _ask(client: LlumletClient) -> tuple[InstanceStatus, InstanceMetadata]:
    return await asyncio.gather(client.get_instance_status(), client.get_instance_metadata())


def _document(answer: tuple[InstanceStatus, InstanceMetadata] | None) -> dict[str, object]:
    status, metadata = answer or (None, None)
    return {
        "status": None if status is None else output.to_dict(status),
        "metadata": None if metadata is None else output.to_dict(metadata),
    }


def _row(address: str, status: InstanceStatus, metadata: InstanceMetadata) -> list[str]:
    used, total = status.num_used_gpu_tokens, status.num_total_gpu_tokens
    used_blocks = status.num_total_blocks - status.num_free_blocks
    held = (status.num_pinned_blocks, status.num_reserved_blocks, status.num_draining_blocks)
    return [
        status.instance_id,
        metadata.instance_type,
        address,
        metadata.model,
        _state(status),
        str(status.num_running_requests),
        str(status.num_waiting_requests),
        f"{used_blocks}/{status.num_total_blocks}",
        f"{used / total:.0%}" if total else "",
        "+".join(map(str, held)) if any(held) else "0",
        f"{status.num_migrate_out_reqs}/{metadata.max_migrations_out}",
        f"{status.num_migrate_in_reqs}/{metadata.max_migrations_in}",
        "none" if metadata.unsupported else "recompute" if status.kv_unsupported else "live",
        ",".join(metadata.transports),
        metadata.version,
    ]


def _state(status: InstanceStatus) -> str:
    if status.health in NOT_WELL:
        busy = f" in {status.busy_with}" if status.busy_with else ""
        return f"{word(Health, status.health)}, {status.loop_age_ms / 1e3:.1f} s{busy}"
    return "schedulable" if status.schedulable else "closed"


COMMAND: Final = Listing(_DESCRIPTION, _ask, _document, _COLUMNS, lambda address, answer: [_row(address, *answer)])
