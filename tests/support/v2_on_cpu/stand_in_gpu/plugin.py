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
        _plan_every_kind_of_layer()
        _fill_pages_in_one_piece()


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


def _plan_every_kind_of_layer() -> None:
    """DeepSeek V4 on a CPU names three of the kinds of layers for which GPUs plan tiles, and is asked for five (vLLM
    0.32); a CPU plans nothing for any."""
    from vllm.models.deepseek_v4.cpu import cpu_mla
    from vllm.v1.attention.backends.mla import sparse_swa

    kinds = [value for name, value in vars(sparse_swa).items() if name.startswith("_LAYER_TYPE_")]
    builder: Any = cpu_mla.DeepseekV4CPUSparseSWAMetadataBuilder
    builder.build_tile_scheduler = lambda self, num_decode_tokens: dict.fromkeys(kinds)


def _fill_pages_in_one_piece() -> None:
    """Speed only. Where new blocks are filled with zeros, a kernel's program fills 1,024 numbers; here, a page."""
    from vllm.v1.worker.utils import KVBlockZeroer

    if getattr(KVBlockZeroer, "fills_pages_in_one_piece", False):
        return
    KVBlockZeroer.fills_pages_in_one_piece = True
    zero_block_ids = KVBlockZeroer.zero_block_ids

    def in_one_piece(zeroer: Any, block_ids: list[int]) -> None:
        if zeroer._meta is not None:
            addresses, strides, sizes, _, _, count = zeroer._meta
            zeroer._meta = addresses, strides, sizes, 1, 1 << (int(sizes.max()) - 1).bit_length(), count
        zero_block_ids(zeroer, block_ids)

    KVBlockZeroer.zero_block_ids = in_one_piece
