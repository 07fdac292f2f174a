# SPDX-License-Identifier: Apache-2.0
"""TLS contexts whose files may be replaced while the process runs. Standard library only."""

from __future__ import annotations

import ssl
from typing import Any, Self

from llumlet.process.secret_files import Current


class RenewedContext(ssl.SSLContext):
    """Stands for the context that the files make now: each new connection is made with that one, and those that are
    open go on. For servers and clients, event loops and sockets.

    A new context is made for new files, because loading a certificate whose key does not fit would spoil an old one.
    """

    def __new__(cls, current: Current[ssl.SSLContext]) -> Self:
        return super().__new__(cls, current.value.protocol)

    def __init__(self, current: Current[ssl.SSLContext]) -> None:
        self._current = current

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        return self._current.value.wrap_bio(*args, **kwargs)

    def wrap_socket(self, *args: Any, **kwargs: Any) -> ssl.SSLSocket:
        return self._current.value.wrap_socket(*args, **kwargs)
