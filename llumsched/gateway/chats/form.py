# SPDX-License-Identifier: Apache-2.0
"""The form in which a request's body holds its prompt."""

from __future__ import annotations

from enum import StrEnum


class Form(StrEnum):
    OPENAI = "openai"
    """`prompt` of /v1/completions, or `messages` and `tools` of /v1/chat/completions."""
    ANTHROPIC = "anthropic"
    """`system`, `messages` and `tools` of /v1/messages."""
    RESPONSES = "responses"
    """`instructions`, `input` and `tools` of /v1/responses."""
    TOKENS = "tokens"
    """`token_ids` of /inference/v1/generate."""
    OTHER = "other"
    """Any other form; only its length is estimated."""
