# SPDX-License-Identifier: Apache-2.0
"""The use of an instance: `--llumlet-instance-type`, `instance_type` of its metadata, stages of a policy."""

from __future__ import annotations

from enum import StrEnum


class InferType(StrEnum):
    NEUTRAL = "neutral"
    """Prefill and decode of the same request."""
    PREFILL = "prefill"
    DECODE = "decode"
