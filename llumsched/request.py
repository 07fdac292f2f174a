# SPDX-License-Identifier: Apache-2.0
"""What a placement may depend on of a request, the same from the gateway that reads its body to the policy that names
it: `gateway.body` makes it, `contract` sends it to the scheduler, `policy` has its numbers as columns."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta, Struct

from llumlet.contract.block_hashes import HASH_BYTES

Name = Annotated[str, Meta(max_length=1024)]
Count = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
MOST_PROMPT_BLOCKS: Final = 8192
"""Blocks of a prompt that are named; of a longer one, the first. A decision is to take less than a millisecond."""
Priority = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Milliseconds = Annotated[float, Meta(ge=0)]


class Request(Struct, frozen=True, omit_defaults=True):
    """A request that asks for a place. Whatever else a policy needs of one (a deadline, say) becomes a field here, is
    read in `gateway.body`, and, if it is a number, stands in `REQUEST_COLUMNS`; providers and filters are given all."""

    id: Name = ""
    model: Name = ""
    """The model's name; empty: any."""
    prompt_num_tokens: Count = 0
    """Tokens of the prompt; 0 when they were not counted."""
    priority: Priority = 0
    """What its header or body says: lower ones come first, below 0 it is urgent (`llumlet.protocol.urgency`)."""
    ttft_slo_ms: Milliseconds = 0.0
    """Objective for the time to its first token, since it came to its gateway; 0: none is known."""
    tpot_slo_ms: Milliseconds = 0.0
    """Objective for the mean time between two of its tokens; 0: none is known."""
    waited_ms: Milliseconds = 0.0
    """Since it came to its gateway."""
    may_wait: bool = False
    """Whether its gateway would rather ask again soon than have it placed where its objectives are missed."""
    prompt_blocks: Annotated[bytes, Meta(max_length=MOST_PROMPT_BLOCKS * HASH_BYTES)] = b""
    """Names of the prompt's first full blocks, 8 bytes each (`contract.block_hashes`), for schedulers that heed prefix
    caches. Empty: not known."""
    prompt_block_size: Count = 0
    """Tokens of each of these blocks."""

    @property
    def has_objectives(self) -> bool:
        return bool(self.ttft_slo_ms or self.tpot_slo_ms)


REQUEST_COLUMNS: Final = ("prompt_num_tokens", "priority", "ttft_slo_ms", "tpot_slo_ms", "waited_ms", "may_wait")
"""Fields of a request that formulas may name."""
