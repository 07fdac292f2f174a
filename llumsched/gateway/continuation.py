# SPDX-License-Identifier: Apache-2.0
"""How another engine continues a stream from the tokens that its client has. Pure.

The other engine gets a completion request. Its prompt is the first prompt and the delivered tokens, by id; its limits
are the rest of the client's. Its events are rewritten to follow the client's. `plan` refuses if the result could differ
from what the first engine would have sent (or, for sampled text, from its distribution).

Ledger of tokens, half-open:

    first engine     [0 ........ P) prompt   [P ...... P+D) delivered | lost
    second engine    [0 ................... P+D) prompt               [P+D ...) its output
    usage told       prompt P, completion D + its output

A character may take several tokens. Delivered tokens that end within a character have no text yet and do not count
among D: the second engine generates them again. Otherwise its detokenizer (`DecodeStream` of tokenizers) would repeat
the prompt's text, as it starts without a prefix where that text ends in U+FFFD.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from llumsched.gateway.body import Body, Content
from llumsched.gateway.continuable import CannotContinue, Outline
from llumsched.gateway.events import payload
from llumsched.gateway.sse import DONE, EventStream, Usage, event, last_numbers, num_numbers

COMPLETIONS = "/v1/completions"
DETOKENIZE = "/detokenize"
_NUM_LAST = 1024
"""Number of last tokens whose text shows whether they end a character. It is large because in tokenizers that fall back
to bytes, a run of bytes that starts within a character has no text."""
_MOST_AGAIN = 16
"""Largest number of tokens taken back: more of them are replacement characters, not a character."""
_INCOMPLETE = "\ufffd"
_DEFAULT_MAX_TOKENS = 16
"""The API's default for /v1/completions; a chat may use the rest of the context."""


@dataclass(slots=True)
class Transcript:
    """The part of a stream that the client has."""

    is_chat: bool
    keeps_ids: bool
    """True if the client asked for token ids."""
    head: dict[str, Any] = field(default_factory=dict)
    """The first event."""
    prompt_ids: bytes | None = None
    """Token ids of the prompt, separated by commas."""
    token_ids: list[int] = field(default_factory=list)
    """Tokens whose text has come."""
    again: list[int] = field(default_factory=list)
    """Later tokens without a text, to be generated again."""
    num_texts: int = 0
    has_text: bool = False
    is_finished: bool = False
    is_done: bool = False
    has_usage: bool = False
    usage: Usage = Usage()
    """Prompt and completion tokens, if the stream's end told them."""
    is_parsed: bool = False

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt; 0 if unknown."""
        return num_numbers(self.prompt_ids or b"")

    @property
    def prompt_and_tokens_json(self) -> Content:
        """Token ids of the prompt and the delivered tokens, as a JSON list."""
        between = b"," if self.num_prompt and self.token_ids else b""
        return b"[", self.prompt_ids or b"", between, msgspec.json.encode(self.token_ids)[1:]

    def take(self, events: EventStream) -> None:
        """Adds an engine's part."""
        if not self.head and events.first:
            head = payload(events.first)
            self.head = head if isinstance(head, dict) else {}
        if self.prompt_ids is None:
            self.prompt_ids = events.prompt_ids
        if events.has_usage:
            told, before = events.usage, len(self.token_ids)
            self.usage = Usage(told.num_prompt - before, told.num_output + before, 0 if before else told.num_cached)
        self.token_ids += events.token_ids
        del self.again[: len(events.token_ids)]
        self.num_texts += events.num_texts
        self.has_text = self.has_text or events.has_text
        self.is_finished = self.is_finished or events.is_finished
        self.is_done = events.is_done
        self.has_usage = self.has_usage or events.has_usage
        self.is_parsed = self.is_parsed or events.is_parsed

    def take_back(self) -> None:
        """Moves the last token to `again`. Raises CannotContinue."""
        if len(self.again) == _MOST_AGAIN:
            raise CannotContinue("its last characters are not whole")
        self.again.insert(0, self.token_ids.pop())

    @property
    def is_withheld(self) -> bool:
        """True if a parser withheld the text of whole characters: they may begin reasoning or a tool call, which only
        that parser knows."""
        return self.is_chat and not self.has_text and bool(self.token_ids)

    def forget_tokens(self) -> None:
        """Forgets all tokens, so that the client gets the whole answer anew. Raises CannotContinue if it has token
        ids."""
        if self.keeps_ids:
            raise CannotContinue("the engine had begun reasoning or a tool call, or given tokens without a text")
        self.token_ids.clear()
        self.again.clear()

    def last_tokens(self, model: str) -> bytes:
        """The `DETOKENIZE` request whose answer shows whether the last tokens end a character."""
        tokens = self.token_ids[-_NUM_LAST:]
        if more := _NUM_LAST - len(tokens):
            tokens = last_numbers(self.prompt_ids or b"", more) + tokens
        return msgspec.json.encode({"model": model, "tokens": tokens})


class _Detokenized(msgspec.Struct):
    prompt: str


def ends_within_character(answer: bytes) -> bool:
    """True if an answer of `DETOKENIZE` ends within a character. Raises msgspec.DecodeError."""
    return msgspec.json.decode(answer, type=_Detokenized).prompt.endswith(_INCOMPLETE)


@dataclass(frozen=True, slots=True)
class Continuation:
    path: str
    content: Content
    change: Callable[[dict[str, Any]], dict[str, Any] | None]
    """Rewrites the other engine's events to the client's."""


