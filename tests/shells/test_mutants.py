# SPDX-License-Identifier: Apache-2.0
"""Production code, broken on purpose: what the checks of this package are worth is which of these they see."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.request import Request

from llumlet.protocol.origin import streams
from llumlet.protocol.origin.gate import Arrival, Gate, Verdict
from llumlet.protocol.recovery import rescue
from tests.shells.cells import PLAY, company
from tests.shells.cluster import cluster_of
from tests.shells.marks import MARKS
from tests.simulation.mutants import EarlyFree, ResumeOnTimeout, SameTerm, Unasked, Unheeded
from vllm_llumnix.engine.blocks.reservations import Reservations
from vllm_llumnix.engine.blocks.scheduler_port import SchedulerPort
from vllm_llumnix.engine.engine_port import FrozenRequest, Pin
from vllm_llumnix.engine.moves import destination_shell as incoming
from vllm_llumnix.engine.moves import source_shell as outgoing
from vllm_llumnix.engine.recovery import claims
from vllm_llumnix.engine.service import relay_sender as engine_relay
from vllm_llumnix.engine.service.aborts import Aborts
from vllm_llumnix.frontend import calls
from vllm_llumnix.kv.transport import local
from vllm_llumnix.wire import relay_convert

pytestmark = MARKS

Patch = pytest.MonkeyPatch


def unnumbered_outputs(patch: Patch) -> None:
    """The relay numbers no output: each begins where the epoch began."""
    stock = relay_convert.token_output_from
    patch.setattr(engine_relay, "token_output_from", lambda out, epoch, base, _: stock(out, epoch, base, base))


def open_gate(patch: Patch) -> None:
    """The origin's gate lets everything through that is not barred, in the order of arrival."""

    class Open(Gate):
        def offer(self, arrival: Arrival) -> Verdict:
            if arrival.count:
                self.next_index = arrival.first
            return super().offer(arrival)

    patch.setattr(streams, "Gate", Open)


def same_term(patch: Patch) -> None:
    """The origin forgets to raise the term: who is started anew has the epoch of the one that was lost."""

    patch.setattr(streams, "Gate", SameTerm)


def freed_before_quiet(patch: Patch) -> None:
    """Blocks of a copy that was given up are free before the mover has stopped writing them."""
    patch.setattr(incoming, "Destination", EarlyFree)


def no_pins(patch: Patch) -> None:
    """Nothing holds the frozen request's blocks."""
    stock = SchedulerPort.drained

    def drained(self: SchedulerPort, *args: Any, **kwargs: Any) -> FrozenRequest | None:
        frozen = stock(self, *args, **kwargs)
        if frozen is None:
            return None
        self.unpin(frozen.pin)
        return dataclasses.replace(frozen, pin=self._pin([]))

    patch.setattr(SchedulerPort, "drained", drained)


def no_pins_of_claims(patch: Patch) -> None:
    """What another engine reads of a request that was taken from here is free as soon as the loop goes on."""
    stock = SchedulerPort.pin_all

    def pin_all(self: SchedulerPort, request: Request) -> Pin:
        self.unpin(stock(self, request))
        return self._pin([])

    patch.setattr(SchedulerPort, "pin_all", pin_all)


def unheeded_claims(patch: Patch) -> None:
    """The waking loop does not look whether anything was claimed."""
    patch.setattr(claims, "Claim", Unheeded)


def unasked(patch: Patch) -> None:
    """Nobody asks whether the blocks that were read were the request's until the end."""
    patch.setattr(rescue, "Rescue", Unasked)


def kept_pins(patch: Patch) -> None:
    """Pins are never given back."""
    patch.setattr(SchedulerPort, "unpin", lambda *_: None)


def kept_reservation(patch: Patch) -> None:
    """A reservation that was called off is kept."""
    patch.setattr(Reservations, "cancel", lambda *_: None)


def resumed_on_silence(patch: Patch) -> None:
    """A source that gets no answer to Commit and Withdraw goes on."""
    patch.setattr(outgoing, "Source", ResumeOnTimeout)


def wrong_byte(patch: Patch) -> None:
    """One byte of a copy is not what it was."""
    stock = local.read_pieces

    def read_pieces(pid: int, pieces: Any, chunk_bytes: int) -> Iterator[int]:
        yield from stock(pid, pieces, chunk_bytes)
        ctypes.c_ubyte.from_address(int(pieces.destination[0]) + 5).value ^= 1

    patch.setattr(local, "read_pieces", read_pieces)


def lost_tail(patch: Patch) -> None:
    """The source's tokens since the last round do not come with Commit."""
    stock = incoming.DestinationShell._append

    def append(self: Any, token_ids: Sequence[int]) -> None:
        stock(self, [10 + token % 7 for token in token_ids])

    patch.setattr(incoming.DestinationShell, "_append", append)


def never_told(patch: Patch) -> None:
    """No engine hears that its request's client has left: aborts are not sent on, and Dismissal is not obeyed."""
    patch.setattr(Aborts, "forward", lambda *_: None)
    patch.setattr(Aborts, "dismiss", lambda *_: None)


def replay_from_before(patch: Patch) -> None:
    """A replay begins before what the client has."""
    stock = calls.state_of
    patch.setattr(calls, "state_of", lambda request, delivered, *rest: stock(request, delivered[:-1], *rest))


MUTANTS: list[tuple[Callable[[Patch], None], str, str]] = [
    (unnumbered_outputs, "moves", "instead of"),
    (open_gate, "moves", "is wrong"),
    (same_term, "loses_tokens", "instead of"),
    (freed_before_quiet, "given_up", "wrong"),
    (no_pins, "preempted", "is wrong"),
    (no_pins_of_claims, "wakes_up", "wrong"),
    (unheeded_claims, "wakes_up", "is wrong"),
    (unasked, "too_late", "wrong"),
    (kept_pins, "moves", "pins"),
    (kept_reservation, "called_off", "reservations"),
    (resumed_on_silence, "fenced_late", "not settled"),
    (wrong_byte, "moves", "is wrong"),
    (lost_tail, "moves", "is wrong"),
    (never_told, "left", "not settled"),
    (replay_from_before, "loses_tokens", "instead of"),
]


PLAYS = 3
"""Whether a block that was freed too early is somebody's when it is written is chance; more often than not it is. And a
machine that is late to the deadlines may have let an engine go on without what the play is about."""


@pytest.mark.parametrize(("mutant", "scenario", "complaint"), MUTANTS, ids=[row[0].__name__ for row in MUTANTS])
async def test_mutant(
    mutant: Callable[[Patch], None], scenario: str, complaint: str, monkeypatch: Patch, model_dir: Path
) -> None:
    found: list[str] = []
    for _ in range(PLAYS):
        mutant(monkeypatch)
        faults = await played(scenario, model_dir)
        monkeypatch.undo()
        found += faults
        if any(complaint in fault for fault in faults):
            return
    pytest.fail(f"not caught, but {found}")


async def played(scenario: str, model_dir: Path) -> list[str]:
    async with cluster_of(model_dir) as cluster:
        cluster.seconds = 1.2
        stream = await company(cluster, num_others=3, max_tokens=800)
        try:
            await PLAY[scenario](cluster, stream)
        except TimeoutError as error:
            return [f"{scenario} did not come about: {error}"]
        return await cluster.verdict(stream)
