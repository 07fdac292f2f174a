# SPDX-License-Identifier: Apache-2.0
"""An engine's state at one moment."""

from __future__ import annotations

from dataclasses import dataclass, field

from llumlet.contract.types import InstanceMetadata, InstanceStatus
from llumlet.process.addresses import Address


@dataclass(frozen=True, slots=True)
class Instance:
    """A life of an engine. Every change makes a new object, so that readers keep a consistent one."""

    metadata: InstanceMetadata
    status: InstanceStatus | None
    """The newest status; None before the first, when nothing is sent to the instance."""
    received_s: float
    """When the newest status (or before it, the metadata) was received, on this process's monotonic clock."""
    late_s: float = 0.0
    """Transport time of the newest status, as far as both clocks tell; 0 if it is negligible or nonsense."""
    numbers: tuple[float, ...] = field(default=(), compare=False, repr=False)
    """Numbers of the status, if already read, in the order of the table."""

    @property
    def id(self) -> str:
        return self.metadata.instance_id

    @property
    def llumlet(self) -> Address:
        return Address(self.metadata.ip, self.metadata.llumlet_port)

    @property
    def api_server(self) -> Address:
        return Address(self.metadata.ip, self.metadata.api_server_port)

    @property
    def as_of_s(self) -> float:
        """The moment of the newest status on this process's monotonic clock."""
        return self.received_s - self.late_s

    def age_s(self, now_s: float) -> float:
        return now_s - self.received_s
