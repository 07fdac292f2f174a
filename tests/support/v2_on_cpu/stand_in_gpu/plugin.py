# SPDX-License-Identifier: Apache-2.0
"""What vLLM loads in each of its processes."""

from __future__ import annotations

import os
from typing import Any

from stand_in_gpu import interpreter


def register() -> None:
    """Once or several times a process; nothing unless kernels are interpreted."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        interpreter.mend()
        _keep_asynchronous_scheduling()


def _keep_asynchronous_scheduling() -> None:
    """vLLM decides on asynchronous scheduling from its flags and from what the engine can do, then asks the platform;
    that of CPUs takes it back ("not required on CPU"). Here its decision stands, `--no-async-scheduling` included."""
    from vllm.platforms.cpu import CpuPlatform

    if getattr(CpuPlatform, "keeps_asynchronous_scheduling", False):
        return
    CpuPlatform.keeps_asynchronous_scheduling = True
    check_and_update_config = CpuPlatform.check_and_update_config.__func__

    def keeping(cls: type[CpuPlatform], vllm_config: Any) -> None:
        decided = vllm_config.scheduler_config.async_scheduling
        check_and_update_config(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = decided

    CpuPlatform.check_and_update_config = classmethod(keeping)
