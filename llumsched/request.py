# SPDX-License-Identifier: Apache-2.0
"""What a placement may depend on of a request, the same from the gateway that reads its body to the policy that names
it: `gateway.body` makes it, `contract` sends it to the scheduler, `policy` has its numbers as columns."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta, Struct

from llumlet.block_hashes import HASH_BYTES

Name = Annotated[str, Meta(max_length=1024)]
Count = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
MOST_PROMPT_BLOCKS: Final = 8192
"""Blocks of a prompt that are named; of a longer one, the first. A decision is to take less than a millisecond."""
Priority = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class Request(Struct, frozen=True, omit_defaults=True):
    """A request that asks for a place. Whatever else a policy needs of one (a deadline, say) becomes a field here, is
    read in `gateway.body`, and, if it is a number, stands in `REQUEST_COLUMNS`; providers and filters are given all."""

    id: Name = ""
    model: Name = ""
    """The model's name; empty: any."""
    prompt_num_tokens: Count = 0
    """Tokens of the prompt; 0 when they were not counted."""
    priority: Priority = 0
    """What its body says: lower ones come first. It is for policies to heed; the built-in ones do not."""
    prompt_blocks: Annotated[bytes, Meta(max_length=MOST_PROMPT_BLOCKS * HASH_BYTES)] = b""
    """Names of the prompt's first full blocks, 8 bytes each (`llumlet.block_hashes`), for schedulers that heed prefix
    caches. Empty: not known."""
    prompt_block_size: Count = 0
    """Tokens of each of these blocks."""


REQUEST_COLUMNS: Final = ("prompt_num_tokens", "priority")
"""Fields of a request that formulas may name."""
