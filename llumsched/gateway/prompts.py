# SPDX-License-Identifier: Apache-2.0
"""The number of tokens of a request's prompt, and the names of its blocks. Pure.

Token-id prompts are counted exactly; several prompts count together. Chats are rendered as vLLM renders them (`chats`).
Without a tokenizer the count is an estimate: a token per four bytes of text. A client's own chat template or rendering
parameters are never applied: such a chat is estimated from its texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeGuard

from llumlet.contract.block_hashes import chain, root_of
from llumsched.gateway.chats.form import Form
from llumsched.request import MOST_PROMPT_BLOCKS

_BYTES_PER_TOKEN: Final = 4
_TOKENS_AROUND_MESSAGE: Final = 4
"""Tokens of role and delimiters, where there is no chat template."""
MOST_ENCODED_CHARACTERS: Final = 1 << 18
"""Characters that are encoded: a quarter of a second. The rest of a longer text is extrapolated."""

_MOST_VALUES: Final = 10_000
"""Values that are looked at, within some milliseconds; the rest does not count."""
_NO_TEXT: Final = frozenset(
    ("model", "audio", "data", "file_data", "format", "id", "image", "image_url", "input_audio", "metadata", "role",
     "type", "url", "user", "video_url")
)  # fmt: skip
_DATA_URL: Final = "data:"


class Tokenizer(Protocol):
    def encode(self, text: str, *, special: bool = True) -> Sequence[int]:
        """Token ids of a text. `special`: with the tokens that the model puts around a text."""
        ...

    def render(self, document: Mapping[str, Any], form: Form) -> str | None:
        """Renders a chat with the model's own template; None if that is impossible here."""
        ...

    @property
    def reserved(self) -> frozenset[str]:
        """Names of rendering parameters, which a client may not set as variables."""
        ...


class Counted(NamedTuple):
    num_tokens: int
    token_ids: Sequence[int] = ()
    """Token ids of the only prompt, as far as they are known: of a long text, the first ones."""


def estimate(document: Mapping[str, Any], form: Form = Form.OPENAI) -> int:
    return count(None, document, form).num_tokens


def count(tokenizer: Tokenizer | None, document: Mapping[str, Any], form: Form = Form.OPENAI) -> Counted:
    match form:
        case Form.TOKENS if _are_ids(ids := document.get("token_ids")):
            return Counted(len(ids), () if document.get("features") else ids)  # images change names
        case Form.TOKENS | Form.OTHER:
            return Counted(rough_number(document))
        case Form.OPENAI if (prompt := document.get("prompt")) is not None:
            return _completion(tokenizer, document, prompt)
    if tokenizer is not None and (rendered := _rendered(tokenizer, document, form)) is not None:
        # vLLM adds these to a chat that says so, and to all responses.
        special = form is Form.RESPONSES or (form is Form.OPENAI and document.get("add_special_tokens") is True)
        return _encoded(tokenizer, rendered, special=special)
    return Counted(_messages(tokenizer, document.get("messages")) if form is Form.OPENAI else rough_number(document))


def _completion(tokenizer: Tokenizer | None, document: Mapping[str, Any], prompt: Any) -> Counted:
    if isinstance(prompt, list):
        if _are_ids(prompt):
            return Counted(len(prompt), prompt)
        return Counted(sum(len(part) if isinstance(part, list) else _text(tokenizer, part) for part in prompt))
    if tokenizer is None or not isinstance(prompt, str):
        return Counted(_text(tokenizer, prompt))
    counted = _encoded(tokenizer, prompt, special=document.get("add_special_tokens") is not False)
    return Counted(counted.num_tokens) if document.get("suffix") is not None else counted


def _are_ids(prompt: Any) -> TypeGuard[list[int]]:
    return isinstance(prompt, list) and all(isinstance(part, int) for part in prompt)


def blocks(document: Mapping[str, Any], token_ids: Sequence[int], block_size: int) -> bytes:
    """Names of the prompt's first full blocks (`contract.block_hashes`), without tokens that the engine would cut
    off."""
    if block_size < 1 or document.get("truncate_prompt_tokens") is not None:
        return b""
    salt = document.get("cache_salt")
    root = root_of(block_size, salt if isinstance(salt, str) else "")
    try:
        return b"".join(chain(token_ids[: MOST_PROMPT_BLOCKS * block_size], block_size, root))
    except (OverflowError, TypeError):  # no token ids: the engine says what is wrong
        return b""


def _rendered(tokenizer: Tokenizer, document: Mapping[str, Any], form: Form) -> str | None:
    variables = document.get("chat_template_kwargs") or {}
    if document.get("chat_template") is not None or not _are_variables(variables, tokenizer.reserved):
        return None
    return tokenizer.render(document, form)


def _are_variables(given: Any, reserved: frozenset[str]) -> bool:
    """True if a client's variables are scalars under names of the template's own."""
    return isinstance(given, dict) and all(
        name not in reserved and isinstance(value, str | int | float | bool | None) for name, value in given.items()
    )


def _encoded(tokenizer: Tokenizer, text: str, *, special: bool = True) -> Counted:
    ids = tokenizer.encode(text[:MOST_ENCODED_CHARACTERS], special=special)
    is_whole = len(text) <= MOST_ENCODED_CHARACTERS
    return Counted(len(ids) if is_whole else len(ids) * len(text) // MOST_ENCODED_CHARACTERS, ids)


def _messages(tokenizer: Tokenizer | None, messages: Any) -> int:
    return sum(_TOKENS_AROUND_MESSAGE + _text(tokenizer, text) for text in _texts(messages))


def _text(tokenizer: Tokenizer | None, text: Any) -> int:
    if not isinstance(text, str):
        return 0
    return _encoded(tokenizer, text).num_tokens if tokenizer else of_bytes(len(text.encode(errors="replace")))


def of_bytes(num_bytes: int) -> int:
    """Estimates tokens from a length in bytes."""
    return -(-num_bytes // _BYTES_PER_TOKEN)


def rough_number(document: Any) -> int:
    """Estimates the tokens of a body of unknown form: one per four bytes of text and one per number of a list.

    Images and audio count as nothing, since an estimate that is too high would be refused by schedulers that look for
    room.
    """
    num_bytes = num_numbers = num_seen = 0
    to_see = [document]
    while to_see and num_seen < _MOST_VALUES:
        value = to_see.pop()
        num_seen += 1
        if isinstance(value, str):
            num_bytes += 0 if value.startswith(_DATA_URL) else len(value.encode(errors="replace"))
        elif isinstance(value, dict):
            to_see += [part for name, part in value.items() if name not in _NO_TEXT]
        elif isinstance(value, list) and value:
            if isinstance(value[0], int):
                num_numbers += len(value)
            else:
                to_see += value[: _MOST_VALUES - num_seen]
    return of_bytes(num_bytes) + num_numbers


def _texts(messages: Any) -> Sequence[str]:
    """Texts of messages in OpenAI's form, and no others."""
    texts = []
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        parts = content if isinstance(content, list) else [{"text": content}]
        texts += [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
    return texts
