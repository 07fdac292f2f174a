# SPDX-License-Identifier: Apache-2.0
"""How long does a decision take, and how many are made in a second, with so many instances?

    python -m benchmarks.scheduler --instances 1000

On one core, in one process: instances report new loads all the time (`--updates` for each decision), each decision is
the whole of `Dispatcher.schedule`, with its account, and each request shows up in its instance's status later. Beside
them the API servers of all instances ask for their peers (each every five seconds), and gateways complain of `--dead`
instances. Each is timed by the wall clock and by this thread's CPU time, which other processes of a busy machine do not
lengthen.

The reference runs the same decisions with the pure functions over a list, which is what the arrays are compared with.
Machines differ, and one machine from day to day: the last column gives each time as a multiple of the reference's, and
each rate as a number per such time. What is to be reached is CPU time on a core on which the reference takes 4 ms, and
as much more where that takes longer; a test holds it. A pass of the rescheduler plans over the same instances, with
skewed loads, and over a full cluster whose long requests fit nowhere; /metrics is scraped while requests are placed.
Status to view is `benchmarks.status_to_view`: its 100 instances push 10 times a second from a process of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import gc
import random
import time
from collections import deque
from collections.abc import Callable
from statistics import median

import numpy as np
import uvloop
from prometheus_client import CollectorRegistry
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import status_to_view
from llumlet.contract.types import InstanceMetadata, InstanceStatus, PeersRequest, StepSample
from llumlet.protocol.infer_type import InferType
from llumsched.causes import Cause
from llumsched.cluster.providers.account import Account
from llumsched.cluster.providers.in_flight import InFlight
from llumsched.cluster.providers.step_models import StepModels
from llumsched.cluster.table import Table as ClusterTable
from llumsched.cluster.table import standard_table
from llumsched.cluster.view import View
from llumsched.cms.peers import PeerLists
from llumsched.dispatch.complaints import Complaint
from llumsched.dispatch.dispatcher import Dispatcher
from llumsched.policy.candidates import Candidates, Context
from llumsched.policy.document import Mode, load_policy
from llumsched.policy.metrics import METRICS
from llumsched.policy.selectors import Draw
from llumsched.request import Request
from llumsched.rescheduling.executing.history import History
from llumsched.rescheduling.planning.planner import plan
from llumsched.rescheduling.planning.policies import load_policies
from llumsched.rescheduling.rescheduling_config import ReschedulingConfig
from llumsched.scheduler.scheduler_metrics import SchedulerMetrics
from tests.support import scheduling_reference as reference
from tests.support.report import add_json, print_json
from tests.support.stats import quantile

_SEED = 7
_GATEWAY = "gateway"
_ARRIVES_AFTER = 200
"""Decisions between a dispatch and the status that shows it."""
_REFERENCE_DECISIONS = 30
_PASSES = 50
_PEERS_EVERY_S = 5.0
_RATE_ASSUMED = 5000
"""Decisions a second, to spread the questions for peers over decisions."""
_SCRAPES = 9
_PREDICTIONS = 300


REFERENCE_MS = 4.0
"""CPU time of the reference, over 1,000 instances, on a core for which `TARGETS_MS` are meant."""
TARGETS_MS = {
    "decision_cpu_p99_ms": 1.0,
    "per_decision_cpu_ms": 0.2,
    "reschedule_pass_cpu_ms": 10.0,
    "full_pass_cpu_ms": 10.0,
    "prediction_cpu_ms": 0.2,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    instances: int
    decision_p50_ms: float
    decision_p99_ms: float
    decision_cpu_p99_ms: float
    decisions_per_s: float
    """Beside the updates, on one core."""
    decisions_per_cpu_s: float
    updates_per_s: float
    update_us: float
    reference_p50_ms: float
    reference_cpu_ms: float
    """Median."""
    reschedule_pass_ms: float
    """p99"""
    reschedule_pass_cpu_ms: float
    full_pass_ms: float
    """p99, over instances with a few long requests each, and no room."""
    full_pass_cpu_ms: float
    peers_p99_ms: float
    prediction_ms: float
    """Median, of TTFT and TPOT of one request at all instances."""
    prediction_cpu_ms: float
    scrape_cpu_ms: float
    """CPU time of a scrape of /metrics, beside decisions."""
    scrape_hold_cpu_ms: float
    """The most that a decision had to wait for it."""
    status_to_view_p99_ms: float | None

    @property
    def per_decision_cpu_ms(self) -> float:
        """With the updates and the questions that come beside each."""
        return 1e3 / self.decisions_per_cpu_s

    def target_ms(self, figure: str) -> float:
        """The target of a figure, scaled to this machine's speed."""
        return TARGETS_MS[figure] * self.reference_cpu_ms / REFERENCE_MS

    @property
    def missed(self) -> dict[str, tuple[float, float]]:
        """Figures that miss their target, with that."""
        found = {name: (getattr(self, name), self.target_ms(name)) for name in TARGETS_MS}
        return {name: (value, target) for name, (value, target) in found.items() if value > target}


