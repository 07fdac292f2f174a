# SPDX-License-Identifier: Apache-2.0
"""The conditions under which another engine can continue a stream, and the fields it gets beside the tokens. Pure.

They follow from the request's document, whose reading takes time in proportion to the body's length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

_LIMITS: Final = frozenset(("max_tokens", "max_completion_tokens", "min_tokens"))
_DROPPED: Final = frozenset(
    ("messages", "prompt", "prompt_embeds", "tools", "tool_choice", "request_id",
     "parallel_tool_calls", "return_token_ids", "add_special_tokens", "truncate_prompt_tokens", "truncation_side",
     "chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message", "documents",
     "reasoning_effort", "include_reasoning", "return_prompt_text", "logprobs", "top_logprobs", "n", "echo",
     "response_format")
)  # fmt: skip
"""Fields that have no meaning once the prompt is token ids."""
_MOST_BYTES: Final = 1 << 18
"""Largest size of all other fields together, as JSON: a millisecond."""


class CannotContinue(Exception):
    """Raised if the stream cannot continue; the text is the reason, for the client and the log."""


class Outline(msgspec.Struct, array_like=True):
    refusal: str
    """The reason why a stream is not continued; "" if it is."""
    has_several_choices: bool
    tells_usage: bool
    limits: bytes
    """The limits `max_tokens`, `max_completion_tokens` and `min_tokens` of the document, as a JSON object."""
    fields: bytes
    """Further fields for the other engine, as a JSON object."""


def outline(document: Mapping[str, Any]) -> Outline:
    reason = refusal(document)
    fields = b"{}"
    if not reason:
        fields = _object(document, lambda name: name not in _DROPPED and name not in _LIMITS)
        if len(fields) > _MOST_BYTES:
            reason, fields = "its fields beside the prompt are too long", b"{}"
    stream_options = document.get("stream_options")
    return Outline(
        refusal=reason,
        has_several_choices=_above_one(document.get("n")) or _is_several_prompts(document.get("prompt")),
        tells_usage=isinstance(stream_options, dict) and bool(stream_options.get("include_usage")),
        limits=_object(document, lambda name: name in _LIMITS),
        fields=fields,
    )


def _object(document: Mapping[str, Any], is_in: Callable[[str], bool]) -> bytes:
    return msgspec.json.encode({name: value for name, value in document.items() if is_in(name)})


def _above_one(value: Any) -> bool:
    return value not in (None, 1)


def _not_text(value: Any) -> bool:
    return bool(value) and (not isinstance(value, dict) or value.get("type") != "text")


_REFUSED: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "n": (_above_one, "it has several choices"),
    "best_of": (_above_one, "it has several choices"),
    "use_beam_search": (bool, "beam search"),
    "echo": (bool, "it echoes its prompt"),
    "suffix": (bool, "it fills a gap (`suffix`)"),
    "logprobs": (lambda value: value is not None and value is not False, "it returns logprobs"),
    "prompt_logprobs": (lambda value: value is not None, "it returns logprobs"),
    "stop": (bool, "a stop string may lie across the cut"),
    "bad_words": (bool, "a bad word may lie across the cut"),
    "presence_penalty": (bool, "a penalty counts its output"),
    "frequency_penalty": (bool, "a penalty counts its output"),
    "repetition_detection": (bool, "repetition detection counts its output"),
    "thinking_token_budget": (bool, "a budget counts its output"),
    "response_format": (_not_text, "its output is constrained"),
    "structured_outputs": (bool, "its output is constrained"),
    "guided_json": (bool, "its output is constrained"),
    "guided_regex": (bool, "its output is constrained"),
    "guided_choice": (bool, "its output is constrained"),
    "guided_grammar": (bool, "its output is constrained"),
    "include_reasoning": (lambda value: value is False, "hidden reasoning"),
    "watermarking": (bool, "a watermark depends on its output"),
    "vllm_xargs": (bool, "it has arguments for extensions"),
    "logits_processors": (bool, "it has logits processors"),
    "kv_transfer_params": (bool, "its KV cache comes from elsewhere"),
    "ec_transfer_params": (bool, "its encoder cache comes from elsewhere"),
    "prompt_embeds": (bool, "its prompt is embeddings"),
}


def refusal(document: Mapping[str, Any]) -> str:
    """The reason why a request with these fields is not continued; "" if it is."""
    for name, (is_refused, reason) in _REFUSED.items():
        if name in document and is_refused(document[name]):
            return reason
    if document.get("tools") and document.get("tool_choice") != "none":
        return "its output may hold tool calls"
    if document.get("seed") is not None and document.get("temperature") != 0:
        return "a request with a seed cannot continue in the middle"
    if _is_several_prompts(document.get("prompt")):
        return "it has several prompts"
    if any(_is_multimodal(message) for message in document.get("messages") or ()):
        return "its prompt is not text only"
    return ""


def _is_several_prompts(prompt: Any) -> bool:
    return isinstance(prompt, list) and len(prompt) > 1 and any(not isinstance(part, int) for part in prompt)


def _is_multimodal(message: Any) -> bool:
    content = message.get("content") if isinstance(message, dict) else None
    return isinstance(content, list) and any(
        not isinstance(part, str) and (not isinstance(part, dict) or part.get("type") != "text") for part in content
    )
