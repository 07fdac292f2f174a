# SPDX-License-Identifier: Apache-2.0
"""The types that stand for vLLM's engine client ask for nothing that vLLM's clients do not have."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.config import CacheConfig, ModelConfig, ParallelConfig, VllmConfig
from vllm.config.aux_output import AuxOutputConfig
from vllm.v1.engine.core_client import BackgroundResources
from vllm.v1.engine.utils import CoreEngineProcManager

from tests.support.protocols import missing, protocols_of
from vllm_llumnix.frontend import vllm_client_types as ours

FOUND = [
    (ours.ClientVllmConfig, VllmConfig),
    (ours.ClientModelConfig, ModelConfig),
    (ours.AuxOutputConfig, AuxOutputConfig),
    (ours.CacheConfig, CacheConfig),
    (ours.ClientParallelConfig, ParallelConfig),
    (ours.Resources, BackgroundResources),
    (ours.EngineManager, CoreEngineProcManager),
]


@pytest.mark.parametrize(("protocol", "found"), FOUND, ids=lambda one: one.__name__)
def test_vllm_has_what_is_asked_of_it(protocol: type, found: type) -> None:
    assert not missing(protocol, found)


def test_every_protocol_is_held_against_vllm() -> None:
    assert protocols_of(ours) == {protocol for protocol, _ in FOUND} | {ours.Client, ours.BalancingClient}


@pytest.mark.asyncio
async def test_the_plain_client(client: Any) -> None:
    assert not missing(ours.Client, client)
    assert not missing(ours.Resources, client.resources)
    assert not isinstance(client, ours.BalancingClient)


@pytest.mark.asyncio
async def test_the_client_of_several_engines(dp_client: Any) -> None:
    assert not missing(ours.Client, dp_client)
    assert isinstance(dp_client, ours.BalancingClient)
