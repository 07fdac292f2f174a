# SPDX-License-Identifier: Apache-2.0
"""The meaning of a request's `priority` beyond the order of a queue.

As in vLLM, lower numbers come first. Below 0 a request is *urgent*: it should decode undisturbed. Instances keep room
free beside it, and it does not move to make room for others. Two numbers on the same side of 0 differ in queues, and in
who moves first by `Order.LP`.
"""

from __future__ import annotations


def is_urgent(priority: int) -> bool:
    return priority < 0
