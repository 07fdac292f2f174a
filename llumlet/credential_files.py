# SPDX-License-Identifier: Apache-2.0
"""The settings that name credentials, and the files behind them. Standard library only, as parsers are built early."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from typing import Final

from llumlet.kinds import Faulty, Kind
from llumlet.secret_files import read_file
from llumlet.settings import Group
from llumlet.tokens import MIN_TOKEN_CHARACTERS

_PATH: Final = Kind(os.path.abspath, "FILE")
_TLS: Final = ("tls_cert", "tls_key", "tls_ca")
_credentials = Group("credentials", "As the instances have them; the token may be an operator's.", "--llumlet-")


class CredentialsError(Faulty):
    """Credentials that cannot be used. The faults never tell their contents."""


@dataclass(frozen=True, slots=True)
class CredentialFiles:
    """Paths, the same settings for instances and for their callers; empty for what is not used."""

    tls_cert: str = _credentials.setting(
        "",
        _PATH,
        "This side's certificate (PEM). It must name the address under which others reach it.",
        variable="LLUMNIX_TLS_CERT",
    )
    tls_key: str = _credentials.setting(
        "", _PATH, "The certificate's private key (PEM), not readable for everybody.", variable="LLUMNIX_TLS_KEY"
    )
    tls_ca: str = _credentials.setting(
        "", _PATH, "Certificates of the authority whose certificates are accepted (PEM).", variable="LLUMNIX_TLS_CA"
    )
    token_file: str = _credentials.setting(
        "",
        _PATH,
        "A file, not readable for everybody, with the token that all instances and their callers share, "
        f"at least {MIN_TOKEN_CHARACTERS} characters, or with the tokens of each role, as JSON.",
        variable="LLUMNIX_TOKEN_FILE",
    )

    def read_tls(self) -> dict[str, bytes]:
        """The contents of the TLS files by field, empty for what is not used. Raises CredentialsError."""
        faults: list[str] = []
        contents: dict[str, bytes] = {}
        paths = {name: getattr(self, name) for name in _TLS}
        if any(paths.values()) and not all(paths.values()):
            flags = ", ".join(flag(name) for name, path in paths.items() if not path)
            faults.append(f"mutual TLS needs {flags} as well")
        for name, path in paths.items():
            try:
                contents[name] = read_file(path, is_secret=name == "tls_key") if path else b""
            except ValueError as error:
                faults.append(f"{flag(name)} {error}")
        if not faults and all(paths.values()):
            faults += self._tls_faults()
        if faults:
            raise CredentialsError(faults)
        return contents

    def _tls_faults(self) -> list[str]:
        """What gRPC would only say to its log, at the first connection."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_verify_locations(self.tls_ca)
        except (OSError, ValueError) as error:
            return [f"{flag('tls_ca')} {self.tls_ca} holds no certificates: {error}"]
        try:
            # A key with a passphrase is refused, not asked for at a terminal that may not be there.
            context.load_cert_chain(self.tls_cert, self.tls_key, password="")
        except (OSError, ValueError) as error:
            return [f"{flag('tls_cert')} {self.tls_cert} and {flag('tls_key')} {self.tls_key} do not fit: {error}"]
        return []


def flag(name: str) -> str:
    """The flag that sets a field."""
    return _credentials.prefix + name.replace("_", "-")
