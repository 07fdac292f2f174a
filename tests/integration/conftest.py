# SPDX-License-Identifier: Apache-2.0
"""Real engines for the integration tests.

Two engines of the small model run for the whole session (`engines`); a test that needs another
kind starts it with `start_server` and it ends with the test. `conserved` makes a test fail if any
of them holds anything afterwards that it did not hold before.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import pytest_asyncio

from tests.support.conservation import Holdings, assert_conserved, wait_idle
from tests.support.harness import Fleet, Server, ServerSpec

StartServer = Callable[..., Server]
_LOG_LINES = 60
_fleets: list[Fleet] = []


class Engines(NamedTuple):
    """Two instances with their llumlets on."""

    a: Server
    b: Server


@pytest.fixture(scope="session")
def log_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("servers")


@pytest.fixture(scope="session")
def engines(model_dir: Path, log_dir: Path, request: pytest.FixtureRequest) -> Iterator[Engines]:
    with _fleet(log_dir / "session", request) as fleet:
        specs = [ServerSpec(model_dir, name=name, instance_id=name) for name in Engines._fields]
        yield Engines(*fleet.start(*specs))


@pytest.fixture
def start_server(model_dir: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[StartServer]:
    """`start_server(name="d", num_kv_blocks=40, env={...})`: any field of ServerSpec by name; the
    model is the small one unless `model` says otherwise.
    """
    with _fleet(tmp_path / "servers", request) as fleet:

        def start(**fields: Any) -> Server:
            name = fields.setdefault("name", f"extra{len(fleet.servers)}")
            if fields.get("llumlet", True):
                fields.setdefault("instance_id", name)
            return fleet.start(ServerSpec(**{"model": model_dir, **fields}))[0]

        yield start


@pytest_asyncio.fixture
async def conserved(engines: Engines) -> AsyncIterator[dict[Server, Holdings]]:
    """What the engines hold while idle before the test; checked again after it."""
    before = {server: await wait_idle(server) for server in engines}
    yield before
    await assert_conserved(before)


@contextlib.contextmanager
def _fleet(log_dir: Path, request: pytest.FixtureRequest) -> Iterator[Fleet]:
    with Fleet(log_dir, _announcer(request.config)) as fleet:
        _fleets.append(fleet)
        try:
            yield fleet
        finally:
            _fleets.remove(fleet)


def _announcer(config: pytest.Config) -> Callable[[str], None]:
    """Shows each stage of a start once, past the capture: a start takes half a minute."""
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    capture = config.pluginmanager.get_plugin("capturemanager")
    said: set[str] = set()

    def say(text: str) -> None:
        if text in said or terminal is None:
            return
        said.add(text)
        with capture.global_and_fixture_disabled() if capture else contextlib.nullcontext():
            terminal.ensure_newline()
            terminal.write_line(text)

    return say


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failed test shows the end of every server's log."""
    report = yield
    if report.failed:
        for fleet in _fleets:
            for server in fleet.servers:
                lines = server.log_text().splitlines()[-_LOG_LINES:]
                report.sections.append((f"log of {server.name}: {server.log}", "\n".join(lines)))
    return report
