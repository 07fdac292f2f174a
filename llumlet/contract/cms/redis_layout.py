# SPDX-License-Identifier: Apache-2.0
"""Names of the keys and of the channel of one cluster in a Redis.

    llumnix:instance_metadata:<id>    InstanceMetadata, serialised
    llumnix:instance_status:<id>      InstanceStatus, serialised
    llumnix:peers:<digest>            sorted set: ids of instances of one compatibility digest, by when they were there
    llumnix:instances                 sorted set: ids of all instances, likewise
    llumnix:changes                   channel: the id, published after each write
    llumnix:rescheduler               the lease of the rescheduler that leads, and `llumnix:rescheduler_term`

A URL with `?cluster=NAME` has `llumnix:NAME:` in the place of `llumnix:`, so that several clusters share a database.
Redis does not scope channels by database: that of any database but 0 ends in `:<database>`. Llumlets of the
release before publish without that ending, and are heard as well; ids that a database does not have are passed over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from llumlet.process.redis_url import RedisUrl


@dataclass(frozen=True, slots=True)
class Layout:
    prefix: str
    channel: str

    @classmethod
    def of(cls, url: str) -> Self:
        """The layout that a URL asks for. Raises ValueError for an invalid URL."""
        where = RedisUrl.parse(url)
        prefix = f"llumnix:{where.cluster}:" if where.cluster else "llumnix:"
        return cls(prefix, f"{prefix}changes:{where.database}" if where.database else f"{prefix}changes")

    @property
    def heard_channels(self) -> frozenset[str]:
        """The channel, and the one at which llumlets of the former release publish."""
        return frozenset((self.channel, f"{self.prefix}changes"))

    @property
    def metadata(self) -> str:
        """The prefix of an instance's id in a key."""
        return f"{self.prefix}instance_metadata:"

    @property
    def status(self) -> str:
        """Likewise."""
        return f"{self.prefix}instance_status:"

    @property
    def instances(self) -> str:
        return f"{self.prefix}instances"

    @property
    def lease(self) -> str:
        return f"{self.prefix}rescheduler"

    @property
    def term(self) -> str:
        return f"{self.prefix}rescheduler_term"

    def peers(self, digest: str) -> str:
        return f"{self.prefix}peers:{digest}"
