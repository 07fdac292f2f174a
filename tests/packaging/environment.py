# SPDX-License-Identifier: Apache-2.0
"""Fresh virtual environments, and the archives that are installed into them. Nothing here reaches for an index."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from vllm_llumnix.patching import contract
from vllm_llumnix.patching.series import Series, directory_of

ROOT = Path(__file__).resolve().parents[2]
OUR_SITE = Path(sysconfig.get_path("purelib"))
"""The site-packages of the Python that runs the tests: with vLLM, and with setuptools to build with."""

_NOT_SOURCE = (".*", "__pycache__", "build", "dist", "*.egg-info")


def copy_source(target: Path) -> Path:
    """What a checkout holds, without what was built in it."""
    shutil.copytree(ROOT, target, ignore=shutil.ignore_patterns(*_NOT_SOURCE))
    return target


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """The command's output; AssertionError with all of it if it fails.

    The caller's environment takes no part: neither its PYTHONPATH, nor its target device, nor its pip settings.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "PIP_", "VLLM_", "LLUMNIX_")) and name != "VIRTUAL_ENV"
    }
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env={**kept, "PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}: {done.returncode}\n{done.stdout}"
    return done.stdout


def build(source: Path, kind: str, out: Path, target: str | None = None) -> Path:
    """One archive of `source`; `kind` is "wheel" or "sdist", `target` the VLLM_TARGET_DEVICE."""
    device = {} if target is None else {"VLLM_TARGET_DEVICE": target}
    run(sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "--outdir", out, source, cwd=out.parent, **device)
    (archive,) = out.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return archive


class Environment:
    """A virtual environment of its own below `directory`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "env"
        self._elsewhere = directory
        venv.create(self.directory, symlinks=True, with_pip=False)
        self.python = self.directory / "bin" / "python"
        self.site = Path(self.run("import sysconfig; print(sysconfig.get_path('purelib'))").strip())
        self._tools = directory / "tools"
        self._tools.mkdir()
        for tool in [OUR_SITE / "_distutils_hack", OUR_SITE / "pkg_resources", *OUR_SITE.glob("setuptools*")]:
            (self._tools / tool.name).symlink_to(tool)

    def install(self, what: Path, *, editable: bool = False, target: str = "cpu") -> None:
        """`pip install --no-deps`; a source tree or sdist is built with the setuptools that the tests run with."""
        options = ["--editable"] if editable else []
        self._pip("install", "--no-deps", "--no-build-isolation", *options, what, target=target)

    def uninstall(self) -> None:
        self._pip("uninstall", "--yes", "vllm-llumnix")

    def borrow(self, directory: Path) -> None:
        """Make the packages in `directory` importable, after this environment's own; hooks there do not run."""
        (self.site / "zz-borrowed.pth").write_text(f"{directory}\n")

    def run(self, code: str) -> str:
        """What `python -c CODE` prints."""
        return run(self.python, "-c", code, cwd=self._elsewhere)

    def run_script(self, text: str, *arguments: str) -> str:
        """What a Python file prints. It can be imported again, as a spawned child does."""
        script = self._elsewhere / "script.py"
        script.write_text(text)
        return run(self.python, script, *arguments, cwd=self._elsewhere)

    def command(self, name: str, *arguments: str) -> str:
        """What one of the environment's console scripts prints."""
        return run(self.directory / "bin" / name, *arguments, cwd=self._elsewhere)

    def files(self) -> set[str]:
        """All that is in the environment; compiled bytecode does not count."""
        paths = (path.relative_to(self.directory) for path in self.directory.rglob("*"))
        return {str(path) for path in paths if path.suffix != ".pyc" and path.name != "__pycache__"}

    def _pip(self, *arguments: str | Path, target: str = "cpu") -> None:
        run(
            *(sys.executable, "-m", "pip", "--python", self.python, *arguments),
            cwd=self._elsewhere,
            VLLM_TARGET_DEVICE=target,
            PYTHONPATH=str(self._tools),
        )


def copy_patched_files(series: Series, target: Path) -> Path:
    """A directory with those files of the installed vLLM that the series patches or relies on, and what they need.

    Quick to import, and yet the released text of every one of them.
    """
    package = target / "vllm"
    relied_on = contract.load(directory_of(series.version)).files
    for path in {*series.files, *relied_on, "vllm/_version.py"}:
        copy = target / path
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(OUR_SITE / path, copy)
        for parent in copy.relative_to(package).parents:
            init = package / parent / "__init__.py"
            if str(init.relative_to(target)) not in {*series.files, *relied_on}:
                init.touch()
    (package / "__init__.py").write_text("from vllm._version import __version__\n")
    (package / "logger.py").write_text(
        "import logging\n\nconfigure_logging_from_args = None\ninit_logger = logging.getLogger\n"
    )
    return target
