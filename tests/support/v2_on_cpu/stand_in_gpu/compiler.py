# SPDX-License-Identifier: Apache-2.0
"""The compiler half of the backend: a name. The interpreter never asks it for anything."""

from __future__ import annotations

from types import ModuleType
from typing import Any, NoReturn

from triton.backends.compiler import BaseBackend


class StandInCompiler(BaseBackend):
    @staticmethod
    def supports_target(target: Any) -> bool:
        return target.backend == "cpu"

    def hash(self) -> str:
        return "stand-in-gpu"

    def parse_options(self, options: dict[str, Any]) -> NoReturn:
        raise NotImplementedError("this backend compiles nothing: set TRITON_INTERPRET=1")

    def add_stages(self, stages: dict[str, Any], options: object, language: Any) -> NoReturn:
        raise NotImplementedError("this backend compiles nothing: set TRITON_INTERPRET=1")

    def load_dialects(self, context: Any) -> None:
        """There are none."""

    def get_module_map(self) -> dict[str, ModuleType]:
        return {}
