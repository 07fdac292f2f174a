# SPDX-License-Identifier: Apache-2.0
"""Forecast of which requests of a model will move, before it is deployed: vLLM builds it without weights, and plans its
KV cache.

    python -m vllm_llumnix.engine.compatibility.foresight --model DIR [FLAGS OF vllm serve]

prints `Foresight` as JSON, for the device that vLLM finds here and as if one worker had all of the model: its division
changes the sizes of pages and not their kinds.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from vllm_llumnix.engine.blocks.block_rows import kind_of
from vllm_llumnix.engine.compatibility.portability import why_engine_unsupported, why_kv_unsupported
from vllm_llumnix.errors import TransportUnavailable
from vllm_llumnix.kv.memory.vllm_cache import carried_layout, carried_specs
from vllm_llumnix.kv.vllm_worker_types import KVCacheConfig


@dataclasses.dataclass(frozen=True, slots=True)
class Foresight:
    """`caches`: what the layers keep, and how many of them. `unsupported`: why nothing moves, `kv_unsupported`: why
    requests move with their tokens alone; empty if they do."""

    device: str
    model_runner: str
    caches: dict[str, int]
    layout: str
    unsupported: str
    kv_unsupported: str


def foresee(flags: Sequence[str]) -> Foresight:
    """flags: of `vllm serve`. Raises what vLLM raises for a model or flags that it cannot serve."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    arguments = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(list(flags))
    arguments.tensor_parallel_size = arguments.pipeline_parallel_size = arguments.data_parallel_size = 1
    config = EngineArgs.from_cli_args(arguments).create_engine_config()
    with set_current_vllm_config(config):
        planned = _plan(config)
    connector = object() if config.kv_transfer_config is not None else None
    scheduler = SimpleNamespace(
        kv_cache_config=planned, connector=connector, use_v2_model_runner=config.use_v2_model_runner
    )
    engine: Any = SimpleNamespace(vllm_config=config, scheduler=scheduler)
    layers: Counter[str] = Counter()
    for group in planned.kv_cache_groups:
        kind = kind_of(group)
        layers[kind.value if kind else type(group.kv_cache_spec).__name__] += len(group.layer_names)
    return Foresight(
        device=current_platform.device_type,
        model_runner="V2" if config.use_v2_model_runner else "V1",
        caches=dict(layers),
        layout=planned.kv_cache_layout,
        unsupported=why_engine_unsupported(engine) or "",
        kv_unsupported=why_kv_unsupported(engine, ()) or _why_not_read(planned),
    )


def _why_not_read(planned: KVCacheConfig) -> str:
    try:
        carried_specs(planned)
        carried_layout(planned)
    except TransportUnavailable as error:
        return str(error)
    return ""


def _plan(config: Any) -> Any:
    """vLLM's `KVCacheConfig` of the model, without sizes. Its parts are built on no device."""
    import torch
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype
    from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

    with tempfile.TemporaryDirectory() as scratch:
        init_distributed_environment(1, 0, f"file://{scratch}/group", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
    with set_default_torch_dtype(config.model_config.dtype), torch.device("meta"):
        # The layers make themselves known to the configuration.
        initialize_model(config)
    specs = get_kv_cache_spec(config)
    layouts = [layout.name for layout in get_supported_kv_cache_layouts(get_current_attn_backends(config))]
    layout = resolve_kv_cache_layout(config, [layouts], specs.values())
    groups = _grouping()(config, specs)
    return KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=groups, kv_cache_layout=layout.name)


def _grouping() -> Callable[[Any, dict[str, Any]], list[Any]]:
    """vLLM's function; 0.33 has it in a module of its own."""
    try:
        module = importlib.import_module("vllm.v1.core.kv_cache_planning")
    except ModuleNotFoundError:
        module = importlib.import_module("vllm.v1.core.kv_cache_utils")
    grouping: Callable[[Any, dict[str, Any]], list[Any]] = module.get_kv_cache_groups
    return grouping


def main() -> None:
    try:
        foreseen = foresee(sys.argv[1:])
    except Exception as error:  # noqa: BLE001 - whatever vLLM and the model's own code have to say
        sys.exit(" ".join(f"{type(error).__name__}: {error}".split()))
    print(json.dumps(dataclasses.asdict(foreseen)))


if __name__ == "__main__":
    main()
