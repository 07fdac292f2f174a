# SPDX-License-Identifier: Apache-2.0
"""The loop: a pass at least every interval, earlier when the load changes or a move has ended.

Embedded in the scheduler process or in one of its own, over whatever feeds the view. A pass plans and starts moves; it
never waits for them. While the view's store is lost nothing is planned: an old view makes bad moves.
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
"""Time after which a store that has been lost is not planned with."""
SHARE: Final = 20
"""A pass is followed by a pause of at least this many times its length: the process has other work."""


def lease_of(cms: str) -> Lease | Turns:
    """The lease in the Redis that instances report to; turns where the CMS is a process, of which there may be
    several."""
    if not cms.startswith(REDIS_SCHEMES):
        return Turns()
    # Its client need not be installed otherwise.
    from llumsched.rescheduling.leadership import Lease

    return Lease(cms)


class Rescheduler:
    """The loop; `records` is what it did and does. Belongs to the event loop of `view`.

    `table` is the dispatcher's, with what it has sent and no status shows yet; None: one of its own, without.
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
        """`clock` must be that of the view. Metrics are registered in `registry` (default: one of its own). `lease`:
        nothing is planned while another one has it; None: there is no other rescheduler. `shares`: what prefix caches
        have of each other, as far as known. Raises PolicyError."""
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
        """Leaves the calls under way, after `run` was cancelled. What the llumlets have begun goes on."""
        self._unobserve()
        await self._executor.close()

    def run_pass(self, woken_by: str = "call") -> PassRecord:
        """Makes one pass, now: starts its moves and leaves its record."""
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
        """Names of its policies."""
        return [policy.name for policy in self._policies]

    def dry_run(self) -> DryRun:
        """What a pass would do now, and why. Starts nothing and changes nothing: what it forgets is forgotten in a copy
        of what is remembered."""
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
        """Makes a pass and returns its seconds. One that breaks must not end the loop; it leaves its record, too."""
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
        """That of its lease; 0 without one, and while another rescheduler has it."""
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
