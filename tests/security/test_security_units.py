# SPDX-License-Identifier: Apache-2.0
"""The command lines of `deploy/systemd`, read by the programs' own parsers."""

from __future__ import annotations

import json
import shlex
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from llumsched.cli import main, prepare
from tests.security.test_security_credentials import read
from tests.support.authority import Authority, token_file

SYSTEMD: Final = Path(__file__).parents[2] / "deploy" / "systemd"
SECRETS: Final = "/etc/llumnix"


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    for line in path.read_text().replace("\\\n", "").splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            yield name, value


def _unit(name: str, secrets: Path) -> tuple[list[str], dict[str, str]]:
    """The words of `ExecStart`, and the variables of a unit, whose secrets lie in a directory of the test."""
    found = defaultdict[str, list[str]](list)
    for key, value in _lines(SYSTEMD / name):
        found[key].append(value.replace(SECRETS, str(secrets)).replace("%i", "0").replace("%H", "host"))
    (start,) = found["ExecStart"]
    for variable, value in _lines(SYSTEMD / "cluster.env"):
        start = start.replace(f"${{{variable}}}", value)
    assert "${" not in start
    assert "%" not in start
    assert "LoadCredential" not in found, "a copy does not follow when its file is renewed"
    assert found["SupplementaryGroups"] == ["llumnix"]
    variables = dict(each.split("=", 1) for line in found["Environment"] for each in line.split())
    return shlex.split(start), variables


@pytest.fixture
def secrets(tmp_path: Path) -> Path:
    """The files of /etc/llumnix, readable by their group."""
    authority = Authority(tmp_path, "ca")
    for name in ("node", "gateway"):
        authority.issue(name, "10.0.0.1")
    for name in ("token", "service-token"):
        token_file(tmp_path, name)
    token = (tmp_path / "service-token").read_text().strip()
    (tmp_path / "service-tokens.json").write_text(json.dumps({"gateway": [token]}))
    (tmp_path / "api-keys.json").write_text(json.dumps({"a": {"keys": ["sk-0123456789abcdef"]}}))
    for path in tmp_path.iterdir():
        path.chmod(0o640)
    return tmp_path


@pytest.mark.parametrize("unit", ["llumnix-scheduler.service", "llumnix-gateway.service"])
def test_units_of_llumnix_are_accepted_and_want_tls(unit: str, secrets: Path) -> None:
    (_, name, *words), variables = _unit(unit, secrets)
    assert not prepare(name, [name, *words], variables).faults
    for flag in ("--ssl-certfile", "--ssl-keyfile"):
        at = words.index(flag)
        words = words[:at] + words[at + 2 :]
    (fault,) = prepare(name, [name, *words], variables).faults
    assert "is not a loopback address" in fault


def test_unit_of_engines_is_accepted(secrets: Path) -> None:
    (_, serve, _, *words), variables = _unit("vllm-llumnix@.service", secrets)
    assert serve == "serve"
    at = next(number for number, word in enumerate(words) if word.startswith("--llumlet"))
    config = read("--enable-llumlet", *words[at:], **variables)
    assert config.host == "10.0.0.5"
    assert config.authenticated


def test_every_listener_beyond_loopback_wants_its_credentials() -> None:
    rescheduler = ["rescheduler", "--standalone-rescheduling-mode", "--cms", "127.0.0.1:1"]
    for words in (["scheduler"], ["gateway", "--scheduler-endpoints", "a:1"], [*rescheduler, "--port", "0"]):
        for host in ("0.0.0.0", "192.0.2.1", "::"):
            given = [*words, "--host", host]
            (fault,) = prepare(words[0], given, {}).faults
            assert "is not a loopback address" in fault
            assert "--insecure" in fault
            assert not prepare(words[0], [*given, "--insecure"], {}).faults
        assert not prepare(words[0], words, {}).faults
    assert not prepare("rescheduler", [*rescheduler, "--host", "0.0.0.0"], {}).faults, "without a port it has no HTTP"


def test_cms_beyond_loopback_wants_its_credentials(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scheduler", "--port", "0", "--cms", "listen://0.0.0.0:0"]) == 2
    said = capsys.readouterr().err
    assert "0.0.0.0 is not a loopback address" in said
    assert "--llumlet-token-file" in said
