# SPDX-License-Identifier: Apache-2.0
"""What an API server expects in the outputs of its model's engines."""

from __future__ import annotations

from vllm_llumnix.frontend.vllm_client_types import VllmConfig
from vllm_llumnix.wire.relay_convert import ExpertsForm, OutputForm


def output_form_of(vllm_config: VllmConfig) -> OutputForm:
    model, experts = vllm_config.model_config, None
    if vllm_config.aux_output_config.enable_return_routed_experts:
        counts = (model.get_total_num_hidden_layers(), model.get_num_experts_per_tok(), model.get_num_experts())
        experts = ExpertsForm(*counts)
    return OutputForm(model.get_vocab_size(), model.return_sampling_mask, experts)
