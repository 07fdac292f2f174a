# SPDX-License-Identifier: Apache-2.0
"""The patch series applied in memory, while vLLM's modules are imported.

`vllm-llumnix.pth` calls `install` at the start of every Python of the environment, children of vLLM included. It adds a
finder to `sys.meta_path` and imports nothing that the interpreter has not imported itself. The series is read when the
first module of vLLM is imported. A listed module whose file has the hash in BASE is compiled from its patched text;
no bytecode is written, and tracebacks and `inspect` show the patched text. Any other file is imported as it is, and
`state` says what is wrong with it: only `--enable-llumlet` is refused for that.
"""

from __future__ import annotations

import sys
from importlib.machinery import SourceFileLoader

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing itself is not imported: each start of Python would pay for it
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import CodeType, ModuleType
    from typing import Any

    from vllm_llumnix.patching.series import Series
    from vllm_llumnix.patching.state import PatchState

MARK = "__llumnix_digest__"
"""Set in each patched module, to the digest of the series that it was patched with."""


class PatchedLoader(SourceFileLoader):
    """Loads one module from the patched text of its file."""

    def __init__(self, fullname: str, path: str, text: str, digest: str) -> None:
        super().__init__(fullname, path)
        self._text = text
        self._digest = digest

    def get_source(self, fullname: str) -> str:
        return self._text

    def get_code(self, fullname: str) -> CodeType:
        import linecache

        # An entry without a time is kept even though the file on disk has another text.
        linecache.cache[self.path] = (len(self._text), None, self._text.splitlines(keepends=True), self.path)
        return compile(self._text, self.path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        setattr(module, MARK, self._digest)
        super().exec_module(module)


class PatchFinder:
    """Finds what the other finders find, and gives the listed modules a `PatchedLoader`."""

    def __init__(self) -> None:
        self._series: Series | None = None
        self._paths: dict[str, str] | None = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith("vllm."):
            return None
        paths = self._listed()
        if fullname not in paths:
            return None
        spec = self._find_elsewhere(fullname, path, target)
        # An exact type: a subclass of it knows better than we do where its source comes from.
        if spec is None or type(spec.loader) is not SourceFileLoader:
            return spec
        loader = self._loader(fullname, spec.loader.path, paths[fullname])
        if loader is not None:
            spec.loader = loader
            spec.cached = None
        return spec

    def _listed(self) -> dict[str, str]:
        """Module names of the series and the paths of their files; none when there is no series for this vLLM."""
        if self._paths is None:
            from vllm_llumnix.patching.installed import installed
            from vllm_llumnix.patching.series import module_name

            self._series = installed().series
            paths = self._series.files if self._series is not None else ()
            self._paths = {module_name(path): path for path in paths}
        return self._paths

    def _find_elsewhere(self, fullname: str, path: Any, target: Any) -> ModuleSpec | None:
        for finder in sys.meta_path:
            find_spec = getattr(finder, "find_spec", None)
            if finder is not self and find_spec is not None:
                spec: ModuleSpec | None = find_spec(fullname, path, target)
                if spec is not None:
                    return spec
        return None

    def _loader(self, fullname: str, filename: str, path: str) -> PatchedLoader | None:
        from vllm_llumnix.patching.series import sha256

        assert self._series is not None
        with open(filename, "rb") as file:
            data = file.read()
        base = self._series.files[path]
        found = sha256(data)
        if found == base.after:
            text = data.decode()
        elif found == base.before:
            text = self._series.apply(path, data.decode())
            if sha256(text) != base.after:
                return None
        else:
            return None
        return PatchedLoader(fullname, filename, text, self._series.digest)


def install() -> None:
    """Add the finder to this interpreter, once."""
    if not installed_here():
        sys.meta_path.insert(0, PatchFinder())  # type: ignore[arg-type]


def installed_here() -> bool:
    """Whether this interpreter has the finder."""
    return any(isinstance(finder, PatchFinder) for finder in sys.meta_path)


def state() -> PatchState:
    """What is patched in this process, and what stands against it. Imports nothing of vLLM."""
    from vllm_llumnix.patching.state import current

    return current()
