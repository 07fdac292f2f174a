# SPDX-License-Identifier: Apache-2.0
"""The fingerprint tells weights apart, and not the places of experts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from vllm_llumnix.kv.fingerprint import common_fingerprint, fingerprint


class RoutedExperts(torch.nn.Module):
    """Named as vLLM's; of its fields, those that say who has which experts."""

    def __init__(self, experts: torch.Tensor, dp_size: int, enable_eplb: bool) -> None:
        super().__init__()
        self.w13_weight = torch.nn.Parameter(experts)
        parallel = SimpleNamespace(dp_size=dp_size, enable_eplb=enable_eplb)
        self.moe_config = SimpleNamespace(moe_parallel_config=parallel)


def model(rank: int = 0, router: float = 1.0, dp_size: int = 1, *, eplb: bool = False) -> torch.nn.Module:
    """`rank` decides over the experts."""
    gate = torch.nn.Linear(4, 2)
    torch.nn.init.constant_(gate.weight, router)
    torch.nn.init.zeros_(gate.bias)
    return torch.nn.ModuleDict(
        {"gate": gate, "experts": RoutedExperts(torch.full((2, 4, 4), float(rank)), dp_size, eplb)}
    )


def test_experts_count_where_they_stay() -> None:
    assert fingerprint(model(0)) == fingerprint(model(0))
    assert fingerprint(model(0)) != fingerprint(model(1))


@pytest.mark.parametrize("scattered", [{"dp_size": 2}, {"eplb": True}])
def test_experts_that_are_elsewhere_on_every_rank(scattered: dict) -> None:
    assert fingerprint(model(0, **scattered)) == fingerprint(model(1, **scattered))
    assert fingerprint(model(0, **scattered)) != fingerprint(model(0, router=2.0, **scattered))


def test_parameters_that_cannot_be_read(caplog: pytest.LogCaptureFixture) -> None:
    """They are there by name, shape and type: no reason not to start."""

    def with_meta(router: float, rows: int = 2) -> torch.nn.Module:
        built = model(router=router)
        built.register_parameter("absent", torch.nn.Parameter(torch.empty(rows, 2, device="meta")))
        return built

    assert fingerprint(with_meta(1.0)) == fingerprint(with_meta(1.0))
    assert "the weights of absent are not part of" in caplog.text
    assert len({fingerprint(with_meta(1.0)), fingerprint(with_meta(2.0)), fingerprint(with_meta(1.0, 3))}) == 3


class VocabParallelEmbedding(torch.nn.Module):
    """Named as vLLM's: `rank`'s part of `table`, and where it begins and ends."""

    def __init__(self, table: torch.Tensor, rank: int, num_ranks: int) -> None:
        super().__init__()
        self.org_vocab_size = len(table)
        size = -(-len(table) // num_ranks)
        begin, end = rank * size, min((rank + 1) * size, len(table))
        self.shard_indices = SimpleNamespace(org_vocab_start_index=begin, org_vocab_end_index=end)
        part = torch.zeros(size, table.shape[1])  # the last one is padded
        part[: end - begin] = table[begin:end]
        self.weight = torch.nn.Parameter(part)


def split(table: torch.Tensor, norm: float, num_ranks: int) -> int:
    """Of a model that so many ranks share."""
    parts = [
        torch.nn.ModuleDict(
            {"embed_tokens": VocabParallelEmbedding(table, rank, num_ranks), "norm": torch.nn.RMSNorm(8)}
        )
        for rank in range(num_ranks)
    ]
    for part in parts:
        torch.nn.init.constant_(part["norm"].weight, norm)
    return sum(common_fingerprint(part, rank) for rank, part in enumerate(parts)) % 2**32


def test_an_embedding_that_cannot_be_read_is_no_reason_not_to_start() -> None:
    table = torch.arange(64.0).reshape(8, 8)
    packed, absent = (torch.nn.ModuleDict({"embed_tokens": VocabParallelEmbedding(table, 0, 1)}) for _ in range(2))
    del packed["embed_tokens"].weight
    absent.to("meta")
    assert common_fingerprint(packed, 0) == 0
    assert common_fingerprint(absent, 0) == common_fingerprint(absent, 1) != 0


def test_however_many_ranks() -> None:
    table = torch.arange(1001 * 8, dtype=torch.float32).reshape(1001, 8)
    alone = split(table, 1.0, 1)
    assert alone == split(table, 1.0, 2) == split(table, 1.0, 4)
    assert len({alone, split(table, 2.0, 2), split(table + 1, 1.0, 2), split(table.flip(0), 1.0, 2)}) == 4
