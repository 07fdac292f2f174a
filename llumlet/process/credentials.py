# SPDX-License-Identifier: Apache-2.0
"""Authentication of llumlets and their callers: mutual TLS, and a bearer token.

Both ends of a connection show a certificate of the same authority, and each call carries a token of the caller's role.
Only paths travel between processes; contents are read where they are used, and never printed. Standard library only, as
parsers are built early.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Self

from llumlet.process.kinds import Faulty, Kind
from llumlet.process.secret_files import Current, read_file
from llumlet.process.settings import Group
from llumlet.process.tokens import ALL, MIN_TOKEN_CHARACTERS, Role, Tokens, read_peers_tokens, read_tokens

TOKEN_METADATA: Final = "authorization"
_PATH: Final = Kind(os.path.abspath, "FILE")
_TLS: Final = ("tls_cert", "tls_key", "tls_ca")
_credentials = Group("credentials", "Files by which instances and their callers know each other.", "--llumlet-")


class CredentialsError(Faulty):
    """Credentials that cannot be used. The faults never tell their contents."""


@dataclass(frozen=True, slots=True)
class CredentialFiles:
    """Paths of credentials, for instances and their callers alike; "" if unused."""

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
        paths = {name: getattr(self, name) for name in _TLS}
        if all(paths.values()):
            return Current(_read_tls, "llumlets' certificate, key and authority", *paths.values())
        if any(paths.values()):
            missing = ", ".join(_flag(name) for name, path in paths.items() if not path)
            faults = [f"mutual TLS needs {missing} as well"]
            _read_all(paths, faults)
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
    return Tls(*contents)


def _read_all(paths: Mapping[str, str], faults: list[str]) -> list[bytes]:
    """Contents of the named files; `faults` gets those of the others."""
    contents: list[bytes] = []
    for name, path in paths.items():
        try:
            contents.append(read_file(path, is_secret=name == "tls_key") if path else b"")
        except ValueError as error:
            faults.append(f"{_flag(name)} {error}")
    return contents


def _tls_faults(cert: str, key: str, ca: str) -> list[str]:
    """The faults that gRPC would only write to its log, at the first connection."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_verify_locations(ca)
    except (OSError, ValueError) as error:
        return [f"{_flag('tls_ca')} {ca} holds no certificates: {error}"]
    try:
        # A key with a passphrase is refused, not asked for at a terminal that may not be there.
        context.load_cert_chain(cert, key, password="")
    except (OSError, ValueError) as error:
        return [f"{_flag('tls_cert')} {cert} and {_flag('tls_key')} {key} do not fit: {error}"]
    return []


def _flag(name: str) -> str:
    """The flag that sets a field."""
    return _credentials.flag(name)


@dataclass(frozen=True, slots=True)
class Credentials:
    """The credential files; None for what is not used. The representation shows nothing of their contents."""

    tls_files: Current[Tls] | None = field(default=None, repr=False, compare=False)
    token_file: Current[Tokens] | None = field(default=None, repr=False, compare=False)
    role: Role = Role.PEER
    """The role whose token this process shows."""

    @classmethod
    def load(cls, files: CredentialFiles, role: Role = Role.PEER) -> Self:
        """Reads the files. Raises CredentialsError."""
        faults, tls, tokens = [], None, None
        try:
            tls = files.tls()
        except CredentialsError as error:
            faults += error.faults
        try:
            if files.token_file:
                reader = read_peers_tokens if role is Role.PEER else read_tokens
                tokens = Current(reader, "llumlets' tokens", files.token_file)
        except ValueError as error:
            faults.append(f"{_flag('token_file')} {error}")
        if faults:
            raise CredentialsError(faults)
        return cls(tls, tokens, role)

    @property
    def tls(self) -> Tls | None:
        """The certificate, key and authority that the files have now; None without files."""
        return self.tls_files.value if self.tls_files else None

    @property
    def complete(self) -> bool:
        """True if both ends of every connection are authenticated, and it is encrypted."""
        return self.tls_files is not None and self.token_file is not None

    @property
    def tokens(self) -> Tokens | None:
        """The tokens that the file has now; None without a file."""
        return self.token_file.value if self.token_file else None

    @property
    def own_tokens(self) -> tuple[bytes, ...]:
        """Tokens of this process's role, in clear; the first is the one that it shows."""
        return self.tokens.in_clear(self.role) if self.tokens else ()

    @property
    def call_metadata(self) -> tuple[tuple[str, str], ...]:
        """The token, as gRPC metadata that goes with each call; empty without a token file."""
        own = self.own_tokens
        return ((TOKEN_METADATA, f"Bearer {own[0].decode()}"),) if own else ()

    def roles(self, metadata: Iterable[tuple[str, str | bytes]]) -> frozenset[Role]:
        """Roles of the token in a call's metadata; none for a stranger, all without a token file."""
        tokens = self.tokens
        if tokens is None:
            return ALL
        shown = [value for key, value in metadata if key == TOKEN_METADATA]
        if len(shown) != 1:
            return frozenset()
        value = shown[0].decode("latin-1") if isinstance(shown[0], bytes) else shown[0]
        scheme, _, token = value.partition(" ")
        return tokens.roles(token) if scheme == "Bearer" else frozenset()


NONE: Final = Credentials()
"""No credentials: anybody may call, unencrypted."""
