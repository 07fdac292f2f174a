# SPDX-License-Identifier: Apache-2.0
"""Random schedules of a `World`: every choice of what happens next comes from outside, as a number."""

from __future__ import annotations

from collections.abc import Callable

from vllm_llumnix.migration.source import Method

from .world import World

Action = tuple[str, Callable[[], object]]
NEVER_LOST = frozenset({"out"})
"""Outputs reach the origin once their engine has sent them: what is lost with an engine is replayed by others."""
METHODS = (Method.LIVE, Method.LIVE, Method.BLOCKING, Method.RECOMPUTE)


def actions(world: World, *, aborts: bool, crashes: bool) -> list[Action]:
    """What can happen now, the usual more often than the rare."""
    usual: list[Action] = []
    rare: list[Action] = []
    for message in world.network:
        usual.append((f"deliver {message}", lambda m=message: world.deliver(m)))  # type: ignore[misc]
        if message.kind not in NEVER_LOST:
            rare.append((f"drop {message}", lambda m=message: world.drop(m)))  # type: ignore[misc]
        rare.append((f"duplicate {message}", lambda m=message: world.deliver(m, keep=True)))  # type: ignore[misc]
    for name, engine in world.engines.items():
        if engine.commands:
            usual.append((f"loop {name}", lambda n=name: world.loop(n)))  # type: ignore[misc]
        if engine.request is not None:
            usual.append((f"step {name}", lambda n=name: world.step(n)))  # type: ignore[misc]
            rare.append((f"preempt {name}", lambda n=name: world.preempt(n)))  # type: ignore[misc]
            for to in world.engines:
                if to != name:
                    method = METHODS[len(world.log) % len(METHODS)]
                    move = (f"move {name}>{to} {method}", lambda n=name, t=to, m=method: world.move(n, t, m))  # type: ignore[misc]
                    usual.append(move)
        for move, out in engine.out.items():
            for call in out.calls:
                rare.append((f"unreachable {name} {call}", lambda n=name, m=move, c=call: world.unreachable(n, m, c)))  # type: ignore[misc]
            rare.append((f"cancel {name}", lambda n=name, m=move: world.cancel(n, m)))  # type: ignore[misc]
        for move, into in engine.into.items():
            if into.job is not None:
                pull = (f"pull {name}", lambda n=name, m=move: world.pull_block(n, m))  # type: ignore[misc]
                usual += [pull, pull]
                if not into.job.stopping:
                    rare.append((f"pull-fails {name}", lambda n=name, m=move: world.fail_pull(n, m)))  # type: ignore[misc]
            rare.append((f"revoke {name} {move}", lambda n=name, m=move: world.revoke(n, m)))  # type: ignore[misc]
            rare.append((f"forbid {name} {move}", lambda n=name, m=move: world.forbid(n, m)))  # type: ignore[misc]
        rare.append((f"churn {name}", lambda n=name: world.churn(n)))  # type: ignore[misc]
        if crashes and not world.crashed:
            rare.append((f"crash {name}", lambda n=name: world.crash(n)))  # type: ignore[misc]
    for due in world.due():
        usual.append((f"timer {due}", lambda d=due: world.fire(*d)))  # type: ignore[misc]
    for seconds in (1.0, 6.0, 31.0):
        rare.append((f"advance {seconds}", lambda s=seconds: _advance(world, s)))  # type: ignore[misc]
    if aborts and not world.client_left:
        rare.append(("abort", world.client_leaves))
    return usual * 8 + rare


def _advance(world: World, seconds: float) -> None:
    world.now += seconds


def play(world: World, choose: Callable[[int], int], num_actions: int, *, aborts: bool, crashes: bool) -> list[str]:
    """Run a schedule and let the world come to rest. Returns the violations; the schedule is in the world's log."""
    for _ in range(num_actions):
        possible = actions(world, aborts=aborts, crashes=crashes)
        label, act = possible[choose(len(possible))]
        world.log.append(f"> {label}")
        act()
        if faults := world.violations():
            return faults
    world.settle()
    return world.violations_at_rest()
