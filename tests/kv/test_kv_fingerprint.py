# SPDX-License-Identifier: Apache-2.0
"""The fingerprint tells weights apart, and not the places of experts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from vllm_llumnix.kv.fingerprint import fingerprint


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
