# SPDX-License-Identifier: Apache-2.0
"""The settings that name credentials, and the files behind them. Standard library only, as parsers are built early."""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from llumlet.process.kinds import Faulty, Kind
from llumlet.process.secret_files import Current, read_file
from llumlet.process.settings import Group
from llumlet.process.tokens import MIN_TOKEN_CHARACTERS

_PATH: Final = Kind(os.path.abspath, "FILE")
_TLS: Final = ("tls_cert", "tls_key", "tls_ca")
_credentials = Group("credentials", "Files by which instances and their callers know each other.", "--llumlet-")


class CredentialsError(Faulty):
    """Credentials that cannot be used. The faults never tell their contents."""


@dataclass(frozen=True, slots=True)
class CredentialFiles:
    """Paths, the same settings for instances and for their callers; empty for what is not used."""

    tls_cert: str = _credentials.setting(
        "",
        _PATH,
        "certificate of this process (PEM), valid for the address under which others reach it; empty disables TLS",
        variable="LLUMNIX_TLS_CERT",
    )
    tls_key: str = _credentials.setting(
        "", _PATH, "private key of --llumlet-tls-cert (PEM), not readable by others", variable="LLUMNIX_TLS_KEY"
    )
    tls_ca: str = _credentials.setting(
        "", _PATH, "certificates of the authorities whose certificates are accepted (PEM)", variable="LLUMNIX_TLS_CA"
    )
    token_file: str = _credentials.setting(
        "",
        _PATH,
        f"file with the token that all instances and their callers share (at least {MIN_TOKEN_CHARACTERS} "
        "characters), or JSON with the tokens of each role; not readable by others",
        variable="LLUMNIX_TOKEN_FILE",
    )

    def tls(self) -> Current[Tls] | None:
        """The TLS files; None without any. Raises CredentialsError."""
        paths = [getattr(self, name) for name in _TLS]
        if all(paths):
            return Current(_read_tls, "llumlets' certificate, key and authority", *paths)
        faults: list[str] = []
        if any(paths):
            flags = ", ".join(flag(name) for name, path in zip(_TLS, paths, strict=True) if not path)
            faults.append(f"mutual TLS needs {flags} as well")
        _read_all(dict(zip(_TLS, paths, strict=True)), faults)
        if faults:
            raise CredentialsError(faults)
        return None


@dataclass(frozen=True, slots=True)
class Tls:
    """Contents of the TLS files, which fit each other. The representation shows none of it."""

    certificate: bytes = field(repr=False)
    key: bytes = field(repr=False)
    authority: bytes = field(repr=False)


def _read_tls(cert: str, key: str, ca: str) -> Tls:
    """Raises CredentialsError."""
    faults: list[str] = []
    contents = _read_all({"tls_cert": cert, "tls_key": key, "tls_ca": ca}, faults)
    if not faults:
        faults += _tls_faults(cert, key, ca)
    if faults:
        raise CredentialsError(faults)
    return Tls(contents["tls_cert"], contents["tls_key"], contents["tls_ca"])


def _read_all(paths: Mapping[str, str], faults: list[str]) -> dict[str, bytes]:
    """The contents of the files that are named, by field; `faults` gets what is wrong with the others."""
    contents: dict[str, bytes] = {}
    for name, path in paths.items():
        try:
            contents[name] = read_file(path, is_secret=name == "tls_key") if path else b""
        except ValueError as error:
            faults.append(f"{flag(name)} {error}")
    return contents


def _tls_faults(cert: str, key: str, ca: str) -> list[str]:
    """The faults that gRPC would only write to its log, at the first connection."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_verify_locations(ca)
    except (OSError, ValueError) as error:
        return [f"{flag('tls_ca')} {ca} holds no certificates: {error}"]
    try:
        # A key with a passphrase is refused, not asked for at a terminal that may not be there.
        context.load_cert_chain(cert, key, password="")
    except (OSError, ValueError) as error:
        return [f"{flag('tls_cert')} {cert} and {flag('tls_key')} {key} do not fit: {error}"]
    return []


def flag(name: str) -> str:
    """The flag that sets a field."""
    return _credentials.prefix + name.replace("_", "-")
