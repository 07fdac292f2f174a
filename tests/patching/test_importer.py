# SPDX-License-Identifier: Apache-2.0
"""The import hook, in fresh interpreters with a miniature vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.patching.conftest import MINI_AFTER, Miniature

REPOSITORY = Path(__file__).parents[2]
PROLOGUE = """
import sys, json
from pathlib import Path
sys.path[:0] = [{site!r}, {repository!r}]
from vllm_llumnix.patching import importer
def use_series():
    from vllm_llumnix.patching import series
    series.root = lambda: Path({patches!r})
use_series()
def state():
    from vllm_llumnix.patching.state import current
    now = current()
    return {{"version": now.version, "digest": now.digest, "applied": sorted(now.applied), "problem": now.problem,
        "remarks": now.remarks}}
"""
LISTED = ["vllm.one", "vllm.sub"]


def run(mini: Miniature, code: str) -> Any:
    """What the code, in an interpreter without `site`, prints as JSON in its last line."""
    prologue = PROLOGUE.format(site=str(mini.site), repository=str(REPOSITORY), patches=str(mini.patches))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [sys.executable, "-S", "-c", prologue + code], capture_output=True, text=True, timeout=60, env=environment
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_listed_modules_are_patched(miniature: Miniature) -> None:
    result = run(
        miniature,
        """
importer.install(); importer.install()
before = state()
import vllm.one, vllm.sub, vllm.other
print(json.dumps({"before": before, "after": state(), "name": vllm.sub.NAME, "other": vllm.other.NAME,
    "finders": sum(isinstance(f, importer.PatchFinder) for f in sys.meta_path),
    "marks": [vllm.one.__llumnix_digest__, vllm.sub.__llumnix_digest__, hasattr(vllm.other, "__llumnix_digest__")]}))
""",
    )
    digest = result["before"]["digest"]
    assert result["before"] == {"version": "9.9.9", "digest": digest, "applied": [], "problem": None, "remarks": []}
    assert result["after"] == {"version": "9.9.9", "digest": digest, "applied": LISTED, "problem": None, "remarks": []}
    assert (result["name"], result["other"], result["finders"]) == ("patched", "other", 1)
    assert result["marks"] == [digest, digest, False]


def test_tracebacks_and_sources_show_the_patched_text(miniature: Miniature) -> None:
    result = run(
        miniature,
        """
importer.install()
import inspect, traceback, vllm.one
try:
    vllm.one.answer()
except ZeroDivisionError as error:
    text = "".join(traceback.format_exception(error))
print(json.dumps({"traceback": text, "source": inspect.getsource(vllm.one)}))
""",
    )
    assert 'one.py", line 3, in answer\n    value = 1 / (value - 1)\n' in result["traceback"]
    assert result["source"] == MINI_AFTER["vllm/one.py"]


def test_no_bytecode_of_patched_text(miniature: Miniature) -> None:
    run(miniature, "importer.install()\nimport vllm.one, vllm.other\nprint(1)")
    written = {path.name.partition(".")[0] for path in miniature.site.rglob("*.pyc")}
    assert "other" in written
    assert "one" not in written
    # And a bytecode file of the original is not taken for the patched module.
    run(miniature, "import vllm.sub\nprint(1)")
    assert run(miniature, "importer.install()\nimport vllm.sub\nprint(json.dumps(vllm.sub.NAME))") == "patched"


def test_beside_an_altered_file_everything_stays_as_it_is(miniature: Miniature) -> None:
    """A patch may need another one's: vLLM without the llumlet must not get half of them."""
    miniature.file("vllm/sub/__init__.py").write_text("NAME = 'mine'\n")
    result = run(
        miniature,
        "importer.install()\nimport vllm.sub, vllm.one\nprint(json.dumps({'name': vllm.sub.NAME, **state()}))",
    )
    assert (result["name"], result["digest"], result["applied"]) == ("mine", None, [])
    assert "vLLM 9.9.9" in result["problem"]
    assert str(miniature.file("vllm/sub/__init__.py")) in result["problem"]


def test_a_release_without_a_series_stays_as_it_is(miniature: Miniature) -> None:
    miniature.file("vllm/_version.py").write_text("__version__ = version = '8.0.0'\n")
    miniature.file("vllm/one.py").write_text("NAME = 'new'\n")
    result = run(
        miniature, "importer.install()\nimport vllm.sub\nprint(json.dumps({'name': vllm.sub.NAME, **state()}))"
    )
    assert (result["name"], result["version"], result["digest"]) == ("stock", "8.0.0", None)
    assert "no patch series for vLLM 8.0.0" in result["problem"]


