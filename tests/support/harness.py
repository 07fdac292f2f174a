# SPDX-License-Identifier: Apache-2.0
"""Real `vllm serve` processes for measurements, tests and the demo: started, awaited, stopped, and
never left behind.

    with Fleet(log_dir) as fleet:
        a, b = fleet.start(ServerSpec(model), ServerSpec(model))     # returns when both answer

A `Server` is started below a reaper (`llumsched/up/reaper.py`) that ends it and everything it started
when this process goes away, killed or not. Waiting shows who is waited for; a server that dies
while it starts raises `ServerDied` with the end of its log. The calls block; use them outside an
event loop.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal, NamedTuple, Protocol, Self, get_args

from llumsched.up import reaper
from llumsched.up.ports import free_port
from tests.support.model import cache_root
from tests.support.v2_on_cpu import stand_in_gpu

SERVED_NAME = "model"
LAUNCHER: Sequence[str] = (str(Path(sys.executable).with_name("vllm")), "serve")
START_TIMEOUT_S = 240.0
STOP_GRACE_S = 10.0
WARM_UP_TOKENS = 96
"""Length of the first prompt. A first forward pass over a few tokens only can die with SIGILL on
CPUs with AMX.
"""

_LLUMLET_LINE = re.compile(r"llumlet: instance (\S+) listening on (\S+):(\d+)")
_FINAL_ERROR = re.compile(r"(?:^|\s)[\w.]*(?:Error|Exception): ")
"""The last line of a traceback."""
_STAGES = (
    # What a log shows last comes first.
    ("Application startup complete", "warming up"),
    ("KV cache size", "starting the API server"),
    ("Starting to load model", "loading the model"),
    ("Initializing a V1 LLM engine", "starting the worker"),
)
_Progress = Callable[[str], None]
Runner = Literal["", "v2"]


def add_runner(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--runner",
        choices=get_args(Runner),
        default="",
        help="v2: the V2 runner with asynchronous scheduling, interpreted",
    )


class ServerDied(RuntimeError):
    """A server ended, was not ready in time, or did not answer its first request; the text has the end of its log."""


class LlumletAddress(NamedTuple):
    """What an instance prints at start."""

    instance_id: str
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


Executor = Literal["", "uni", "mp"]
""""uni": the model runs in the engine's process, vLLM's choice for one GPU; "mp": in one of its own; "": what vLLM
chooses, which is "mp" on a CPU."""
usual_executor: Executor = ""
"""Where the model of servers runs that do not say. Tests choose `uni` (`tests/conftest`)."""

FEW_CORES = 4
"""On a machine with no more than this, a fleet gives each server a core of its own, in turn."""
_CORES = sorted(os.sched_getaffinity(0))


@dataclasses.dataclass(frozen=True, slots=True)
class ServerSpec:
    """One `vllm serve` command. `flags` come last and win; `num_kv_blocks` None means as many as
    fit `kv_cache_gib`, `block_size` None that vLLM chooses.
    """

    model: Path
    llumlet: bool = True
    name: str = ""
    block_size: int | None = 32
    max_model_len: int = 8192
    max_num_seqs: int = 16
    kv_cache_gib: int = 1
    num_kv_blocks: int | None = None
    instance_id: str | None = None
    port: int = 0
    """Of the API server; 0: any free one."""
    bandwidth_limit: int | None = None
    flags: tuple[str, ...] = ()
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    runner: Runner = ""
    """"v2": vLLM's V2 model runner with asynchronous scheduling, as on a GPU, with Triton's interpreter in the GPU's
    place (`tests/support/v2_on_cpu`); "": what vLLM chooses here.
    """
    warm_up: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Parameters of the first prompt, for a server that does not take any."""
    gpu: bool = False
    """It has one, and nothing that engines on a CPU are given for its sake."""
    eager: bool = True
    """Without what vLLM compiles and captures."""
    executor: Executor | None = None
    """Where the model runs; None: where `usual_executor` says."""
    core: int | None = None
    """The CPU core for all of its processes; None: any. An engine and its worker wait for each other by spinning, for
    a second beyond the last message too. On one core the spinning one makes way for the working one; spread over all
    cores, the spinners of one engine take the time of the other engines.
    """

    def command(self, port: int) -> list[str]:
        command = [*LAUNCHER, str(self.model), "--served-model-name", SERVED_NAME]
        command += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", str(self.max_model_len)]
        if self.eager:
            command += ["--enforce-eager"]
        if self.block_size is not None:
            command += ["--block-size", str(self.block_size)]
        command += ["--max-num-seqs", str(self.max_num_seqs), "--disable-uvicorn-access-log"]
        if self.num_kv_blocks is not None:
            command += ["--num-gpu-blocks-override", str(self.num_kv_blocks)]
        if self.llumlet:
            command += ["--enable-llumlet"]
            if self.instance_id is not None:
                command += ["--llumlet-instance-id", self.instance_id]
            if self.bandwidth_limit is not None:
                command += ["--llumlet-bandwidth-limit-local", str(self.bandwidth_limit)]
        if self._executor:
            command += ["--distributed-executor-backend", self._executor]
        return command + list(self.flags)

    @property
    def _executor(self) -> Executor:
        usual: Executor = "" if self.gpu else usual_executor
        return usual if self.executor is None else self.executor

    def environment(self, scratch: Path) -> dict[str, str]:
        """This process's environment without settings of vLLM's or ours, plus what an engine needs
        here.
        """
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "LLUMNIX_", "TRITON_"))}
        environment = kept | {
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1",
            # Sockets and temporary files of the server, removed with it.
            "TMPDIR": str(scratch),
            "VLLM_RPC_BASE_PATH": str(scratch),
            "TORCHINDUCTOR_CACHE_DIR": str(cache_root() / "kernels"),
        }
        environment |= ({} if self.gpu else self._environment_of_a_cpu()) | dict(self.env)
        if self.runner == "v2":
            paths = [str(stand_in_gpu.PATH), *filter(None, [environment.get("PYTHONPATH")])]
            environment |= stand_in_gpu.ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(paths)}
        return environment

    def _environment_of_a_cpu(self) -> dict[str, str]:
        # vLLM's platform for CPUs makes every `uni` an `mp` unless this says that all is one process, and `vllm serve`
        # asks it for nothing else.
        one_process = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if self._executor == "uni" else {}
        return one_process | {
            "VLLM_CPU_KVCACHE_SPACE": str(self.kv_cache_gib),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            # vLLM compiles one small kernel, for logprobs, even where it runs eagerly otherwise: 3 to 18 s of a start.
            # Where compiling is asked for (TORCH_COMPILE_DISABLE=0), all servers use the same compiled kernel.
            "TORCH_COMPILE_DISABLE": "1",
        }


