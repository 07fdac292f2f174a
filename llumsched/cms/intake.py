# SPDX-License-Identifier: Apache-2.0
"""Checks the reports of instances, and removes silent instances.

An incarnation identifies a life of an instance. A life that was replaced or has signed off is over: its later reports
change nothing. A life that only fell silent may return.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from llumlet.contract.types import InstanceMetadata, InstanceStatus
from llumlet.process.addresses import Address
from llumsched.cluster.providers.status import numbers_of
from llumsched.cluster.view import View
from llumsched.cms.validation import metadata_faults, status_faults

logger = logging.getLogger(__name__)

MAX_INSTANCES: Final = 10_000
_MAX_OVER: Final = 4 * MAX_INSTANCES
SWEEP_S: Final = 0.25


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds of silence after which an instance leaves the view."""

    silent_s: float = 10.0
    """Silence on a standing connection: ten keep-alives, so that a starved process survives."""
    cut_s: float = 3.0
    """Time to reconnect after a connection broke: two attempts of a reporter."""


PATIENCE: Final = Patience()


class ReportRefused(Exception):
    """A report that is refused. `hopeless`: the sender's next one would be too."""

    def __init__(self, text: str, *, hopeless: bool = False) -> None:
        super().__init__(text)
        self.hopeless = hopeless


class Intake:
    """Writes `view` on its event loop."""

    def __init__(self, view: View, patience: Patience, clock: Callable[[], float] = time.monotonic) -> None:
        self._view = view
        self._patience = patience
        self._clock = clock
        self._over: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._deadlines: dict[str, float] = {}
        """Times by which instances must be heard again."""
        self._swept_s = clock()

    def metadata(self, metadata: InstanceMetadata) -> None:
        """Raises ReportRefused."""
        faults = metadata_faults(metadata)
        if faults:
            raise ReportRefused("; ".join(faults))
        known = self._view.get(metadata.instance_id)
        if (metadata.instance_id, metadata.incarnation) in self._over:
            if known is not None and known.metadata.incarnation != metadata.incarnation:
                raise ReportRefused(
                    f"this life of the instance is over: {_shared(metadata, known.metadata)}", hopeless=True
                )
            raise ReportRefused("this life of the instance is over", hopeless=True)
        if known is None and len(self._view) >= MAX_INSTANCES:
            raise ReportRefused(f"there are {MAX_INSTANCES} instances already")
        if known is not None and known.metadata.incarnation != metadata.incarnation:
            if 0 < metadata.utc_create < known.metadata.utc_create:
                why = _shared(metadata, known.metadata)
                raise ReportRefused(f"a later life of the instance has begun: {why}", hopeless=True)
            self._bury(known.id, known.metadata.incarnation)
            logger.info("Instance %s has restarted", known.id)
        elif known is None:
            logger.info("Instance %s has appeared", metadata.instance_id)
        self._view.put_metadata(metadata)
        self.heard(metadata.instance_id)

    def status(self, status: InstanceStatus, instance_id: str, incarnation: str) -> bool:
        """Takes a status; False if it is late or its instance is unknown. Raises ReportRefused."""
        numbers = numbers_of(status)
        faults = status_faults(status, instance_id, incarnation, numbers)
        if faults:
            raise ReportRefused("; ".join(faults))
        taken = self._view.put_status(status, numbers=numbers)
        if taken:
            self.heard(instance_id)
        return taken

    def heard(self, instance_id: str) -> None:
        self._deadlines[instance_id] = self._clock() + self._patience.silent_s

    def cut(self, instance_id: str, incarnation: str) -> None:
        """Notes that the connection of this life broke."""
        if self.lives(instance_id, incarnation):
            soon = self._clock() + self._patience.cut_s
            self._deadlines[instance_id] = min(self._deadlines.get(instance_id, soon), soon)

    def left(self, instance_id: str, incarnation: str) -> None:
        """Notes that this life has signed off."""
        self._bury(instance_id, incarnation)
        if self.lives(instance_id, incarnation) or instance_id in self._view.lost:
            self.remove(instance_id)

    def remove(self, instance_id: str) -> None:
        """Removes a lost instance, whose life may return."""
        self._deadlines.pop(instance_id, None)
        if instance_id in self._view:
            logger.info("Instance %s has left", instance_id)
        self._view.remove(instance_id)

    def lives(self, instance_id: str, incarnation: str) -> bool:
        known = self._view.get(instance_id)
        return known is not None and known.metadata.incarnation == incarnation

    async def keep_sweeping(self) -> None:
        """Sweeps periodically. Time in which this process stood still does not count as silence."""
        self._forgive(self._clock() - self._swept_s)
        self._swept_s = self._clock()
        while True:
            await asyncio.sleep(SWEEP_S)
            self.sweep()

    def sweep(self) -> None:
        """Removes silent instances. A late sweep shows that this process was held up and heard nobody."""
        now = self._clock()
        late_s = now - self._swept_s - SWEEP_S
        self._swept_s = now
        if late_s > SWEEP_S:
            self._forgive(late_s)
        for instance_id in [each for each, deadline in self._deadlines.items() if deadline < now]:
            logger.warning("Instance %s has fallen silent", instance_id)
            del self._deadlines[instance_id]
            self._view.lose(instance_id)

    def _forgive(self, seconds: float) -> None:
        for instance_id in self._deadlines:
            self._deadlines[instance_id] += seconds

    def _bury(self, instance_id: str, incarnation: str) -> None:
        self._over[instance_id, incarnation] = None
        if len(self._over) > _MAX_OVER:
            self._over.popitem(last=False)


def _shared(earlier: InstanceMetadata, later: InstanceMetadata) -> str:
    """The reason for refusing an instance whose id a later one has too."""
    first, second = (Address(one.ip, one.api_server_port) for one in (earlier, later))
    return (
        f"{first} and {second} both report as {later.instance_id!r}; if both "
        "are to serve, give each an id of its own (--llumlet-instance-id)"
    )
