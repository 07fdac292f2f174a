# SPDX-License-Identifier: Apache-2.0
"""The facts about a request that a placement may depend on, from the gateway to the policy: `gateway.body` reads them,
`contract` sends them to the scheduler, and `policy` has its numbers as columns."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta, Struct

from llumlet.contract.block_hashes import HASH_BYTES

Name = Annotated[str, Meta(max_length=1024)]
Count = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
MOST_PROMPT_BLOCKS: Final = 8192
"""Largest number of named blocks of a prompt, so that a decision takes less than a millisecond."""
Priority = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Milliseconds = Annotated[float, Meta(ge=0)]


class Request(Struct, frozen=True, omit_defaults=True):
    """A request to be placed. A new fact becomes a field here, is read in `gateway.body` and, if it is a number, is
    listed in `REQUEST_COLUMNS`."""

    id: Name = ""
    model: Name = ""
    """The model's name; "" is any."""
    prompt_num_tokens: Count = 0
    """Tokens of the prompt; 0 if they were not counted."""
    priority: Priority = 0
    """Lower numbers come first; below 0 the request is urgent (`llumlet.protocol.urgency`)."""
    ttft_slo_ms: Milliseconds = 0.0
    """Objective for the time from arrival at the gateway to the first token; 0 is none."""
    tpot_slo_ms: Milliseconds = 0.0
    """Objective for the mean time between two tokens; 0 is none."""
    waited_ms: Milliseconds = 0.0
    """Time since it came to its gateway."""
    may_wait: bool = False
    """True if its gateway would rather ask again than have it placed where its objectives are missed."""
    prompt_blocks: Annotated[bytes, Meta(max_length=MOST_PROMPT_BLOCKS * HASH_BYTES)] = b""
    """Names of the prompt's first full blocks, 8 bytes each (`contract.block_hashes`), for policies that use prefix
    caches; empty if unknown."""
    prompt_block_size: Count = 0
    """Tokens per block of `prompt_blocks`."""

    @property
    def has_objectives(self) -> bool:
        return bool(self.ttft_slo_ms or self.tpot_slo_ms)


REQUEST_COLUMNS: Final = ("prompt_num_tokens", "priority", "ttft_slo_ms", "tpot_slo_ms", "waited_ms", "may_wait")
"""Fields of a request that formulas may name."""
