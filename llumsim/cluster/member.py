# SPDX-License-Identifier: Apache-2.0
"""One instance of the simulated cluster.

It reports as instances do (`contract.cms.reporter`): with every change, one push at a time and never more
often than the link allows; tokens of running requests alone after a tenth of a second; an idle one repeats itself.
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
    """When statuses are sent, and how long messages take. Seconds."""

    hop_s: float = 0.0005
    """One way, between any two processes."""
    push_interval_s: float = 0.005
    """Between two pushes of one instance: of a gRPC link (`llumlet.contract.cms.stores`)."""
    tokens_s: float = 0.1
    """After which a change that is only tokens is told."""
    keepalive_s: float = 1.0
    late_s: float = 0.0
    """How much longer than a hop a status is on its way: the scheduler sees what was so long ago."""
    foretold: float | None = None
    """Share of the requests that end where their limit of tokens is; the others stop before, as nobody can tell. None:
    statuses say nothing of coming steps."""


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
        """That were sent."""
        self._push(loop.now_ps)
        # What was said so far is not late: it is what puts an instance into service.
        self._told_after_ps += round(cadence.late_s * PS)
        self._tick(loop.now_ps)

    def changed(self, now_ps: int) -> None:
        """It is told, now or as soon as the link allows."""
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