def plan(body: Body, outline: Outline, path: str, transcript: Transcript, max_model_len: int | None) -> Continuation:
    """The request for another engine. The stream has begun and not finished. Raises CannotContinue."""
    if outline.refusal:
        raise CannotContinue(outline.refusal)
    if transcript.is_parsed:
        raise CannotContinue("the engine was in the middle of reasoning or a tool call")
    if transcript.prompt_ids is None:
        raise CannotContinue("the engine gave no token ids")
    if not transcript.token_ids and not transcript.again:
        return Continuation(path, body.with_token_ids(), _again(transcript))
    fields = msgspec.json.decode(outline.fields, type=dict[str, Any])
    fields |= {"stream": True, "return_token_ids": True}
    fields |= _remaining(msgspec.json.decode(outline.limits, type=dict[str, Any]), transcript, max_model_len)
    content = msgspec.json.encode(fields)[:-1], b',"prompt":', *transcript.prompt_and_tokens_json, b"}"
    return Continuation(COMPLETIONS, content, _onward(transcript))


def _remaining(limits: dict[str, Any], transcript: Transcript, max_model_len: int | None) -> dict[str, int]:
    num_delivered = len(transcript.token_ids)
    if transcript.is_chat:
        limit = limits.get("max_completion_tokens")
        limit = limits.get("max_tokens") if limit is None else limit
    else:
        limit = limits.get("max_tokens", _DEFAULT_MAX_TOKENS)
    if limit is not None:
        max_tokens = _number(limit) - num_delivered
    elif max_model_len is not None:
        max_tokens = max_model_len - transcript.num_prompt - num_delivered
    else:
        raise CannotContinue("it has no max_tokens, and the model's length is not known")
    if max_tokens < 1:
        raise CannotContinue("no token is left to generate")
    remaining = {"max_tokens": max_tokens}
    if min_tokens := limits.get("min_tokens"):
        remaining["min_tokens"] = max(0, _number(min_tokens) - num_delivered)
    return remaining


def _number(value: Any) -> int:
    """A number as engines read it: "20" is 20. Raises CannotContinue."""
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        raise CannotContinue("its token limits are not numbers") from None


def _again(transcript: Transcript) -> Callable[[dict[str, Any]], dict[str, Any] | None]:
    """Rewrites a whole new answer for a client that has the beginning without a token."""

    def change(document: dict[str, Any]) -> dict[str, Any] | None:
        if any("role" in (choice.get("delta") or {}) for choice in document.get("choices") or ()):
            return None
        return _same_stream(document, transcript)

    return change


def _onward(transcript: Transcript) -> Callable[[dict[str, Any]], dict[str, Any] | None]:
    num_before = len(transcript.token_ids)
    repetition = _Repetition(transcript)

    def change(document: dict[str, Any]) -> dict[str, Any] | None:
        if any(repetition.is_all_of(choice) for choice in document.get("choices") or ()):
            return None
        if usage := document.get("usage"):
            document["usage"] = _usage(usage["prompt_tokens"] - num_before, usage["completion_tokens"] + num_before)
        if transcript.is_chat:
            document["object"] = "chat.completion.chunk"
            document["choices"] = [_as_chat(choice) for choice in document.get("choices") or ()]
        for choice in document["choices"]:
            if choice.get("prompt_token_ids") is not None:
                choice["prompt_token_ids"] = None
        return _same_stream(document, transcript)

    return change


class _Repetition:
    """The beginning of another engine's answer that the client already has: tokens without a text."""

    def __init__(self, transcript: Transcript) -> None:
        self._is_on = bool(transcript.again)
        self._ids = list(transcript.again) if transcript.keeps_ids else []

    def is_all_of(self, choice: dict[str, Any]) -> bool:
        """True if a choice is only repetition; otherwise its repeated beginning is cut off. Raises CannotContinue if it
        differs."""
        if not self._is_on:
            return False
        if self._ids:
            ids = choice.get("token_ids") or []
            num_same = min(len(ids), len(self._ids))
            is_last = choice.get("finish_reason") is not None
            if ids[:num_same] != self._ids[:num_same] or (is_last and num_same < len(self._ids)):
                raise CannotContinue("the client has token ids of a part of a character, and another one was chosen")
            choice["token_ids"] = ids[num_same:]
            del self._ids[:num_same]
        self._is_on = not (choice.get("text") or choice.get("token_ids") or choice.get("finish_reason"))
        return self._is_on


def _same_stream(document: dict[str, Any], transcript: Transcript) -> dict[str, Any]:
    for name in ("id", "created", "model"):
        if name in transcript.head:
            document[name] = transcript.head[name]
    return document


def _as_chat(choice: dict[str, Any]) -> dict[str, Any]:
    chat = {
        "index": 0,
        "delta": {"content": choice.get("text", "")},
        "logprobs": None,
        "finish_reason": choice.get("finish_reason"),
        "token_ids": choice.get("token_ids"),
    }
    if chat["finish_reason"] is not None:
        chat["stop_reason"] = choice.get("stop_reason")
    return chat


def _usage(num_prompt: int, num_completion: int) -> dict[str, int]:
    """The usage, without details: those would be the second engine's."""
    return {
        "prompt_tokens": num_prompt,
        "total_tokens": num_prompt + num_completion,
        "completion_tokens": num_completion,
    }


def ending(outline: Outline, transcript: Transcript) -> bytes:
    """The rest of a stream whose finish reason has come. Raises CannotContinue if it cannot be known."""
    if transcript.is_done:
        return b""
    if transcript.has_usage:
        return DONE
    if outline.has_several_choices:
        raise CannotContinue("it has several choices")
    if not outline.tells_usage:
        return DONE
    if transcript.prompt_ids is None or not transcript.head:
        raise CannotContinue("its usage is not known")
    head = {name: transcript.head[name] for name in ("id", "object", "created", "model") if name in transcript.head}
    usage = _usage(transcript.num_prompt, len(transcript.token_ids))
    return event(head | {"choices": [], "usage": usage}) + DONE
