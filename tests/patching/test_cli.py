# SPDX-License-Identifier: Apache-2.0
"""The command `vllm-llumnix`: what it prints, and what it ends with."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from tests.patching import rebase
from tests.patching.conftest import Miniature
from vllm_llumnix import doctor
from vllm_llumnix.cli import ExitCode, main
from vllm_llumnix.kv.networks import nixl_process
from vllm_llumnix.patching.installed import examine
from vllm_llumnix.patching.series import load, root
from vllm_llumnix.seams import ALL

Output = pytest.CaptureFixture[str]


def test_check(vllm_033: Path, capsys: Output) -> None:
    assert main(["patch", "check", "--vllm", str(vllm_033)]) == ExitCode.OK
    output = capsys.readouterr().out
    assert f"vLLM 0.33.0: 12 patches in 8 files fit without fuzz, series {load('0.33.0').digest}" in output
    assert "patched in memory" in output


def test_check_as_json(vllm_033: Path, capsys: Output) -> None:
    (vllm_033 / "v1/engine/core.py").write_text("mine\n")
    assert main(["patch", "check", "--json", "--vllm", str(vllm_033)]) == ExitCode.PROBLEM
    result = json.loads(capsys.readouterr().out)
    assert (result["version"], result["on_disk"]) == ("0.33.0", False)
    assert result["files"]["vllm/v1/engine/core.py"] == "altered"
    assert "core.py is altered: reinstall vLLM 0.33.0" in result["problem"]


def test_check_of_an_unknown_version(miniature: Miniature, capsys: Output) -> None:
    assert main(["patch", "check", "--vllm", str(miniature.file("vllm"))]) == ExitCode.PROBLEM
    output = capsys.readouterr().out
    assert "there is no patch series for vLLM 9.9.9, only for 0.32.0, 0.33.0" in output
    assert "see whether --llumlet-adapt takes them" in output


def test_apply_and_revert(vllm_033: Path, capsys: Output) -> None:
    where = ["--vllm", str(vllm_033)]
    assert main(["patch", "apply", *where]) == ExitCode.OK
    assert "patched vllm/v1/engine/core.py" in capsys.readouterr().out
    assert examine(vllm_033).on_disk
    assert main(["patch", "apply", *where]) == ExitCode.OK
    assert capsys.readouterr().out == "vLLM 0.33.0 is patched on disk already\n"
    assert main(["patch", "check", *where]) == ExitCode.OK
    assert "; patched on disk" in capsys.readouterr().out
    assert main(["patch", "revert", "--json", *where]) == ExitCode.OK
    assert "vllm/v1/engine/core.py" in json.loads(capsys.readouterr().out)["restored"]
    assert main(["patch", "revert", *where]) == ExitCode.OK
    assert capsys.readouterr().out == "vLLM 0.33.0 is not patched on disk\n"


def test_apply_refuses(vllm_033: Path, capsys: Output) -> None:
    (vllm_033 / "v1/engine/core.py").unlink()
    assert main(["patch", "apply", "--json", "--vllm", str(vllm_033)]) == ExitCode.PROBLEM
    captured = capsys.readouterr()
    assert "core.py is missing: reinstall vLLM 0.33.0" in captured.err
    assert "core.py is missing" in json.loads(captured.out)["problem"]


def test_export(vllm_033: Path, tmp_path: Path, capsys: Output) -> None:
    assert main(["patch", "export", str(tmp_path / "out"), "--vllm", str(vllm_033)]) == ExitCode.OK
    assert f"wrote {tmp_path / 'out' / 'series.diff'}" in capsys.readouterr().out
    assert "kvconn_outputs = kvconn.step()" in (tmp_path / "out/vllm/v1/engine/core.py").read_text()


def test_show(capsys: Output) -> None:
    assert main(["patch", "show", "--for", "0.33.0"]) == ExitCode.OK
    listing = capsys.readouterr().out
    assert all(patch.name in listing for patch in load("0.33.0").patches)
    for name in ("0005-core-step.patch", "0005-core-step", "5"):
        assert main(["patch", "show", name, "--for", "0.33.0"]) == ExitCode.OK
        assert capsys.readouterr().out == (root() / "v0.33.0/0005-core-step.patch").read_text()
    assert main(["patch", "show", "--json", "--for", "0.33.0"]) == ExitCode.OK
    assert json.loads(capsys.readouterr().out)["patches"][4]["files"] == ["vllm/v1/engine/core.py"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["patch", "show", "nonsense", "--for", "0.33.0"], "there is no patch 'nonsense' for vLLM 0.33.0"),
        (["patch", "show", "--for", "0.1"], "no patch series for vLLM 0.1"),
        (["patch", "apply", "--vllm", "/nowhere"], "/nowhere is not the directory of the package vllm"),
    ],
)
def test_problems(argv: list[str], message: str, capsys: Output) -> None:
    assert main(argv) == ExitCode.PROBLEM
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("argv", [[], ["patch"], ["patch", "export"], ["patch", "check", "--nonsense"]])
def test_usage(argv: list[str], capsys: Output) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == ExitCode.USAGE
    assert "usage: vllm-llumnix" in capsys.readouterr().err


def test_doctor(monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    checks = [doctor.Check("first", "fine"), doctor.Check("second", "broken", "repair it")]
    monkeypatch.setattr(doctor, "examine_all", lambda adapt, flags: checks)
    assert main(["doctor"]) == ExitCode.PROBLEM
    output = capsys.readouterr().out
    assert "broken" in output
    assert "repair it" in output
    assert main(["doctor", "--json"]) == ExitCode.PROBLEM
    told = [dataclasses.asdict(check) | {"level": check.level} for check in checks]
    assert json.loads(capsys.readouterr().out) == {"ok": False, "checks": told}
    monkeypatch.setattr(doctor, "examine_all", lambda adapt, flags: checks[:1])
    assert main(["doctor"]) == ExitCode.OK
    assert "Nothing stands against --enable-llumlet.\n" in capsys.readouterr().out


def test_optional_parts_that_are_broken_are_no_problem(monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    """Their remedy is printed as it is: a bracket is no markup."""
    remedy = "pip install vllm-llumnix[mooncake], and libibverbs1"
    monkeypatch.setattr(doctor.mooncake_engine, "why_not_installed", lambda: remedy)
    monkeypatch.setattr(doctor, "_exists", lambda name: True)
    checks = [doctor.python(), doctor.mooncake()]
    monkeypatch.setattr(doctor, "examine_all", lambda adapt, flags: checks)
    assert main(["doctor"]) == ExitCode.OK
    printed = capsys.readouterr().out
    assert remedy in printed
    assert "without what is optional: transport 'mooncake'" in printed
    assert main(["doctor", "--json"]) == ExitCode.OK
    document = json.loads(capsys.readouterr().out)
    assert document["ok"]
    assert [check["level"] for check in document["checks"]] == ["ok", "optional"]


def test_checks_of_this_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not doctor.modules().problem
    assert not doctor.variables().problem
    monkeypatch.setenv("LLUMNIX_NONSENSE", "1")
    assert doctor.variables().result == "unknown: LLUMNIX_NONSENSE"
    monkeypatch.setattr(doctor, "_MODULES", ("json", "no_such_module", "no_such_parent.module"))
    assert doctor.modules().result == "missing: no_such_module, no_such_parent.module"


def test_local_transport_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process reads another one's memory; a reader that is refused gives the system's reason."""
    refused = "print('Operation not permitted'); raise SystemExit(1)"
    monkeypatch.setattr(doctor, "_READER", refused)
    check = doctor.local_transport()
    assert check.result == "not available (Operation not permitted)"
    assert "ptrace_scope" in check.problem


