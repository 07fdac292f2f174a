# SPDX-License-Identifier: Apache-2.0
"""The models of `benchmarks.models`, without their weights."""

from __future__ import annotations

import pytest
import torch
import transformers

from tests.support.other_models import OTHER, config_of


@pytest.mark.parametrize("family", OTHER)
def test_each_family_can_be_made_as_large(family: str) -> None:
    model = OTHER[family].enlarged()
    config = config_of(model, bos=1, eos=2)
    with torch.device("meta"):
        network = transformers.AutoModelForCausalLM.from_config(config)
    assert config.hidden_size == 512
    assert config.num_hidden_layers == 16
    assert sum(parameter.numel() for parameter in network.parameters()) > 5_000_000
