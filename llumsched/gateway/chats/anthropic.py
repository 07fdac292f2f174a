# SPDX-License-Identifier: Apache-2.0
"""Requests of /v1/messages as chat completions. Pure. vLLM: `to_chat_completion_request` of its Anthropic front end."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from llumsched.gateway.chats.conversation import BILLING_HEADER, Message, NotText


def as_completion(document: Mapping[str, Any], *, system_first: bool, effort_without_thinking: str) -> dict[str, Any]:
    """The equivalent chat completion. `system_first`: the template takes a system message only at the beginning.
    `effort_without_thinking`: `reasoning_effort` of a request without thinking."""
    given = [message for message in document["messages"] if message["role"] == "system"]
    inner = [_system_text(message["content"]) for message in given] if system_first else []
    system = "".join([_system_text(document.get("system") or ""), *inner])
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    for message in document["messages"]:
        if message["role"] != "system":
            messages += _converted(message)
        elif not system_first and (text := _system_text(message["content"])):
            messages.append({"role": "system", "content": text})
    found: dict[str, Any] = {"messages": messages}
    if (tools := document.get("tools")) is not None:
        found["tools"] = [_tool(tool) for tool in tools]
    for name in ("cache_salt", "chat_template_kwargs"):
        found[name] = document.get(name)
    if (effort := (document.get("output_config") or {}).get("effort")) is not None:
        found["reasoning_effort"] = effort
    if (document.get("thinking") or {}).get("type") == "disabled":
        found["reasoning_effort"] = effort_without_thinking
    return found


def _system_text(content: Any) -> str:
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if any(block["type"].startswith("tool_") for block in blocks):
        raise NotText("tools that change within a conversation")
    texts = [block["text"] for block in blocks if block["type"] == "text" and block.get("text")]
    return "".join(text for text in texts if not text.startswith(BILLING_HEADER))


def _converted(message: Mapping[str, Any]) -> list[Message]:
    """The message, after those that its blocks become."""
    role, content = message["role"], message["content"]
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    before: list[Message] = []
    texts, calls, thoughts = [], [], []
    for block in content:
        match block["type"]:
            case "text" if block.get("text"):
                texts.append(block["text"])
            case "thinking" if block.get("thinking") is not None:
                thoughts.append(block["thinking"])
            case "tool_use":
                calls.append(_call(block))
            case "tool_result" if role == "user":
                before.append(_result(block))
            case "tool_result":
                texts.append(f"Tool result: {block.get('content') or ''}")
            case "text" | "thinking" | "redacted_thinking" | "tool_reference":
                pass
            case kind:
                raise NotText(kind)
    found: Message = {"role": role}
    if thoughts:
        found["reasoning"] = "".join(thoughts)
    if calls:
        found["tool_calls"] = calls
    if texts:
        found["content"] = texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]
    return [*before, found] if texts or role != "user" else before


def _call(block: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": block.get("name") or "", "arguments": json.dumps(block.get("input") or {})}
    return {"id": block["id"], "type": "function", "function": function}


def _result(block: Mapping[str, Any]) -> Message:
    content = block.get("content") or ""
    if not isinstance(content, str):
        if any(part["type"] != "text" for part in content):
            raise NotText("tool_result")
        content = "\n".join(part.get("text", "") for part in content)
    return {"role": "tool", "tool_call_id": block.get("tool_use_id") or "", "content": content}


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    schema = tool["input_schema"]
    function = {
        "name": tool["name"],
        "description": tool.get("description"),
        "parameters": schema if "type" in schema else {**schema, "type": "object"},
        "strict": tool.get("strict"),
        "defer_loading": tool.get("defer_loading"),
    }
    return {"type": "function", "function": function}
