# SPDX-License-Identifier: Apache-2.0
"""What of the GPU check can run without one: its comparison of kernels, on the CPU's; which cells there are, what
follows from what was seen of one, and the report, with engines that are a script; and with V2-on-CPU engines."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from email.message import Message
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.error import HTTPError, URLError

import pytest
import torch

from benchmarks.gpu_check import __main__ as gpu_check
from benchmarks.gpu_check import device, drive, engines, ipc, parts, pulls, verdicts
from benchmarks.gpu_check.budget import Budget
from benchmarks.gpu_check.cells import (
    ATTENTIONS,
    BLOCK_SIZES,
    GRAPHS,
    KVS,
    RUNNERS,
    Cell,
    Engines,
    Machine,
    matrix,
    single,
    why_unrun,
)
from benchmarks.gpu_check.engines import Engined, cause_of, found_in
from benchmarks.gpu_check.verdicts import NotStarted, Numerics, Observed, Part, Runs, run_cells
from tests.support.harness import Fleet, Server, ServerDied, ServerSpec
from tests.support.moves import Move
from vllm_llumnix.kv.kernels import native, reference
from vllm_llumnix.kv.kernels.plan import PlannedCopy

pytestmark = pytest.mark.rest


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "BLOCKS", 8)
    monkeypatch.setattr(device, "REAL_BLOCKS", 2)
    monkeypatch.setattr(device, "TIMES", 2)
    monkeypatch.setattr(pulls, "BLOCKS", 4)
    monkeypatch.setattr(pulls, "SECONDS", 0.2)
    monkeypatch.setattr(pulls, "WIDTH", 64)


CPU = torch.device("cpu")


def test_kernels() -> None:
    part = device.check_kernels(CPU, ("cuda", "cpp", "torch"))
    assert (part["verdict"], part["wrong"]) == ("right", [])
    assert part["missing"] == {"cuda": "it copies on CUDA devices only"}
    assert {row["backend"] for row in part["speeds"]} == {"cpp", "torch"}
    assert all(row["gather_gb_s"] > 0 < row["scatter_gb_s"] for row in part["speeds"])
    timed = {row["pages"] for row in part["speeds"]}
    assert {"LBNHC, a real model's block", "LBNHC, half of the heads", "LBHNC, vector by vector"} < timed


def test_a_real_models_block_is_among_what_is_copied() -> None:
    cases = {case.name: case for case in device.cases()}
    assert cases["LBNHC, a real model's block"].layout.bytes_per_block == 9 << 18
    regions = {case.name: len(case.layout.regions) for case in cases.values() if case.cut is not None}
    assert regions == {
        "LBNHC, half of the heads": device.TOKENS,
        "LBNHC, a quarter of the tokens": 1,
        "LBNHC, vector by vector": device.HEADS * device.TOKENS,
        "LBHNC, half of the heads": 1,
        "LBHNC, a quarter of the tokens": device.HEADS,
        "LBHNC, vector by vector": device.HEADS * device.TOKENS,
    }


def test_a_wrong_byte_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(copy: PlannedCopy, *_: int) -> None:
        reference.copy_blocks(copy)
        copy.buffer[copy.num_bytes - 1] ^= 1

    monkeypatch.setattr(native, "copy_blocks_cpu", wrong)
    part = device.check_kernels(CPU, ("cpp",))
    assert (part["verdict"], len(part["wrong"])) == ("wrong", len(list(device.cases())))


def test_seals(monkeypatch: pytest.MonkeyPatch) -> None:
    part = device.check_seals(torch.device("cpu"))
    assert (part["verdict"], len(part["speeds"])) == ("right", len(device.SEALED))
    monkeypatch.setattr(device.Multilinear, "seal", lambda *_: b"the same")
    part = device.check_seals(torch.device("cpu"))
    assert part["wrong"] == [f"{size} bytes, one of them changed" for size in device.SEALED]


def test_the_self_test_says_what_copies() -> None:
    part = device.self_test(CPU, ("cpp",))
    assert (part["verdict"], part["copied_by"], part["passed_over"]) == ("right", ["cpp"], {})


def test_a_backend_that_is_passed_over_makes_the_self_test_wrong() -> None:
    """Whatever copies in its place, and also if it is behind one that copies."""
    part = device.self_test(CPU, ("cpp", "cuda"))
    assert (part["verdict"], part["copied_by"]) == ("wrong", ["cpp"])
    assert part["passed_over"] == {"cuda": "it copies on CUDA devices only"}


@pytest.mark.parametrize("transport", pulls.TRANSPORTS)
def test_a_pull_between_two_processes_beside_a_model(transport: str) -> None:
    part = pulls.check_pull(CPU, transport)
    assert (part["verdict"], part["copied_by"], part["mib"]) == ("right", "cpp", 9)
    assert part["pulls"] >= pulls.MIN_PULLS
    assert part["gb_s_p50"] > 0
    assert part["steps"]["quiet"]["p99_ms"] >= part["steps"]["quiet"]["p50_ms"] > 0
    assert part["steps"]["beside_pulls"]["steps"] > 0


def test_a_pull_that_fails_says_why() -> None:
    found = parts.carried_out(lambda: pulls.check_pull(CPU, "nixl"), None)
    assert found["verdict"] == "wrong"
    assert "no nixl: no transport 'nixl'" in found["why"]


def test_a_survivor_that_does_not_compute_is_wrong() -> None:
    well = [{"when": when, "pulls": 2, "noticed": "has ended", "why": None} for when in ipc.WHEN]
    assert ipc.judged(well)["verdict"] == "right"
    dead = [well[0], {**well[1], "why": "RuntimeError: CUDA error: an illegal memory access was encountered"}, well[2]]
    part = ipc.judged(dead)
    assert (part["verdict"], len(part["wrong"])) == ("wrong", 1)
    assert part["wrong"][0].startswith("killed during a copy: RuntimeError: CUDA error")
    idle = ipc.judged([{**well[0], "pulls": 0}, {**well[1], "pulls": 0}, well[2]])
    assert idle["wrong"] == ["killed during a copy: nothing was read before"]


def test_survivors_prove_that_they_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = torch.zeros(64, dtype=torch.uint8)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert ipc.why_it_does_not_compute(storage) is None
    assert bool((storage == 1).all())

    def sticky() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", sticky)
    assert "illegal memory access" in (ipc.why_it_does_not_compute(storage) or "")


# Which cells

MACHINE = Machine(1)
AXES = {"graphs": GRAPHS, "runner": RUNNERS, "kv": KVS, "attention": ATTENTIONS, "block_size": BLOCK_SIZES}


def test_any_two_choices_meet_by_default() -> None:
    rows = [dataclasses.astuple(cell.engines)[: len(AXES)] for cell in matrix()]
    for (one, ones), (other, others) in itertools.combinations(enumerate(AXES.values()), 2):
        assert {(row[one], row[other]) for row in rows} == set(itertools.product(ones, others))
    assert len({*matrix(every=True)}) == 32 > len(rows)
    assert {*matrix()} < {*matrix(every=True)}


def test_each_choice_meets_what_gpus_run() -> None:
    on_gpus = [cell.engines for cell in matrix() if cell.engines.graphs and cell.engines.runner == "v2"]
    for name in ("kv", "attention", "block_size"):
        assert {getattr(engines, name) for engines in on_gpus} == set(AXES[name])


def test_single_cells_begin_with_the_defaults() -> None:
    named = single(stand_in=False)
    assert named[0].engines == Engines()
    assert {cell.task for cell in named} == {"move", "prefix", "lora", "ngram", "json", "kill"}
    assert [cell.name for cell in named if cell.engines.gpus > 1] == ["tensor parallel 2", "two GPUs"]
    assert not any(cell.engines.graphs for cell in single(stand_in=True))


@pytest.mark.parametrize(
    ("engines", "machine", "why"),
    [
        (Engines(), Machine(1), None),
        (Engines(), Machine(0, obstacle="torch sees no GPU"), "torch sees no GPU"),
        (Engines(gpus=2), Machine(1), "2 GPUs are needed, there is 1"),
        (Engines(gpus=2), Machine(2), "do not reach each other"),
        (Engines(gpus=2), Machine(2, gpus_reach_each_other=True), None),
        (Engines(gpus=2, ranks=2), Machine(2), None),
        (Engines(), Machine(0, stand_in=True), "captures no graphs"),
        (Engines(graphs=False), Machine(0, stand_in=True), None),
        (Engines(graphs=False, gpus=2, ranks=2), Machine(0, stand_in=True), None),
        (Engines(graphs=False, gpus=2), Machine(0, stand_in=True), "no second GPU"),
        (Engines(graphs=False, kv="fp8", attention="mla"), Machine(0, stand_in=True), "fp8"),
    ],
)
def test_cells_beyond_the_machine_are_skipped_with_a_reason(
    engines: Engines, machine: Machine, why: str | None
) -> None:
    found = why_unrun(Cell("", engines), machine)
    assert found is None if why is None else why in (found or "")


def test_engines_are_started_as_vllm_starts_them_on_a_gpu(tmp_path: Path) -> None:
    def words(
        engines: Engines, stand_in: bool = False, numerics: Numerics = "as started"
    ) -> tuple[str, dict[str, str]]:
        spec = Engined(Machine(1, stand_in=stand_in), None, tmp_path).spec(engines, numerics, "b")
        return " ".join(spec.command(1)), spec.environment(tmp_path)

    command, environment = words(Engines())
    assert not [word for word in ("eager", "block-size", "kv-cache-dtype", "executor") if word in command]
    assert not environment.keys() & {"TORCH_COMPILE_DISABLE", "OMP_NUM_THREADS", "VLLM_USE_V2_MODEL_RUNNER"}
    command, environment = words(Engines(False, "v1", "fp8", "mla", 64, "mp"), numerics="batch invariant")
    for flag in ("--enforce-eager", "--block-size 64", "--kv-cache-dtype fp8", "--distributed-executor-backend mp"):
        assert flag in command
    assert environment["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    assert environment["VLLM_BATCH_INVARIANT"] == "1"
    assert words(Engines(gpus=2))[1]["CUDA_VISIBLE_DEVICES"] == "1,0"
    command, environment = words(Engines(graphs=False, transport="tcp"), stand_in=True, numerics="float32")
    assert "--llumlet-transport tcp" in command
    assert "--dtype float32" in command
    assert environment["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    assert environment["TRITON_INTERPRET"] == "1"


LOG = """/logs/00-a.log:
(Worker pid=7) ERROR 11-24 21:51:13 [multiproc_executor.py:1063] ValueError: No common block size for 16.
(EngineCore pid=6) ERROR 11-24 21:51:13 [core.py:1514] RuntimeError: Worker failed with error 'No common block size'
RuntimeError: Engine core initialization failed. See root cause above.
"""


def test_flags_and_environment_of_all_servers(tmp_path: Path) -> None:
    bench = Engined(MACHINE, None, tmp_path, flags=["--attention-backend", "TRITON_ATTN"], env={"VLLM_X": "1"})
    spec = bench.spec(Engines(), "as started", "a")
    assert spec.command(1)[-2:] == ["--attention-backend", "TRITON_ATTN"]
    assert spec.environment(tmp_path)["VLLM_X"] == "1"


@pytest.mark.parametrize("stock", [True, False])
def test_failed_start_is_blamed_on_vllm_or_the_llumlet(
    stock: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of vLLM if it does not start without the llumlet either."""
    asked: list[ServerSpec] = []

    def start(self: Fleet, *specs: ServerSpec, timeout_s: float) -> list[Server]:
        asked.extend(specs)
        if stock or specs[0].llumlet:
            raise ServerDied(LOG)
        return []

    monkeypatch.setattr(Fleet, "start", start)
    bench = Engined(MACHINE, tmp_path, tmp_path)
    with pytest.raises(NotStarted, match=r"ValueError: No common block size for 16\.$") as error:
        bench.pair(Engines(), "as started").__enter__()
    assert error.value.stock is stock
    assert [spec.llumlet for spec in asked] == [True, True, False]
    assert not [word for word in asked[-1].command(1) if "llumlet" in word]
    assert cause_of(ServerDied("a was not ready after 600 s")) == "a was not ready after 600 s"


