# SPDX-License-Identifier: Apache-2.0
"""`llumnix status`: load and settings of instances."""

from __future__ import annotations

import asyncio
from typing import Final

from llumlet.contract.client import LlumletClient
from llumlet.contract.types import NOT_WELL, Health, InstanceMetadata, InstanceStatus, word
from llumlet.process.credentials import Credentials
from llumlet.process.setting_sources import Reading
from llumsched.commands import instances
from llumsched.commands.arguments import Output
from llumsched.console import output
from llumsched.console.fan_out import LlumletAnswer, report_failures

DESCRIPTION = """Show the load and the settings of instances.

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


SETTINGS: Final = (instances.Named, instances.ClusterAddress, instances.Cms, Output)


def prepare(reading: Reading) -> tuple[instances.Places, bool]:
    return instances.named(reading), reading.make_with_defaults(Output).json


def run(prepared: tuple[instances.Places, bool], credentials: Credentials) -> int:
    places, as_json = prepared
    answers = asyncio.run(places.ask(_ask, credentials))
    if as_json:
        for answer in answers:
            output.print_json(_document(answer))
    else:
        rows = output.table(_COLUMNS)
        for answer in answers:
            if answer.value is not None:
                rows.add_row(*map(output.clean, _row(answer.where, *answer.value)))
        if rows.row_count:
            output.console().print(rows)
    return report_failures(answers, quiet=as_json)


async def _ask(client: LlumletClient) -> tuple[InstanceStatus, InstanceMetadata]:
    return await asyncio.gather(client.get_instance_status(), client.get_instance_metadata())


def _document(answer: LlumletAnswer[tuple[InstanceStatus, InstanceMetadata]]) -> dict[str, object]:
    status, metadata = answer.value or (None, None)
    return {
        "address": answer.where,
        "error": answer.error_dict(),
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
