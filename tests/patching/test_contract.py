# SPDX-License-Identifier: Apache-2.0
"""The functions of vLLM that are relied on: hashed by what they do, committed for each release, complete."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.patching.conftest import MINI_OTHER, Miniature
from vllm_llumnix.cli import ExitCode, main
from vllm_llumnix.patching import contract
from vllm_llumnix.patching.installed import examine
from vllm_llumnix.patching.release import Release
from vllm_llumnix.patching.relied_on import RELIED_ON
from vllm_llumnix.patching.series import Series, directory_of

Output = pytest.CaptureFixture[str]
V1 = "vllm/v1"
PACKAGE = Path(contract.__file__).resolve().parents[1]


def test_the_committed_contract_is_what_the_release_keeps(series: Series, release: Release) -> None:
    committed = (directory_of(series.version) / contract.FILE).read_text()
    assert contract.of(release) == committed, f"run: vllm-llumnix patch contract --write (for vLLM {series.version})"


def test_every_release_has_every_function() -> None:
    assert len({(row.path, row.name) for row in RELIED_ON}) == len(RELIED_ON)
    for version in ("0.32.0", "0.33.0"):
        signed = contract.load(directory_of(version))
        assert {(f.path, f.name, f.refuses) for f in signed.functions} == {
            (row.path, row.name, row.refuses) for row in RELIED_ON
        }
        assert len(signed.functions) == len(RELIED_ON)


def test_modules_that_rely_on_them_are_there() -> None:
    for row in RELIED_ON:
        assert (PACKAGE / row.used_by).is_file(), row


def test_released_files_keep_their_contract(series: Series, release: Release, tmp_path: Path) -> None:
    signed = contract.load(directory_of(series.version))
    for path in signed.files:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(release.read(path))
    assert contract.compare(signed, tmp_path, series.files) == []
    for path in series.files.keys() & signed.files.keys():  # patched on disk
        (tmp_path / path).write_text(series.apply(path, release.text(path)))
    assert contract.compare(signed, tmp_path, series.files) == []


def test_a_released_file_is_not_parsed(vllm_033: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The usual start costs the reading of the files."""
    monkeypatch.setattr(contract.ast, "parse", None)
    assert contract.compare(contract.load(directory_of("0.33.0")), vllm_033.parent, {}) == []


STOCK = '''
def relied(a, *, b=1):
    """What it does."""
    if a:  # why
        return f"{a!r:>10}" + 'x'
    return [b
            for _ in range(3)]
'''


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("What it does.", "What it did."),
        ('    """What it does."""\n', ""),
        ("# why", "# what for"),
        ("[b\n            for", "[b for"),
        ("'x'", '"x"'),
        ("\ndef", "\n\n\nimport os\ndef"),
    ],
)
def test_some_changes_keep_the_contract(old: str, new: str) -> None:
    changed = STOCK.replace(old, new)
    assert changed != STOCK
    assert contract.digests(changed.encode()) == contract.digests(STOCK.encode())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("b=1", "b=2"),
        ("*, b=1", "b=1"),
        ("if a:", "if not a:"),
        ("'x'", "'y'"),
        ("range(3)", "range(2)"),
        ("!r:", "!s:"),
        ("def relied", "@cache\ndef relied"),
        ("def relied", "async def relied"),
    ],
)
def test_some_changes_break_the_contract(old: str, new: str) -> None:
    assert contract.digests(STOCK.replace(old, new).encode()) != contract.digests(STOCK.encode())


def test_names_of_methods_and_classes() -> None:
    found = contract.digests(MINI_OTHER.encode())
    assert found.keys() == {"Pool", "Pool.touch", "Pool.size"}
    changed = contract.digests(MINI_OTHER.replace("return 2", "return 3").encode())
    assert {name for name in found if found[name] != changed[name]} == {"Pool", "Pool.size"}
    assert contract.digests(b"no python") == {}


def test_check_names_what_differs(vllm_033: Path, capsys: Output) -> None:
    manager, pool = vllm_033 / "v1/core/kv_cache_manager.py", vllm_033 / "v1/core/block_pool.py"
    stock = examine(vllm_033).digest
    manager.write_text(manager.read_text().replace("    def get_blocks(self", "    @cached\n    def get_blocks(self"))
    where = ["--vllm", str(vllm_033)]
    assert main(["patch", "check", *where]) == ExitCode.OK
    assert "warning: KVCacheManager.get_blocks (vllm/v1/core/kv_cache_manager.py) differs\n" in capsys.readouterr().out
    pool.unlink()
    assert main(["patch", "check", "--json", *where]) == ExitCode.PROBLEM
    printed = json.loads(capsys.readouterr().out)
    assert (printed["digest"], printed["series"]) == (stock, "0.33.0")
    assert {one["name"]: (one["refuses"], one["gone"]) for one in printed["differences"]} == {
        "BlockPool.touch": (True, True),
        "BlockPool.free_blocks": (True, True),
        "BlockPool.get_num_free_blocks": (False, True),
        "BlockPool.cache_full_blocks": (False, True),
        "BlockPool._remove_cached_block_hashes": (False, True),
        "BlockPool._maybe_evict_cached_block": (False, True),
        "BlockPool.reset_prefix_cache": (False, True),
        "BlockHashToBlockMap.get_one_block": (False, True),
        "KVCacheManager.get_blocks": (False, False),
    }
    assert "BlockPool.touch (vllm/v1/core/block_pool.py) is gone" in printed["problem"]
    assert main(["patch", "contract", *where]) == ExitCode.PROBLEM
    assert "BlockPool.touch (vllm/v1/core/block_pool.py) is gone; refuses\n" in capsys.readouterr().out


