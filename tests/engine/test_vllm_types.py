# SPDX-License-Identifier: Apache-2.0
"""The types that stand for vLLM's objects ask for nothing that vLLM's objects do not have."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import pytest
from vllm.config import LoRAConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.core.sched.request_queue import FCFSRequestQueue, PriorityRequestQueue
from vllm.v1.engine import core
from vllm.v1.executor.abstract import Executor

from tests.engine.rig import Rig
from tests.support.protocols import missing, protocols_of
from vllm_llumnix.engine import vllm_types

OURS = {"llumlet_residence"}
OF_ONE_KIND = {"insert"}
"""Of queues that are in order of arrival."""


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_scheduler_and_what_hangs_on_it(model_dir: Path, asynchronous: bool) -> None:
    rig = Rig(model_dir, asynchronous=asynchronous)
    request = rig.add("a")
    rig.turns(3)
    scheduler = rig.scheduler
    manager = scheduler.kv_cache_manager
    blocks = manager.get_blocks("a")
    found: dict[type, Any] = {
        vllm_types.Scheduler: scheduler,
        vllm_types.EncoderCacheManager: scheduler.encoder_cache_manager,
        vllm_types.SchedulerConfig: scheduler.scheduler_config,
        vllm_types.LoRAConfig: LoRAConfig,
        vllm_types.KVCacheManager: manager,
        vllm_types.GroupManager: manager.coordinator.single_type_managers[0],
        vllm_types.BlockPool: manager.block_pool,
        vllm_types.FreeBlocks: manager.block_pool.free_block_queue,
        vllm_types.KVCacheBlocks: blocks,
        vllm_types.Block: blocks.blocks[0][0],
        vllm_types.RequestQueue: scheduler.waiting,
        vllm_types.Request: request,
    }
    assert not set().union(*(missing(protocol, instance, OURS) for protocol, instance in found.items()))
    elsewhere = {vllm_types.Engine, vllm_types.Executor, vllm_types.Connector}
    assert protocols_of(vllm_types) == found.keys() | elsewhere


@pytest.mark.parametrize("kind", [FCFSRequestQueue, PriorityRequestQueue])
def test_queues_of_both_kinds(kind: type) -> None:
    assert not missing(vllm_types.RequestQueue, kind, OF_ONE_KIND if kind is PriorityRequestQueue else ())


def test_the_engine_and_its_executor() -> None:
    assert not missing(vllm_types.Engine, core.DPEngineCoreProc)
    assert not missing(vllm_types.Executor, Executor)


def test_connectors() -> None:
    assert not missing(vllm_types.Connector, KVConnectorBase_V1, {"sub_connectors"})
    assert not missing(vllm_types.Connector, MultiConnector)


def test_missing_attributes_are_found() -> None:
    class Asked(vllm_types.Executor, Protocol):
        no_such: int

    assert missing(Asked, Executor) == {"Asked.no_such"}
