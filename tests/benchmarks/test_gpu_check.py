# SPDX-License-Identifier: Apache-2.0
"""What of the GPU check can run without one: its comparison of kernels, on the CPU's; which cells there are, what
follows from what was seen of one, and the report, with engines that are a script; and with V2-on-CPU engines."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu_check import __main__ as gpu_check
from benchmarks.gpu_check import device, verdicts
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
from benchmarks.gpu_check.engines import Engined, cause_of
from benchmarks.gpu_check.verdicts import NotStarted, Numerics, Observed, Part, Runs, run_cells
from tests.support.beside import Beside, paused
from tests.support.harness import Fleet, Server, ServerDied, ServerSpec
from tests.support.moves import Move
from vllm_llumnix.kv.kernels import native, reference
from vllm_llumnix.kv.kernels.plan import BlockCopy


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "BLOCKS", 8)
    monkeypatch.setattr(device, "TIMES", 2)


def test_kernels() -> None:
    part = device.check_kernels(torch.device("cpu"), ("cuda", "cpp", "torch"))
    assert part["verdict"] == "right"
    assert part["missing"] == {"cuda": "it copies on CUDA devices only"}
    assert {row["backend"] for row in part["speeds"]} == {"cpp", "torch"}
    assert all(row["gb_s"] > 0 for row in part["speeds"])


def test_a_wrong_byte_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(copy: BlockCopy, *_: int) -> None:
        reference.copy_blocks(copy)
        copy.buffer[copy.num_bytes - 1] ^= 1

    monkeypatch.setattr(native, "copy_blocks_cpu", wrong)
    part = device.check_kernels(torch.device("cpu"), ("cpp",))
    assert (part["verdict"], len(part["wrong"])) == ("wrong", 6)


def test_seals(monkeypatch: pytest.MonkeyPatch) -> None:
    part = device.check_seals(torch.device("cpu"))
    assert (part["verdict"], len(part["speeds"])) == ("right", len(device.SEALED))
    monkeypatch.setattr(device.Multilinear, "seal", lambda *_: b"the same")
    part = device.check_seals(torch.device("cpu"))
    assert part["wrong"] == [f"{size} bytes, one of them changed" for size in device.SEALED]


def test_the_self_test_says_what_copies() -> None:
    part = device.self_test(torch.device("cpu"))
    assert (part["verdict"], part["copied_by"], part["passed_over"]) == ("right", ["cpp"], [])


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
def test_what_a_machine_cannot_run(engines: Engines, machine: Machine, why: str | None) -> None:
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


@pytest.mark.parametrize("stock", [True, False])
def test_whose_fault_it_is_that_engines_do_not_start(
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
    json.dumps(row)
    return row


def test_right() -> None:
    script = Script(as_started=seen())
    row = row_of(script)
    assert (row["verdict"], row["why"], row["runner"]) == ("right", [], V2)
    assert row["concluded"] == "exact, as started"
    (engine, _) = row["attempts"][0]["engines"]
    assert engine == {"runner": V2, "scheduler": "AsyncScheduler", "steps_in_flight": 2, "executor": "uni"}
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


def test_what_breaks_is_wrong() -> None:
    row = row_of(Script(as_started=RuntimeError("out of order")))
    assert (row["verdict"], row["why"]) == ("wrong", ["RuntimeError: out of order"])


def test_cells_with_equal_engines_share_a_pair() -> None:
    script = Script(as_started=seen())
    named = [Cell("one", Engines()), Cell("other", Engines(), "json"), Cell("third", Engines(lora=True), "lora")]
    rows = run_cells(named, MACHINE, script, lambda text: None)
    assert [row["cell"] for row in rows] == ["one", "other", "third"]
    assert script.pairs == ["as started"] * 2


# The report


def test_without_a_gpu(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert gpu_check.main(["--json", str(tmp_path / "gpu.json")]) == 1
    report = json.loads(capsys.readouterr().out)
    assert json.loads((tmp_path / "gpu.json").read_text()) == report
    assert {part["verdict"] for part in [*report["parts"].values(), *report["cells"]]} == {"unrun"}
    assert {why for row in report["cells"] for why in row["why"]} == {"torch sees no GPU"}
    assert len(report["cells"]) == len(matrix()) + len(single(stand_in=False))
    assert (report["gpus"], report["stand_in"]) == ([], None)
    assert report["counts"] == {"right": 0, "wrong": 0, "undecided": 0, "unrun": len(report["cells"]) + 5}


@pytest.mark.parametrize(("verdict", "status"), [("right", 0), ("wrong", 1), ("undecided", 1), ("unrun", 0)])
def test_a_stand_in_is_named_and_the_exit_code(
    verdict: str, status: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the processor's kernels are right, so something was."""

    def rows(chosen: list[Cell], machine: Machine, *_: Any) -> list[Part]:
        assert (machine.stand_in, [cell.name for cell in chosen]) == (True, ["LoRA", "eager-v1-fp8-gqa-16"])
        attempt = {"verdict": verdict, "numerics": "as started", "why": []}
        return [verdicts.row(cell, [attempt], None) for cell in chosen]

    monkeypatch.setattr(gpu_check, "run_cells", rows)
    assert gpu_check.main(["--stand-in", "--cells", "LoRA,eager-v1-fp8-gqa-16"]) == status
    report = json.loads(capsys.readouterr().out)
    assert "no GPU was checked" in report["stand_in"]
    assert [report["parts"][name]["verdict"] for name in ("self_test", "kernels", "seals")] == ["right"] * 3
    assert [report["parts"][name]["verdict"] for name in ("ipc", "ipc_killed_source")] == ["unrun"] * 2


def test_a_cell_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_check.main(["--cells", "LoRA,no such"])
    assert "no cell is called no such; there are: graphs-v2-bf16-gqa-16" in capsys.readouterr().err


# With engines

REAL = ["eager-v2-bf16-mla-64", "prefix hits", "source killed"]


@pytest.mark.full
def test_v2_on_cpu_engines_in_a_gpus_place(tmp_path: Path, simulation: Beside | None) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--stand-in", "--cells", ",".join(REAL)]
    command += ["--logs", str(tmp_path)]
    with paused(simulation):
        run = subprocess.run(command, text=True, capture_output=True, timeout=580, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    report = json.loads(run.stdout)
    assert [row["cell"] for row in report["cells"]] == REAL
    assert {row["runner"] for row in report["cells"]} == {"vllm.v1.worker.cpu.model_runner.CPUModelRunner"}
    assert {runs["scheduler"] for row in report["cells"] for runs in row["attempts"][-1]["engines"]} == {
        "AsyncScheduler"
    }
