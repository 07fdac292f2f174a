# SPDX-License-Identifier: Apache-2.0
"""A module compiled from the patched text of its file."""

from __future__ import annotations

import linecache
from importlib.machinery import SourceFileLoader
from types import CodeType, ModuleType

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
        # An entry without a time is kept even though the file on disk has another text.
        linecache.cache[self.path] = (len(self._text), None, self._text.splitlines(keepends=True), self.path)
        return compile(self._text, self.path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        setattr(module, MARK, self._digest)
        super().exec_module(module)