def test_nixl_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Optional; what is installed and does not start, or ends its process, is a problem."""
    monkeypatch.setattr(nixl_process, "why_not_installed", lambda: "NIXL is not installed: pip")
    assert (doctor.nixl().result, doctor.nixl().problem) == ("NIXL is not installed (optional): pip", "")
    monkeypatch.setattr(nixl_process, "why_not_installed", lambda: None)
    for code, problem in (
        ("raise ImportError('no libssl')", "ImportError: no libssl"),
        ("import os; os.abort()", "it ends with status -6"),
    ):
        monkeypatch.setattr(doctor, "_NIXL", code)
        assert (doctor.nixl().result, doctor.nixl().problem) == ("broken", f"NIXL does not start: {problem}")


def test_nixl_starts_here() -> None:
    check = doctor.nixl()
    assert (check.result[:11], check.problem) == ("NIXL starts", "")


def test_hook_check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    interpreter = tmp_path / "python"
    interpreter.write_text("#!/bin/sh\nexit 1\n")
    interpreter.chmod(0o755)
    monkeypatch.setattr(doctor.sys, "executable", str(interpreter))
    assert "vllm-llumnix.pth is missing" in doctor.hook().problem


def test_seams(vllm_033: Path, capsys: Output) -> None:
    assert main(["patch", "seams", "--json", str(vllm_033)]) == ExitCode.OK
    listed = json.loads(capsys.readouterr().out)["seams"]
    assert [row["attribute"] for row in listed] == [row.attribute for row in ALL]
    scheduler = vllm_033 / "v1/core/sched/scheduler.py"
    scheduler.write_text(scheduler.read_text().replace("_enqueue_waiting_request", "_queue"))
    assert main(["patch", "seams", "--json", str(vllm_033)]) == ExitCode.PROBLEM
    listed = json.loads(capsys.readouterr().out)["seams"]
    assert [row["attribute"] for row in listed if row["missing"]] == ["_enqueue_waiting_request"]
    assert main(["patch", "seams", str(vllm_033)]) == ExitCode.PROBLEM
    missing = "missing: Scheduler._enqueue_waiting_request (vllm/v1/core/sched/scheduler.py)"
    assert f"{missing}\n" in capsys.readouterr().out
    assert rebase.main([str(vllm_033), "--series", str(root() / "v0.33.0")]) == 1
    assert f"{missing}, wrapped at run time: load: a request is queued\n" in capsys.readouterr().out


def test_seams_of_the_installed_vllm(capsys: Output) -> None:
    assert main(["patch", "seams"]) == ExitCode.OK
    assert f"all {len(ALL)} are there\n" in capsys.readouterr().out
    assert not doctor.seams().problem
