# SPDX-License-Identifier: Apache-2.0
"""What a placement may depend on of a request, the same from the gateway that reads its body to the policy that names
it: `gateway.body` makes it, `contract` sends it to the scheduler, `policy` has its numbers as columns."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta, Struct

Name = Annotated[str, Meta(max_length=1024)]
Count = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
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
    """What its header or body says: lower ones come first, below 0 it is urgent (`llumlet.urgency`)."""


REQUEST_COLUMNS: Final = ("prompt_num_tokens", "priority")
"""Fields of a request that formulas may name."""
