# SPDX-License-Identifier: Apache-2.0
"""The loop of the rescheduler: a pass at least every interval, and earlier after load changes and ended moves.

It runs in the scheduler process or in its own. A pass plans and starts moves without waiting for them. Nothing is
planned while the view's store is lost.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry

from llumlet.process.credentials import NONE, Credentials
from llumlet.process.redis_url import REDIS_SCHEMES
from llumsched.cluster.lost import FAILS_S
from llumsched.cluster.providers.in_flight import InFlight
from llumsched.cluster.providers.step_models import StepModels
from llumsched.cluster.table import Table, standard_table
from llumsched.cluster.view import View
from llumsched.foresight.moved_on import move_on
from llumsched.foresight.outlook import Outlook
from llumsched.rescheduling.executing.executor import Connect, Executor, connect
from llumsched.rescheduling.executing.history import History
from llumsched.rescheduling.executing.records import PassRecord, Records, RescheduleCounters
from llumsched.rescheduling.executing.waking import Waking
from llumsched.rescheduling.planning.draft import Shares, caches_unknown
from llumsched.rescheduling.planning.dry_run import DryRun, PassWatcher
from llumsched.rescheduling.planning.planner import Plan, Watch, nobody_watches, plan
from llumsched.rescheduling.planning.policies import load_policies
from llumsched.rescheduling.rescheduling_config import ReschedulingConfig
from llumsched.rescheduling.turns import Turns

if TYPE_CHECKING:
    from llumsched.rescheduling.leadership import Lease

logger = logging.getLogger(__name__)

LOST_S: Final = 2.0
"""Time after which a lost store's view is not used for planning."""
SHARE: Final = 20
"""Pause after a pass, as a multiple of its length, since the process has other work."""


def lease_of(cms: str) -> Lease | Turns:
    """The lease in the Redis that instances report to; turns for a CMS in a process, which several reschedulers may
    share."""
    if not cms.startswith(REDIS_SCHEMES):
        return Turns()
    # Its client need not be installed otherwise.
    from llumsched.rescheduling.leadership import Lease

    return Lease(cms)


class Rescheduler:
    """The loop; `records` tells its work. Belongs to the event loop of `view`.

    `table`: the dispatcher's, which includes sent requests that no status shows yet; None makes one without them.
    """

    def __init__(
        self,
        view: View,
        config: ReschedulingConfig,
        credentials: Credentials = NONE,
        registry: CollectorRegistry | None = None,
        *,
        table: Table | None = None,
        lease: Lease | Turns | None = None,
        shares: Shares = caches_unknown,
        clock: Callable[[], float] = time.monotonic,
        connect: Connect = connect,
    ) -> None:
        """`clock`: the view's. `registry` for metrics (default: its own). `lease`: nothing is planned while another
        process has it; None: there is no other rescheduler. `shares`: overlaps of prefix caches, as far as known.
        Raises PolicyError."""
        self.config = config
        self.records = Records()
        self._view = view
        self._policies = load_policies(config)
        self._unobserve: Callable[[], None] = lambda: None
        if table is None:
            step_models, outlooks = StepModels(clock), [Outlook(clock)] if config.forward_status else []
            table = standard_table(InFlight(), step_models, *outlooks)
            self._unobserve = view.observe(step_models, *outlooks, table)
        self._table = table
        self._clock = clock
        self._lease = lease
        self._shares = shares
        self._history = History(config)
        self._counters = RescheduleCounters(registry or CollectorRegistry())
        self._waking = Waking(self._history)
        self._executor = Executor(
            view,
            config,
            self._history,
            self.records,
            self._counters,
            credentials,
            lambda: self._waking.wake("move"),
            lease.refused if lease is not None else lambda _: None,
            clock,
            connect,
        )
        self._num_passes = 0

    async def run(self) -> None:
        """Makes passes until it is cancelled."""
        if self.config.interval_ms <= 0:
            await asyncio.Event().wait()
        unobserve = self._view.observe(self._waking)
        woken_by = "start"
        try:
            while True:
                duration_s = self._pass_logged(woken_by)
                await asyncio.sleep(max(self.config.debounce_ms / 1000, SHARE * duration_s))
                woken_by = await self._waking.wait(self.config.interval_ms / 1000)
        finally:
            unobserve()

    async def close(self) -> None:
        """Ends the running calls, after `run` was cancelled. Moves that llumlets have begun continue."""
        self._unobserve()
        await self._executor.close()

    def run_pass(self, woken_by: str = "call") -> PassRecord:
        """Makes one pass now: starts its moves and returns its record."""
        began_s = self._clock()
        # As of now: what is planned while the lease runs out must not go out as a person's order.
        term = self._term
        skipped = self._reason_to_skip(term)
        made = Plan((), ()) if skipped else self._plan(began_s, self._history)
        self._log_broken(made)
        duration_ms = (self._clock() - began_s) * 1000
        numbers = self._executor.start(made.moves, term)
        self._counters.passed(duration_ms)
        return self._record(woken_by, duration_ms, made, numbers, skipped)

    @property
    def policies(self) -> list[str]:
        return [policy.name for policy in self._policies]

    def dry_run(self) -> DryRun:
        """The pass that would be made now, and why. Starts and changes nothing."""
        if skipped := self._reason_to_skip(self._term):
            return DryRun(skipped)
        watcher = PassWatcher()
        return DryRun(plan=self._plan(self._clock(), self._history.copy(), watcher), watcher=watcher)

    def _log_broken(self, made: Plan) -> None:
        broken = [result for result in made.results if result.error is not None]
        for result in broken:
            logger.error("rescheduling policy %s failed", result.policy, exc_info=result.error)
        if broken:
            self._counters.broke()

    def _record(
        self, woken_by: str, duration_ms: float, made: Plan, moves: tuple[int, ...], skipped: str
    ) -> PassRecord:
        self._num_passes += 1
        record = PassRecord(
            self._num_passes, time.time(), duration_ms, woken_by, len(self._view), made.results, moves, skipped
        )
        self.records.passes.append(record)
        return record

    def _pass_logged(self, woken_by: str) -> float:
        """Makes a pass and returns its seconds. A pass that raises is recorded and does not end the loop."""
        began_s = self._clock()
        try:
            self.run_pass(woken_by)
        except Exception as error:
            logger.exception("a rescheduling pass failed")
            self._counters.broke()
            self._record(woken_by, (self._clock() - began_s) * 1000, Plan((), ()), (), f"it failed: {error!r}")
        return self._clock() - began_s

    @property
    def _term(self) -> int:
        """The term of its lease; 0 without one, or while another rescheduler has it."""
        return self._lease.term if self._lease is not None else 0

    def _reason_to_skip(self, term: int) -> str:
        if not self._view.connected and self._view.age_s > LOST_S:
            return f"the view is {self._view.age_s:.0f} s old: its store is lost"
        return self._lease.reason if self._lease is not None and not term else ""

    def _plan(self, now_s: float, history: History, watch: Watch = nobody_watches) -> Plan:
        config = self.config
        instances = list(self._view.values())
        history.seen(instances)
        history.forget_expired(now_s)
        lost = self._view.lost.within(FAILS_S)
        # Instances are as old as the view, moves are not.
        view_s = now_s - self._view.age_s
        snapshot = reported = self._table.snapshot(lost)
        if config.forward_status:
            snapshot = reported.copy()
            move_on(snapshot, view_s)
        return plan(snapshot, self._policies, history, config, now_s, view_s, self._shares, reported, watch)
