# SPDX-License-Identifier: Apache-2.0
"""TLS contexts of connections that others open to this process, and of its own. New files are used by the next
connection. Standard library only."""

from __future__ import annotations

import ssl
from typing import Any, Self

from llumlet.process.secret_files import Current, read_secret


class RenewedContext(ssl.SSLContext):
    """Stands for the context that the files make now: each new connection is made with that one, and open ones go on.
    For servers and clients, event loops and sockets.

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


def server_context(certfile: str, keyfile: str) -> ssl.SSLContext:
    """TLS 1.2 and above. Raises ValueError or OSError if the files are not a certificate and its key."""
    return RenewedContext(Current(_read_server, "certificate and key of the HTTPS server", certfile, keyfile))


def _read_server(certfile: str, keyfile: str) -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    made.set_alpn_protocols(["http/1.1"])
    read_secret(keyfile)
    # A key with a passphrase is refused, not asked for at a terminal that may not be there.
    made.load_cert_chain(certfile, keyfile, password="")
    return made


def server_faults(certfile: str, keyfile: str) -> list[str]:
    """Faults of `--ssl-certfile` and `--ssl-keyfile`; none if neither was given."""
    if bool(certfile) != bool(keyfile):
        return ["--ssl-certfile and --ssl-keyfile belong together"]
    try:
        if certfile:
            _read_server(certfile, keyfile)
    except (OSError, ValueError) as error:
        return [f"--ssl-certfile {certfile} and --ssl-keyfile {keyfile} do not fit: {error}"]
    return []


def client_context(ca_file: str) -> ssl.SSLContext:
    """A context that trusts the authorities of `ca_file`, or the system's if it is "". Raises OSError (also
    ssl.SSLError) if the file holds none."""
    if not ca_file:
        return _read_client("")
    return RenewedContext(Current(_read_client, f"authorities in {ca_file}", ca_file))


def _read_client(ca_file: str) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=ca_file or None)


def checked_ca_file(path: str) -> str:
    """The path of a file with certificates. Raises ValueError if it holds none."""
    try:
        _read_client(path)
    except OSError as error:
        raise ValueError(f"{path} holds no certificates: {error}") from None
    return path
