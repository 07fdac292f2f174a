# SPDX-License-Identifier: Apache-2.0
"""Tries the parts of a policy with no, one and three instances when it is loaded, so that they do not raise in
decisions."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from typing import Final

import numpy as np

from llumlet.contract.types import InstanceMetadata, InstanceStatus
from llumsched.cluster.instance import Instance
from llumsched.cluster.providers import RequestProvider
from llumsched.cluster.providers.in_flight import InFlight
from llumsched.cluster.providers.step_models import StepModels
from llumsched.cluster.table import Table, standard_table
from llumsched.policy import pipeline
from llumsched.policy.candidates import Candidates, Context
from llumsched.policy.filters import Filter, GroupFilter
from llumsched.policy.metrics import Metric
from llumsched.policy.selectors import Draw, Selector
from llumsched.request import Request

_SIZES: Final = (0, 1, 3)
_REQUEST: Final = Request("trial", "trial", 100, ttft_slo_ms=1000.0, tpot_slo_ms=50.0, may_wait=True)


def fault_of(part: object, providers: Sequence[RequestProvider]) -> str | None:
    """The reason why a filter, selector or metric cannot be used; None if it can. `providers`: of columns beside the
    table's."""
    for table in _tables():
        candidates = Candidates(table, Context(1.0, _REQUEST), providers)
        try:
            _try(part, candidates)
        except Exception as error:  # noqa: BLE001 - whatever a foreign part raises
            return f"raises with {len(candidates)} instances: {type(error).__name__}: {error}"
    return None


def _try(part: object, candidates: Candidates) -> None:
    number = len(candidates)
    nobody = np.zeros(number, np.bool_)
    if isinstance(part, GroupFilter):
        pipeline.checked(part.refuse_among(candidates, nobody), number)
    elif isinstance(part, Filter):
        pipeline.checked(part.refuse(candidates), number)
    elif isinstance(part, Metric):
        part.computed(candidates)
    elif isinstance(part, Selector) and number:
        costs = _Costs(number)
        part.choose(np.arange(number), costs, candidates.cluster.order, Draw(random.Random(0)))


class _Costs(dict[str, "np.typing.NDArray[np.float64]"]):
    """The same costs under any name that a selector asks for."""

    def __init__(self, number: int) -> None:
        super().__init__(load=np.arange(number, dtype=np.float64))

    def __missing__(self, name: str) -> np.typing.NDArray[np.float64]:
        return self["load"]


@functools.cache
def _tables() -> Sequence[Table]:
    tables = []
    for size in _SIZES:
        table = standard_table(InFlight(), StepModels(lambda: 0.0))
        for number in range(size):
            name = f"trial-{number}"
            metadata = InstanceMetadata(instance_id=name, instance_type="neutral", served_models=["trial"])
            status = InstanceStatus(instance_id=name, schedulable=True, num_total_gpu_tokens=1000 * number)
            table.appeared(Instance(metadata, status, 0.0))
        tables.append(table)
    return tables
