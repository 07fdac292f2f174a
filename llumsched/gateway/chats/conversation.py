# SPDX-License-Identifier: Apache-2.0
"""Messages and tools of a chat completion, as vLLM prepares them for the chat template. Pure.

vLLM: `parse_chat_messages` and `safe_apply_chat_template` of vllm/renderers, `build_chat_params` of the request. The
order of fields is that of vLLM's types, since templates write tools and calls as JSON. Malformed chats raise any
exception; the engine reports their faults.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

Message = dict[str, Any]

_TEXT_PARTS: Final = ("text", "input_text", "output_text", "refusal")
BILLING_HEADER: Final = "x-anthropic-billing-header"
"""Beginning of a line that Claude Code sends, different each time. vLLM drops it."""
PART_FIELDS: Final = frozenset(
    ("audio_embeds", "audio_url", "closed", "data", "file", "image_embeds", "image_pil", "image_url", "input_audio",
     "name", "prompt_cache_breakpoint", "refusal", "text", "thinking", "type", "uuid", "video_embeds", "video_url")
)  # fmt: skip
"""Fields of parts that vLLM knows. Other fields reach templates unchanged."""
_FUNCTION_FIELDS: Final = ("name", "description", "parameters", "strict", "defer_loading")
_UNSET: Final = (None, "auto")


class NotText(ValueError):
    """Raised for a part of a message whose tokens are not known here."""


def conversation(
    messages: Iterable[Any], *, as_parts: bool, knows_developer: bool, is_typed: bool = True
) -> list[Message]:
    """The messages for the template. `as_parts`: contents are lists of parts, not texts. `knows_developer`: the
    template has a case for that role. `is_typed`: vLLM reads the messages into its types first, as it does unless it
    made them from a request for a response."""
    found = [_message(message, as_parts=as_parts, is_typed=is_typed) for message in messages]
    if not knows_developer and any(message["role"] == "developer" for message in found):
        return _with_one_system_message([_without_developer(message) for message in found])
    return found


def tools(document: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The tools for the template; None if there are none."""
    given = document.get("tools")
    return None if given is None else [_tool(one) for one in given]


def variables(document: Mapping[str, Any]) -> dict[str, Any]:
    """The other variables of the template."""
    told = document.get("chat_template_kwargs") or {}
    effort = document.get("reasoning_effort")
    own = {
        "add_generation_prompt": document.get("add_generation_prompt", True),
        "continue_final_message": document.get("continue_final_message", False),
        "documents": document.get("documents"),
        "reasoning_effort": effort,
    }
    if effort is not None and "enable_thinking" not in told:
        own["enable_thinking"] = effort != "none"
    return {**told, **{name: value for name, value in own.items() if value not in _UNSET}}


def _message(message: Any, *, as_parts: bool, is_typed: bool) -> Message:
    role, content = message["role"], message.get("content")
    parts = [] if content is None else [content] if isinstance(content, str) else content
    if role == "system":
        parts = _without_billing_header(parts)
    told = [(text, part) for part in parts if (text := _text(part)) is not None]
    found: Message = {"role": role}
    if as_parts and role != "tool":
        found["content"] = [{"type": "text", "text": text, **_others(part, PART_FIELDS)} for text, part in told]
    else:
        found["content"] = "\n".join(text for text, _ in told if text or as_parts)
    if role == "assistant":
        if message.get("tool_calls"):
            found["tool_calls"] = [_call(call, is_typed=is_typed) for call in message["tool_calls"]]
        reasoning = message.get("reasoning")
        if reasoning is None:
            reasoning = message.get("reasoning_content")
        if reasoning is not None:
            found["reasoning"] = found["reasoning_content"] = reasoning
    if role == "tool" and "tool_call_id" in message:
        found["tool_call_id"] = message["tool_call_id"]
    if isinstance(message.get("name"), str):
        found["name"] = message["name"]
    if role == "developer":
        given = message.get("tools")
        found["tools"] = None if given is None else [_ordered(tool, "function", "type") for tool in given]
    return found


def _others(given: Any, known: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name not in known} if isinstance(given, dict) else {}


def _text(part: Any) -> str | None:
    """The text of a part; None if it has none."""
    if isinstance(part, str):
        return part
    kind = part["type"]
    if kind not in _TEXT_PARTS and kind != "thinking":
        raise NotText(kind)
    text = part.get("thinking" if kind == "thinking" else "refusal" if kind == "refusal" else "text")
    if text is not None and not isinstance(text, str):
        raise NotText(kind)
    return text


def _without_billing_header(parts: Iterable[Any]) -> list[Any]:
    found = []
    for part in parts:
        text = part if isinstance(part, str) else part.get("text")
        if not (isinstance(text, str) and text.startswith(BILLING_HEADER)):
            found.append(part)
        elif rest := text.partition("\n")[2]:
            found.append(rest if isinstance(part, str) else {**part, "text": rest})
    return found


def _ordered(given: Any, *names: str) -> dict[str, Any]:
    """The object with these fields first, if present. The fields of its function are ordered too."""
    found = {name: given[name] for name in names if name in given} | _others(given, names)
    if "function" in found:
        found["function"] = _ordered(found["function"], "arguments", "name", "description", "parameters", "strict")
    return found


def _call(call: Any, *, is_typed: bool) -> dict[str, Any]:
    """A call with its arguments as an object; clients send them as JSON text."""
    function = call["function"]
    arguments = function.get("arguments")
    try:
        parsed = json.loads(arguments) if arguments else {}
    except json.JSONDecodeError:
        parsed = {}
    arguments = parsed if isinstance(parsed, dict) else {}
    found = {**call, "function": {**function, "arguments": arguments}}
    return _ordered(found, "id", "function", "type") if is_typed else found


def _tool(tool: Any) -> dict[str, Any]:
    given = tool["function"]
    deferred = tool.get("defer_loading")
    if deferred is not None and given.get("defer_loading") is None:
        given = {**given, "defer_loading": deferred}
    function = {
        name: given.get(name)
        for name in _FUNCTION_FIELDS
        if given.get(name) is not None or name in _FUNCTION_FIELDS[:3]
    }
    found: dict[str, Any] = {"type": "function", "function": function}
    return found if deferred is None else {**found, "defer_loading": deferred}


def _without_developer(message: Message) -> Message:
    if message["role"] != "developer":
        return message
    return {name: value for name, value in message.items() if name != "tools"} | {"role": "system"}


def _with_one_system_message(messages: list[Message]) -> list[Message]:
    """Joins all system messages into one at the beginning, since templates often take no other."""
    if all(message["role"] != "system" for message in messages[1:]):
        return messages
    contents = []
    for message in messages:
        if message["role"] == "system":
            content = message["content"]
            text = content if isinstance(content, str) else "\n".join(part["text"] for part in content)
            contents += [text] if text else []
    others = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(contents)}, *others]
