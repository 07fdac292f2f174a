# SPDX-License-Identifier: Apache-2.0
"""What do urgent requests get from engines that heed priorities, and does moving take it away or add to it?

One request in ten is urgent, as in the paper, or `--urgent` of them; the same ones are where nobody heeds it. Engines
let urgent ones in first and preempt them last. That is all there is: neither dispatch nor the rescheduler knows of
priorities, unless `--settings` says so. The paper's 1.2 to 1.5 for the mean urgent request, against itself without
priorities, comes of an instance that keeps room free beside an urgent request, so that others move away from it (a
virtual usage that is greater than the real one): `benchmarks.objectives priorities`.

What moves do to those that are moved is told by the same requests in a run of the same dispatch where nothing moves.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from benchmarks.paper.lab import Lab, Outcome, Run, mean, ratio
from benchmarks.simulated import Load
from llumlet.protocol.urgency import is_urgent
from llumsim.cluster.metrics import Metrics, RequestRecord, Slo, quantile
from llumsim.engine.step_model import load_hardware

_LOADS: Final = ((7.4, 2), (10.0, 2), (7.4, 8))
"""Requests a second, and the variation of the time between two: the second is more than the cluster bears."""
OBJECTIVES: Final = {"urgent": Slo(ttft_s=1.0, tpot_s=0.06), "other": Slo(ttft_s=10.0, tpot_s=0.12)}
"""By kind: somebody reads along, and somebody will read it later. A token takes 38 ms where nobody else is."""
_COLUMNS: Final[dict[str, str]] = {
    "ttft_mean_s": "TTFT mean",
    "ttft_p99_s": "p99",
    "tpot_mean_s": "TPOT mean",
    "tpot_p99_s": "p99",
    "e2e_mean_s": "request mean",
    "e2e_p99_s": "p99",
    "slo_attainment": "in time",
    "preemption_loss": "preemption loss",
    "moves_per_request": "moves per request",
}
_MUCH: Final = 1.05
"""Times as long as the other way: from there on a request is worse off, or better."""
_MOVED_COLUMNS: Final = (
    *("moved", "TPOT mean", "staying", "request mean", "staying", "preemption loss", "staying"),
    *("preempted after", "worse off", "better off"),
)


def play(lab: Lab) -> None:
    hardware = load_hardware("a10-llama-7b")
    settings = lab.compared("load-balance", "load-balance+moves")
    outcomes = lab.play(
        Run(
            labels={"rate": rate, "cv": cv, "urgent": lab.urgent, "setting": setting.name, "priorities": by_priority},
            load=Load(lengths="m-m", rate=rate, num_requests=lab.requests(10_000), cv=cv, urgent=lab.urgent),
            setting=setting,
            hardware=replace(hardware, engine=replace(hardware.engine, by_priority=by_priority)),
            measure=measure_kinds,
            keeps_records=True,
        )
        for (rate, cv), setting, by_priority in itertools.product(lab.cells(*_LOADS), settings, (False, True))
    )
    lab.rows(
        (*outcomes[0].run.labels, "requests", *_COLUMNS.values()),
        (
            (*outcome.run.labels.values(), kind, *(outcome[f"{kind}_{name}"] for name in _COLUMNS))
            for outcome, kind in itertools.product(outcomes, OBJECTIVES)
        ),
    )
    moved = list(_moved(outcomes))
    if moved:
        lab.rows((*outcomes[0].run.labels, "requests", *_MOVED_COLUMNS), moved)
    _compare(lab, outcomes)


def measure_kinds(metrics: Metrics, records: Sequence[RequestRecord]) -> Mapping[str, float]:
    """Figures of urgent requests, and of the others."""
    found: dict[str, float] = {}
    for kind, objectives in OBJECTIVES.items():
        those = list(_of_kind(records, kind))
        ttft_s = [one.ttft_s for one in those if one.ttft_s is not None]
        tpot_s = [one.tpot_s for one in those if one.tpot_s is not None]
        e2e_s = [one.e2e_s for one in those if one.e2e_s is not None]
        found |= {
            f"{kind}_ttft_mean_s": mean(ttft_s),
            f"{kind}_ttft_p99_s": quantile(ttft_s, 0.99),
            f"{kind}_tpot_mean_s": mean(tpot_s),
            f"{kind}_tpot_p99_s": quantile(tpot_s, 0.99),
            f"{kind}_e2e_mean_s": mean(e2e_s),
            f"{kind}_e2e_p99_s": quantile(e2e_s, 0.99),
            f"{kind}_slo_attainment": mean([_is_in_time(one, objectives) for one in those]),
            f"{kind}_preemption_loss": mean([one.preemption_loss_s for one in those]),
            f"{kind}_moves_per_request": mean([one.num_moves for one in those]),
        }
    return found


def _of_kind(records: Iterable[RequestRecord], kind: str) -> Iterator[RequestRecord]:
    return (one for one in records if is_urgent(one.priority) == (kind == "urgent"))


def _is_in_time(record: RequestRecord, objectives: Slo) -> bool:
    """Who has no token, as nobody took it, is late."""
    return record.ttft_s is not None and objectives.is_met(record.ttft_s, record.tpot_s or 0.0)


def _moved(outcomes: Sequence[Outcome]) -> Iterator[Sequence[object]]:
    """Rows of what those gain and lose that moved, where something moves and the same dispatch was played without."""
    for moving in outcomes:
        staying = next((one for one in outcomes if _stays(one.run, moving.run)), None)
        if staying is None:
            continue
        for kind in OBJECTIVES:
            number = sum(len(list(_of_kind(played.records, kind))) for played in moving.played)
            pairs = [
                pair
                for there, here in zip(moving.played, staying.played, strict=True)
                for pair in moved_and_same(_of_kind(there.records, kind), here.records)
            ]
            yield (*moving.run.labels.values(), kind, *_figures(pairs, number))


def _stays(run: Run, moving: Run) -> bool:
    """Whether a run is what the other one would be if nothing moved."""
    still = replace(moving.setting, name=run.setting.name, rescheduling=None)
    return moving.setting.rescheduling is not None and run == replace(moving, labels=run.labels, setting=still)


def moved_and_same(
    records: Iterable[RequestRecord], staying: Iterable[RequestRecord]
) -> list[tuple[RequestRecord, RequestRecord]]:
    """Requests that moved, each with itself in the other run; of those that finished in both."""
    others = {one.id: one for one in staying if one.outcome == "finished"}
    moved = (one for one in records if one.has_moved and one.outcome == "finished")
    return [(one, others[one.id]) for one in moved if one.id in others]


def _figures(pairs: Sequence[tuple[RequestRecord, RequestRecord]], number: int) -> Iterator[float]:
    """`_MOVED_COLUMNS`. `number`: of requests, moved or not."""
    both = list(zip(*pairs, strict=True)) or [(), ()]
    yield len(pairs) / max(number, 1)
    yield from (mean([one.tpot_s for one in records if one.tpot_s is not None]) for records in both)
    yield from (mean([one.e2e_s or 0.0 for one in records]) for records in both)
    yield from (mean([one.preemption_loss_s for one in records]) for records in both)
    yield mean([one.num_preemptions_after_move > 0 for one, _ in pairs])
    yield mean([(one.e2e_s or 0.0) > _MUCH * (same.e2e_s or 0.0) for one, same in pairs])
    yield mean([_MUCH * (one.e2e_s or 0.0) < (same.e2e_s or 0.0) for one, same in pairs])


def _compare(lab: Lab, outcomes: Sequence[Outcome]) -> None:
    """The last setting with priorities, against itself without; each where the difference is the greatest."""
    last = [outcome for outcome in outcomes if outcome.run.setting == outcomes[-1].run.setting]
    pairs = list(zip(last[0::2], last[1::2], strict=True))

    def most(name: str) -> float:
        return max(ratio(without[name], with_them[name]) for without, with_them in pairs)

    slowed = max(ratio(with_them["other_e2e_mean_s"], without["other_e2e_mean_s"]) for without, with_them in pairs)
    lab.compare(
        ("urgent: request mean, without over with, up to", "1.2 to 1.5", most("urgent_e2e_mean_s")),
        ("urgent: TTFT mean, up to", "2.9 to 8.6", most("urgent_ttft_mean_s")),
        ("urgent: TTFT p99, up to", "3.6 to 10", most("urgent_ttft_p99_s")),
        ("others: request mean, with over without, up to", "1.13", slowed),
    )
