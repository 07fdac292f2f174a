# SPDX-License-Identifier: Apache-2.0
"""One model's tokenizer and chat template. Imported by the processes that count, not by the gateway's own."""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

_log = logging.getLogger(__name__)


class ModelTokenizer:
    """A tokenizer. Raises ValueError if it, or the chat template, cannot be loaded."""

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
        self.reserved = _parameters(self._chat)

    def encode(self, text: str, *, special: bool = True) -> Sequence[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special).ids
        return ids

    def render(self, chat: Mapping[str, Any], variables: Mapping[str, Any]) -> str | None:
        """The text of a chat; None if its messages cannot be rendered here."""
        if self._chat is None:
            return None
        try:
            rendered = self._chat.apply_chat_template(
                chat["messages"],
                tools=chat.get("tools"),
                tokenize=False,
                add_generation_prompt=chat.get("add_generation_prompt") is not False,
                **variables,
            )
        except Exception as error:  # noqa: BLE001 (a template may raise anything; the engine says what is wrong)
            _log.debug("the chat template fails: %s", error)
            return None
        return rendered if isinstance(rendered, str) else None


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


def _parameters(chat: Any) -> frozenset[str]:
    """Parameters of `apply_chat_template`, base classes' as well: a subclass may take them as keywords."""
    names = {"self", "messages"}
    for one in type(chat).__mro__ if chat is not None else ():
        if (method := one.__dict__.get("apply_chat_template")) is not None:
            names |= inspect.signature(method).parameters.keys()
    return frozenset(names)
