# SPDX-License-Identifier: Apache-2.0
"""Servers of the harness, with a stand-in for vLLM that starts at once."""

from __future__ import annotations

import io
import os
import random
import signal
import sys
import textwrap
import time
from pathlib import Path
from subprocess import PIPE, Popen

import pytest

from llumsched.up import ports as ports_module
from llumsched.up import reaper
from llumsched.up.ports import free_port, free_ports
from tests.support import harness
from tests.support.harness import Fleet, Server, ServerDied, ServerSpec

STAND_IN = textwrap.dedent(
    """
    import http.server, json, os, subprocess, sys
    if "--fail" in sys.argv:
        print("(EngineCore pid=7) ERROR 11-21 19:18:45 [core.py:1514] OSError: the port is taken")
        print("a line of the traceback\\n" * 100)
        sys.exit("no such flag")
    class Handler(http.server.BaseHTTPRequestHandler):
        def answer(self, body):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())
        def do_GET(self):
            self.answer({})
        def do_POST(self):
            self.answer({"env": dict(os.environ), "argv": sys.argv})
        def log_message(self, *_):
            pass
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    print("INFO llumlet: instance i-1 listening on 127.0.0.1:4321", flush=True)
    port = int(sys.argv[sys.argv.index("--port") + 1])
    http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
    """
)

DEAF_REAPER = textwrap.dedent(
    """
    import os, sys, time
    os.close(0)
    os.rmdir(sys.argv[sys.argv.index("--scratch") + 1])
    os.write(1, b"pid 1\\n")
    time.sleep(0.5)
    """
)


@pytest.fixture(autouse=True)
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "stand_in.py"
    program.write_text(STAND_IN)
    monkeypatch.setattr(harness, "LAUNCHER", (sys.executable, str(program)))
    monkeypatch.setattr(harness, "usual_executor", "")


def test_a_server_is_ready_knows_its_llumlet_and_ends_without_a_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLUMNIX_FAULTS", "[]")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    spec = ServerSpec(tmp_path, name="one", bandwidth_limit=5, env={"EXTRA": "1"})
    with Fleet(tmp_path / "logs") as fleet:
        (server,) = fleet.start(spec)
        assert str(server.llumlet) == "127.0.0.1:4321"
        answer = server.generate("x", 1)
        pids = [server.reaper_pid, *server.pids()]
        assert len(pids) == 3
        assert server.pid == pids[1]
        assert server.cpu_seconds() > 0
        scratch = Path(answer["env"]["TMPDIR"])
        assert scratch.is_dir()
    assert not scratch.exists()
    assert not set(pids) & set(reaper.parents())
    environment = answer["env"]
    assert environment["EXTRA"] == "1"
    assert environment["OMP_NUM_THREADS"] == "1"
    assert "LLUMNIX_FAULTS" not in environment
    assert "VLLM_LOGGING_LEVEL" not in environment
    assert answer["argv"][-3:] == ["--enable-llumlet", "--llumlet-bandwidth-limit-local", "5"]


def test_a_stock_server_has_no_llumlet_flags(tmp_path: Path) -> None:
    command = ServerSpec(tmp_path, llumlet=False, bandwidth_limit=5).command(1)
    assert not [word for word in command if "llumlet" in word]


def test_a_server_that_dies_shows_the_end_of_its_log_and_the_cause_before_it(tmp_path: Path) -> None:
    with Fleet(tmp_path / "logs") as fleet, pytest.raises(ServerDied, match="no such flag") as died:
        fleet.start(ServerSpec(tmp_path, flags=("--fail",)))
    assert "OSError: the port is taken" in str(died.value)
    assert len(str(died.value).splitlines()) < 50


GIVES = "from llumsched.up import ports; print(*ports.free_ports({count}), flush=True); input()"


def test_a_port_is_not_given_again_before_its_server_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports_module, "_CHOICE", range(20_000, 20_300))
    given = [free_port() for _ in range(150)]
    assert len(set(given)) == len(given)


def test_nor_by_another_process_while_that_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    program = GIVES.format(count=100)
    with Popen([sys.executable, "-c", program], stdin=PIPE, stdout=PIPE, text=True) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        theirs = {int(port) for port in other.stdout.readline().split()}
        monkeypatch.setattr(ports_module, "_CHOICE", sorted(theirs)[:50] + list(range(19_000, 19_100)))
        assert not {free_port() for _ in range(50)} & theirs
        other.stdin.write("\n")
    monkeypatch.setattr(ports_module, "_CHOICE", sorted(theirs))
    assert set(free_ports(50)) < theirs


def test_equal_seeds_get_different_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Hypothesis does before each test, in all processes that share the tests."""
    monkeypatch.setattr(ports_module, "_keep", lambda port: True)
    found = []
    for _ in range(2):
        random.seed(0)
        found.append(free_ports(3))
    assert found[0] != found[1]


def test_ports_are_distinct_and_not_those_that_the_system_gives_away() -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = free_ports(50)
    assert len(set(ports)) == 50
    assert max(ports) < first


def test_a_server_that_cannot_be_executed_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "LAUNCHER", ("/nonexistent/vllm",))
    with Fleet(tmp_path / "logs") as fleet, pytest.raises(ServerDied, match="nonexistent"):
        fleet.start(ServerSpec(tmp_path))


def test_a_server_that_is_late_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "LAUNCHER", ("sleep", "600", "#"))
    monkeypatch.setattr(ServerSpec, "command", lambda self, port: ["sleep", "600"])
    server = Server.launch(ServerSpec(tmp_path), tmp_path / "log")
    started = time.monotonic()
    with pytest.raises(ServerDied, match="not ready"):
        server.wait_ready(timeout_s=0.5)
    server.stop(grace_s=1)
    assert time.monotonic() - started < 5
    assert not set(reaper.descendants(os.getpid())) & {server.pid, server.reaper_pid}


def test_an_exit_code_is_the_commands_own(tmp_path: Path) -> None:
    for index, (script, code) in enumerate((("exit 3", 3), ("kill -9 $$", -9), ("true", 0))):
        command = harness.Command.start("one", ["sh", "-c", script], tmp_path / f"{index}.log")
        assert [command.exit_code(), command.exit_code()] == [code, code]
        command.stop()


def test_killed_reaper_leaves_no_exit_code(tmp_path: Path) -> None:
    command = harness.Command.start("one", ["sleep", "600"], tmp_path / "one.log")
    os.kill(command.reaper_pid, signal.SIGKILL)
    with pytest.raises(LookupError, match="one has ended"):
        command.exit_code()
    command.stop()


def test_a_command_whose_reaper_is_about_to_end_is_stopped_like_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It no longer reads, and has not ended yet: the order to stop finds a broken pipe."""
    program = tmp_path / "reaper.py"
    program.write_text(DEAF_REAPER)
    monkeypatch.setattr(reaper, "__file__", str(program))
    command = harness.Command.start("one", ["true"], tmp_path / "one.log")
    process = command._process
    assert command.alive()
    command.stop()
    assert process.returncode == 0
    for pipe in (process.stdin, process.stdout):
        assert isinstance(pipe, io.IOBase)
        assert pipe.closed
