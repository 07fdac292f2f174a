# SPDX-License-Identifier: Apache-2.0
"""What vLLM's CPU build lacks for mixtures of experts on data-parallel ranks, for tests.

On a CPU, tokens get to the ranks that have their experts by vLLM's own `AgRsAll2AllManager`. It calls `all_gatherv` and
`reduce_scatterv` of the group's communicator, which there are for GPUs and XPUs; that for CPUs raises
NotImplementedError in the first forward pass. And where a rank has some of the experts (`--enable-expert-parallel`),
the kernel takes the numbers of all experts for those of its own, and reads past their end.

This distribution, on `PYTHONPATH`, adds the two collectives, over Gloo, and gives the kernel the numbers of its own
experts. All else is as it is: the ranks, their coordinator and its waves, the dummy batches of a rank that has nothing
to do, the experts. Nothing of this is installed with the project: it lies in its tests.

`PATH` is what goes onto `PYTHONPATH`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

PATH = Path(__file__).resolve().parent


def register() -> None:
    """What vLLM calls in each of its processes, once or several times."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    if hasattr(CPUUnquantizedExperts, "apply_own"):
        return
    CpuCommunicator.all_gatherv = _all_gatherv
    CpuCommunicator.reduce_scatterv = _reduce_scatterv
    CPUUnquantizedExperts.apply_own = CPUUnquantizedExperts.apply
    CPUUnquantizedExperts.apply = _apply


def _all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    """The rows of all ranks, `sizes[r]` of rank r: of each tensor, if it is a list."""
    import torch

    if isinstance(input_, list):
        return [_all_gatherv(self, each, dim, sizes) for each in input_]
    assert dim == 0
    sizes = sizes or [len(input_)] * self.world_size
    # Gloo gathers equal sizes only.
    padded = input_.new_zeros(max(sizes), *input_.shape[1:])
    padded[: len(input_)] = input_
    gathered = [torch.empty_like(padded) for _ in sizes]
    torch.distributed.all_gather(gathered, padded, group=self.device_group)
    return torch.cat([rows[:size] for rows, size in zip(gathered, sizes, strict=True)])


def _reduce_scatterv(self: Any, input_: Any, dim: int = -1, sizes: list[int] | None = None) -> Any:
    """This rank's rows of the sum over all ranks."""
    import torch

    assert dim == 0
    total = input_.clone()
    torch.distributed.all_reduce(total, group=self.device_group)
    sizes = sizes or [len(input_) // self.world_size] * self.world_size
    return total.split(sizes)[self.rank_in_group].contiguous()


def _apply(self: Any, **arguments: Any) -> None:
    """What an expert of another rank adds, that rank adds: here it counts nothing."""
    numbers = arguments["expert_map"]
    if numbers is not None:
        own = numbers[arguments["topk_ids"]]
        arguments["topk_weights"] = arguments["topk_weights"].masked_fill(own < 0, 0.0)
        arguments["topk_ids"] = own.clamp(min=0).to(arguments["topk_ids"].dtype)
    self.apply_own(**arguments)
