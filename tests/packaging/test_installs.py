# SPDX-License-Identifier: Apache-2.0
"""The hook is active after every kind of install, in spawned children too, and gone after an uninstall."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.packaging.environment import OUR_SITE, Environment
from tests.support.model import PRESETS, build

HOOK = "vllm-llumnix.pth"

LOOK = """
import inspect, json, multiprocessing, sys

def look(answers):
    import vllm.entrypoints.cli.main as main
    from vllm_llumnix.patching import importer, series, state
    now = state.current()
    answers.put({
        "problem": now.problem, "digest": now.digest, "applied": sorted(now.applied),
        "patched": "version=vllm.__version__" in inspect.getsource(main.main),
        "package": inspect.getfile(importer), "series": str(series.root()),
    })

if __name__ == "__main__":
    spawn = multiprocessing.get_context("spawn")
    answers = spawn.SimpleQueue()
    look(answers)
    spawn.Process(target=look, args=(answers,)).start()
    print(json.dumps(answers.get()), json.dumps(answers.get()), sep="\\n")
"""
"""Prints what this process and then a spawned child of it see, one JSON line each."""

HOOKED = "import sys; print('PatchFinder' in [type(finder).__name__ for finder in sys.meta_path])"


def what_is_seen(environment: Environment) -> list[dict[str, object]]:
    return [json.loads(line) for line in environment.run_script(LOOK).splitlines() if line.startswith("{")]


def assert_patched(environment: Environment, package: Path) -> None:
    """A process and its spawned child patch vLLM with the series that belongs to the package in `package`."""
    parent, child = what_is_seen(environment)
    assert parent == child
    assert parent["problem"] is None
    assert parent["digest"] is not None
    assert parent["applied"] == ["vllm.entrypoints.cli.main"]
    assert parent["patched"] is True
    assert Path(str(parent["package"])).is_relative_to(package)
    assert Path(str(parent["series"])).is_relative_to(package)


Install = Callable[[Environment], Path]
"""Installs, and returns the directory that holds the package."""


@pytest.fixture(params=["wheel", *(pytest.param(kind, marks=pytest.mark.rest) for kind in ("sdist", "editable"))])
def install(request: pytest.FixtureRequest, source: Path) -> Install:
    archives = {
        "wheel": lambda: request.getfixturevalue("wheels")["cpu"],
        "sdist": lambda: request.getfixturevalue("sdist"),
        "editable": lambda: source,
    }
    what = archives[request.param]()
    editable = request.param == "editable"

    def into(environment: Environment) -> Path:
        environment.install(what, editable=editable)
        return source if editable else environment.site

    return into


def test_the_hook_works_and_is_gone_after_uninstall(
    environment: Environment, install: Install, small_vllm: Path
) -> None:
    environment.borrow(small_vllm)
    before = environment.files()
    assert environment.run(HOOKED).strip() == "False"

    package = install(environment)
    assert (environment.site / HOOK).is_file()
    assert environment.run(HOOKED).strip() == "True"
    assert_patched(environment, package)

    environment.uninstall()
    assert environment.files() == before
    assert environment.run(HOOKED).strip() == "False"


@pytest.mark.rest
def test_the_hook_imports_nothing_but_itself(environment: Environment, wheels: dict[str, Path]) -> None:
    """Every Python of the environment runs it, with or without vLLM."""
    count = "import sys; print(*sorted(sys.modules))"
    before = set(environment.run(count).split())
    environment.install(wheels["cpu"])
    added = set(environment.run(count).split()) - before
    assert {name for name in added if not name.startswith("vllm_llumnix")} <= {"__future__"}


@pytest.mark.rest
def test_a_wheel_over_an_editable_install_leaves_one_hook(
    environment: Environment, source: Path, wheels: dict[str, Path], small_vllm: Path
) -> None:
    environment.borrow(small_vllm)
    environment.install(source, editable=True)
    environment.install(wheels["cpu"])
    assert sorted(path.name for path in environment.site.glob("*.pth")) == [HOOK, "zz-borrowed.pth"]
    assert_patched(environment, environment.site)


@pytest.mark.rest
def test_an_editable_install_over_a_wheel_reads_the_checkout(
    environment: Environment, source: Path, wheels: dict[str, Path], small_vllm: Path
) -> None:
    environment.borrow(small_vllm)
    environment.install(wheels["cpu"])
    environment.install(source, editable=True)
    assert not (environment.site / "vllm_llumnix").exists()
    assert_patched(environment, source)


@pytest.mark.rest
def test_a_left_over_hook_does_not_break_python(environment: Environment, wheels: dict[str, Path]) -> None:
    """As after an uninstall by hand: the line is still there, the package is not."""
    environment.install(wheels["empty"])
    (environment.site / HOOK).write_bytes((OUR_SITE / HOOK).read_bytes())
    assert environment.run("print('fine')") == "fine\n"


@pytest.mark.rest
def test_the_whole_vllm_starts_patched_from_a_wheel(environment: Environment, wheels: dict[str, Path]) -> None:
    """The command fails in an unpatched CPU build: it asks for the metadata of a distribution named `vllm`."""
    environment.install(wheels["cpu"])
    environment.borrow(OUR_SITE)
    out = environment.run(
        "import sys; sys.argv[1:] = ['--version']; from vllm.entrypoints.cli.main import main; main()"
    )
    assert out.splitlines()[-1].startswith("0.32.0")


KERNEL = """
import torch
from vllm_llumnix.kv.kernels import gather, native
from vllm_llumnix.kv.memory.layout import BlockLayout, TensorRegion
layout = BlockLayout(0, 8, 4, (TensorRegion(0, 1, 8, 2, 2),), "LBHNC")
buffer = torch.zeros(4, dtype=torch.uint8)
gather(torch.arange(8, dtype=torch.uint8), layout, [3, 1], buffer, backend="cpp")
print(native.DIRECTORY, *buffer.tolist())
"""


@pytest.mark.skipif(not any(map(shutil.which, ["c++", "g++", "clang++"])), reason="no C++ compiler")
@pytest.mark.rest
def test_the_compiled_kernel_works_after_every_kind_of_install(environment: Environment, install: Install) -> None:
    package = install(environment)
    environment.borrow(OUR_SITE)
    *directory, _, _, _, _ = found = environment.run(KERNEL).split()
    assert Path(" ".join(directory)).is_relative_to(package)
    assert found[-4:] == ["6", "7", "2", "3"]


SCHEDULER_SIDE = """
import importlib, pkgutil, sys
for name in ("vllm", "torch", "vllm_llumnix"):
    sys.modules[name] = None