def test_without_time_vllm_alone_is_not_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    def start(self: Fleet, *specs: ServerSpec, timeout_s: float) -> list[Server]:
        asked.append(timeout_s)
        raise ServerDied(LOG)

    monkeypatch.setattr(Fleet, "start", start)
    bench = Engined(MACHINE, tmp_path, tmp_path, start_timeout_s=50, budget=Budget(10, clock=lambda: 0.0))
    with pytest.raises(NotStarted, match="no time to try vLLM without the llumlet; with it: ValueError") as error:
        bench.pair(Engines(), "as started").__enter__()
    assert (error.value.stock, asked) == (False, [10])


class Answering(Server):
    """Is healthy, and has an error for its first request."""

    def __init__(self, error: OSError, log: Path) -> None:
        log.write_text("EngineCore: RuntimeError: CUDA error: invalid argument\n")
        self.name, self.log, self.spec, self.error = "a", log, ServerSpec(log, llumlet=False), error

    def _read_pid(self) -> None:
        """It is known."""

    def healthy(self) -> bool:
        return True

    def generate(self, prompt: str | list[int], max_tokens: int, **parameters: Any) -> dict[str, Any]:
        raise self.error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (HTTPError("http://a", 500, "", Message(), io.BytesIO(b"engine dead")), "first request with 500: engine dead"),
        (URLError("refused"), "did not answer its first request: <urlopen error refused>"),
        (TimeoutError("timed out"), "did not answer its first request: timed out"),
    ],
)
def test_engine_that_fails_its_warm_up_has_not_started(error: OSError, said: str, tmp_path: Path) -> None:
    with pytest.raises(ServerDied, match=said) as died:
        Answering(error, tmp_path / "a.log").wait_ready()
    assert "CUDA error: invalid argument" in str(died.value)


