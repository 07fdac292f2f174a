# SPDX-License-Identifier: Apache-2.0
"""`llumnix gateway` as a process, its flags, and its workers."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import tempfile
import time
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import psutil
import pytest

from llumlet.process.addresses import Address
from llumsched.cli import prepare
from llumsched.commands import gateway_command as gateway
from llumsched.gateway import workers
from llumsched.gateway.config import AccessLog, Config
from llumsched.scheduler import process
from llumsched.up.ports import free_port, free_ports
from tests.llumsched.conftest import Llumnix, finish, start
from tests.llumsched.gateway.support import engine, until
from tests.support.mock_api import Mock

COMPLETIONS = "/v1/completions"
BODY = {"model": "mock", "prompt": "one two three", "max_tokens": 3}


@pytest.mark.asyncio
async def test_all_faults_are_listed_at_once(llumnix: Llumnix) -> None:
    done = await llumnix(
        "gateway", "--port", "70000", "--workers", "0", "--llm-backend-endpoints", "nowhere", "--stall-time", "soon",
        "--access-log", "xml", "--continuation", "perhaps", "--read-timeout", "0",
        "--retry-budget", "1.5", "--max-ejected", "half", "--nonsense",
    )  # fmt: skip
    assert done.code == 2
    for flag in ("--port", "--workers", "--llm-backend-endpoints", "--stall-time", "--access-log", "--continuation",
                 "--read-timeout", "--retry-budget", "--max-ejected", "--nonsense"):  # fmt: skip
        assert flag in done.err
    done = await llumnix("gateway", "--scheduling-policy", "round-robin", "--scheduler-endpoints", "a:1")
    assert done.code == 2
    assert "needs --llm-backend-endpoints" in done.err
    assert "--scheduler-endpoints has no effect" in done.err
    assert "needs --scheduler-endpoints" in (await llumnix("gateway")).err
    local = ("gateway", "--scheduling-policy", "round-robin", "--llm-backend-endpoints", "127.0.0.1:1")
    for flag in ("--shed-priority", "--late-wait"):
        done = await llumnix(*local, flag, "5")
        assert (done.code, f"{flag} has no effect with --scheduling-policy round-robin" in done.err) == (2, True)


@pytest.mark.asyncio
async def test_contradictions_are_listed_with_what_cannot_be_read(llumnix: Llumnix) -> None:
    done = await llumnix("gateway", "--workers", "2", "--port", "0", "--stall-time", "soon", "--chat-template", "/none")
    assert done.code == 2
    for fault in (
        "--stall-time 'soon' is not a duration",
        "--chat-template '/none' is not a file",
        "--workers above 1 needs a --port",
        "--scheduling-policy load-balance needs --scheduler-endpoints",
    ):
        assert fault in done.err
    done = await llumnix("gateway", "--scheduler-endpoints", "127.0.0.1:1", "--chat-template", __file__)
    assert "--chat-template has no effect without --tokenizer-path" in done.err
    for flag in ("--llm-backend-endpoints", "--scheduling-policy"):
        done = await llumnix("gateway", "--scheduling-policy", "round-robin", flag, "No Name")
        assert flag in done.err
        assert "needs" not in done.err, "that is for the flag to say that could not be read"


def test_the_help_names_the_schedulers_port() -> None:
    assert f"--scheduler-endpoints 127.0.0.1:{process.PORT}\n" in gateway.DESCRIPTION


def test_settings_of_a_file_and_of_variables(tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text(
        "scheduler-endpoints: [a:1, b:2]\nenable-full-mode-scheduling: false\naccess_log: off\nread-timeout: 3m\n"
        "tokenizer-name: [m=/a, /b]\nport: 1\n"
    )
    environ = {"LLUMNIX_GATEWAY_PORT": "2", "LLUMNIX_GATEWAY_WORKERS": "3", "LLUMNIX_GATEWAY_MAX_EJECTED": "0"}
    words = ["gateway", "--config", str(path), "--workers", "4", "--insecure", "--continuation", "false"]
    config, _, faults = prepare("gateway", words, environ)
    assert not faults
    assert config == Config(
        scheduler_endpoints=(Address("a", 1), Address("b", 2)), full_mode=False, access_log=AccessLog.OFF,
        read_timeout_s=180.0, tokenizers={"m": "/a", "": "/b"}, port=2, workers=4, max_ejected=0.0, insecure=True,
        continuation=False,
    )  # fmt: skip
    link = {"LLUMNIX_GATEWAY_PORT": "tcp://10.96.0.8:8001", "LLUMNIX_GATEWAY_SERVICE_HOST": "10.96.0.8"}
    config, _, faults = prepare("gateway", ["gateway", "--config", str(path)], link)
    assert (faults, config.port) == ([], 1), (
        "what Kubernetes tells of a Service called llumnix-gateway is not a setting"
    )
    path.write_text("prot: 1\nport: x\n")
    assert prepare("gateway", ["gateway", "--scheduler-endpoints", "a:1", "--config", str(path)], {}).faults == [
        f"{path}:1: prot is not a setting; did you mean port?",
        f"{path}:2: port 'x' is not a port",
    ]


@pytest.mark.parametrize(
    ("flag", "name", "value"),
    [
        ("--requests-report-duration=500ms", "requests_report_duration_s", 0.5),
        ("--retry-max-count=0", "retry_max_count", 0),
        ("--ttft-slo=700", "ttft_slo_ms", {"": 700.0}),
        ("--tpot-slo=mine=40", "tpot_slo_ms", {"mine": 40.0}),
    ],
)
def test_a_flag_sets_one_field(flag: str, name: str, value: Any) -> None:
    config, _, faults = prepare("gateway", ["gateway", "--scheduler-endpoints=a:1", flag], {})
    assert not faults
    assert config == replace(Config(scheduler_endpoints=(Address("a", 1),)), **{name: value})
    assert getattr(Config(), name) != value


@pytest.mark.asyncio
async def test_a_tokenizer_that_is_not_there_ends_it_with_a_reason(llumnix: Llumnix, tmp_path: Path) -> None:
    done = await llumnix("gateway", "--scheduler-endpoints", "127.0.0.1:1", "--tokenizer-path", str(tmp_path))
    assert done.code == 1
    assert "no tokenizer at" in done.err


@asynccontextmanager
async def _process(*arguments: str) -> Any:
    port = free_port()
    process = await start("gateway", "--host", "127.0.0.1", "--port", str(port), *arguments)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client:
        deadline_s = time.monotonic() + 120
        while True:
            try:
                async with client.get("/healthz") as answer:
                    assert answer.status == 200
                    break
            except aiohttp.ClientError:
                assert time.monotonic() < deadline_s
                assert process.returncode is None
                await asyncio.sleep(0.1)
        try:
            yield client, process
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
                await finish(process)


@pytest.mark.asyncio
async def test_workers_share_a_port_and_their_metrics_and_end_with_their_streams() -> None:
    mock = Mock(interval_s=0.02)
    async with engine(mock) as (port, _, _):
        metrics_port = free_port()
        arguments = ("--workers", "2", "--metrics-port", str(metrics_port), "--scheduling-policy", "round-robin")
        arguments += ("--llm-backend-endpoints",)
        async with _process(*arguments, f"127.0.0.1:{port}", "--access-log", "json") as (client, process):
            for _ in range(8):
                async with client.post(COMPLETIONS, json=BODY, headers={"Connection": "close"}) as answer:
                    assert answer.status == 200
            metrics = f"http://127.0.0.1:{metrics_port}/metrics"
            async with aiohttp.ClientSession() as operator, operator.get(metrics) as answer:
                assert 'request_total{model="mock",status_code="200"} 8.0' in await answer.text()
            async with client.post(COMPLETIONS, json=BODY | {"stream": True, "max_tokens": 50}) as answer:
                await answer.content.readany()
                process.send_signal(signal.SIGTERM)
                rest = await answer.read()
                assert rest.endswith(b"data: [DONE]\n\n")
            done = await finish(process)
            assert done.code == 0
            assert len([line for line in done.lines if line["status"] == 200]) == 9


async def _counted(url: str) -> int:
    """Requests that the gateway's metrics show."""
    async with aiohttp.ClientSession() as operator, operator.get(url) as answer:
        assert answer.status == 200
        found = re.search(r'request_total\{model="mock",status_code="200"\} (\d+)', await answer.text())
    return int(found[1]) if found else 0


