# SPDX-License-Identifier: Apache-2.0
"""Advice for people, by reason."""

from __future__ import annotations

from typing import Final

from llumlet.contract.types import Reason

_LATER = "Try again in a moment."

# Mentions flags of `vllm serve` (--llumlet-…) and of `llumnix migrate` (the others).
HINTS: Final[dict[Reason, str]] = {
    Reason.UNKNOWN_REQUEST: "`llumnix ps` lists the requests of an instance.",
    Reason.REQUEST_FINISHED: "Nothing to do: it ended before it could move.",
    Reason.REQUEST_ABORTED: "Nothing to do: its client left, or it was aborted.",
    Reason.REQUEST_PREEMPTED: "Its KV cache was given up meanwhile; move it again once it runs.",
    Reason.ALREADY_MIGRATING: "`llumnix ps` shows the move that is under way.",
    Reason.HANDOVER_OPEN: "Its last move is being closed. " + _LATER,
    Reason.NOT_STARTED: "It has produced no token yet. " + _LATER,
    Reason.PREFILL_RUNNING: "Its prompt is being computed. " + _LATER,
    Reason.NOT_PORTABLE: (
        "It cannot be moved so that it goes on exactly. If it is only its KV cache that cannot: --method recompute."
    ),
    Reason.INVALID_REQUEST: "The message has faults; are both sides of the same version?",
    Reason.LORA_NOT_AVAILABLE: "Load the adapter at the destination under the same name.",
    Reason.REQUEST_TOO_LONG: (
        "It may grow beyond the destination's --max-model-len: choose an instance with as much as its own."
    ),
    Reason.INCOMPATIBLE_ENGINE: (
        "Both instances need the same model, weights, dtype, block size and versions: compare `llumnix status --json`."
    ),
    Reason.SAME_INSTANCE: "Source and destination are one instance; name another destination.",
    Reason.WRONG_INSTANCE: "Another instance has that address now; look with `llumnix status`.",
    Reason.DESTINATION_FULL: "No free KV blocks or batch slot there: move fewer, or elsewhere.",
    Reason.DESTINATION_BUSY: "It takes in as many as --llumlet-max-migrations-in lets it. " + _LATER,
    Reason.DESTINATION_PAUSED: "The destination is paused or asleep; wake it first.",
    Reason.DESTINATION_NEEDS_BLOCKS: "Its own requests need the blocks: move fewer, or elsewhere.",
    Reason.SOURCE_BUSY: "It moves as many as --llumlet-max-migrations-out lets it. " + _LATER,
    Reason.SOURCE_PAUSED: "The source is paused or asleep; wake it first, or give --method recompute.",
    Reason.SHUTTING_DOWN: "That instance is on its way out; choose another.",
    Reason.OTHER_WEIGHTS: "Weights were updated at one of the two only: update the other, or wait until that is done.",
    Reason.PEER_UNREACHABLE: (
        "The source cannot reach the destination: is it up, and is --to an address that the source can use?"
    ),
    Reason.TRANSPORT_UNAVAILABLE: "Choose another --llumlet-transport for both instances.",
    Reason.TRANSFER_FAILED: "The copy broke off; the logs of both instances say why. " + _LATER,
    Reason.DEADLINE: "Something took too long; the destination may be overloaded. " + _LATER,
    Reason.LEASE_EXPIRED: "The copy outlasted --llumlet-lease-seconds; raise it.",
    Reason.UNAUTHENTICATED: "Give --llumlet-token-file (or LLUMNIX_TOKEN_FILE) with the cluster's token.",
    Reason.ADDRESS_REFUSED: "Without TLS and a token, instances know only each other's loopback addresses.",
    Reason.STALL_BUDGET: "Use --force, or a larger --stall-budget-ms.",
    Reason.TOO_MANY_ROUNDS: "The request grows faster than it can be copied. Use --force.",
    Reason.BARRED: "The destination called the move off; its log says why. " + _LATER,
    Reason.CANCELLED: "Somebody called the move off.",
    Reason.UNKNOWN_MIGRATION: "That move is over, or never was.",
    Reason.OWNER_LOST: "The owner vanished in the middle; the origin replays the request.",
    Reason.INTERNAL: "This is a defect: the instance's log has the traceback.",
    Reason.NOT_LEADER: "Another rescheduler leads now; this one's plans are void.",
    Reason.ROLE_REFUSED: "--llumlet-token-file holds a token of another role: moves and drains want an operator's.",
}
