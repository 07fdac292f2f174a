# SPDX-License-Identifier: Apache-2.0
"""The start of every process over the fake GPU: this project's hook, and samplers that sample one token for ever.

No kernel computes a token there. What vLLM's samplers return is overwritten: TOKEN, one for each request.
"""

from __future__ import annotations

import importlib.abc
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

TOKEN = 105

os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # it is not installed


def _one_each(module: Any) -> None:
    """The V2 runner asks a kernel how many tokens were sampled."""
    stock = module.get_num_sampled_and_rejected

    def get_num_sampled_and_rejected(num_sampled: Any, *args: Any, **kwargs: Any) -> Any:
        num_sampled.copy_(num_sampled.cpu().fill_(1))
        return stock(num_sampled, *args, **kwargs)

    module.get_num_sampled_and_rejected = get_num_sampled_and_rejected


def _always_the_same(method: str) -> Callable[[Any], None]:
    def change(module: Any) -> None:
        stock = getattr(module.Sampler, method)

        def sample(self: Any, *args: Any, **kwargs: Any) -> Any:
            output = stock(self, *args, **kwargs)
            output.sampled_token_ids.copy_(output.sampled_token_ids.cpu().fill_(TOKEN))
            return output

        setattr(module.Sampler, method, sample)

    return change


CHANGES: dict[str, Callable[[Any], None]] = {
    "vllm.v1.worker.gpu.input_batch": _one_each,
    "vllm.v1.worker.gpu.sample.sampler": _always_the_same("__call__"),
    "vllm.v1.sample.sampler": _always_the_same("forward"),
}


class Changing(importlib.abc.MetaPathFinder):
    """Finds what the other finders find, and changes it when it has been run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in CHANGES:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                CHANGES[fullname](module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


try:
    from vllm_llumnix.patching import importer
except ImportError:
    pass
else:
    importer.install()
sys.meta_path.insert(0, Changing())
