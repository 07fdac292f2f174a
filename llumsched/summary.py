# SPDX-License-Identifier: Apache-2.0
"""The summary of an instance for the web page and `llumnix top`."""

from __future__ import annotations

from typing import Any

from llumlet.contract.types import NOT_WELL, Health, InstanceStatus, word
from llumsched.cluster.instance import Instance


def summary(instance: Instance) -> dict[str, Any]:
    """An instance in JSON types. Loads are null before the first status; `received_s` is on the view's clock."""
    metadata, status = instance.metadata, instance.status
    about = {
        "id": instance.id,
        "incarnation": metadata.incarnation,
        "type": metadata.instance_type,
        "model": metadata.model,
        "api_server": str(instance.api_server),
        "node": metadata.node_id,
        "state": state(status),
        "received_s": instance.received_s,
    }
    return about | (_load(status) if status is not None else dict.fromkeys(LOADS))


LOADS = ("running", "waiting", "urgent", "kv", "used_tokens", "total_tokens", "prefill_tokens", "moves_out", "moves_in",
         "preemptions")  # fmt: skip


def state(status: InstanceStatus | None) -> str:
    """The state: silent (no status yet), open (takes new requests), closed, or its health problem."""
    if status is None:
        return "silent"
    if status.health in NOT_WELL:
        return word(Health, status.health)
    return "open" if status.schedulable else "closed"


def _load(status: InstanceStatus) -> dict[str, float]:
    used, total = status.num_used_gpu_tokens, status.num_total_gpu_tokens
    uncomputed = (
        status.num_uncomputed_tokens_all_waiting_prefills + status.num_uncomputed_tokens_scheduler_running_prefills
    )
    return {
        "running": status.num_running_requests,
        "waiting": status.num_waiting_requests,
        "urgent": status.num_urgent_requests,
        "kv": used / total if total > 0 else 0.0,
        "used_tokens": used,
        "total_tokens": total,
        "prefill_tokens": uncomputed,
        "moves_out": status.num_migrate_out_reqs,
        "moves_in": status.num_migrate_in_reqs,
        "preemptions": status.num_preemptions,
    }
