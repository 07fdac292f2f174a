# SPDX-License-Identifier: Apache-2.0
"""The stand-in for a GPU computes what vLLM's kernels say, stays out of what is installed, and does nothing uncalled.

vLLM's own kernels are run by the interpreter, in a process of their own, against
PyTorch.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.harness import ServerSpec
from tests.support.v2_on_cpu import stand_in_gpu

VOCABULARY = 1024


def grammar_bitmask() -> None:
    """Guided decoding. Unmended: "mask has unsupported dtype"."""
    import torch
    from vllm.v1.worker.gpu.structured_outputs import _apply_grammar_bitmask_kernel as kernel

    logits = torch.randn(2, VOCABULARY)
    words = torch.randint(-(2**31), 2**31 - 1, (2, VOCABULARY // 32), dtype=torch.int32)
    allowed = ((words[:, :, None] >> torch.arange(32)) & 1).bool().reshape(2, VOCABULARY)
    expected = logits.masked_fill(~allowed, -float("inf"))
    rows, first = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([0, 1, 2], dtype=torch.int32)
    kernel[(2, 1)](logits, VOCABULARY, rows, first, words, VOCABULARY // 32, VOCABULARY, MASK_STRIDE=1, BLOCK_SIZE=8192)
    assert torch.equal(logits, expected)


def top_k_top_p() -> None:
    """Unmended: "'int' object has no attribute 'to'"."""
    import torch
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch
    from vllm.v1.sample.ops.topk_topp_triton import apply_top_k_top_p_triton

    logits = torch.randn(4, VOCABULARY) * 3
    k = torch.tensor([5, VOCABULARY, 200, 1], dtype=torch.int32)
    p = torch.tensor([0.9, 0.8, 1.0, 0.5])
    kept = apply_top_k_top_p_triton(logits.clone(), k, p)
    expected = apply_top_k_top_p_pytorch(logits.clone(), k, p)
    assert (kept.isfinite().sum(-1) > 0).all()
    assert torch.equal(kept.isfinite(), expected.isfinite())
    assert torch.equal(kept[kept.isfinite()], logits[kept.isfinite()])


def bad_words() -> None:
    """One of a single token, one whose beginning is there, one whose beginning is not."""
    import torch
    from vllm.v1.worker.gpu.sample.bad_words import apply_bad_words

    def integers(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    logits, tokens, ends = torch.zeros(1, 64), integers(5, 6, 7, 9, 8).reshape(1, 5), integers(0, 1, 3, 5).reshape(1, 4)
    said = integers(1, 2, 3, 6, 0, 0).reshape(1, 6)
    one, position = integers(0), integers(0)
    apply_bad_words(
        logits,
        one,
        tokens,
        ends,
        integers(3),
        said,
        integers(2),
        integers(4),
        integers(6),
        position,
        max_num_bad_words=3,
    )
    assert logits.isinf().nonzero().tolist() == [[0, 5], [0, 7]]


def new_blocks() -> None:
    """Pages of two sizes, which a program each fills with zeros."""
    import torch
    from vllm.plugins import load_general_plugins
    from vllm.v1.worker.utils import KVBlockZeroer

    load_general_plugins()
    memory = torch.ones(4, 3000, dtype=torch.int32)
    zeroer = KVBlockZeroer.__new__(KVBlockZeroer)
    zeroer.device = memory.device
    places = torch.tensor([memory.data_ptr(), memory.data_ptr() + 4 * 1500], dtype=torch.uint64)
    zeroer._meta = places, torch.tensor([3000, 3000]), torch.tensor([1400, 900]), 2, 1024, 2
    zeroer.zero_block_ids([1, 3])
    expected = torch.ones_like(memory)
    expected[1::2, :1400] = expected[1::2, 1500:2400] = 0
    assert torch.equal(memory, expected)


KERNELS = {function.__name__: function for function in (grammar_bitmask, top_k_top_p, bad_words, new_blocks)}


def decisions(model: Path) -> list[str]:
    """Whether vLLM takes the V2 runner, and asynchronous scheduling: by default, and with `--no-async-scheduling`."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    configs = [EngineArgs(str(model), async_scheduling=wanted).create_engine_config() for wanted in (None, False)]
    return [f"V2 {it.use_v2_model_runner}, async {it.scheduler_config.async_scheduling}" for it in configs]


def test_kernels_compute_what_they_say_and_vllm_decides_as_on_a_gpu(model_dir: Path) -> None:
    paths = [str(stand_in_gpu.PATH), str(Path(__file__).resolve().parents[2])]
    environment = os.environ | stand_in_gpu.ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(paths)}
    environment["VLLM_LOGGING_LEVEL"] = "ERROR"
    command = [sys.executable, "-c", "from tests.runner_v2.test_stand_in import main; main()", str(model_dir)]
    run = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=240, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.splitlines() == [*KERNELS, "V2 True, async True", "V2 True, async False"]


def test_only_a_server_that_asks_for_it_gets_it(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    stock = ServerSpec(model_dir).environment(Path("/tmp"))
    assert stock["PYTHONPATH"] == "/elsewhere"
    assert not stand_in_gpu.ENVIRONMENT.keys() & stock.keys()
    paths = ServerSpec(model_dir, runner="v2", env={"PYTHONPATH": "/own"}).environment(Path("/tmp"))["PYTHONPATH"]
    assert paths.split(os.pathsep) == [str(stand_in_gpu.PATH), "/own"]


def main() -> None:
    import torch
    from stand_in_gpu.interpreter import mend

    mend()  # as the plugin would
    torch.manual_seed(0)
    for name, check in KERNELS.items():
        check()
        print(name)
    print(*decisions(Path(sys.argv[1])), sep="\n")