async def _until_counted(url: str, number: int) -> None:
    """They are rendered once a second, and by nobody while no worker listens."""
    for _ in range(300):
        with suppress(aiohttp.ClientError):
            if await _counted(url) == number:
                return
        await asyncio.sleep(0.2)
    raise AssertionError(f"they never showed {number}")


_UNFINISHED = "counter_99999.db"


@pytest.mark.asyncio
async def test_metrics_outlive_workers_and_what_these_leave_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    metrics_port = free_port()
    metrics = f"http://127.0.0.1:{metrics_port}/metrics"
    async with engine(Mock()) as (port, _, _):
        arguments = ("--workers", "2", "--metrics-port", str(metrics_port), "--scheduling-policy", "round-robin")
        async with _process(*arguments, "--llm-backend-endpoints", f"127.0.0.1:{port}") as (client, process):
            num_sent = 0
            for life in range(3):
                for _ in range(8):
                    async with client.post(COMPLETIONS, json=BODY, headers={"Connection": "close"}) as answer:
                        assert answer.status == 200
                        num_sent += 1
                await _until_counted(metrics, num_sent)
                files = _leave_unfinished(tmp_path)
                assert files <= {f"{kind}_{place}.db" for kind in _KINDS for place in range(2)} | {_UNFINISHED}
                victim = _workers_of(process)[life % 2]
                victim.kill()
                await asyncio.to_thread(victim.wait, 60)
                await until(lambda: len(_workers_of(process)) == 2)
                await _until_counted(metrics, num_sent)