class Process(Protocol):
    """A reaper, as `subprocess.Popen` has it."""

    @property
    def pid(self) -> int: ...
    @property
    def stdin(self) -> IO[bytes] | None: ...
    @property
    def stdout(self) -> IO[bytes] | None: ...
    def poll(self) -> int | None: ...
    def wait(self) -> int: ...


class Command:
    """One command below a reaper, with its output in a log. `pid` is that of the command's own process, the leader of
    its own session; 0 until it is known."""

    def __init__(self, name: str, log: Path, process: Process) -> None:
        self.name = name
        self.log = log
        self.pid = 0
        self._process = process
        self._code: int | None = None

    @classmethod
    def start(cls, name: str, command: Sequence[str], log: Path) -> Self:
        """Start it in this environment and return when it runs, not when it is ready."""
        log.parent.mkdir(parents=True, exist_ok=True)
        started = cls(name, log, execute(command, log, _scratch(), os.environ))
        started._read_pid()
        return started

    @property
    def reaper_pid(self) -> int:
        return self._process.pid

    def alive(self) -> bool:
        return self._process.poll() is None

    def pids(self) -> list[int]:
        """The living processes, the command's own first."""
        return reaper.descendants(self._process.pid)

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    def exit_code(self) -> int:
        """How the command has ended by itself, negative for a signal; waits for it. Raises LookupError if its reaper
        was killed."""
        if self._code is None:
            self._read_pid()
            stdout = self._process.stdout
            assert stdout is not None
            word, _, number = stdout.readline().decode().partition(" ")
            if word != "exit":
                raise LookupError(f"nobody knows how {self.name} has ended")
            self._code = int(number)
        return self._code

    def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """SIGTERM, then SIGKILL after `grace_s`. Returns when no process of it is left."""
        if self._process.poll() is None:
            stdin = self._process.stdin
            assert stdin is not None
            with contextlib.suppress(BrokenPipeError):
                stdin.write(f"stop {grace_s}\n".encode())
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _read_pid(self) -> None:
        if self.pid == 0:
            stdout = self._process.stdout
            assert stdout is not None
            word, _, number = stdout.readline().decode().partition(" ")
            if word != "pid":
                raise ServerDied(f"{self.name} could not be started:\n{self._tail()}")
            self.pid = int(number)

    def _tail(self, lines: int = 40) -> str:
        """The end of the log, behind the errors of the processes that ended first: theirs is the cause."""
        log = self.log_text().splitlines()
        causes = [line for line in log[:-lines] if _FINAL_ERROR.search(line)]
        return "\n".join([f"{self.log}:", *causes, *log[-lines:]])


