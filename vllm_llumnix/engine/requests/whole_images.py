# SPDX-License-Identifier: Apache-2.0
"""Images of requests that moved here reach the V1 runner whole.

vLLM sends a runner no image that lies within what is computed when its request starts, and nothing later on: should a
preemption have the image computed once more, the V1 runner looks for it and ends the engine. (In stock vLLM so ends a
prompt that was found in the prefix cache, is preempted, and is found there no more.) V2 is sent the request anew.
"""

from __future__ import annotations

from typing import Any

from llumlet.protocol.ids import HOME
from vllm_llumnix.engine.requests.request_state import residence_of
from vllm_llumnix.engine.seams import SEAMS
from vllm_llumnix.engine.vllm_types import Scheduler
from vllm_llumnix.kv.vllm_worker_types import SchedulerOutput


def send_whole_images(scheduler: Scheduler) -> None:
    """From now on."""
    stock = scheduler.schedule

    def schedule(*args: Any, **kwargs: Any) -> SchedulerOutput:
        output = stock(*args, **kwargs)
        for new in output.scheduled_new_reqs:
            if new.mm_features and new.num_computed_tokens:
                request = scheduler.requests[new.req_id]
                residence = residence_of(request)
                if residence is not None and residence.epoch != HOME:
                    new.mm_features = request.mm_features
        return output

    if not scheduler.use_v2_model_runner:
        SEAMS.wrap(scheduler, "Scheduler.schedule", schedule)
