# SPDX-License-Identifier: Apache-2.0
"""What is known of one engine at a moment."""

from __future__ import annotations

from dataclasses import dataclass, field

from llumlet.contract.types import InstanceMetadata, InstanceStatus
from llumlet.process.addresses import Address


@dataclass(frozen=True, slots=True)
class Instance:
    """One life of one engine. A new object with every change: what a reader holds does not change under it."""

    metadata: InstanceMetadata
    status: InstanceStatus | None
    """The newest status; None until the first one has come: nothing is sent to such an instance."""
    received_s: float
    """The time at which the newest status (before it, the metadata) was received, by this process's monotonic clock."""
    late_s: float = 0.0
    """How long the newest status was on its way, as far as the clocks of both ends can tell; 0 if that is next to
    nothing, or nonsense."""
    numbers: tuple[float, ...] = field(default=(), compare=False, repr=False)
    """Numbers of the status, if they were read when it was taken, in the order of the table."""

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
        """The moment that the newest status shows, by this process's monotonic clock."""
        return self.received_s - self.late_s

    def age_s(self, now_s: float) -> float:
        return now_s - self.received_s