class _Cluster:
    """Instances whose loads change, in a view."""

    def __init__(self, instances: int, *, is_full: bool = False) -> None:
        """`is_full`: of two long requests each, which fit nowhere; a tenth is somewhat fuller."""
        self.view = View()
        self._is_full = is_full
        self._random = random.Random(_SEED)
        self._update_id = self._num_steps = 0
        self._arrived: dict[str, deque[str]] = {}
        for index in range(instances):
            name = f"instance-{index:04d}"
            self._arrived[name] = deque(maxlen=10)
            self.view.put_metadata(
                InstanceMetadata(
                    instance_id=name, incarnation="1", instance_type="neutral", ip="10.0.0.1",
                    api_server_port=8000 + index,
                    node_id=f"node-{index // 8}", max_model_len=32_768, served_models=["m"], data_parallel_size=1,
                    block_size=16, bytes_per_block=1 << 20, num_total_blocks=1 << 16, compatibility_digest="same",
                    max_migrations_in=4, max_migrations_out=4, transports=["tcp"], llumlet_port=7000,
                    max_num_batched_tokens=2048,
                )
            )  # fmt: skip
        self.names = list(self._arrived)
        for name in self.names:
            self.view.put_status(self.status(name))

    def arrive(self, request_id: str, name: str) -> None:
        self._arrived[name].append(request_id)

    def status(self, name: str) -> InstanceStatus:
        """Skewed: a tenth of the instances is hot."""
        draw = self._random.random
        hot, cold, spread = (0.99, 0.85, 0.01) if self._is_full else (0.8, 0.3, 0.2)
        used = int((hot if hash_of(name) % 10 == 0 else cold) * (1 << 20) * (1 - spread * draw()))
        running = 2 if self._is_full else used >> 12
        self._update_id += 1
        return InstanceStatus(
            instance_id=name, incarnation="1", schedulable=True, update_id=self._update_id,
            timestamp_ms=self._update_id, recent_waiting_requests=self._arrived[name], num_total_gpu_tokens=1 << 20,
            num_used_gpu_tokens=used, num_running_requests=running, num_total_blocks=1 << 16,
            num_free_blocks=(1 << 16) - used // 16, num_available_migrate_out_slots=4, num_available_migrate_in_slots=4,
            num_available_migrate_in_tokens=1 << 20, num_available_migrate_out_tokens=1 << 20,
            scheduler_running_to_decode_requests_num=running, scheduler_running_to_decode_tokens_num=used,
            num_uncomputed_tokens_all_waiting_prefills=int(6000 * draw()),
            steps=[self._step() for _ in range(4)], num_decode_steps=self._num_steps,
            decode_steps_requests=100 * self._num_steps, decode_steps_kv=100_000 * self._num_steps,
            decode_steps_s=0.05 * self._num_steps,
        )  # fmt: skip

    def _step(self) -> StepSample:
        """A fresh one each time, every fourth of them with a prefill."""
        self._num_steps += 1
        draw, prefill = self._random.random, 0 if self._num_steps % 4 else self._random.randrange(2, 2048)
        num_decodes = int(200 * draw())
        kv, pairs = int(2000 * draw()) * num_decodes, prefill * prefill // 2
        seconds = 0.03 + 2e-4 * prefill + 8e-9 * pairs + 1.5e-4 * num_decodes + 2e-6 * kv
        return StepSample(
            number=self._num_steps, prefill_tokens=prefill, pairs=pairs, num_decodes=num_decodes, decode_kv=kv,
            seconds=seconds * (0.9 + 0.2 * draw()),
        )  # fmt: skip

    def any_status(self) -> InstanceStatus:
        return self.status(self._random.choice(self.names))


