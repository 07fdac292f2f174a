# SPDX-License-Identifier: Apache-2.0
"""The driver half of the backend: says that there is one device, a CPU, while kernels are interpreted."""

from __future__ import annotations

import os
from typing import NoReturn

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


class StandInDriver(DriverBase):
    @classmethod
    def is_active(cls) -> bool:
        return os.environ.get("TRITON_INTERPRET") == "1"

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cpu", 0, 32)

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, ty: str) -> NoReturn:
        raise NotImplementedError("this backend compiles nothing")

    def get_benchmarker(self) -> NoReturn:
        raise NotImplementedError("the interpreter is not worth tuning for")