@pytest.mark.asyncio
async def test_stream_whose_move_was_refused_is_moved_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the refusal is what is told, not that the stream has ended meanwhile."""
    moves = [a_move(), a_move(phase="stayed", reason="no_slots", detail="4 of 4"), a_move()]
    asked: list[tuple[Any, Any]] = []

    class Endless:
        token_ids = TOKENS

        async def wait_for(self, count: int) -> None:
            """There are so many."""

        async def result(self) -> Endless:
            return self

    async def move_stream(source: Any, destination: Any, stream: Any) -> Move:
        asked.append((source, destination))
        return moves[len(asked) - 1]

    async def at_once(*_: Any) -> Any:
        return Endless()

    monkeypatch.setattr(engines, "Client", lambda url: contextlib.nullcontext(url))
    monkeypatch.setattr(engines, "move_stream", move_stream)
    monkeypatch.setattr(engines, "_may_move", at_once)
    monkeypatch.setattr(engines._Task, "_begin", at_once)
    a, b = (SimpleNamespace(base_url=name) for name in "ab")
    found = Observed([])
    _, made = await engines._Task(engines.Two(a, b), CELL, engines.ON_GPU, found)._moved(256)  # type: ignore[arg-type]
    assert (made, asked) == (moves[:2], [(a, b), (b, a)])
    told = verdicts.judged(CELL, dataclasses.replace(seen(), moves=made))
    assert told.why == ["a move was not live: stayed, live, no_slots 4 of 4"]


def test_answers_outlast_their_moves_and_fit_the_models() -> None:
    scale = engines.ON_GPU
    assert scale.tokens >= 2000
    assert max(scale.lengths) == 6000
    assert max(scale.lengths) + scale.tokens <= 8192


def test_a_log_names_the_attention_backend(tmp_path: Path) -> None:
    log = "this engine has X behind Y, steps in flight: 2\n"
    told = {
        "Using FLASH_ATTN attention backend out of potential backends: ['FLASH_ATTN', 'TRITON_ATTN'].": "FLASH_ATTN",
        "Using AttentionBackendEnum.TRITON_ATTN backend.": "TRITON_ATTN",
        "Using FlashAttention version 3": "",
    }
    for line, backend in told.items():
        server = SimpleNamespace(log_text=lambda line=line: log + line, pids=list, name="a")
        assert found_in(server) == Runs("X", "Y", 2, "uni", backend)  # type: ignore[arg-type]


# What follows from what was seen

V2 = "vllm.v1.worker.gpu.model_runner.GPUModelRunner"
V1 = "vllm.v1.worker.gpu_model_runner.GPUModelRunner"
CELL = Cell("it", Engines())
TOKENS = list(range(40))
OTHER = [*TOKENS[:30], 7, *TOKENS[31:]]


def a_move(**fields: Any) -> Move:
    settled: dict[str, Any] = {field.name: None for field in dataclasses.fields(Move)}
    live = {"phase": "moved", "mode": "live", "recomputed_tokens": 1, "transport": "local", "reason": "", "detail": ""}
    return Move(**settled | live | fields)


def seen(**fields: Any) -> Observed:
    runs = Runs(V2, "AsyncScheduler", 2, "uni")
    right: dict[str, Any] = {"engines": [runs, runs], "unmoved": [(TOKENS, TOKENS)], "moved": [TOKENS]}
    return Observed(**right | {"moves": [a_move(), a_move()]} | fields)


class Script:
    """Implements `Bench`: in each of the numerics, what is seen, or raised; numerics that are not named do not start.

    `pairs` are those that were asked for.
    """

    def __init__(self, **by_numerics: Observed | Exception) -> None:
        self._said = {name.replace("_", " "): what for name, what in by_numerics.items()}
        self.pairs: list[str] = []

    @contextlib.contextmanager
    def pair(self, engines: Engines, numerics: Numerics) -> Iterator[str]:
        self.pairs.append(numerics)
        said = self._said.get(numerics, NotStarted("no such kernels", stock=True))
        if isinstance(said, NotStarted):
            raise said
        yield numerics

    def observe(self, pair: str, cell: Cell) -> Observed:
        said = self._said[pair]
        if isinstance(said, Exception):
            raise said
        return said


def row_of(script: Script, cell: Cell = CELL, machine: Machine = MACHINE) -> Part:
    (row,) = run_cells([cell], machine, script, lambda text: None)
    assert row["left"] is False
    json.dumps(row)
    return row


def test_right() -> None:
    script = Script(as_started=seen())
    row = row_of(script)
    assert (row["verdict"], row["why"], row["runner"]) == ("right", [], V2)
    assert row["concluded"] == "exact, as started"
    (engine, _) = row["attempts"][0]["engines"]
    assert engine == {
        "runner": V2,
        "scheduler": "AsyncScheduler",
        "steps_in_flight": 2,
        "executor": "uni",
        "attention": "",
    }
    assert script.pairs == ["as started"]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"moves": [a_move(), a_move(mode="recompute")]}, "a move was not live: moved, recompute"),
        ({"moves": [a_move(recomputed_tokens=9)]}, "a move was not live"),
        ({"moves": [a_move(phase="stayed", reason="deadline", detail="late")]}, "stayed, live, deadline late"),
        ({"moves": [a_move(transport="tcp")]}, "a move went over tcp, not local"),
        ({"moves": []}, "nothing was moved"),
        ({"faults": ["no draft was accepted"]}, "no draft was accepted"),
        ({"engines": [Runs(V2, "AsyncScheduler", 2, "uni"), Runs(V1, "AsyncScheduler", 2, "uni")]}, f"asked for, {V1}"),
        (
            {"engines": [Runs("theirs.Runner", "AsyncScheduler", 2, "uni")]},
            "the v2 runner was asked for, theirs.Runner",
        ),
    ],
)
def test_wrong(fields: dict[str, Any], why: str) -> None:
    """Whatever the tokens say, also where they say nothing; and no other attempt is made."""
    for unmoved in ((TOKENS, TOKENS), (TOKENS, OTHER)):
        script = Script(as_started=seen(**fields, unmoved=[unmoved]), float32=seen())
        row = row_of(script)
        assert row["verdict"] == "wrong"
        assert why in row["why"][0]
        assert script.pairs == ["as started"]


def test_a_wrong_executor() -> None:
    row = row_of(Script(as_started=seen()), Cell("it", Engines(executor="mp")))
    assert row["why"] == ["executor mp was asked for, uni is there"] * 2


@pytest.mark.parametrize("runner", [V2, V1])
def test_runners_are_told_apart(runner: str) -> None:
    """Of CPUs, too."""
    for name in (runner, runner.replace("gpu", "cpu").replace("GPU", "CPU")):
        assert Runs(name, "", 1, "").runner_kind == ("v2" if runner == V2 else "v1")


def test_a_wrong_token() -> None:
    """Is wrong for good; but the same request is tried where tokens depend on nothing else."""
    row = row_of(Script(as_started=seen(moved=[OTHER]), batch_invariant=seen()))
    assert (row["verdict"], row["why"]) == ("wrong", ["tokens differ from token 30 of 40 on"])
    assert "is exact batch invariant: the bytes arrive" in row["concluded"]
    row = row_of(Script(as_started=seen(moved=[OTHER]), batch_invariant=seen(moved=[OTHER]), float32=seen()))
    assert row["verdict"] == "wrong"
    row = row_of(Script(**dict.fromkeys(("as_started", "batch_invariant", "float32"), seen(moved=[OTHER]))))
    assert (row["verdict"], row["concluded"]) == ("wrong", "differs")


def test_an_answer_that_is_too_short() -> None:
    row = row_of(Script(as_started=seen(moved=[TOKENS[:20]])))
    assert row["why"][0] == "tokens differ from token 20 of 40 on"


def test_unmoved_runs_that_differ_clear_nothing_and_blame_nothing() -> None:
    apart = seen(unmoved=[(TOKENS, OTHER)], moved=[OTHER])
    script = Script(as_started=apart, batch_invariant=seen())
    row = row_of(script)
    assert (row["verdict"], script.pairs) == ("right", ["as started", "batch invariant"])
    assert row["concluded"] == "exact, batch invariant; nothing follows as started, where unmoved runs differ, too"
    script = Script(as_started=apart, float32=seen())
    row = row_of(script)
    assert script.pairs == list(verdicts.NUMERICS)
    assert (row["verdict"], row["concluded"][:14]) == ("right", "exact, float32")
    row = row_of(Script(as_started=apart, batch_invariant=apart, float32=seen(moved=[OTHER])))
    assert row["verdict"] == "wrong"
    row = row_of(Script(as_started=apart, batch_invariant=apart, float32=apart))
    assert (row["verdict"], row["concluded"]) == ("undecided", "nothing: unmoved runs differ, too")
    assert len(row["why"]) == 3


def test_a_prefix_hit_is_compared_where_it_must_be_exact() -> None:
    script = Script(batch_invariant=seen())
    assert row_of(script, Cell("it", Engines(), "prefix"))["verdict"] == "right"
    assert script.pairs == ["batch invariant"]
    script = Script(float32=seen())
    engines = Engines(graphs=False)
    assert row_of(script, Cell("it", engines, "prefix"), Machine(0, stand_in=True))["verdict"] == "right"


def test_engines_that_do_not_start() -> None:
    script = Script()
    row = row_of(script)
    assert (row["verdict"], row["why"], row["runner"]) == ("unrun", ["no such kernels"], None)
    assert script.pairs == ["as started"]
    row = row_of(Script(as_started=NotStarted("with the llumlet only", stock=False)))
    assert (row["verdict"], row["why"][0]) == ("wrong", "with the llumlet only")


def test_exception_makes_a_cell_wrong() -> None:
    row = row_of(Script(as_started=RuntimeError("out of order")))
    assert (row["verdict"], row["why"]) == ("wrong", ["RuntimeError: out of order"])


def test_cells_with_equal_engines_share_a_pair() -> None:
    script = Script(as_started=seen())
    named = [Cell("one", Engines()), Cell("other", Engines(), "json"), Cell("third", Engines(lora=True), "lora")]
    rows = list(run_cells(named, MACHINE, script, lambda text: None))
    assert [row["cell"] for row in rows] == ["one", "other", "third"]
    assert script.pairs == ["as started"] * 2


def test_a_row_is_there_before_the_next_cell_begins() -> None:
    script = Script(as_started=seen())
    rows = run_cells([Cell("one", Engines()), Cell("other", Engines(lora=True))], MACHINE, script, lambda text: None)
    assert (next(rows)["cell"], script.pairs) == ("one", ["as started"])
    assert (next(rows)["cell"], script.pairs) == ("other", ["as started"] * 2)


def test_a_harness_that_breaks_costs_one_pair() -> None:
    script = Script(as_started=seen())
    pair, broken = script.pair, [True]

    @contextlib.contextmanager
    def once(engines: Engines, numerics: Numerics) -> Iterator[str]:
        if broken:
            raise ValueError(broken.pop())
        with pair(engines, numerics) as made:
            yield made

    script.pair = once  # type: ignore[method-assign]
    named = [Cell("one", Engines()), Cell("other", Engines(lora=True))]
    rows = list(run_cells(named, MACHINE, script, lambda text: None))
    assert [(row["verdict"], row["why"]) for row in rows] == [("wrong", ["ValueError: True"]), ("right", [])]


def test_no_pair_is_begun_for_which_there_is_no_time() -> None:
    now = [0.0]
    budget = Budget(200, clock=lambda: now[0])

    class Slow(Script):
        def observe(self, pair: str, cell: Cell) -> Observed:
            now[0] += 90.0
            return super().observe(pair, cell)

    script = Slow(as_started=seen())
    named = [Cell(name, Engines(ranks=number)) for number, name in enumerate("abcd", 1)]
    rows = list(run_cells(named, MACHINE, script, lambda text: None, budget))
    assert [(row["cell"], row["verdict"], row["left"]) for row in rows] == [
        *(("a", "right", False), ("b", "right", False)),
        *(("c", "unrun", True), ("d", "unrun", True)),
    ]
    assert rows[2]["why"] == ["no time: 20 s are left, a pair of engines has taken up to 90 s"]
    assert len(script.pairs) == 2


def test_a_cell_that_is_left_undecided_for_lack_of_time_says_so() -> None:
    now = [0.0]
    script = Script(as_started=seen(unmoved=[(TOKENS, OTHER)]), batch_invariant=seen())

    def say(text: str) -> None:
        now[0] += 30.0

    (row,) = run_cells([CELL], MACHINE, script, say, Budget(100, clock=lambda: now[0]))
    assert (row["verdict"], row["left"], script.pairs) == ("undecided", True, ["as started"])
    assert row["why"][0].startswith("no time: 40 s are left")


@pytest.mark.parametrize("most", [1, 2, 3])
def test_so_many_numerics_are_tried(most: int) -> None:
    apart = seen(unmoved=[(TOKENS, OTHER)])
    script = Script(**dict.fromkeys(("as_started", "batch_invariant", "float32"), apart))
    (row,) = run_cells([CELL], MACHINE, script, lambda text: None, most=most)
    assert row["verdict"] == "undecided"
    assert script.pairs == list(verdicts.NUMERICS[:most])
    script.pairs.clear()
    (row,) = run_cells([Cell("it", Engines(), "prefix")], MACHINE, script, lambda text: None, most=most)
    assert script.pairs == list(verdicts.NUMERICS[1:][:most])


# The report


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "new" / "gpu.jsonl"
    assert gpu_check.main(["--json", str(file)]) == 1
    report = json.loads(capsys.readouterr().out)
    head, *rows, tail = map(json.loads, file.read_text().splitlines())
    assert [row for row in rows if "cell" in row] == report["cells"]
    assert {row["part"]: row for row in rows if "part" in row} == report["parts"]
    assert head | {"parts": report["parts"], "cells": report["cells"]} | tail == report
    assert {row["verdict"] for row in rows} == {"unrun"}
    assert {why for row in report["cells"] for why in row["why"]} == {"torch sees no GPU"}
    assert [row["cell"] for row in report["cells"]] == [cell.name for cell in single(stand_in=False) + matrix()]
    assert (report["gpus"], report["stand_in"], report["left"]) == ([], None, [])
    assert report["counts"] == {"right": 0, "wrong": 0, "undecided": 0, "unrun": len(rows)}
    assert report["vllm_asks_for"].startswith("torch==")
    assert report["torch"] == torch.__version__
    assert gpu_check.main(["--no-parts", "--cells", "tcp", "--json", str(file)]) == 1
    assert len(file.read_text().splitlines()) == len(rows) + 2 + 3, "what was there before is still there"


def test_a_line_is_written_as_soon_as_it_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, found = tmp_path / "gpu.jsonl", list[list[str]]()

    def noting(*_: Any) -> Iterator[Part]:
        for name in ("one", "other"):
            found.append([next(iter(json.loads(line).values())) for line in file.read_text().splitlines()])
            yield {"part": name, "verdict": "right", "left": False}

    monkeypatch.setattr(parts, "run_parts", noting)
    assert gpu_check.main(["--stand-in", "--no-cells", "--json", str(file)]) == 0
    assert found == [["gpu_check"], ["gpu_check", "one"]]


def test_parts_by_name_and_in_what_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--stand-in", "--no-cells", "--parts", "seals,self_test"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report["parts"]) == ["seals", "self_test"]
    assert report["cells"] == []
    assert gpu_check.main(["--stand-in", "--no-cells", "--parts", "seals", "--seconds", "0"]) == 1
    found = capsys.readouterr()
    assert json.loads(found.out)["left"] == ["seals"]
    assert "for lack of time this was left: seals" in found.err


def test_parts_need_nothing_of_vllm(tmp_path: Path) -> None:
    """Where vLLM cannot be imported, neither here nor in the processes of the parts."""
    (tmp_path / "vllm.py").write_text("raise ImportError('there is no vLLM here')\n")
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--stand-in", "--numerics", "1", "--cells", "LoRA"]
    command += ["--parts", "self_test,seals,pull_local,pull_tcp"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(gpu_check.ipc.ROOT)])}
    run = subprocess.run(
        [sys.executable, "-c", SMALL, *command[3:]],
        text=True,
        capture_output=True,
        timeout=300,
        check=False,
        env=environment,
        cwd=gpu_check.ipc.ROOT,
    )
    report = json.loads(run.stdout.splitlines()[-1])
    assert {name: part["verdict"] for name, part in report["parts"].items()} == dict.fromkeys(
        ("self_test", "seals", "pull_local", "pull_tcp"), "right"
    )
    (row,) = report["cells"]
    assert (row["verdict"], row["why"]) == ("unrun", ["vLLM cannot be imported: there is no vLLM here"])


SMALL = """
import sys
from benchmarks.gpu_check import __main__ as gpu_check, device, pulls
device.BLOCKS, pulls.BLOCKS, pulls.SECONDS, pulls.WIDTH = 8, 4, 0.2, 64
sys.exit(gpu_check.main(sys.argv[1:]))
"""


@pytest.mark.parametrize(("verdict", "status"), [("right", 0), ("wrong", 1), ("undecided", 1), ("unrun", 0)])
def test_a_stand_in_is_named_and_the_exit_code(
    verdict: str, status: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the processor's kernels are right, so something was."""

    def rows(chosen: list[Cell], machine: Machine, *_: Any) -> Iterator[Part]:
        assert (machine.stand_in, [cell.name for cell in chosen]) == (True, ["LoRA", "eager-v1-fp8-gqa-16"])
        attempt = {"verdict": verdict, "numerics": "as started", "why": []}
        yield from (verdicts.row(cell, [attempt], None) for cell in chosen)

    monkeypatch.setattr(gpu_check, "run_cells", rows)
    command = ["--stand-in", "--parts", "self_test,ipc", "--cells", "LoRA,eager-v1-fp8-gqa-16"]
    assert gpu_check.main(command) == status
    report = json.loads(capsys.readouterr().out)
    assert "no GPU was checked" in report["stand_in"]
    assert {name: part["verdict"] for name, part in report["parts"].items()} == {"self_test": "right", "ipc": "unrun"}