def _scratch() -> Path:
    # Unix socket paths hold 107 characters: the scratch directory must have a short name.
    return Path(tempfile.mkdtemp(prefix="llx-", dir="/tmp"))


def execute(
    command: Sequence[str], log: Path, scratch: Path, environment: Mapping[str, str], core: int | None = None
) -> Process:
    """A reaper, and below it the command in `environment`, on `core` alone if one is named."""
    below = [sys.executable, "-S", "-I", reaper.__file__, "--scratch", str(scratch)]
    below += [] if core is None else ["--cores", str(core)]
    with log.open("wb") as log_file:
        return subprocess.Popen(
            [*below, "--", *command],
            bufsize=0,  # an order that the reaper no longer takes must not come up again when its pipe is closed
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log_file,
            env=environment,
            cwd=scratch,
            # A Ctrl-C in the terminal must reach the owner only, which then stops its servers in order.
            start_new_session=True,
        )


start_server: Callable[[Sequence[str], Path, Path, Mapping[str, str], int | None], Process] = execute
"""How `vllm serve` is started. Tests, which start it often, put something faster here (`tests/support/warm`)."""


class Server(Command):
    """One running `vllm serve`. Made by `launch`; ready after `wait_ready`."""

    def __init__(self, spec: ServerSpec, log: Path, port: int, process: Process) -> None:
        super().__init__(spec.name or log.stem, log, process)
        self.spec = spec
        self.port = port
        self.llumlet: LlumletAddress | None = None
        """The first rank's llumlet; None with a stock server."""

    @classmethod
    def launch(cls, spec: ServerSpec, log: Path) -> Self:
        """Start the process and return at once."""
        port, scratch = spec.port or free_port(), _scratch()
        log.parent.mkdir(parents=True, exist_ok=True)
        environment = spec.environment(scratch)
        return cls(spec, log, port, start_server(spec.command(port), log, scratch, environment, spec.core))

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def cpu_seconds(self) -> float:
        """User and system time of all the server's processes so far, including those it has waited
        for.
        """
        return sum(cpu_seconds(pid) for pid in self.pids())

    def process(self, title: str) -> int:
        """The pid of the server's only process whose title holds `title`, such as `EngineCore` or
        `Worker`.
        """
        found = [pid for pid in self.pids() if title in command_line(pid)]
        if len(found) != 1:
            raise LookupError(f"{self.name} has {len(found)} processes called {title!r}, not one")
        return found[0]

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S, progress: _Progress | None = None) -> Self:
        """Until the server answers, its llumlet is known and it has computed something. Raises
        ServerDied.
        """
        deadline = time.monotonic() + timeout_s
        self._read_pid()
        while not self.healthy():
            if not self.alive():
                raise ServerDied(f"{self.name} ended while it started:\n{self._tail()}")
            if time.monotonic() > deadline:
                raise ServerDied(f"{self.name} was not ready after {timeout_s:.0f} s:\n{self._tail()}")
            if progress is not None:
                progress(f"{self.name}: {self._stage()}")
            time.sleep(0.25)
        if self.spec.llumlet:
            self.llumlet = self._find_llumlet()
        try:
            self.generate(list(range(100, 100 + WARM_UP_TOKENS)), max_tokens=4, **self.spec.warm_up)
        except urllib.error.HTTPError as error:
            why = f"answered its first request with {error.code}: {error.read(1000).decode(errors='replace')}"
            raise ServerDied(f"{self.name} {why}\n{self._tail()}") from None
        except OSError as error:
            raise ServerDied(f"{self.name} did not answer its first request: {error}\n{self._tail()}") from None
        return self

    def generate(self, prompt: str | list[int], max_tokens: int, **parameters: Any) -> dict[str, Any]:
        """One completion, not streamed, greedy unless `parameters` say otherwise; the answer's JSON
        object.
        """
        body = {
            "model": SERVED_NAME,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "return_token_ids": True,
            **parameters,
        }
        request = urllib.request.Request(
            f"{self.base_url}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with _direct().open(request, timeout=120) as answer:
            decoded: dict[str, Any] = json.load(answer)
            return decoded

    def healthy(self) -> bool:
        """Whether it answers, and its engine lives as far as it knows."""
        try:
            with _direct().open(f"{self.base_url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _find_llumlet(self) -> LlumletAddress:
        deadline = time.monotonic() + 10
        while not (found := self.llumlets()):
            if time.monotonic() > deadline:
                raise ServerDied(f"{self.name} answers but never printed its llumlet's address:\n{self._tail()}")
            time.sleep(0.1)
        return found[0]

    def llumlets(self) -> list[LlumletAddress]:
        """Every llumlet the log speaks of: one a data-parallel rank."""
        return [LlumletAddress(i, host, int(port)) for i, host, port in _LLUMLET_LINE.findall(self.log_text())]

    def _stage(self) -> str:
        text = self.log_text()
        return next((stage for marker, stage in _STAGES if marker in text), "starting")


class Fleet:
    """Servers that are stopped together. A context manager; `start` and `launch` may be called repeatedly."""

    def __init__(self, log_dir: Path | None = None, progress: _Progress | None = None) -> None:
        self.log_dir = log_dir if log_dir is not None else Path(tempfile.mkdtemp(prefix="llumnix-logs-"))
        self.servers: list[Server] = []
        self._progress = progress
        self._started = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def start(self, *specs: ServerSpec, timeout_s: float = START_TIMEOUT_S) -> list[Server]:
        """Start one server per spec, all at once, and wait for all of them."""
        started = self.launch(*specs)
        deadline = time.monotonic() + timeout_s
        for server in started:
            server.wait_ready(deadline - time.monotonic(), self._progress)
        return started

    def launch(self, *specs: ServerSpec) -> list[Server]:
        """Start their processes and return at once: `wait_ready` is the caller's."""
        launched = []
        for spec in specs:
            log = self.log_dir / f"{self._started:02d}-{spec.name or 'server'}.log"
            if spec.core is None and not spec.gpu and len(_CORES) <= FEW_CORES:
                spec = dataclasses.replace(spec, core=_CORES[self._started % len(_CORES)])
            self._started += 1
            server = Server.launch(spec, log)
            launched.append(server)
            self.servers.append(server)
        return launched

    def stop(self, *servers: Server) -> None:
        for server in servers:
            server.stop()
            self.servers.remove(server)

    def close(self) -> None:
        """Stop everything; all servers get SIGTERM before the first is waited for."""
        with contextlib.ExitStack() as stack:
            for server in self.servers:
                stack.callback(server.stop)
                for pid in server.pids()[:1]:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, 15)
        self.servers.clear()


@contextlib.contextmanager
def running(
    *specs: ServerSpec, log_dir: Path | None = None, progress: _Progress | None = None
) -> Iterator[list[Server]]:
    """Servers for the length of a `with` block."""
    with Fleet(log_dir, progress) as fleet:
        yield fleet.start(*specs)


def _direct() -> urllib.request.OpenerDirector:
    """Without the proxies of the environment: the servers are on this host."""
    return urllib.request.build_opener(urllib.request.ProxyHandler({}))


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far, and of the children it has waited for; 0 if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    # Fields 14 to 17 of proc(5): own user and system time, then that of children waited for.
    return sum(int(ticks) for ticks in fields[11:15]) / os.sysconf("SC_CLK_TCK")


def command_line(pid: int) -> str:
    """The command line of a process, or what it has put there; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
