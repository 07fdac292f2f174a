# SPDX-License-Identifier: Apache-2.0
"""TLS of HTTP servers and clients. Changed files apply to the next connection."""

from __future__ import annotations

import ssl

from llumlet.process.renewed_tls import RenewedContext
from llumlet.process.secret_files import Current, read_secret


def server_context(certfile: str, keyfile: str) -> ssl.SSLContext:
    """TLS 1.2 and above. Raises ValueError or OSError if the files are not a certificate and its key."""
    return RenewedContext(Current(_read_server, "certificate and key of the HTTPS server", certfile, keyfile))


def _read_server(certfile: str, keyfile: str) -> ssl.SSLContext:
    read_secret(keyfile)
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    # A key with a passphrase is refused, not asked for at a terminal that may not be there.
    made.load_cert_chain(certfile, keyfile, password="")
    made.set_alpn_protocols(["http/1.1"])
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