def hash_of(name: str) -> int:
    return int(name.rsplit("-", 1)[1])


def decide(instances: int, num_decisions: int, updates: float, num_dead: int, *, quiet: bool) -> dict[str, float]:
    cluster = _Cluster(instances)
    account = Account(time.monotonic, 10.0)
    dispatcher = Dispatcher(cluster.view, load_policy("load-balance", Mode.FULL), account, time.monotonic)
    dead = cluster.names[:: max(1, instances // num_dead)][:num_dead] if num_dead else []
    complaint = Complaint(Cause.UNREACHABLE, "nobody listens there", time.monotonic())
    addresses = [cluster.view[name].api_server for name in dead]
    dispatcher.complaints.complain(_GATEWAY, dict.fromkeys(addresses, complaint), ttl_s=3600.0)
    peers = PeerLists(cluster.view)
    decisions_per_question = max(1, round(_RATE_ASSUMED * _PEERS_EVERY_S / instances))
    on_their_way: deque[tuple[str, str]] = deque()
    decisions, updates_made, questions = _Times(), _Times(), _Times()
    due = 0.0
    gc.collect()
    for number in track(range(num_decisions), "decisions", console=Console(stderr=True, quiet=quiet, markup=False)):
        due += updates
        while due >= 1:
            status = cluster.any_status()
            with updates_made:
                cluster.view.put_status(status)
            due -= 1
        request = Request(f"request-{number}", "m", 1 + number * 37 % 4000)
        with decisions:
            (placed,) = dispatcher.schedule(request, gateway_id=_GATEWAY)
        assert placed.fallback or placed.instance.id not in dead
        if number % decisions_per_question == 0:
            asker = PeersRequest(instance_ids=[cluster.names[number // decisions_per_question % instances]])
            with questions:
                peers.answer(asker)
        on_their_way.append((request.id, placed.instance.id))
        if len(on_their_way) > _ARRIVES_AFTER:
            cluster.arrive(*on_their_way.popleft())
    all_of_it = (decisions, updates_made, questions)
    wall_s = sum(sum(times.wall_s) for times in all_of_it)
    full_view = _Cluster(instances, is_full=True).view
    full_table = standard_table(InFlight(), StepModels(time.monotonic))
    full_view.observe(full_table)
    full = _passes(full_view, full_table)
    passes = _passes(cluster.view, dispatcher.table)
    predictions = _predictions(dispatcher)
    scrape_s, hold_s = asyncio.run(_scrape(dispatcher))
    by_reference = _reference(dispatcher, account)
    return {
        "decision_p50_ms": quantile(decisions.wall_s, 0.5) * 1e3,
        "decision_p99_ms": quantile(decisions.wall_s, 0.99) * 1e3,
        "decision_cpu_p99_ms": quantile(decisions.cpu_s, 0.99) * 1e3,
        "decisions_per_s": num_decisions / wall_s,
        "decisions_per_cpu_s": num_decisions / sum(sum(times.cpu_s) for times in all_of_it),
        "updates_per_s": len(updates_made.wall_s) / wall_s,
        "update_us": sum(updates_made.cpu_s) / max(len(updates_made.cpu_s), 1) * 1e6,
        "reference_p50_ms": quantile(by_reference.wall_s, 0.5) * 1e3,
        "reference_cpu_ms": quantile(by_reference.cpu_s, 0.5) * 1e3,
        "reschedule_pass_ms": quantile(passes.wall_s, 0.99) * 1e3,
        "reschedule_pass_cpu_ms": quantile(passes.cpu_s, 0.99) * 1e3,
        "full_pass_ms": quantile(full.wall_s, 0.99) * 1e3,
        "full_pass_cpu_ms": quantile(full.cpu_s, 0.99) * 1e3,
        "peers_p99_ms": quantile(questions.wall_s, 0.99) * 1e3,
        "prediction_ms": quantile(predictions.wall_s, 0.5) * 1e3,
        "prediction_cpu_ms": quantile(predictions.cpu_s, 0.5) * 1e3,
        "scrape_cpu_ms": scrape_s * 1e3,
        "scrape_hold_cpu_ms": hold_s * 1e3,
    }


class _Times:
    """Times of the blocks that it is entered for."""

    def __init__(self) -> None:
        self.wall_s: list[float] = []
        self.cpu_s: list[float] = []
        self._began = (0.0, 0.0)

    def __enter__(self) -> None:
        self._began = time.perf_counter(), time.thread_time()

    def __exit__(self, *_: object) -> None:
        cpu_s, wall_s = time.thread_time(), time.perf_counter()
        self.wall_s.append(wall_s - self._began[0])
        self.cpu_s.append(cpu_s - self._began[1])


def _reference(dispatcher: Dispatcher, account: Account) -> _Times:
    stage = dispatcher.policy.stages[InferType.NEUTRAL]

    def one() -> None:
        loads = [reference.Load(one, account.in_flight.of(one.id)) for one in dispatcher.view.values()]
        seen = reference.Situation(time.monotonic(), Request("r", "m", 100))
        reference.choice(stage, loads, seen, Draw(random.Random(_SEED)))

    return _timed(one, _REFERENCE_DECISIONS)


def _passes(view: View, table: ClusterTable) -> _Times:
    config = ReschedulingConfig()
    policies = load_policies(config)

    def one() -> None:
        history, now_s = History(config), time.monotonic()
        history.seen(view.values())
        plan(table.snapshot(), policies, history, config, now_s)

    return _timed(one, _PASSES)


def _predictions(dispatcher: Dispatcher) -> _Times:
    context = Context(time.monotonic(), Request("r", "m", 1000))

    def one() -> None:
        columns = Candidates(dispatcher.table, context)
        for name in ("predicted_ttft", "predicted_tpot"):
            assert np.isfinite(METRICS[name].values(columns)).all()

    return _timed(one, _PREDICTIONS)


async def _scrape(dispatcher: Dispatcher) -> tuple[float, float]:
    """Seconds of CPU time that a scrape takes, and that the longest part of it takes for which a decision waits; of
    several scrapes the median of each."""
    metrics = SchedulerMetrics(dispatcher, CollectorRegistry())
    totals, holds = [], []
    for _ in range(_SCRAPES):
        parts = []
        scrape = asyncio.create_task(metrics.exposition())
        while not scrape.done():
            began_s = time.thread_time()
            await asyncio.sleep(0)
            parts.append(time.thread_time() - began_s)
            dispatcher.schedule(Request("beside", "m", 100))
        totals.append(sum(parts))
        holds.append(max(parts))
    return median(totals), median(holds)


def _timed(run: Callable[[], None], times: int) -> _Times:
    taken = _Times()
    for _ in range(times):
        with taken:
            run()
    return taken


def measure_all(
    instances: int, decisions: int, updates: float, seconds: float, *, dead: int = 0, quiet: bool = False
) -> Result:
    """`seconds` 0 leaves status to view out."""
    figures = decide(instances, decisions, updates, dead, quiet=quiet)
    to_view = None
    if seconds:
        to_view = uvloop.run(status_to_view.measure(seconds=seconds, quiet=quiet)).p99_ms
    return Result(instances=instances, **figures, status_to_view_p99_ms=to_view)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=1000)
    parser.add_argument("--decisions", type=int, default=20_000)
    parser.add_argument("--updates", type=float, default=2.0, help="statuses that come in between two decisions")
    parser.add_argument("--dead", type=int, default=10, help="instances that gateways cannot reach")
    parser.add_argument("--seconds", type=float, default=10.0, help="of status to view; 0: without it")
    add_json(parser)
    args = parser.parse_args()
    result = measure_all(args.instances, args.decisions, args.updates, args.seconds, dead=args.dead)
    table = Table("figure", "wall", "CPU", "to reach", "by the reference")
    to_view, reference_ms = result.status_to_view_p99_ms, result.reference_p50_ms

    def to_reach(figure: str) -> str:
        return f"{result.target_ms(figure):.3g} ms"

    def times(milliseconds: float) -> str:
        return f"{milliseconds / reference_ms:.3f}"

    rows = (
        ("decision, p50", f"{result.decision_p50_ms:.3f} ms", "", "", times(result.decision_p50_ms)),
        (
            "decision, p99",
            f"{result.decision_p99_ms:.3f} ms",
            f"{result.decision_cpu_p99_ms:.3f} ms",
            to_reach("decision_cpu_p99_ms"),
            times(result.decision_p99_ms),
        ),
        (
            "decisions per second",
            f"{result.decisions_per_s:,.0f}",
            f"{result.decisions_per_cpu_s:,.0f}",
            f"{1e3 / result.target_ms('per_decision_cpu_ms'):,.0f}",
            f"{result.decisions_per_s * reference_ms / 1e3:.1f}",
        ),
        ("updates per second, beside them", f"{result.updates_per_s:,.0f}", "", "", ""),
        ("update of an instance", "", f"{result.update_us:.1f} µs", "", ""),
        ("question for peers, p99", f"{result.peers_p99_ms:.3f} ms", "", "", times(result.peers_p99_ms)),
        ("decision with the pure functions, p50", f"{reference_ms:.3f} ms", "", "", "1"),
        (
            "pass of the rescheduler, p99",
            f"{result.reschedule_pass_ms:.3f} ms",
            f"{result.reschedule_pass_cpu_ms:.3f} ms",
            to_reach("reschedule_pass_cpu_ms"),
            times(result.reschedule_pass_ms),
        ),
        (
            "… over a full cluster",
            f"{result.full_pass_ms:.3f} ms",
            f"{result.full_pass_cpu_ms:.3f} ms",
            to_reach("full_pass_cpu_ms"),
            times(result.full_pass_ms),
        ),
        (
            "predictions of TTFT and TPOT, all instances",
            f"{result.prediction_ms:.3f} ms",
            f"{result.prediction_cpu_ms:.3f} ms",
            to_reach("prediction_cpu_ms"),
            "",
        ),
        (
            "scrape of /metrics; its part that a decision waits for",
            "",
            f"{result.scrape_cpu_ms:.1f} ms; {result.scrape_hold_cpu_ms:.2f} ms",
            "",
            "",
        ),
        ("status to view, p99", "" if to_view is None else f"{to_view:.2f} ms", "", "20 ms", ""),
    )
    for row in rows:
        table.add_row(*row)
    Console(markup=False).print(table)
    print_json(args.json, {"bench": "scheduler", **dataclasses.asdict(result)})


if __name__ == "__main__":
    main()
