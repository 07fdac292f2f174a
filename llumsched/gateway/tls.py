# SPDX-License-Identifier: Apache-2.0
"""TLS of the connections that clients open."""

from __future__ import annotations

import ssl


def context(certfile: str, keyfile: str) -> ssl.SSLContext:
    """TLS 1.2 and above. Raises OSError if the files are no certificate and its key; ssl.SSLError is one."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    # A key with a passphrase is refused, not asked for at a terminal that may not be there.
    made.load_cert_chain(certfile, keyfile, password="")
    made.set_alpn_protocols(["http/1.1"])
    return made


def faults(certfile: str, keyfile: str) -> list[str]:
    try:
        context(certfile, keyfile)
    except (OSError, ValueError) as error:
        return [f"--ssl-certfile {certfile} and --ssl-keyfile {keyfile} do not fit: {error}"]
    return []
