# SPDX-License-Identifier: Apache-2.0
"""What of the GPU check can run without one: its comparison of kernels, on the CPU's, and its report."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import gpu_check
from vllm_llumnix.kv.kernels import native, reference
from vllm_llumnix.kv.kernels.plan import BlockCopy


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "BLOCKS", 8)
    monkeypatch.setattr(gpu_check, "TIMES", 2)


def test_kernels() -> None:
    part = gpu_check.check_kernels(torch.device("cpu"), ("cuda", "cpp", "torch"))
    assert part["verdict"] == "right"
    assert part["missing"] == {"cuda": "it copies on CUDA devices only"}
    assert {row["backend"] for row in part["speeds"]} == {"cpp", "torch"}
    assert all(row["gb_s"] > 0 for row in part["speeds"])


def test_a_wrong_byte_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(copy: BlockCopy, *_: int) -> None:
        reference.copy_blocks(copy)
        copy.buffer[copy.num_bytes - 1] ^= 1

    monkeypatch.setattr(native, "copy_blocks_cpu", wrong)
    part = gpu_check.check_kernels(torch.device("cpu"), ("cpp",))
    assert (part["verdict"], len(part["wrong"])) == ("wrong", 6)


def test_seals(monkeypatch: pytest.MonkeyPatch) -> None:
    part = gpu_check.check_seals(torch.device("cpu"))
    assert (part["verdict"], len(part["speeds"])) == ("right", len(gpu_check.SEALED))
    monkeypatch.setattr(gpu_check.Multilinear, "seal", lambda *_: b"the same")
    part = gpu_check.check_seals(torch.device("cpu"))
    assert part["wrong"] == [f"{size} bytes, one of them changed" for size in gpu_check.SEALED]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main([]) == 1
    report = json.loads(capsys.readouterr().out)
    assert [report[part]["verdict"] for part in gpu_check.PARTS] == ["unrun"] * 4
    assert report["gpu"] is None
