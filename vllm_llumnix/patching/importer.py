# SPDX-License-Identifier: Apache-2.0
"""The patch series applied in memory, while vLLM's modules are imported.

`vllm-llumnix.pth` calls `install` at the start of every Python of the environment, children of vLLM included. It adds a
finder to `sys.meta_path` and imports nothing that the interpreter has not imported itself. The series is read when the
first module of vLLM is imported. If all its files fit (`installed.py`), the listed modules are compiled from their
patched text; no bytecode is written, and tracebacks and `inspect` show the patched text. If one does not, vLLM is
imported as it is: some patches need others. `state.py` says what is wrong: only `--enable-llumlet` is refused for that.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing itself is not imported: each start of Python would pay for it
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

    from vllm_llumnix.patching.installed import Installed
    from vllm_llumnix.patching.loader import PatchedLoader


FLAG = "--enable-llumlet"


class PatchFinder:
    """Finds what the other finders find, and gives the listed modules a `PatchedLoader`."""

    def __init__(self) -> None:
        self.problem: str | None = None
        """Why a file that is as BASE says could not be patched, if that happened."""
        self._found: Installed | None = None
        self._paths: dict[str, str] | None = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith("vllm."):
            return None
        paths = self._listed()
        if fullname not in paths:
            return None
        from importlib.machinery import SourceFileLoader

        spec = self._find_elsewhere(fullname, path, target)
        # An exact type: a subclass of it knows better than we do where its source comes from.
        if spec is None or type(spec.loader) is not SourceFileLoader:
            return spec
        loader = self._loader(fullname, spec.loader.path, paths[fullname])
        if loader is not None:
            spec.loader = loader
        return spec

    def _listed(self) -> dict[str, str]:
        """Module names of the series and the paths of their files; none when no series fits this vLLM."""
        if self._paths is None:
            from vllm_llumnix.patching.installed import installed
            from vllm_llumnix.patching.series import module_name

            found = installed()
            if found.problem is not None and any(argument.replace("_", "-") == FLAG for argument in sys.argv):
                # The parser that would say it is not patched, and does not even know the flag.
                print(f"vllm: error: {FLAG}: {found.problem}", file=sys.stderr)
                raise SystemExit(2)
            self._found = found
            paths = found.files if found.problem is None else ()
            self._paths = {module_name(path): path for path in paths}
        return self._paths

    def _find_elsewhere(self, fullname: str, path: Any, target: Any) -> ModuleSpec | None:
        for other in sys.meta_path:
            find_spec = getattr(other, "find_spec", None)
            if other is not self and find_spec is not None:
                spec: ModuleSpec | None = find_spec(fullname, path, target)
                if spec is not None:
                    return spec
        return None

    def _loader(self, fullname: str, filename: str, path: str) -> PatchedLoader | None:
        """The loader for `filename`, or None for a file that is not what was examined."""
        from vllm_llumnix.errors import PatchError
        from vllm_llumnix.patching.loader import PatchedLoader

        found = self._found
        assert found is not None
        with open(filename, "rb") as file:
            data = file.read()
        try:
            text = found.patched(path, data)
        except PatchError as error:
            # vLLM without the llumlet must go on working whatever happened to our files.
            self.problem = str(error)
            return None
        if text is None or found.digest is None:
            return None
        return PatchedLoader(fullname, filename, text, found.digest)


def install() -> None:
    """Add the finder to this interpreter, once."""
    if finder() is None:
        sys.meta_path.insert(0, PatchFinder())


def finder() -> PatchFinder | None:
    """The finder of this interpreter, if it has one."""
    for found in sys.meta_path:
        if isinstance(found, PatchFinder):
            return found
    return None