def test_an_adapted_vllm_is_reported(vllm_033: Path, capsys: Output) -> None:
    flags = vllm_033 / "engine/arg_utils.py"
    flags.write_text("# a vendor's line\n" + flags.read_text())
    where = ["--vllm", str(vllm_033)]
    assert main(["patch", "check", *where]) == ExitCode.PROBLEM
    assert "arg_utils.py is altered: reinstall vLLM 0.33.0; if these files" in capsys.readouterr().out
    assert main(["patch", "check", "--adapt", *where]) == ExitCode.OK
    output = capsys.readouterr().out
    assert "patched, adapted: vllm/engine/arg_utils.py; only with --llumlet-adapt" in output
    assert main(["patch", "check", "--adapt", "--json", *where]) == ExitCode.OK
    printed = json.loads(capsys.readouterr().out)
    assert printed["files"]["vllm/engine/arg_utils.py"] == "adapted"
    found = examine(vllm_033, adapt=True)
    assert found.series is not None
    assert printed["digest"] == found.digest != found.series.digest


def test_a_contract_is_written_again(miniature_series: Miniature, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row for row in RELIED_ON if row.name == "Scheduler.schedule"]
    monkeypatch.setattr(contract, "RELIED_ON", rows)
    scheduler = miniature_series.file(rows[0].path)
    scheduler.parent.mkdir(parents=True)
    scheduler.write_text("class Scheduler:\n    def schedule(self): ...\n")
    assert main(["patch", "contract", "--write", "--vllm", str(miniature_series.file("vllm"))]) == ExitCode.OK
    signed = contract.load(directory_of("9.9.9"))
    assert [(f.name, f.refuses) for f in signed.functions] == [("Scheduler.schedule", True)]
    assert main(["patch", "contract", "--vllm", str(miniature_series.file("vllm"))]) == ExitCode.OK


CLASSES = {
    **dict.fromkeys(("scheduler",), (f"{V1}/core/sched/scheduler.py", "Scheduler")),
    **dict.fromkeys(("engine", "_engine"), (f"{V1}/engine/core.py", None)),
    **dict.fromkeys(("model_executor", "executor"), (f"{V1}/executor/abstract.py", "Executor")),
    **dict.fromkeys(("kv_cache_manager", "manager"), (f"{V1}/core/kv_cache_manager.py", "KVCacheManager")),
    **dict.fromkeys(("block_pool", "pool"), (f"{V1}/core/block_pool.py", "BlockPool")),
    **dict.fromkeys(("_grammars",), (f"{V1}/structured_output/__init__.py", "StructuredOutputManager")),
    **dict.fromkeys(("request",), (f"{V1}/request.py", "Request")),
    **dict.fromkeys(("worker",), (f"{V1}/worker/gpu_worker.py", "Worker")),
}
"""What our code calls vLLM's objects, and where their classes are; None: any class of the file."""
CLIENTS = f"{V1}/engine/core_client.py"


def uses(path: Path) -> set[tuple[str, str]]:
    """Attributes of vLLM's objects that a module reads: the file of the object's class, and the attribute."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value).split(".")[-1]
            if owner in CLASSES:
                found.add((CLASSES[owner][0], node.attr))
            if path.name == "client.py" and path.parent.name == "frontend" and owner in ("self", "super()", "client"):
                found.add((CLIENTS, node.attr))
    return found


def methods(read: Callable[[str], bytes], path: str) -> set[str]:
    """Names of the methods and properties of the classes in `path` that our code has objects of."""
    owners = {owner for where, owner in CLASSES.values() if where == path}
    names = (name.split(".") for name in contract.digests(read(path)) if "." in name)
    return {method for owner, method in names if owners in (set(), {None}) or owner in owners}


def test_every_method_that_is_used_is_in_the_contract(series: Series, release: Release) -> None:
    listed = {(row.path, row.name.split(".")[-1]) for row in RELIED_ON}
    modules = [path for part in ("engine", "frontend", "kv") for path in sorted((PACKAGE / part).rglob("*.py"))]
    there = {path: methods(release.read, path) for path in {CLIENTS, *(where for where, _ in CLASSES.values())}}
    used = {one for module in modules for one in uses(module) if one[1] in there[one[0]]}
    assert len(used) > 40
    missing = sorted(used - listed - {(CLIENTS, "__init__")})
    assert not missing, f"add them to RELIED_ON, then: vllm-llumnix patch contract --write, for each release: {missing}"
