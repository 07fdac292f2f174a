# SPDX-License-Identifier: Apache-2.0
"""Runs a transition table. Knows nothing of migrations.

A table is a list of rows; a row says: in this state, on this kind of event, if `when` holds, do `do` and go to `to`.
Rows are tried in order and the first that holds is taken. If none does, `LocalProtocolError` is raised and nothing has
changed, since `when` only reads and only `do` acts: a method that returns effects, or a list of constant effects.
Nothing else writes the state.

Timers. Every state may have a deadline: a timer named after the state, set on entering and cleared on leaving it,
beside the timers that actions ask for. A timer that fires after it was cleared is ignored.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from llumlet.protocol.effects import ClearTimer, SetTimer
from llumlet.protocol.errors import LocalProtocolError
from llumlet.protocol.events import TimerFired

S = TypeVar("S", bound=enum.StrEnum)
E = TypeVar("E")
F = TypeVar("F")
M = TypeVar("M")


@dataclasses.dataclass(frozen=True, slots=True)
class Row(Generic[S]):
    """A transition. `late` marks events that crossed with our own: legal, and without consequence for the state."""

    state: S
    event: type[Any]
    to: S
    do: Callable[[Any, Any], Sequence[Any]] | Sequence[Any] | None
    when: Callable[[Any, Any], bool] | None
    late: bool

    @property
    def guard(self) -> str:
        """The condition in words, for diagrams: the name of its function."""
        return self.when.__name__.strip("_").replace("_", " ") if self.when else ""


def rows(
    states: S | Iterable[S],
    event: type[E],
    to: S | None,
    do: Callable[[M, E], Sequence[F]] | Sequence[F] | None = None,
    *,
    when: Callable[[M, E], bool] | None = None,
    late: bool = False,
) -> list[Row[S]]:
    """A row per state of `states`, in the order of their definition; `to` None keeps the state."""
    several = {states} if isinstance(states, enum.StrEnum) else set(states)
    ordered = [state for state in type(next(iter(several))) if state in several]
    return [Row(state, event, state if to is None else to, do, when, late) for state in ordered]


def deadline(machine: Machine[Any, Any, Any], event: TimerFired) -> bool:
    """A guard: it is the deadline of the present state."""
    return bool(event.name == machine.state.value)


def timer(name: str) -> Callable[[Machine[Any, Any, Any], TimerFired], bool]:
    """A guard: it is this one of the timers that actions ask for."""

    def guard(machine: Machine[Any, Any, Any], event: TimerFired) -> bool:
        return event.name == name

    guard.__name__ = name
    return guard


class Machine(Generic[S, E, F]):
    """Base of the protocol's machines: their states, the events that they take, and the effects that they ask for."""

    TABLE: ClassVar[Sequence[Row[Any]]]
    _index: ClassVar[dict[tuple[enum.StrEnum, type[Any]], list[Row[Any]]]]

    def __init__(self, state: S) -> None:
        self._state = state
        self._armed: set[str] = set()

    @property
    def state(self) -> S:
        return self._state

    def on(self, event: E) -> list[F]:
        """Take one event; returns what is to be done about it, in order. Raises LocalProtocolError."""
        if isinstance(event, TimerFired) and event.name not in self._armed:
            return []
        row = self._row(event)
        if isinstance(event, TimerFired):
            self._armed.discard(event.name)
        effects: list[Any] = list((row.do(self, event) if callable(row.do) else row.do) or ())
        if row.to is not self._state:
            if self._state.value in self._armed:
                effects.append(ClearTimer(self._state.value))
            self._state = row.to
            if (seconds := self._deadline(row.to)) is not None:
                effects.append(SetTimer(row.to.value, seconds))
        for effect in effects:
            match effect:
                case SetTimer(name=name):
                    self._armed.add(name)
                case ClearTimer(name=name):
                    self._armed.discard(name)
        return effects

    def _deadline(self, state: S) -> float | None:
        """Seconds that the machine may stay in `state`; None sets no limit."""
        return None

    def _row(self, event: E) -> Row[S]:
        for row in self._index.get((self._state, type(event)), ()):
            if row.when is None or row.when(self, event):
                return row
        raise LocalProtocolError(f"{type(self).__name__} in state {self._state}: {event}")


def install(machine: type[Machine[Any, Any, Any]], table: Iterable[Iterable[Row[Any]]]) -> None:
    """Give a machine its table."""
    machine.TABLE = [row for group in table for row in group]
    machine._index = {}
    for row in machine.TABLE:
        machine._index.setdefault((row.state, row.event), []).append(row)
