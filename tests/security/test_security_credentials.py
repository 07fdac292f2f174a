# SPDX-License-Identifier: Apache-2.0
"""Credentials as files: every fault is found at once, and what they hold shows nowhere."""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
from pathlib import Path

import pytest

from llumlet.process import setting_sources, settings
from llumlet.process.credentials import CredentialFiles, Credentials, CredentialsError
from tests.support.authority import Authority, flags_of
from vllm_llumnix import config, hooks
from vllm_llumnix.errors import ConfigError


def faults(files: CredentialFiles) -> str:
    with pytest.raises(CredentialsError) as refusal:
        Credentials.load(files)
    return "\n".join(refusal.value.faults)


def test_good_files(files: CredentialFiles, token: Path) -> None:
    loaded = Credentials.load(files)
    assert loaded.complete
    assert loaded.own_tokens == (token.read_bytes().strip(),)


def test_nothing_is_shown(files: CredentialFiles) -> None:
    loaded = Credentials.load(files)
    for text in (repr(loaded), str(loaded), f"{loaded}"):
        assert loaded.own_tokens[0].decode() not in text
        assert "PRIVATE" not in text


@pytest.mark.parametrize("mode", [0o604, 0o644, 0o602])
@pytest.mark.parametrize("name", ["token_file", "tls_key"])
def test_secrets_of_everybody_are_refused(files: CredentialFiles, name: str, mode: int) -> None:
    Path(getattr(files, name)).chmod(mode)
    assert f"--llumlet-{name.replace('_', '-')}" in (found := faults(files))
    assert "chmod o-rw" in found


def test_a_group_may_read(files: CredentialFiles) -> None:
    Path(files.token_file).chmod(0o640)
    assert Credentials.load(files).own_tokens


@pytest.mark.parametrize("text", ["", "short", "two words " * 10, "x" * 31, "ü" * 40])
def test_tokens_that_are_none(files: CredentialFiles, token: Path, text: str) -> None:
    token.write_text(text)
    found = faults(files)
    assert "at least 32 printable ASCII characters" in found
    assert not text or text not in found


def test_all_faults_at_once(tmp_path: Path) -> None:
    found = faults(CredentialFiles(tls_cert=str(tmp_path / "none.pem"), token_file=str(tmp_path / "none")))
    for part in ("--llumlet-tls-key, --llumlet-tls-ca as well", "none.pem: No such file", "none: No such file"):
        assert part in found


def test_a_certificate_needs_its_own_key(files: CredentialFiles, authority: Authority) -> None:
    _, other_key = authority.issue("other")
    assert "do not fit" in faults(dataclasses.replace(files, tls_key=str(other_key)))


def test_an_authority_must_be_one(files: CredentialFiles) -> None:
    assert "holds no certificates" in faults(dataclasses.replace(files, tls_ca=files.tls_key))


def test_a_key_with_a_passphrase_is_not_asked_for(files: CredentialFiles, tmp_path: Path) -> None:
    locked = tmp_path / "locked.key"
    subprocess.run(
        ["openssl", "pkey", "-in", files.tls_key, "-aes256", "-passout", "pass:secret", "-out", locked],
        check=True,
        capture_output=True,
    )
    locked.chmod(0o600)
    assert "do not fit" in faults(dataclasses.replace(files, tls_key=str(locked)))


def test_flags_win_over_variables(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    settings.add_arguments(parser, (CredentialFiles,))
    environ = {"LLUMNIX_TLS_CERT": "/variable", "LLUMNIX_TOKEN_FILE": "/variable"}
    args = parser.parse_args(["--llumlet-token-file", "/flag"])
    given = setting_sources.read("ps", (CredentialFiles,), args, environ).make(CredentialFiles)
    assert given == CredentialFiles(tls_cert="/variable", token_file="/flag")


# The instance's own flags


def read(*flags: str, **environ: str) -> config.LlumletConfig:
    parser = argparse.ArgumentParser()
    hooks.add_cli_args(parser)
    read = config.config_from_args(parser.parse_args(["--enable-llumlet", *flags]), environ)
    assert read is not None
    return read


def test_another_address_needs_tls_and_a_token(files: CredentialFiles) -> None:
    for some in (dataclasses.replace(files, token_file=""), CredentialFiles(token_file=files.token_file)):
        with pytest.raises(ConfigError, match="is not a loopback address"):
            read("--llumlet-host", "10.0.0.5", *flags_of(some))
    assert read("--llumlet-host", "10.0.0.5", *flags_of(files)).authenticated


def test_peers_elsewhere_need_them_too(files: CredentialFiles) -> None:
    with pytest.raises(ConfigError, match=r"--llumlet-peers: 10\.0\.0\.6 is not a loopback address"):
        read("--llumlet-peers", "127.0.0.1:4000,10.0.0.6:4000")
    assert read("--llumlet-peers", "10.0.0.6:4000", *flags_of(files)).peers == ("10.0.0.6:4000",)
    assert read("--llumlet-peers", "10.0.0.6:4000", "--llumlet-insecure").peers == ("10.0.0.6:4000",)


def test_children_inherit_paths_only(files: CredentialFiles, token: Path) -> None:
    on = read(*flags_of(files))
    assert token.read_text().strip() not in on.to_json()
    assert config.LlumletConfig.from_json(on.to_json()).credentials() == Credentials.load(files)


def test_variables_serve_as_flags(files: CredentialFiles) -> None:
    environ = {f"LLUMNIX_{name.upper()}": path for name, path in dataclasses.asdict(files).items()}
    assert read("--llumlet-instance-id", "a", **environ) == read("--llumlet-instance-id", "a", *flags_of(files))


def test_bad_files_are_faults_like_any_other(files: CredentialFiles) -> None:
    Path(files.token_file).chmod(0o644)
    with pytest.raises(ConfigError) as refusal:
        read("--llumlet-port", "70000", *flags_of(files))
    assert len(refusal.value.faults) == 2
