# SPDX-License-Identifier: Apache-2.0
"""Random schedules of a `World`: every choice of what happens next comes from outside, as a number."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from vllm_llumnix.migration.source import Method

from .world import World

Action = tuple[Callable[..., object], tuple[Any, ...]]
NEVER_LOST = frozenset({"out"})
"""Outputs reach the origin once their engine has sent them: what is lost with an engine is replayed by others."""
METHODS = (Method.LIVE, Method.LIVE, Method.BLOCKING, Method.RECOMPUTE)


def usual(world: World) -> Iterator[Action]:
    """What moves things on."""
    for message in world.network:
        yield world.deliver, (message,)
    for name, engine in world.engines.items():
        if engine.commands:
            yield world.loop, (name,)
        if engine.request is not None:
            yield world.step, (name,)
            if not engine.out:
                for to in world.engines:
                    if to != name:
                        yield world.move, (name, to, METHODS[len(world.log) % len(METHODS)])
        for move, into in engine.into.items():
            if into.job is not None:
                yield world.pull_block, (name, move)
                yield world.pull_block, (name, move)
    for due in world.due():
        yield world.fire, due


def rare(world: World, *, aborts: bool, crashes: bool) -> Iterator[Action]:
    """What gets in the way."""
    for message in world.network:
        if message.kind not in NEVER_LOST:
            yield world.drop, (message,)
        yield world.duplicate, (message,)
    for name, engine in world.engines.items():
        yield world.churn, (name,)
        yield world.hog, (name,)
        if engine.request is not None:
            yield world.preempt, (name,)
        for move, out in engine.out.items():
            yield world.cancel, (name, move)
            yield world.cut, (name, out.to)
            yield world.cut, (name, "O")
            for call in sorted(out.calls):
                yield world.unreachable, (name, move, call)
        for move, into in engine.into.items():
            yield world.revoke, (name, move)
            yield world.forbid, (name, move)
            if into.job is not None and not into.job.stopping:
                yield world.fail_pull, (name, move)
        if crashes and not world.crashed:
            yield world.crash, (name,)
    for seconds in (1.0, 6.0, 31.0):
        yield world.advance, (seconds,)
    if aborts and not world.client_left:
        yield world.client_leaves, ()


def play(
    world: World,
    choose: Callable[[int], int],
    num_actions: int,
    *,
    one_rare_in: int = 12,
    aborts: bool = False,
    crashes: bool = False,
) -> list[str]:
    """Run a schedule and let the world come to rest. Returns the violations; the schedule is in the world's log."""
    for _ in range(num_actions):
        possible = [] if choose(one_rare_in) == 0 else list(usual(world))
        act, arguments = pick(possible or list(rare(world, aborts=aborts, crashes=crashes)), choose)
        world.log.append(f"> {act.__name__} {' '.join(str(argument) for argument in arguments)}")
        act(*arguments)
        if faults := world.wrong_tokens_or_owners():
            return faults
    world.settle()
    return world.violations() + world.left_at_rest()


def pick(possible: list[Action], choose: Callable[[int], int]) -> Action:
    return possible[choose(len(possible))]