def _leave_unfinished(directory: Path) -> set[str]:
    """Leaves a file as a worker does that dies in the middle of making it. Returns the names of the others."""
    (metrics,) = directory.glob("llumnix-gateway-*")
    files = {file.name for file in metrics.iterdir()}
    (metrics / _UNFINISHED).touch()
    return files


def _workers_of(process: Any) -> list[psutil.Process]:
    return [one for one in psutil.Process(process.pid).children() if "spawn_main" in " ".join(one.cmdline())]


_KINDS = ("counter", "histogram", "gauge_livesum", "gauge_livemax", "gauge_max")


def test_workers_without_a_place_for_metrics_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> None:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "TemporaryDirectory", lambda **_: none())
    assert workers.run(Config(workers=2)) == 1


async def _until_leaving(client: aiohttp.ClientSession) -> None:
    async with asyncio.timeout(60):
        while True:
            async with client.get("/ready") as answer:
                if answer.status == 503:
                    assert answer.headers["Retry-After"].isdigit()
                    return
            await asyncio.sleep(0.05)


async def _until_closed(client: aiohttp.ClientSession) -> None:
    async with asyncio.timeout(30):
        with suppress(aiohttp.ClientConnectionError):
            while True:
                async with client.get("/health", headers={"Connection": "close"}):
                    await asyncio.sleep(0.05)


@pytest.mark.asyncio
@pytest.mark.parametrize("num_workers", [1, 2])
async def test_before_it_closes_it_says_for_a_while_that_it_leaves(num_workers: int) -> None:
    mock = Mock(interval_s=0.05)
    async with engine(mock) as (port, _, _):
        arguments = ["--workers", str(num_workers), "--scheduling-policy", "round-robin", "--access-log", "off"]
        arguments += ["--llm-backend-endpoints", f"127.0.0.1:{port}", "--shutdown-delay", "100s"]
        async with _process(*arguments) as (client, process):
            async with client.post(COMPLETIONS, json=BODY | {"stream": True, "max_tokens": 120}) as stream:
                await stream.content.readany()
                for _ in range(2):  # within a second: one to all, and one that the parent passes on
                    process.send_signal(signal.SIGTERM)
                for _ in range(num_workers * 4):
                    await _until_leaving(client)
                await asyncio.sleep(1.1)
                async with client.get("/health") as answer:
                    assert answer.status == 200, "nobody is to restart it"
                async with client.post(COMPLETIONS, json=BODY) as answer:
                    assert (answer.status, answer.headers["Connection"]) == (200, "close")
                process.send_signal(signal.SIGTERM)
                await _until_closed(client)
                assert (await stream.read()).endswith(b"data: [DONE]\n\n")
            assert (await finish(process)).code == 0


@pytest.mark.asyncio
async def test_a_while_is_no_longer_than_it_was_said() -> None:
    arguments = ("--scheduling-policy", "round-robin", "--llm-backend-endpoints", "127.0.0.1:1")
    async with _process(*arguments, "--shutdown-delay", "4s") as (client, process):
        process.send_signal(signal.SIGTERM)
        await _until_leaving(client)
        await _until_closed(client)
        assert (await finish(process)).code == 0


def _crash_twice(config: Config, _: int) -> None:
    """Stands in for a worker, and notes each start in the file that it takes for a chat template."""
    starts = Path(config.chat_template)
    with starts.open("a") as file:
        file.write("x")
    if starts.stat().st_size <= 2:
        raise RuntimeError("of the test")
    os.kill(os.getppid(), signal.SIGTERM)
    signal.pause()


def test_a_worker_that_crashes_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "")  # is set anew, and put back after the test
    monkeypatch.setattr(workers, "_child", _crash_twice)
    starts, ports = tmp_path / "starts", free_ports(2)
    config = Config(port=ports[0], metrics_port=ports[1], chat_template=str(starts), workers=2, shutdown_timeout_s=0)
    assert workers.run(config) == 0
    assert starts.stat().st_size > 2


def test_workers_that_crash_again_and_again_are_not_started_without_end() -> None:
    clock, started = [0.0], []

    def start() -> SimpleNamespace:
        started.append(SimpleNamespace(exitcode=None))
        return started[-1]

    worker = workers.Worker(start, lambda: clock[0])  # type: ignore[arg-type]
    pauses = []
    for lived_s in (1, 1, 1, 1, 1, 1, 1, 1, 60, 1, 1):
        clock[0] += lived_s
        assert worker.look() is None, "it lives"
        started[-1].exitcode = 1
        died_s, num_started = clock[0], len(started)
        assert worker.look() == 1
        while len(started) == num_started:
            assert worker.look() is None, "told once"
            clock[0] += 0.5
        pauses.append(clock[0] - 0.5 - died_s)
    assert pauses == [0, 1, 2, 4, 8, 16, 30, 30, 0, 0, 1]


@pytest.mark.asyncio
async def test_workers_that_cannot_listen_end_it(llumnix: Llumnix) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = await llumnix("gateway", "--scheduler-endpoints", "127.0.0.1:1", "--port", port, "--workers", "2")
    assert done.code == 1
    assert f"127.0.0.1:{port}: Address already in use" in done.err
    assert "a worker died" not in done.err
