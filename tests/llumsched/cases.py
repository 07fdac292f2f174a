# SPDX-License-Identifier: Apache-2.0
"""Instances in any condition, for the tests of policies and dispatch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llumlet.contract.types import InstanceMetadata, InstanceStatus
from llumsched.cluster.instance import Instance
from llumsched.cluster.providers import Provider
from llumsched.cluster.providers.in_flight import Counters, InFlight
from llumsched.cluster.providers.step_models import StepModels
from llumsched.cluster.table import Table, standard_table
from llumsched.cluster.view import View
from llumsched.latency.fitting import Coefficients
from llumsched.policy.candidates import Candidates, Context
from llumsched.request import Request
from tests.llumsched.latency.test_fitting import TRUE

UNKNOWN = Coefficients(*[math.nan] * 5)
FIELDS = {field.name for field in InstanceMetadata.DESCRIPTOR.fields}


class Known:
    """A provider of a step model that is known."""

    columns = StepModels.columns

    def __init__(
        self,
        coefficients: Coefficients = TRUE,
        stretch: float = 1.0,
        gone_per_s: float = math.nan,
        ended_per_s: float = math.nan,
    ) -> None:
        self._numbers = (*coefficients, stretch, gone_per_s, ended_per_s)

    def row(self, instance: Instance, before: Instance | None) -> tuple[float, ...]:
        return self._numbers

    def on_change(self, listener: object) -> None:
        pass


class KnownOf(Known):
    """Step models of these instances only."""

    def __init__(self, *ids: str) -> None:
        super().__init__()
        self._ids = ids
        self._of_others = Known(UNKNOWN)

    def row(self, instance: Instance, before: Instance | None) -> tuple[float, ...]:
        return super().row(instance, before) if instance.id in self._ids else self._of_others.row(instance, before)


def metadata(instance_id: str, **fields: Any) -> InstanceMetadata:
    defaults: dict[str, Any] = {
        "incarnation": "first",
        "instance_type": "neutral",
        "ip": "127.0.0.1",
        "api_server_port": 8000,
        "llumlet_port": 7000,
        "max_model_len": 4096,
        "served_models": ["m"],
        "data_parallel_size": 1,
    }
    return InstanceMetadata(instance_id=instance_id, **{**defaults, **fields})


def status(instance_id: str, update_id: int = 1, **fields: Any) -> InstanceStatus:
    defaults: dict[str, Any] = {"incarnation": "first", "schedulable": True, "num_total_gpu_tokens": 10_000}
    return InstanceStatus(instance_id=instance_id, update_id=update_id, **{**defaults, **fields})


def instance(instance_id: str, received_s: float = 0.0, **fields: Any) -> Instance:
    """Of fields of both messages; those that only a status has go there."""
    of_metadata = {name: value for name, value in fields.items() if name in FIELDS}
    of_status = {name: value for name, value in fields.items() if name not in FIELDS}
    return Instance(metadata(instance_id, **of_metadata), status(instance_id, **of_status), received_s)


def starting(instance_id: str, received_s: float = 0.0, **fields: Any) -> Instance:
    """One that has not reported yet."""
    return Instance(metadata(instance_id, **fields), None, received_s)


def table(*instances: Instance, sent: Mapping[str, Counters] | None = None, known: Provider | None = None) -> Table:
    """`sent`: what is on its way, by id. `known`: how long steps take; None: nothing is known of it."""
    in_flight = InFlight()
    for instance_id, counters in (sent or {}).items():
        in_flight.add(instance_id, counters)
    made = standard_table(in_flight, known or Known(UNKNOWN))
    for one in instances:
        made.appeared(one)
    return made


def candidates(
    *instances: Instance,
    now_s: float = 0.0,
    sent: Mapping[str, Counters] | None = None,
    avoid: frozenset[str] = frozenset(),
    complaints: Mapping[str, str] | None = None,
    known: Provider | None = None,
    **request: Any,
) -> Candidates:
    """`request`: its fields."""
    context = Context(now_s, Request(**request), avoid, complaints or {})
    return Candidates(table(*instances, sent=sent, known=known), context)


def put(view: View, instance_id: str, update_id: int = 1, **fields: Any) -> None:
    """An instance, or its newer status, into a view."""
    of_metadata = {name: value for name, value in fields.items() if name in FIELDS}
    of_status = {name: value for name, value in fields.items() if name not in FIELDS or name == "incarnation"}
    view.put_metadata(metadata(instance_id, **of_metadata))
    assert view.put_status(status(instance_id, update_id, **of_status))


def distribution(place: Path, entry_points: str, source: str, module: str = "tiny_extension") -> None:
    """A tiny one, as pip leaves it in site-packages."""
    (place / f"{module}.py").write_text(source)
    info = place / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)
