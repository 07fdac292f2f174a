# SPDX-License-Identifier: Apache-2.0
"""TLS of the connections on which workers send each other KV blocks."""

from __future__ import annotations

import ssl
from functools import partial

from llumlet.process.secret_files import Current, read_secret
from llumlet.process.tls import RenewedContext


def context(certificate: str, key: str, authority: str, *, server_side: bool) -> ssl.SSLContext:
    """Both ends show a certificate of the same authority. New files are used by the next connection. Raises ValueError
    or OSError for files that do not go together."""
    what = "certificate, key and authority of the connections for blocks"
    return RenewedContext(Current(partial(_read, server_side), what, certificate, key, authority))


def _read(server_side: bool, certificate: str, key: str, authority: str) -> ssl.SSLContext:
    read_secret(key)
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.load_cert_chain(certificate, key, password="")
    made.load_verify_locations(authority)
    made.verify_mode = ssl.CERT_REQUIRED
    return made
