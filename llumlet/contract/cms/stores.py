# SPDX-License-Identifier: Apache-2.0
"""Opens cluster metadata stores by address: an embedded one (HOST:PORT), or a Redis (redis://…)."""

from __future__ import annotations

from llumlet.contract.cms.directory import CmsDirectory, Directory
from llumlet.contract.cms.report_links import GrpcLink, Link
from llumlet.process.addresses import Address
from llumlet.process.credentials import NONE, Credentials
from llumlet.process.redis_url import REDIS_SCHEMES


def open_link(store: str, credentials: Credentials) -> Link:
    """A link to `HOST:PORT` or a `redis://` URL. Raises ValueError; connects to nothing."""
    if store.startswith(REDIS_SCHEMES):
        # Only who uses Redis needs its client.
        from llumlet.contract.cms.redis_link import RedisLink

        return RedisLink(store)
    if "://" in store:
        raise ValueError(f"{store!r} is neither HOST:PORT nor a redis:// URL")
    return GrpcLink(Address.parse(store), credentials)


def open_directory(store: str, credentials: Credentials = NONE) -> Directory:
    """A directory at `HOST:PORT` or a `redis://` URL. Raises ValueError; connects to nothing yet."""
    if store.startswith(REDIS_SCHEMES):
        # Only who uses Redis needs its client.
        from llumlet.contract.cms.redis_directory import RedisDirectory

        return RedisDirectory(store)
    return CmsDirectory(Address.parse(store), credentials)
