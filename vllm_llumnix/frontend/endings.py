# SPDX-License-Identifier: Apache-2.0
"""Why a request was ended with an error, said to its client.

vLLM's front-end knows a failed generation by its finish reason alone, and says "Internal server error", code 500: on
which clients and gateways send the request again. A request that two engines died of is refused as one that cannot be
processed instead.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from typing import Any

from vllm.exceptions import VLLMUnprocessableEntityError

from vllm_llumnix.seams import CLIENT

MAX_ENDINGS = 1024

_endings: OrderedDict[str, str] = OrderedDict()
"""Reasons by the request's external id, the oldest first; until it is said."""


def explain(external_id: str, reason: str) -> None:
    """Have the client of this request told `reason`, when the error that ends it is on its way."""
    _wrap()
    _endings[external_id] = reason
    if len(_endings) > MAX_ENDINGS:
        _endings.popitem(last=False)


def _take(request_id: str) -> str | None:
    """`request_id` as the front-end has it: vLLM adds the number of a prompt for the engine."""
    for external_id in _endings:
        if external_id == request_id or external_id.startswith((f"{request_id}-", f"{request_id}_")):
            return _endings.pop(external_id)
    return None


@functools.cache
def _wrap() -> None:
    """Wraps vLLM's function, only in a process in which that is needed."""
    from vllm.entrypoints.generate.base.serving import GenerateBaseServing

    stock = GenerateBaseServing._raise_if_error

    def raise_if_error(self: Any, finish_reason: str | None, request_id: str) -> None:
        if finish_reason == "error" and (reason := _take(request_id)) is not None:
            raise VLLMUnprocessableEntityError(reason)
        stock(self, finish_reason, request_id)

    CLIENT.wrap(GenerateBaseServing, "GenerateBaseServing._raise_if_error", raise_if_error)
