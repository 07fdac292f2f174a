# SPDX-License-Identifier: Apache-2.0
"""The types that stand for vLLM's objects ask for nothing that vLLM's objects do not have."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core.sched.request_queue import FCFSRequestQueue, PriorityRequestQueue
from vllm.v1.engine import core
from vllm.v1.executor.abstract import Executor

from tests.engine.rig import Rig
from vllm_llumnix.engine import vllm_types

OURS = {"llumlet_residence"}
OF_ONE_KIND = {"insert"}
"""Of queues that are in order of arrival."""
_OF_PROTOCOLS = {"_abc_impl", "_is_protocol", "_is_runtime_protocol"}


def members(protocol: type) -> set[str]:
    defined = {name for name in vars(protocol) if not name.startswith("__")}
    return (defined | set(protocol.__annotations__)) - _OF_PROTOCOLS - OURS


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
        vllm_types.SchedulerConfig: scheduler.scheduler_config,
        vllm_types.KVCacheManager: manager,
        vllm_types.BlockPool: manager.block_pool,
        vllm_types.FreeBlocks: manager.block_pool.free_block_queue,
        vllm_types.Blocks: blocks,
        vllm_types.Block: blocks.blocks[0][0],
        vllm_types.RequestQueue: scheduler.waiting,
        vllm_types.Request: request,
    }
    missing = {
        f"{protocol.__name__}.{name}"
        for protocol, instance in found.items()
        for name in members(protocol)
        if not hasattr(instance, name)
    }
    assert not missing


@pytest.mark.parametrize("kind", [FCFSRequestQueue, PriorityRequestQueue])
def test_queues_of_both_kinds(kind: type) -> None:
    wanted = members(vllm_types.RequestQueue) - (OF_ONE_KIND if kind is PriorityRequestQueue else set())
    assert not {name for name in wanted if not hasattr(kind, name)}


def test_the_engine_and_its_executor() -> None:
    source = "".join(map(inspect.getsource, (core.EngineCore, core.EngineCoreProc, core.DPEngineCoreProc)))
    names = members(vllm_types.Engine)
    assert not {name for name in names if not re.search(rf"\b(self\.|def ){name}\b", source)}
    assert not {name for name in members(vllm_types.Executor) if not hasattr(Executor, name)}
    assert "scheduler" in names
