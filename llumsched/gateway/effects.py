# SPDX-License-Identifier: Apache-2.0
"""Requests with effects beside their tokens. Pure.

An engine may have called a tool or stored something before it was lost, and the gateway cannot know. So such a request
is never sent again once it was sent; if it was not sent, it may go elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from llumsched.gateway.body import Head

_Field = tuple[Callable[[Any], bool], str]
_EVERYWHERE: Final[Mapping[str, _Field]] = {
    "runs_tools": (bool, "it may have called a tool"),
    "mcp_servers": (bool, "it may have called a tool"),
    "transfers": (bool, "it may have taken or left blocks of a cache"),
}
_BY_PATH: Final[Mapping[str, Mapping[str, _Field]]] = {
    "/v1/responses": {
        "background": (bool, "it may go on in the background"),
        "store": (lambda value: value is True, "it may have been stored"),
        "conversation": (bool, "it may have been added to its conversation"),
    }
}
"""Fields with effects, by path. `store` is true by default and then counts as no effect: vLLM stores nothing unless a
variable enables it, and a response stored under another id does no harm."""


def of(path: str, head: Head) -> str:
    """The effect that a request of this path may have once it was sent; "" if none."""
    for table in (_EVERYWHERE, _BY_PATH.get(path, {})):
        for name, (is_so, why) in table.items():
            if is_so(getattr(head, name)):
                return why
    return ""
