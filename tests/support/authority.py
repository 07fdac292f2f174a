# SPDX-License-Identifier: Apache-2.0
"""A certificate authority for tests, and the files that a cluster with credentials needs."""

from __future__ import annotations

import dataclasses
import datetime
import ipaddress
import secrets
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from llumlet.process.credentials import CredentialFiles


class Authority:
    """Signs certificates for an hour."""

    def __init__(self, directory: Path, name: str = "test authority") -> None:
        self.directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate = (
            self._builder(self._name, self._key)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.path = directory / f"{name.replace(' ', '-')}.pem"
        self.path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str, address: str = "127.0.0.1") -> tuple[Path, Path]:
        """Paths of a certificate for `address`, for servers and clients, and of its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = (
            self._builder(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]), key)
            .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))]), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        cert_path, key_path = self.directory / f"{name}.pem", self.directory / f"{name}.key"
        cert_path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        key_path.touch()
        key_path.chmod(0o600)
        key_path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return cert_path, key_path

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=5))
            .not_valid_after(now + datetime.timedelta(hours=1))
        )


def token_file(directory: Path, name: str = "token") -> Path:
    path = directory / name
    path.touch(mode=0o600)
    path.write_text(secrets.token_hex(32) + "\n")
    return path


def credential_files(authority: Authority, name: str, token: Path, address: str = "127.0.0.1") -> CredentialFiles:
    """What one instance, or one caller, is given."""
    cert, key = authority.issue(name, address)
    return CredentialFiles(str(cert), str(key), str(authority.path), str(token))


def flags_of(files: CredentialFiles) -> tuple[str, ...]:
    """On the command lines of `vllm serve` and `llumnix`."""
    given = dataclasses.asdict(files)
    return tuple(part for name, path in given.items() if path for part in (f"--llumlet-{name.replace('_', '-')}", path))