@pytest.mark.usefixtures("no_gpu")
def test_a_stand_in_has_all_parts_but_those_of_ipc() -> None:
    unrun = {name for name, (_, obstacle) in parts.chosen(True, None).items() if obstacle}
    assert unrun == {"ipc", "ipc_killed_source"}
    assert all(obstacle == "torch sees no GPU" for _, obstacle in parts.chosen(False, None).values())


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        (["--parts"], ["--seconds", "400", "--no-cells"]),
        (
            ["--seconds", "300", "--numerics", "3", "--flags=--enforce-eager", "--cells", "defaults,LoRA", "tcp"],
            ["--seconds", "300", "--no-parts", "--cells", "defaults,LoRA,tcp", "--flags=--enforce-eager"],
        ),
    ],
)
def test_the_script_of_a_borrowed_machine_uses_options_that_there_are(
    given: list[str], asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[list[str]] = []
    monkeypatch.setattr(gpu_check, "main", lambda arguments: said.append(arguments) or 0)
    monkeypatch.setattr(sys, "argv", ["drive.py", "--report", str(tmp_path / "report.jsonl"), *given])
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert drive.main() == 0
    (arguments,) = said
    gpu_check.parser().parse_args(arguments)
    assert not [word for word in asked if word not in arguments]


def test_the_script_of_a_borrowed_machine_sums_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.jsonl"
    lines = [{"bench": "gpu_check"}, {"part": "seals", "verdict": "right"}, row_of(Script(as_started=seen()))]
    report.write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(sys, "argv", ["drive.py", "--report", str(report), "--summary"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert drive.main() == 0
    assert "{'right': 2, 'wrong': 0, 'undecided': 0, 'unrun': 0}" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["cell", "part"])
def test_a_name_that_is_not_there(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_check.main([f"--{kind}s", "LoRA,no such" if kind == "cell" else "seals,no such"])
    first = "defaults" if kind == "cell" else "self_test"
    assert f"no {kind} is called no such; there are: {first}" in capsys.readouterr().err


def test_an_environment_is_name_and_value(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_check.main(["--env", "VLLM_X"])
    assert "'VLLM_X' is not NAME=VALUE" in capsys.readouterr().err


# With engines

REAL = ["eager-v2-bf16-mla-64", "prefix hits", "source killed"]


@pytest.mark.full
def test_v2_on_cpu_engines_in_a_gpus_place(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--stand-in", "--no-parts", "--cells", ",".join(REAL)]
    command += ["--logs", str(tmp_path)]
    run = subprocess.run(command, text=True, capture_output=True, timeout=580, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    report = json.loads(run.stdout)
    assert [row["cell"] for row in report["cells"]] == REAL
    assert {row["runner"] for row in report["cells"]} == {"vllm.v1.worker.cpu.model_runner.CPUModelRunner"}
    assert {runs["scheduler"] for row in report["cells"] for runs in row["attempts"][-1]["engines"]} == {
        "AsyncScheduler"
    }