def test_another_version_with_the_same_files_is_patched(miniature: Miniature) -> None:
    miniature.file("vllm/_version.py").write_text("__version__ = version = '9.9.10.dev3'\n")
    result = run(miniature, "importer.install()\nimport vllm.one, vllm.sub\nprint(json.dumps(state()))")
    assert (result["version"], result["applied"], result["problem"]) == ("9.9.10.dev3", LISTED, None)


ADAPTED = """
importer.install()
import vllm.one, vllm.sub, inspect
print(json.dumps({'source': inspect.getsource(vllm.one), **state()}))
"""


@pytest.mark.parametrize("flag", ["--llumlet-adapt", "--llumlet_adapt"])
def test_an_altered_file_is_adapted_to_when_asked(
    miniature: Miniature, monkeypatch: pytest.MonkeyPatch, flag: str
) -> None:
    """By the flag in the process that parses it, by the configuration in those that it starts; with one digest."""
    one = miniature.file("vllm/one.py")
    one.write_text("import os\n" + one.read_text())
    parent = run(miniature, f"sys.argv += ['--enable-llumlet', {flag!r}]\n" + ADAPTED)
    assert (parent["applied"], parent["problem"]) == (LISTED, None)
    assert parent["source"] == "import os\n" + MINI_AFTER["vllm/one.py"]
    assert parent["remarks"] == [
        "patched, adapted: in vLLM 9.9.9 not as released in 9.9.9: vllm/one.py",
    ]
    monkeypatch.setenv("LLUMNIX_LLUMLET", '{"instance_id": "a", "adapt": true}')
    assert run(miniature, ADAPTED) == parent
    monkeypatch.setenv("LLUMNIX_LLUMLET", '{"instance_id": "a"}')
    refused = run(miniature, ADAPTED)
    assert (refused["applied"], refused["digest"]) == ([], None)
    assert "see whether --llumlet-adapt takes them" in refused["problem"]


def test_a_function_that_differs_is_named_and_one_of_the_short_list_refused(miniature: Miniature) -> None:
    """Also where all patched files are as released."""
    code = "importer.install()\nimport vllm.one, vllm.sub\nprint(json.dumps(state()))"
    other = miniature.file("vllm/other.py")
    other.write_text(other.read_text().replace("# Comments do not count.", "# None."))
    quiet = run(miniature, code)
    assert (quiet["problem"], quiet["remarks"]) == (None, [])
    other.write_text(other.read_text().replace("return 2", "return 3"))
    warned = run(miniature, code)
    assert (warned["problem"], warned["digest"]) == (None, quiet["digest"])
    assert warned["remarks"] == [
        "Pool.size (vllm/other.py) differs from vLLM 9.9.9, on which the llumlet relies",
    ]
    other.write_text(other.read_text().replace("return 1", "return 3"))
    refused = run(miniature, code)
    assert (refused["digest"], refused["applied"]) == (None, LISTED)
    assert "Pool.touch (vllm/other.py) differs: install vLLM 9.9.9 as released" in refused["problem"]


@pytest.mark.parametrize("path", ["vllm/sub/__init__.py", "vllm/one.py"])
def test_the_flag_is_refused_with_a_reason(miniature: Miniature, path: str) -> None:
    """Also where the parser is not patched and does not know the flag."""
    miniature.file(path).write_text("__version__ = version = '8.0.0'\n")
    code = """
sys.argv += ["serve", "--enable-llumlet"]
importer.install()
try:
    import vllm.other
except SystemExit as ended:
    print(json.dumps(ended.code))
"""
    assert run(miniature, code) == 2
    assert (
        run(miniature, code.replace("--enable-llumlet", "--port") + "else: print(json.dumps(vllm.other.NAME))")
        == "other"
    )


@pytest.mark.parametrize("name", ["series", "BASE", "0001-all.patch"])
def test_a_damaged_series_does_no_harm(miniature: Miniature, name: str) -> None:
    (miniature.patches / "v9.9.9" / name).write_bytes(b"\xff")
    result = run(
        miniature, "importer.install()\nimport vllm.sub\nprint(json.dumps({'name': vllm.sub.NAME, **state()}))"
    )
    assert (result["name"], result["digest"]) == ("stock", None)
    assert "reinstall vllm-llumnix" in result["problem"]


