# SPDX-License-Identifier: Apache-2.0
"""Metadata of the engine, which do not change while it lives, but for its LoRA adapters."""

from __future__ import annotations

import hashlib
import socket
import time
from pathlib import Path

import vllm

import vllm_llumnix
from llumlet.contract.types import InstanceMetadata
from vllm_llumnix.engine.context import EngineContext
from vllm_llumnix.patching import state

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MACHINE_ID = Path("/etc/machine-id")


def node_id() -> str:
    """A name that is the same for all engines of a machine, in containers too; another one on every other machine.

    The kernel's number of its boot: a machine id is often that of the container's image.
    """
    for source in (_BOOT_ID, _MACHINE_ID):
        try:
            text = source.read_text().strip()
        except OSError:
            continue
        if text:
            return text
    return socket.gethostname()


def unit_id(group: str) -> str:
    """Names the engines that fail together: the ranks of one data-parallel group."""
    return hashlib.sha256(group.encode()).hexdigest()[:32]


def metadata_of(context: EngineContext) -> InstanceMetadata:
    config, engine, address = context.config, context.engine, context.address
    model, parallel = engine.vllm_config.model_config, engine.vllm_config.parallel_config
    ranks = parallel.tensor_parallel_size * parallel.prefill_context_parallel_size
    return InstanceMetadata(
        instance_id=config.instance_id,
        instance_type=config.instance_type,
        backend_type="vllm",
        ip=address.host,
        ip_kvs=address.host,
        ip_kvt=address.host,
        api_server_port=config.api_server_port,
        llumlet_port=address.port,
        kvt_port=address.port,
        node_id=node_id(),
        data_parallel_size=config.num_ranks,
        tensor_parallel_size=parallel.tensor_parallel_size,
        unit_id=unit_id(config.unit),
        dp_rank=engine.engine_index,
        # Of its first worker.
        ep_rank=engine.engine_index * ranks if parallel.enable_expert_parallel else 0,
        dp_local_rank=parallel.data_parallel_rank_local or 0,
        utc_create=context.started_at,
        utc_update=time.time(),
        block_size=engine.scheduler.block_size,
        max_num_batched_tokens=engine.vllm_config.scheduler_config.max_num_batched_tokens,
        max_num_seqs=engine.vllm_config.scheduler_config.max_num_seqs,
        incarnation=context.identity.incarnation,
        version=vllm_llumnix.__version__,
        engine_version=vllm.__version__,
        patch_digest=state.current().digest or "",
        model=model.model,
        max_model_len=model.max_model_len,
        num_total_blocks=engine.scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1,
        bytes_per_block=context.movers.bytes_per_block,
        transports=config.transports,
        max_migrations_in=config.max_migrations_in,
        max_migrations_out=config.max_migrations_out,
        stall_budget_ms=config.stall_budget_ms,
        exact=config.exact,
        compatibility_digest=context.identity.facts.digest,
        cache_digest=context.identity.facts.cache_digest,
        unsupported=context.identity.unsupported or "",
        served_models=dict.fromkeys([*(config.served_models or (model.model,)), *context.adapters.names]),
        cache_block_size=context.loop.port.cached_blocks.block_size,
        adapters=context.adapters.names,
    )
