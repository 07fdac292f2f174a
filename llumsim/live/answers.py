# SPDX-License-Identifier: Apache-2.0
"""An OpenAI API's answer as vLLM writes it: the form of events, the order of keys, and which of them are null."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any


class Answer:
    """The answer to one request with the body `document` and this prompt."""

    def __init__(
        self, document: Mapping[str, Any], *, is_chat: bool, request_id: str, model: str | None, prompt: list[int]
    ) -> None:
        options = document.get("stream_options") or {}
        self.is_streamed = bool(document.get("stream"))
        self._wants_ids = document.get("return_token_ids") in (True, "true")  # as lenient as pydantic
        self._wants_usage = bool(options.get("include_usage"))
        self._wants_usage_always = bool(options.get("continuous_usage_stats"))
        self._is_chat = is_chat
        self._prompt = prompt
        self._head = {
            "id": ("chatcmpl-" if is_chat else "cmpl-") + request_id,
            "object": "chat.completion.chunk" if is_chat else "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    @property
    def _prompt_ids(self) -> dict[str, Any]:
        return {"prompt_token_ids": self._prompt if self._wants_ids else None}

    def opening(self) -> list[bytes]:
        """Events before the first token."""
        if not self._is_chat:
            return []
        role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return [_event(self._head | {"choices": [role]} | self._prompt_ids | self._usage_so_far(0))]

    def chunk(self, tokens: Sequence[int], text: str, num_before: int, finish_reason: str | None) -> bytes:
        """The event of these tokens, which come after so many others. `finish_reason` of the last ones; else None."""
        choice: dict[str, Any] = {"index": 0, **({"delta": {"content": text}} if self._is_chat else {"text": text})}
        choice |= {"logprobs": None, "finish_reason": finish_reason}
        if not self._is_chat or finish_reason is not None:
            choice["stop_reason"] = None
        if not self._is_chat:
            choice |= self._prompt_ids if not num_before else {"prompt_token_ids": None}
        choice["token_ids"] = list(tokens) if self._wants_ids else None
        return _event(self._head | {"choices": [choice]} | self._usage_so_far(num_before + len(tokens)))

    def closing(self, num_tokens: int) -> list[bytes]:
        """Events after the last token."""
        usage = [_event(self._head | {"choices": []} | self._usage(num_tokens))] if self._wants_usage else []
        return [*usage, b"data: [DONE]\n\n"]

    def whole(self, tokens: Sequence[int], text: str, finish_reason: str) -> dict[str, Any]:
        """The answer in one piece."""
        content = {"message": {"role": "assistant", "content": text}} if self._is_chat else {"text": text}
        choice: dict[str, Any] = {"index": 0, **content, "finish_reason": finish_reason}
        document = self._head | ({"object": "chat.completion"} if self._is_chat else {})
        if self._wants_ids:
            choice["token_ids"] = list(tokens)
            (document if self._is_chat else choice).update(self._prompt_ids)
        return document | {"choices": [choice]} | self._usage(len(tokens))

    def _usage_so_far(self, num_tokens: int) -> dict[str, Any]:
        return self._usage(num_tokens) if self._wants_usage_always else {}

    def _usage(self, num_tokens: int) -> dict[str, Any]:
        num_prompt = len(self._prompt)
        usage = {"prompt_tokens": num_prompt, "total_tokens": num_prompt + num_tokens}
        return {"usage": usage | {"completion_tokens": num_tokens}}


def _event(document: dict[str, Any]) -> bytes:
    """Write JSON like pydantic: no spaces, no needless escapes."""
    return f"data: {json.dumps(document, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()
