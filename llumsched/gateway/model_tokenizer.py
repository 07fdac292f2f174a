# SPDX-License-Identifier: Apache-2.0
"""A model's tokenizer and chat template. Imported only by the processes that count."""

from __future__ import annotations

import importlib
import inspect
import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

from llumsched.gateway.chats import anthropic, conversation, responses
from llumsched.gateway.chats.form import Form

_log = logging.getLogger(__name__)

WITHOUT_TEMPLATES: Final = (
    "transformers and jinja2 are not installed: chats are counted by their messages' texts, and their blocks have no "
    "names (pip install transformers jinja2)"
)
_RENDERED_BY_CODE: Final = frozenset(
    ("GptOssForCausalLM", "Alpamayo2Super", "MoonshotKimiaForCausalLM", "KimiK3ForConditionalGeneration",
     "DeepseekV32ForCausalLM", "DeepseekV4ForCausalLM", "DeepseekV4ForConditionalGeneration", "DeepseekV41ForCausalLM",
     "InklingForCausalLM", "InklingForConditionalGeneration")
)  # fmt: skip
"""Architectures whose chats vLLM renders with its own code."""
_MISTRALS_OWN: Final = "tekken.json"
"""Name of a tokenizer that vLLM uses with Mistral's library, if that is installed."""
_EFFORTS: Final = ("low", "medium", "high", "xhigh", "max")


class ModelTokenizer:
    """Raises ValueError if the tokenizer or the chat template cannot be loaded."""

    def __init__(self, where: str, chat_template: str = "") -> None:
        path = Path(where)
        directory = where if not path.is_file() else str(path.parent)
        self._chat = _chat_renderer(directory, chat_template)
        self._processors_template = None if self._chat is None or chat_template else _processors_template(directory)
        try:
            if path.is_file():
                self._tokenizer = Tokenizer.from_file(str(path))
            elif self._chat is not None and self._chat.is_fast:
                self._tokenizer = self._chat.backend_tokenizer
            elif path.is_dir():
                self._tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
            else:
                self._tokenizer = Tokenizer.from_pretrained(where)
        except Exception as error:  # noqa: BLE001 (the library raises that very class)
            raise ValueError(f"no tokenizer at {where!r}: {error}") from None
        if self._chat is not None and not (self._chat.chat_template or self._processors_template):
            _log.warning("no chat template at %s: chats are counted by their messages' texts", where)
            self._chat = None
        self.reserved = _parameters(self._chat)

    def encode(self, text: str, *, special: bool = True) -> Sequence[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special).ids
        return ids

    def render(self, document: Mapping[str, Any], form: Form) -> str | None:
        """The text of a chat; None if it cannot be rendered here."""
        if self._chat is None:
            return None
        try:
            return self._rendered(self._as_completion(document, form), is_typed=form is not Form.RESPONSES)
        except Exception as error:  # noqa: BLE001 (a template may raise anything; the engine says what is wrong)
            _log.debug("the chat cannot be rendered: %s", error)
            return None

    def _as_completion(self, document: Mapping[str, Any], form: Form) -> Mapping[str, Any]:
        """The chat completion equivalent to a chat of another form."""
        if form is Form.ANTHROPIC:
            return anthropic.as_completion(
                document,
                system_first=self._wants_system_first,
                effort_without_thinking=self._effort_without_thinking,
            )
        return responses.as_completion(document) if form is Form.RESPONSES else document

    def _rendered(self, document: Mapping[str, Any], *, is_typed: bool) -> str:
        tools = conversation.tools(document)
        template = self._template(tools)
        rendered = self._chat.apply_chat_template(
            conversation.conversation(
                document["messages"],
                as_parts=self._formats.takes_parts(template),
                knows_developer=self._formats.knows_developer(template),
                is_typed=is_typed,
            ),
            tools=tools,
            chat_template=template,
            tokenize=False,
            **conversation.variables(document),
        )
        assert isinstance(rendered, str)
        return rendered

    def _template(self, tools: list[dict[str, Any]] | None) -> str:
        """The template of a chat. Without tools it is the processor's, if that has its own."""
        if tools is None and self._processors_template is not None:
            return self._processors_template
        template: str = self._chat.get_chat_template(None, tools=tools)
        return template

    @cached_property
    def _formats(self) -> Any:
        """The module that reads templates. It needs jinja2, as transformers does to render them."""
        return importlib.import_module("llumsched.gateway.chats.content_format")

    @cached_property
    def _wants_system_first(self) -> bool:
        variants: tuple[list[Any] | None, ...] = (None, [])
        templates = {self._template(tools) for tools in variants}
        return any(self._formats.wants_system_first(template) for template in templates)

    @cached_property
    def _effort_without_thinking(self) -> str:
        """The reasoning effort without thinking, as vLLM computes it: "low" for a template that refuses "none" or
        ignores it."""

        def rendered(effort: str) -> str | None:
            chat = {"messages": [{"role": "user", "content": "Hi"}], "reasoning_effort": effort}
            return self.render(chat, Form.OPENAI)

        without = rendered("none")
        return "low" if without is None or without in map(rendered, _EFFORTS) else "none"


def _chat_renderer(where: str, chat_template: str) -> Any:
    """Transformers' tokenizer, which knows chat templates; None if it is not installed or vLLM uses another one."""
    try:
        importlib.import_module("jinja2")
        transformers = importlib.import_module("transformers")
    except ImportError:
        _log.warning(WITHOUT_TEMPLATES)
        return None
    if kind := _rendered_by_code(transformers, where):
        _log.warning(
            "vLLM renders chats of %s (%s) by code of its own, and no template: they are counted by their messages' "
            "texts, and their blocks have no names",
            where,
            kind,
        )
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
    return tokenizer


def _processors_template(where: str) -> str | None:
    """The template in a file of its own that multimodal models have beside the tokenizer's."""
    try:
        path = importlib.import_module("transformers.utils").cached_file(where, "chat_template.json")
        template = json.loads(Path(path).read_bytes())["chat_template"] if path else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return template if isinstance(template, str) else None


def _rendered_by_code(transformers: Any, where: str) -> str:
    """The architecture of a model that vLLM renders without a template; "" if it uses one."""
    with suppress(OSError):
        if transformers.utils.cached_file(where, _MISTRALS_OWN) is not None:
            return "Mistral's own format"
    with suppress(OSError):
        config, _ = transformers.PretrainedConfig.get_config_dict(where)
        return next((one for one in config.get("architectures") or () if one in _RENDERED_BY_CODE), "")
    return ""


def _parameters(chat: Any) -> frozenset[str]:
    """Parameters of `apply_chat_template` in all base classes, since a subclass may take them as keywords."""
    names = {"self", "messages"}
    for one in type(chat).__mro__ if chat is not None else ():
        if (method := one.__dict__.get("apply_chat_template")) is not None:
            names |= inspect.signature(method).parameters.keys()
    return frozenset(names)
