# SPDX-License-Identifier: Apache-2.0
"""Where Triton's interpreter does something else than its compiler, and vLLM's kernels notice.

Each mend gives what compiled code has, and changes nothing where the two agree. Without them an engine ends in its
first step with top-k or top-p, or with guided decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

COMPARISONS = ("create_icmp", "create_fcmp")


def mend() -> None:
    """Once a process; before or after kernels are defined, as they look everything up when they run."""
    if getattr(InterpreterBuilder, "mended", False):
        return
    InterpreterBuilder.mended = True
    _comparisons_are_booleans()
    _loop_variables_are_tensors()
    _spend_no_time_on_preparations()


def _comparisons_are_booleans() -> None:
    """A comparison's result is of type int1 in the compiler (`arith.cmpi`, `arith.cmpf`). The interpreter's holds
    booleans, but carries the type of what was compared: when a scalar one is spread over a block, the booleans become
    integers, and a store refuses them as a mask ("mask has unsupported dtype", vLLM's grammar bitmask)."""

    def boolean(compare: Callable[..., TensorHandle]) -> Callable[..., TensorHandle]:
        def compared(self: InterpreterBuilder, lhs: TensorHandle, rhs: TensorHandle) -> TensorHandle:
            return TensorHandle(compare(self, lhs, rhs).data, tl.int1)

        return compared

    for name, member in vars(InterpreterBuilder).copy().items():
        if name.startswith(COMPARISONS):
            setattr(InterpreterBuilder, name, boolean(member))


def _loop_variables_are_tensors() -> None:
    """The variable of a `tl.range` loop is a scalar tensor in the compiler (`scf.for`), with `.to()` and all; the
    interpreter hands out Python's integers ("'int' object has no attribute 'to'", vLLM's top-k and top-p). That of
    `tl.static_range` is a compile-time constant in both."""
    patch_language = interpreter._patch_lang_core

    def patched(language: Any, scope: Any) -> None:
        patch_language(language, scope)
        numbers = language.range

        def tensors(*bounds: Any, **options: Any) -> Iterator[tl.tensor]:
            return map(interpreter.interpreter_semantic.to_tensor, numbers(*bounds, **options))

        scope.set_attr(language, "range", tensors)

    interpreter._patch_lang_core = patched


def _spend_no_time_on_preparations() -> None:
    """Speed only. Around each call of a kernel, the interpreter gives `triton.language` its own functions and takes
    them back, for compiled kernels that might be called in between. Here are none, so it is done once: milliseconds a
    call."""
    patch_language = interpreter._patch_lang
    seen: set[Callable[..., Any]] = set()

    def once(function: Callable[..., Any]) -> Any:
        if function not in seen:
            seen.add(function)
            patch_language(function)
        return interpreter._LangPatchScope()  # with nothing to restore

    interpreter._patch_lang = once
