# SPDX-License-Identifier: Apache-2.0
"""What a request's `priority` means for more than the order of a queue.

As for vLLM, lower numbers come first. Below 0 a request is *urgent*: it is to decode undisturbed. Instances that have
one keep room free beside it, and it changes place for nobody's sake. Two numbers on the same side of 0 differ in turns,
and in who moves first where a rule asks for that (`Order.LP`).
"""

from __future__ import annotations


def is_urgent(priority: int) -> bool:
    return priority < 0
