# SPDX-License-Identifier: Apache-2.0
"""What simulated instances are unless a test says otherwise: small, and quick to change."""

from __future__ import annotations

from typing import Any

from llumsim.engine.step_model import EngineConfig, Hardware, StepModel


def engine_model(
    *,
    step_s: float = 0.010,
    decode_s: float = 0.0001,
    prefill_s: float = 0.00002,
    speed: float = 1.0,
    num_blocks: int = 1024,
    block_size: int = 16,
    **config: Any,
) -> Hardware:
    """An engine whose steps take `step_s`, and `decode_s` for each decoded and `prefill_s` for each computed prompt
    token: all of that `speed` times as fast. `config` as for `EngineConfig`. Raises ValueError."""
    step, prefill, decode = (seconds / speed for seconds in (step_s, prefill_s, decode_s))
    return Hardware(
        name="simulated",
        step=StepModel.of_seconds(step, prefill, 0.0, decode, 0.0),
        engine=EngineConfig(
            num_blocks=num_blocks, block_size=block_size, max_model_len=num_blocks * block_size, **config
        ),
        bytes_per_token=1024,
        link_bytes_per_s=1e9,
    )
