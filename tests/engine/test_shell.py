# SPDX-License-Identifier: Apache-2.0
"""The shell around a machine gives it one event at a time, whatever its effects bring about."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from llumlet.process.tasks import Tasks
from llumlet.protocol.effects import ClearTimer, Effect, FreeReservation, RevokeAdmit, SetTimer
from llumlet.protocol.errors import LocalProtocolError
from llumlet.protocol.events import AdmitFailed, CancelRequested, Event, QueryRequested, TimerFired
from llumlet.protocol.machine import Machine
from vllm_llumnix.engine.moves.shell import Shell

FAILED = AdmitFailed(cast(Any, None))


class Script:
    """A machine that answers as it is told, and forgets nothing."""

    def __init__(self, answers: dict[type[Event], list[Effect]]) -> None:
        self.answers = answers
        self.log: list[object] = []

    def on(self, event: Event) -> list[Effect]:
        if type(event) not in self.answers:
            raise LocalProtocolError(str(event))
        self.log.append(event)
        return self.answers[type(event)]


class Recorder(Shell[Machine[Any, Any, Any]]):
    """Answers RevokeAdmit on the spot."""

    def __init__(self, script: Script, answer: Event = FAILED) -> None:
        super().__init__(cast(Any, script))
        self.log = script.log
        self.answer = answer
        self.fired = asyncio.Event()

    def _perform(self, effect: Effect) -> None:
        self.log.append(effect)
        if isinstance(effect, RevokeAdmit):
            self.feed(self.answer)

    def _advanced(self) -> None:
        if isinstance(self.log[-1], TimerFired):
            self.fired.set()
        self.log.append("advanced")


def test_an_event_of_an_effect_waits_for_the_effects_beside_it() -> None:
    script = Script({CancelRequested: [RevokeAdmit(), FreeReservation()], AdmitFailed: [FreeReservation()]})
    Recorder(script).feed(CancelRequested())
    assert script.log == [
        CancelRequested(),
        RevokeAdmit(),
        FreeReservation(),
        "advanced",
        FAILED,
        FreeReservation(),
        "advanced",
    ]


def test_an_illegal_event_changes_nothing() -> None:
    script = Script({CancelRequested: []})
    shell = Recorder(script)
    with pytest.raises(LocalProtocolError):
        shell.feed(QueryRequested())
    assert script.log == []
    shell.feed(CancelRequested())
    assert script.log == [CancelRequested(), "advanced"]


def test_an_illegal_event_of_an_effect_is_not_kept_for_later() -> None:
    script = Script({CancelRequested: [RevokeAdmit()]})
    shell = Recorder(script, QueryRequested())
    with pytest.raises(LocalProtocolError):
        shell.feed(CancelRequested())
    script.answers = {CancelRequested: []}
    script.log.clear()
    shell.feed(CancelRequested())
    assert script.log == [CancelRequested(), "advanced"]


@pytest.mark.asyncio
async def test_timers() -> None:
    set_twice, cleared = [SetTimer("lease", 60.0), SetTimer("lease", 0.01)], [ClearTimer("lease")]
    script = Script({QueryRequested: set_twice, CancelRequested: cleared, TimerFired: []})
    shell = Recorder(script)
    shell.feed(QueryRequested())
    shell.feed(CancelRequested())
    await asyncio.sleep(0.03)
    assert TimerFired("lease") not in script.log
    shell.feed(QueryRequested())
    await asyncio.wait_for(shell.fired.wait(), 5)
    assert script.log[-1] == "advanced"


@pytest.mark.asyncio
async def test_tasks_are_held_until_they_end() -> None:
    tasks, go_on = Tasks(), asyncio.Event()

    async def wait() -> None:
        await go_on.wait()

    task = tasks.spawn(wait())
    assert len(tasks) == 1
    go_on.set()
    await task
    await asyncio.sleep(0)
    assert not tasks
    endless = tasks.spawn(asyncio.Event().wait())  # type: ignore[arg-type]
    tasks.cancel()
    with pytest.raises(asyncio.CancelledError):
        await endless