def test_a_damaged_contract_is_refused(miniature: Miniature) -> None:
    (miniature.patches / "v9.9.9" / "CONTRACT").write_text("vllm 9.9.9\nnonsense\n")
    result = run(miniature, "importer.install()\nimport vllm.one, vllm.sub\nprint(json.dumps(state()))")
    assert result["digest"] is None
    assert "CONTRACT is damaged (neither a file nor a function: 'nonsense'): reinstall" in result["problem"]


def test_a_series_that_gives_another_result_does_no_harm(miniature: Miniature) -> None:
    patch = miniature.patches / "v9.9.9" / "0001-all.patch"
    patch.write_text(patch.read_text().replace("NAME = 'patched'", "NAME = 'wrong'"))
    result = run(
        miniature, "importer.install()\nimport vllm.sub\nprint(json.dumps({'name': vllm.sub.NAME, **state()}))"
    )
    assert (result["name"], result["digest"]) == ("stock", None)
    assert "is damaged (vllm/sub/__init__.py): reinstall vllm-llumnix" in result["problem"]


def test_without_the_hook(miniature: Miniature) -> None:
    assert "import hook of vllm-llumnix is not active" in run(miniature, "print(json.dumps(state()))")["problem"]


def test_a_module_that_was_imported_before_the_hook(miniature: Miniature) -> None:
    result = run(miniature, "import vllm.sub\nimporter.install()\nimport vllm.one\nprint(json.dumps(state()))")
    assert (result["digest"], result["applied"]) == (None, ["vllm.one"])
    assert "only partly patched in this process: vllm.sub came in as released" in result["problem"]


def test_patched_on_disk_needs_no_hook(miniature: Miniature) -> None:
    digest = run(miniature, "importer.install()\nprint(json.dumps(state()))")["digest"]
    for path, text in MINI_AFTER.items():
        miniature.file(path).write_text(text)
    for install in ("", "importer.install()\n"):
        result = run(miniature, f"{install}import vllm.one, vllm.sub\nprint(json.dumps(state()))")
        assert result == {"version": "9.9.9", "digest": digest, "applied": LISTED, "problem": None, "remarks": []}


def test_half_patched_on_disk(miniature: Miniature) -> None:
    """With the hook the rest is patched in memory; without it the process is refused."""
    miniature.file("vllm/one.py").write_text(MINI_AFTER["vllm/one.py"])
    code = "import vllm.one, vllm.sub\nprint(json.dumps({'name': vllm.sub.NAME, **state()}))"
    result = run(miniature, "importer.install()\n" + code)
    assert (result["name"], result["applied"], result["problem"]) == ("patched", LISTED, None)
    result = run(miniature, code)
    assert (result["name"], result["digest"]) == ("stock", None)


def test_foreign_loaders_are_left_alone(miniature: Miniature) -> None:
    result = run(
        miniature,
        """
from importlib.machinery import PathFinder, SourceFileLoader
class Other(SourceFileLoader):
    def get_source(self, name): return ""
    def get_code(self, name): return compile("NAME = 'foreign'", "x", "exec")
class Finder:
    def find_spec(self, name, path=None, target=None):
        spec = PathFinder.find_spec(name, path, target) if name == "vllm.sub" else None
        if spec: spec.loader = Other(name, spec.origin)
        return spec
sys.meta_path.insert(0, Finder())
importer.install()
import vllm.sub
print(json.dumps({"name": vllm.sub.NAME, **state()}))
""",
    )
    assert (result["name"], result["applied"], result["digest"]) == ("foreign", [], None)


def test_without_vllm(miniature: Miniature) -> None:
    result = run(miniature, "sys.path.pop(0)\nimporter.install()\nprint(json.dumps(state()))")
    assert (result["version"], result["problem"]) == (None, "vLLM is not installed: install it into this environment")


def test_the_line_in_site_packages(tmp_path: Path) -> None:
    """It imports a few small modules, needs nothing else, and does nothing when the package is gone."""
    line = (REPOSITORY / "vllm-llumnix.pth").read_text()
    assert line.count("\n") == 1
    assert line.startswith("import ")
    code = f"""
import sys
sys.path.insert(0, {str(REPOSITORY)!r})
before = set(sys.modules)
exec({line!r})
print(sorted(set(sys.modules) - before), type(sys.meta_path[0]).__name__)
"""
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True)
    modules = ["__future__", "vllm_llumnix", "vllm_llumnix.patching", "vllm_llumnix.patching.importer"]
    assert done.stdout.strip() == f"{modules} PatchFinder"
    alone = subprocess.run(
        [sys.executable, "-S", "-c", f"exec({line!r})"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert (alone.stdout, alone.stderr) == ("", "")
