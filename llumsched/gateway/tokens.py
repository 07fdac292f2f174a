# SPDX-License-Identifier: Apache-2.0
"""How many tokens a prompt has, by the model's own tokenizer.

Only the scheduler wants to know, so with round robin nothing is counted. Without a tokenizer the count is an estimate:
a token per four bytes of text. Token-id prompts are counted as they are. Several prompts count together.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

_log = logging.getLogger(__name__)
_INLINE_CHARACTERS = 4096
"""Longer texts are encoded in a thread: some milliseconds in which no stream would move."""
_BYTES_PER_TOKEN = 4
_TOKENS_AROUND_MESSAGE = 4
"""Role and delimiters, where there is no chat template to tell."""


@dataclass(frozen=True, slots=True)
class Counted:
    num_tokens: int
    token_ids: tuple[int, ...] | None = None
    """None for an estimate, and for several prompts."""


class ModelTokenizer:
    """One model's. Raises ValueError if it, or the chat template, cannot be loaded."""

    def __init__(self, where: str, chat_template: str = "") -> None:
        path = Path(where)
        try:
            if path.is_file():
                self._tokenizer = Tokenizer.from_file(str(path))
            elif path.is_dir():
                self._tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
            else:
                self._tokenizer = Tokenizer.from_pretrained(where)
        except Exception as error:  # noqa: BLE001 (the library raises that very class)
            raise ValueError(f"no tokenizer at {where!r}: {error}") from None
        self._chat = _chat_renderer(where if not path.is_file() else str(path.parent), chat_template)

    def text(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text).ids)

    def chat(self, document: Mapping[str, Any]) -> tuple[int, ...] | None:
        """None if the messages cannot be rendered here."""
        if self._chat is None:
            return None
        try:
            rendered = self._chat.apply_chat_template(
                document["messages"],
                tools=document.get("tools"),
                tokenize=False,
                add_generation_prompt=document.get("add_generation_prompt", True),
                **(document.get("chat_template_kwargs") or {}),
            )
        except Exception as error:  # noqa: BLE001 (a template may raise anything; the engine says what is wrong)
            _log.debug("the chat template fails: %s", error)
            return None
        return tuple(self._tokenizer.encode(rendered, add_special_tokens=False).ids)


def _chat_renderer(where: str, chat_template: str) -> Any:
    """Transformers' tokenizer, which knows chat templates; None if it is not installed or has no template."""
    try:
        transformers = importlib.import_module("transformers")
    except ImportError:
        _log.warning("transformers is not installed: chats are counted by their messages' texts")
        return None
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(where)
    except (OSError, ValueError) as error:
        _log.warning("no chat template at %s: %s", where, error)
        return None
    if chat_template:
        try:
            tokenizer.chat_template = Path(chat_template).read_text("utf-8")
        except (OSError, ValueError) as error:
            raise ValueError(f"no chat template at {chat_template!r}: {error}") from None
    return tokenizer if tokenizer.chat_template else None


class TokenCounter:
    """Raises ValueError for a tokenizer that is not there."""

    def __init__(self, tokenizers: Mapping[str, str], chat_template: str = "") -> None:
        self._by_model = {model: ModelTokenizer(where, chat_template) for model, where in tokenizers.items()}
        self._thread = ThreadPoolExecutor(1, "tokenizer")

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def count(self, model: str, document: Mapping[str, Any]) -> Counted:
        tokenizer = self._by_model.get(model) or self._by_model.get("")
        if tokenizer is None or _num_characters(document) <= _INLINE_CHARACTERS:
            return _count(tokenizer, document)
        return await asyncio.get_running_loop().run_in_executor(self._thread, _count, tokenizer, document)


def _count(tokenizer: ModelTokenizer | None, document: Mapping[str, Any]) -> Counted:
    prompt = document.get("prompt")
    if prompt is None:
        ids = tokenizer.chat(document) if tokenizer else None
        return Counted(_messages(tokenizer, document.get("messages"))) if ids is None else Counted(len(ids), ids)
    if isinstance(prompt, list):
        if all(isinstance(part, int) for part in prompt):
            return Counted(len(prompt), tuple(prompt))
        return Counted(sum(len(part) if isinstance(part, list) else _text(tokenizer, part) for part in prompt))
    if tokenizer and isinstance(prompt, str):
        ids = tokenizer.text(prompt)
        return Counted(len(ids), ids)
    return Counted(_text(tokenizer, prompt))


def _messages(tokenizer: ModelTokenizer | None, messages: Any) -> int:
    texts = _texts(messages)
    return sum(_TOKENS_AROUND_MESSAGE + _text(tokenizer, text) for text in texts)


def _text(tokenizer: ModelTokenizer | None, text: Any) -> int:
    if not isinstance(text, str):
        return 0
    return len(tokenizer.text(text)) if tokenizer else -(-len(text.encode(errors="replace")) // _BYTES_PER_TOKEN)


def _texts(messages: Any) -> Sequence[str]:
    """Of messages, in OpenAI's form; what has another form has no texts."""
    texts = []
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        parts = content if isinstance(content, list) else [{"text": content}]
        texts += [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
    return texts


def _num_characters(document: Mapping[str, Any]) -> int:
    prompt = document.get("prompt")
    if isinstance(prompt, str):
        return len(prompt)
    if isinstance(prompt, list):
        return sum(len(part) for part in prompt if isinstance(part, str))
    return sum(map(len, _texts(document.get("messages"))))
