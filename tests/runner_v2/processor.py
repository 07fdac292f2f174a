# SPDX-License-Identifier: Apache-2.0
"""A custom logits processor of the V2 runner that says of itself that its requests may be moved. Engines import it by
name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext, LogitsProcRequestState

WINDOW = 40
"""Output tokens that it looks back on: more than are computed between a move and the next."""
PENALTY = 3.0


class AvoidsTheLatest(LogitsProcessor):
    """Makes the latest output tokens less likely, and those that `avoid` of `vllm_xargs` lists: of requests that have
    such a list."""

    llumnix_portable = True

    def __init__(self, vllm_config: VllmConfig, req_states: LogitsProcRequestState) -> None:
        self._states = req_states
        self._avoided: dict[int, list[int]] = {}
        """Of each slot that has a list."""

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        avoided = (sampling_params.extra_args or {}).get("avoid")
        self._avoided.pop(req_idx, None)
        if avoided is None:
            return False
        self._avoided[req_idx] = avoided
        return True

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        for row, slot in enumerate(ctx.expanded_idx_mapping.tolist()):
            avoided = self._avoided.get(slot)
            if avoided is not None:
                tokens = self._states.all_token_ids.gpu[slot, : int(self._states.total_len.gpu[slot])]
                output = tokens[int(self._states.prompt_len.np[slot]) :]
                logits[row, output[-WINDOW:].long()] -= PENALTY
                logits[row, avoided] -= PENALTY
        return logits