names = []
for package in map(importlib.import_module, ("llumlet", "llumsched")):
    names += [module.name for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
for name in names:
    importlib.import_module(name)
print(len(names))
"""


def test_the_empty_target_needs_neither_vllm_nor_torch(environment: Environment, wheels: dict[str, Path]) -> None:
    environment.install(wheels["empty"])
    environment.borrow(OUR_SITE)
    assert not (environment.site / HOOK).exists()
    assert not (environment.site / "vllm_llumnix").exists()
    assert int(environment.run(SCHEDULER_SIDE)) > 10
    assert environment.run("import llumlet; print(llumlet.__file__)").startswith(str(environment.site))
    assert "migrate" in environment.command("llumnix", "--help")


RENDERS = """
import sys
sys.modules["vllm"] = sys.modules["torch"] = None
from llumsched.gateway.chats.form import Form
from llumsched.gateway.model_tokenizer import ModelTokenizer
chat = {"system": "be brief", "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]}
print(ModelTokenizer(sys.argv[1]).render(chat, Form.ANTHROPIC))
"""


@pytest.mark.rest
def test_the_empty_target_renders_chats(environment: Environment, wheels: dict[str, Path]) -> None:
    """With what its wheel requires, and neither vLLM nor torch."""
    environment.install(wheels["empty"])
    environment.borrow(OUR_SITE)
    needs = environment.run("import importlib.metadata; print(*importlib.metadata.requires('vllm-llumnix'))")
    assert {"transformers", "jinja2"} <= set(re.findall(r"[a-z0-9-]+", needs.lower()))
    rendered = environment.run_script(RENDERS, str(build(PRESETS["tiny"])))
    assert rendered.endswith("system: be brief\nuser: hello\nassistant:\n")


@pytest.mark.rest
def test_the_engine_sides_command_starts(environment: Environment, wheels: dict[str, Path]) -> None:
    environment.install(wheels["cpu"])
    environment.borrow(OUR_SITE)
    assert "patch" in environment.command("vllm-llumnix", "--help")
