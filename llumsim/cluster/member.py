# SPDX-License-Identifier: Apache-2.0
"""An instance of the simulated cluster, which reports its load at the cadence of `llumlet.contract.cms.reporter`.

A change is pushed at once, one push at a time and never more often than the link allows. Tokens of running requests
alone are pushed after a tenth of a second. An idle instance repeats its status.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from llumlet.contract.types import InstanceStatus
from llumlet.process.addresses import Address
from llumsim import PS
from llumsim.clock import VirtualLoop
from llumsim.engine.instance import ModelledInstance, described
from llumsim.engine.requests import Watcher
from llumsim.engine.step_model import Hardware

_PORT: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Cadence:
    """The timing of statuses and messages, in seconds."""

    hop_s: float = 0.0005
    """Travel time of a message between any two processes."""
    push_interval_s: float = 0.005
    """Least time between two pushes of an instance, as on a gRPC link (`llumlet.contract.cms.stores`)."""
    tokens_s: float = 0.1
    """Time until new tokens alone are reported."""
    keepalive_s: float = 1.0
    late_s: float = 0.0
    """Additional delay of a status: the scheduler sees a state of that age."""
    foretold: float | None = None
    """Share of requests that end at their limit of tokens; the others stop before it, unpredictably. None: statuses do
    not describe coming steps."""


class Member(ModelledInstance):
    def __init__(
        self,
        loop: VirtualLoop,
        number: int,
        hardware: Hardware,
        cadence: Cadence,
        watcher: Watcher,
        tell: Callable[[InstanceStatus], None],
        *,
        model: str,
        max_moves: int,
        life: int = 0,
    ) -> None:
        """`tell`: the store that takes statuses. `life`: how often an instance of this number has come back."""
        name = f"i{number:04}"
        metadata = described(
            hardware,
            max_moves=max_moves,
            instance_id=name,
            unit_id=name,
            incarnation=f"{name}.{life}",
            ip=f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}",
            api_server_port=_PORT,
            llumlet_port=_PORT + 1,
            node_id=f"n{number // hardware.instances_per_node:04}",
            model=model or hardware.name,
        )
        super().__init__(loop, hardware, metadata, watcher)
        self.foretold = cadence.foretold
        self.number = number
        self.began_ps = loop.now_ps
        self.api_server = Address(metadata.ip, metadata.api_server_port)
        self.llumlet = Address(metadata.ip, metadata.llumlet_port)
        self._tell = tell
        hop_ps = round(cadence.hop_s * PS)
        self._push_interval_ps = max(round(cadence.push_interval_s * PS), 2 * hop_ps)
        self._tokens_ps = round(cadence.tokens_s * PS)
        self._keepalive_ps = round(cadence.keepalive_s * PS)
        self._pushed_ps = loop.now_ps
        self._push_waits = False
        self._told_after_ps = hop_ps
        self.num_statuses = 0
        """Statuses sent."""
        self._push(loop.now_ps)
        # What was said so far is not late: it is what puts an instance into service.
        self._told_after_ps += round(cadence.late_s * PS)
        self._tick(loop.now_ps)

    def changed(self, now_ps: int) -> None:
        """Push the status now, or as soon as the link allows."""
        super().changed(now_ps)
        if self._push_waits or not self.is_alive:
            return
        due_ps = self._pushed_ps + self._push_interval_ps
        if due_ps <= now_ps:
            self._push(now_ps)
        else:
            self._push_waits = True
            self.clock.at(due_ps, self._push)

    def _push(self, now_ps: int) -> None:
        self._push_waits = False
        if not self.is_alive:
            return
        self._pushed_ps = now_ps
        self.num_statuses += 1
        self.engine.advance(now_ps)
        status = self.status_at(now_ps)
        self.clock.at(now_ps + self._told_after_ps, lambda _: self._tell(status))

    def _tick(self, now_ps: int) -> None:
        if not self.is_alive:
            return
        interval_ps = self._tokens_ps if self.engine.decodes else self._keepalive_ps
        if now_ps - self._pushed_ps >= interval_ps:
            self._push(now_ps)
        self.clock.at(self._pushed_ps + interval_ps, self._tick)
