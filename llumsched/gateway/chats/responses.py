# SPDX-License-Identifier: Apache-2.0
"""Requests of /v1/responses as chat completions. Pure. vLLM: `construct_input_messages` of its Responses front end."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from llumsched.gateway.chats.conversation import Message, NotText

_UNFINISHED: Final = ("in_progress", "incomplete")
_PAYLOAD: Final = "input"
"""The argument of the function that stands for a custom tool."""
_CUSTOM_PARAMETERS: Final = {
    "type": "object",
    "properties": {_PAYLOAD: {"type": "string", "description": "The freeform text payload for this tool."}},
    "required": [_PAYLOAD],
    "additionalProperties": False,
}


def as_completion(document: Mapping[str, Any]) -> dict[str, Any]:
    """The equivalent chat completion. Raises NotText if it continues a response that an engine keeps."""
    if document.get("previous_response_id"):
        raise NotText("previous_response_id")
    messages: list[Message] = []
    if document.get("instructions"):
        messages.append({"role": "system", "content": document["instructions"]})
    given = document["input"]
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    else:
        inputs: list[Message] = []
        for item in given:
            _append(inputs, item)
        messages += inputs
    goes_on = _goes_on(given)
    found = {
        "messages": messages,
        "add_generation_prompt": not goes_on,
        "continue_final_message": goes_on,
        "cache_salt": document.get("cache_salt"),
        "chat_template_kwargs": document.get("chat_template_kwargs"),
        "reasoning_effort": (document.get("reasoning") or {}).get("effort"),
    }
    if document.get("tools"):
        found["tools"] = [converted for tool in document["tools"] for converted in _tools(tool)]
    return found


def _goes_on(given: Any) -> bool:
    """True if the last message is the beginning of the answer."""
    if isinstance(given, str) or not given:
        return False
    last = given[-1]
    return last.get("type", "message") in ("message", "reasoning") and last.get("status") in _UNFINISHED


def _append(messages: list[Message], item: Any) -> None:
    """Adds an item: a message, or a part of the assistant's last one."""
    match item.get("type", "message"):
        case "function_call":
            name = f"{item['namespace']}__{item['name']}" if item.get("namespace") else item["name"]
            _append_call(messages, item["call_id"], name, item["arguments"])
        case "custom_tool_call":
            payload = json.dumps({_PAYLOAD: item.get("input") or ""}, ensure_ascii=False)
            _append_call(messages, item["call_id"], item["name"], payload)
        case "function_call_output" | "custom_tool_call_output":
            output = item.get("output")
            messages.append({"role": "tool", "content": output, "tool_call_id": item.get("call_id")})
        case "reasoning":
            told = item.get("content") or item.get("summary") or [{"text": ""}]
            _append_to_assistant(messages, "reasoning", told[0]["text"])
        case "message" if item["role"] == "assistant" and item.get("content"):
            content = item["content"]
            _append_to_assistant(messages, "content", content if isinstance(content, str) else content[0]["text"])
        case "message":
            messages.append(item)
        case kind:
            raise NotText(kind)


def _last_of_assistant(messages: list[Message]) -> Message | None:
    return messages[-1] if messages and messages[-1]["role"] == "assistant" else None


def _append_call(messages: list[Message], call_id: str, name: str, arguments: str) -> None:
    call = {"id": call_id, "function": {"name": name, "arguments": arguments}, "type": "function"}
    if (last := _last_of_assistant(messages)) is not None:
        last["tool_calls"] = [*(last.get("tool_calls") or ()), call]
    else:
        messages.append({"role": "assistant", "tool_calls": [call]})


def _append_to_assistant(messages: list[Message], field: str, text: str) -> None:
    if (last := _last_of_assistant(messages)) is not None and last.get(field) is None:
        last[field] = text
    else:
        messages.append({"role": "assistant", field: text})


def _tools(tool: Mapping[str, Any]) -> list[dict[str, Any]]:
    match tool["type"]:
        case "function":
            return [{"type": "function", "function": tool}]
        case "custom":
            function = {**tool, "parameters": _CUSTOM_PARAMETERS}
            return [{"type": "function", "function": function}]
        case "namespace":
            own = [one for one in tool["tools"] if one["type"] == "function"]
            return [{"type": "function", "function": {**one, "name": f"{tool['name']}__{one['name']}"}} for one in own]
        case _:
            return []
