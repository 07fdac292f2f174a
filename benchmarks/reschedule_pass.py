# SPDX-License-Identifier: Apache-2.0
"""How long does one pass of the rescheduler take, from the view to the moves?

Every instance has reported since the last pass. In an uneven cluster a tenth of them is hot and a hundredth sick; in an
even one no move is worth its cost, and all the same a pass has to find that out. `measure_pass` is used by
`benchmarks.scheduler`; alone, it prints a table and a line of JSON for each size and cluster.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import time

from rich.console import Console
from rich.table import Table

from llumlet.contract.types import InstanceMetadata, InstanceStatus
from llumsched.cluster.providers.in_flight import InFlight
from llumsched.cluster.providers.step_models import StepModels
from llumsched.cluster.table import Table as ClusterTable
from llumsched.cluster.table import standard_table
from llumsched.cluster.view import View
from llumsched.rescheduling.executing.history import History
from llumsched.rescheduling.planning.planner import Plan, plan
from llumsched.rescheduling.planning.policies import ReschedulingPolicy, load_policies
from llumsched.rescheduling.rescheduling_config import ReschedulingConfig
from tests.support.progress import saying

CAPACITY = 400_000
NUM_RUNNING = 80
PASSES = 50


def measure_pass(num_instances: int, passes: int = PASSES) -> float:
    """Milliseconds of one pass, 99th percentile."""
    return statistics.quantiles(_durations_ms(num_instances, passes), n=100)[98]


def _durations_ms(num_instances: int, passes: int, *, even: bool = False) -> list[float]:
    config, view = ReschedulingConfig(), _cluster(num_instances, even)
    table = standard_table(InFlight(), StepModels(time.monotonic))
    history, policies = History(config), load_policies(config)
    view.observe(table)
    durations = []
    for _ in range(passes):
        began = time.perf_counter()
        made = _pass(view, table, policies, config, history)
        durations.append((time.perf_counter() - began) * 1000)
        assert bool(made.moves) is not even, "the cluster is not what it is meant to be"
    return durations


def _pass(
    view: View,
    table: ClusterTable,
    policies: tuple[ReschedulingPolicy, ...],
    config: ReschedulingConfig,
    history: History,
) -> Plan:
    """One pass as `Rescheduler` makes it; nothing is begun, so that every pass finds the same."""
    now_s = time.monotonic()
    history.seen(view.values())
    history.forget_expired(now_s)
    return plan(table.snapshot(), policies, history, config, now_s)


def _cluster(num_instances: int, even: bool) -> View:
    view, chance = View(), random.Random(num_instances)
    for number in range(num_instances):
        name = f"instance-{number:05}"
        view.put_metadata(
            InstanceMetadata(
                instance_id=name,
                instance_type="neutral",
                ip="10.0.0.1",
                llumlet_port=1,
                block_size=16,
                bytes_per_block=2 << 20,
                data_parallel_size=1,
                node_id=f"node-{number // 8}",
                max_migrations_in=4,
                max_migrations_out=4,
            )
        )
        if even:
            load = chance.uniform(0.48, 0.5)
        else:
            load = chance.uniform(0.8, 0.95) if number % 10 == 0 else chance.uniform(0.1, 0.6)
        tokens = round(load * CAPACITY)
        view.put_status(
            InstanceStatus(
                instance_id=name,
                schedulable=even or number % 100 != 99,
                timestamp_ms=1,
                update_id=1,
                num_running_requests=NUM_RUNNING,
                scheduler_running_to_decode_requests_num=NUM_RUNNING,
                scheduler_running_to_decode_tokens_num=tokens,
                num_total_gpu_tokens=CAPACITY,
                num_used_gpu_tokens=tokens,
            )
        )
    return view


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, nargs="+", default=[10, 100, 1000])
    arguments = parser.parse_args()
    table = Table("instances", "cluster", "median ms", "p99 ms", title="one rescheduling pass")
    results = []
    with saying("passes") as say:
        for number, even in itertools.product(arguments.instances, (False, True)):
            cluster = "even" if even else "uneven"
            say(f"passes over {number} instances, {cluster}")
            durations = _durations_ms(number, PASSES, even=even)
            median, p99 = statistics.median(durations), statistics.quantiles(durations, n=100)[98]
            table.add_row(str(number), cluster, f"{median:.2f}", f"{p99:.2f}")
            results.append(
                {
                    "bench": "reschedule_pass",
                    "instances": number,
                    "cluster": cluster,
                    "median_ms": median,
                    "p99_ms": p99,
                }
            )
    Console(stderr=True, markup=False).print(table)
    for result in results:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
