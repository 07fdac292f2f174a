# SPDX-License-Identifier: Apache-2.0
"""A custom logits processor that says of itself that its requests may be moved. Engines import it by name."""

from __future__ import annotations

import functools

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

WINDOW = 40
"""Output tokens that it looks back on: more than are computed between a move and the next."""
PENALTY = 3.0


class AvoidsTheLatest(AdapterLogitsProcessor):
    """Makes the latest output tokens of every request less likely, and those that it lists in `vllm_xargs`."""

    llumnix_portable = True

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> object:
        avoided = (params.extra_args or {}).get("avoid", [])
        return functools.partial(_penalize, avoided)


def _penalize(avoided: list[int], output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    logits[output_ids[-WINDOW:]] -= PENALTY
    logits[avoided] -= PENALTY
    return logits
