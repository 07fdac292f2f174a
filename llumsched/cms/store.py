# SPDX-License-Identifier: Apache-2.0
"""The source of a scheduler process's knowledge of the cluster: one interface, three kinds.

listen://HOST:PORT    this process is the CMS: instances report to it (`embedded.py`)
redis://HOST:PORT     a Redis to which instances report (`redis.py`), also behind Sentinels (`process.redis_url`)
HOST:PORT             the embedded CMS of another process, watched (`watch.py`)
"""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

from llumlet.process.addresses import Address
from llumlet.process.credentials import NONE, Credentials
from llumlet.process.redis_url import REDIS_SCHEMES, redis_name
from llumsched.cluster.view import View

LISTEN: Final = "listen://"


class Store(Protocol):
    """Writes `view` on the event loop that called `start`."""

    view: View
    problem: str
    """The reason why the source cannot be reached; "" while `view.connected`."""
    complete: asyncio.Event
    """Set when everything that the source knew has been read once."""

    async def start(self) -> None:
        """Begins to feed the view. An unreachable source is no error: it is retried (`View.connected`). Raises OSError
        if a port to listen on is not available."""
        ...

    async def close(self) -> None:
        """Stops. The view stays as it is."""
        ...


def store_faults(url: str) -> list[str]:
    """Faults of a URL of the forms above, a sentence each."""
    try:
        if url.startswith(REDIS_SCHEMES):
            # Only who uses Redis needs its client.
            from llumlet.process.redis_client import checked_name

            checked_name(url)
        elif "://" in url.removeprefix(LISTEN):
            raise ValueError(f"{url!r} is neither HOST:PORT nor a redis:// URL")
        else:
            _listen_address(url) if url.startswith(LISTEN) else Address.parse(url)
    except ValueError as error:
        return [str(error)]
    return []


def name_of(url: str) -> str:
    """The store's name without a password."""
    return redis_name(url) if url.startswith(REDIS_SCHEMES) else url


def open_store(url: str, credentials: Credentials = NONE, *, insecure: bool = False, silent_s: float = 0.0) -> Store:
    """Opens the store of `url` without starting it. `insecure`: listen beyond loopback without complete credentials.
    `silent_s`: silence after which an instance is gone, if this process keeps the view; at least the default.

    Raises ValueError for an invalid URL, or a host that must not be listened on.
    """
    faults = store_faults(url)
    if faults:
        raise ValueError("; ".join(faults))
    # Each form has needs of its own (a server, the Redis client), which the others need not have installed.
    from llumsched.cms.intake import PATIENCE, Patience

    patience = Patience(silent_s=max(silent_s, PATIENCE.silent_s))
    if url.startswith(REDIS_SCHEMES):
        from llumsched.cms.redis import RedisStore

        return RedisStore(url, patience=patience)
    if url.startswith(LISTEN):
        from llumsched.cms.embedded import EmbeddedStore

        return EmbeddedStore(*_listen_address(url), credentials=credentials, insecure=insecure, patience=patience)
    from llumsched.cms.watch_store import WatchStore

    return WatchStore(Address.parse(url), credentials)


def _listen_address(url: str) -> tuple[str, int]:
    """Host and port; port 0 picks a free one."""
    text = url.removeprefix(LISTEN)
    if text.endswith(":0"):
        return Address.parse(text[:-1] + "1").host, 0
    return Address.parse(text)
