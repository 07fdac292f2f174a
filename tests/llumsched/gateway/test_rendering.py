# SPDX-License-Identifier: Apache-2.0
"""Prompts have the token ids that the installed vLLM gives them: block names are of use if they are the engine's."""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from llumsched.gateway import model_tokenizer, prompts
from llumsched.gateway.chats import content_format, conversation
from llumsched.gateway.chats.form import Form
from llumsched.gateway.model_tokenizer import ModelTokenizer
from tests.support import vision_models
from tests.support.model import CHAT_TEMPLATE, PRESETS, build

pytestmark = pytest.mark.filterwarnings("ignore:max_tokens is deprecated:DeprecationWarning")

Document = dict[str, Any]

TEXTS: Final = CHAT_TEMPLATE
TOOLS: Final = """
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- for message in messages %}[{{ message.role }}{% if message.name %} {{ message.name }}{% endif %}]
{%- if message.reasoning_content %}(thinks: {{ message.reasoning_content }}){% endif %}{{ message.content }}
{%- for call in message.tool_calls or [] %}{{ call | tojson }}{% for name, value in call.function.arguments.items() %}
<{{ name }}={{ value }}>{% endfor %}{% endfor %}
{%- if message.tool_call_id %}#{{ message.tool_call_id }}{% endif %}
{%- endfor %}
{%- for document in documents or [] %}{{ document.title }}{% endfor %}
{%- if reasoning_effort %}effort {{ reasoning_effort }}{% endif %}
{%- if enable_thinking is false %}no thinking{% endif %}
{%- if add_generation_prompt %}[assistant]{% endif %}"""
PARTS: Final = """
{%- for message in messages %}<{{ message['role'] }}>
{%- if message.content is string %}{{ message.content }}{% else %}
{%- for part in message['content'] %}{{ part | tojson }}{% endfor %}{% endif %}
{%- if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""
STRICT: Final = """
{%- for message in messages %}
{%- if message.role == 'system' and not loop.first %}{{ raise_exception('a system message comes first') }}{% endif %}
{%- if message.role == 'developer' %}DEV {{ message.tools | tojson }} {% endif %}
{%- generation %}{{ message.role }}: {{ message.content }}{% endgeneration %}{{ eos_token }}
{%- if loop.index > 40 %}{% break %}{% endif %}
{%- endfor %}{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}"""
TEMPLATES: Final = {"texts": TEXTS, "tools": TOOLS, "parts": PARTS, "strict": STRICT}
ODD_TEMPLATES: Final = (
    "{% set rest = messages[1:] %}{% for m in rest | list %}{% for p in m.content %}{{ p }}{% endfor %}{% endfor %}",
    "{% set x = messages %}{% set y = x %}"
    "{% for m in y %}{% for p in m['content'] | list %}{{ p }}{% endfor %}{% endfor %}",
    "{% macro show(what) %}{% for p in what %}{{ p }}{% endfor %}{% endmacro %}"
    "{% for m in messages %}{{ show(m.content) }}{% endfor %}",
    "{% macro show(what, how) %}{% for p in how %}{{ p }}{% endfor %}{% endmacro %}"
    "{% for m in messages %}{{ show(m.role, how=m.content) }}{% endfor %}",
    "{% macro show(what) %}{% for p in what %}{{ p }}{% endfor %}{% endmacro %}"
    "{% for m in messages %}{{ show(m.role) }}{% endfor %}",
    "{% macro show(content) %}{% for p in content %}{{ p }}{% endfor %}{% endmacro %}"
    "{% for m in messages %}{{ show(m.role) }}{% endfor %}",
    "{% for m in messages %}{% set content = m.content %}{% for p in content %}{{ p }}{% endfor %}{% endfor %}",
    "{% for m in messages %}{% for p in m.content[1:] %}{{ p }}{% endfor %}{% endfor %}",
    "{% for m in messages %}{% for call in m.tool_calls %}{{ call }}{% endfor %}{{ m.content }}{% endfor %}",
    "{% for i, m in messages %}{% for p in m.content %}{{ p }}{% endfor %}{% endfor %}",
    "{% set ns = namespace() %}{% set ns.all = messages %}{% for m in messages %}{{ m.content }}{% endfor %}",
    "{% for m in messages %}{{ m.content }",
)

WEATHER: Final = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: Final = {"type": "function", "function": {"parameters": WEATHER, "name": "weather", "description": "Tells."}}
BARE_TOOL: Final = {"type": "function", "function": {"name": "now", "strict": True, "more": 1}, "more": 2}
CALL: Final = {
    "type": "function",
    "id": "call_1",
    "index": 0,
    "function": {"name": "weather", "arguments": '{"city": "Lübeck", "days": [1, 2]}', "more": 1},
}


def user(content: Any, **more: Any) -> Document:
    return {"role": "user", "content": content, **more}


def text(told: str, **more: Any) -> Document:
    return {"type": "text", "text": told, **more}


CHATS: Final[dict[str, Document]] = {
    "a text": {"messages": [user("hello")]},
    "parts": {"messages": [user([text("hello"), text("and more"), text("")])]},
    "a marked part": {"messages": [user([text("hello", cache_control={"type": "ephemeral"})])]},
    "strings as parts": {"messages": [{"role": "custom", "content": ["hello", "there"]}]},
    "a system array": {"messages": [{"role": "system", "content": [text("be"), text("brief")]}, user("hi")]},
    "a billing header": {
        "messages": [
            {"role": "system", "content": [text("x-anthropic-billing-header: 7"), text("be brief")]},
            {"role": "system", "content": "x-anthropic-billing-header: 8\nand kind"},
            user("hi"),
        ]
    },
    "turns": {"messages": [user("one"), {"role": "assistant", "content": "two"}, user([text("three")])]},
    "a name": {"messages": [user("hi", name="anna"), {"role": "assistant", "content": "yes", "name": "bert"}]},
    "a call": {
        "messages": [
            user("the weather?"),
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": [text("rain"), text("and wind")]},
        ],
        "tools": [TOOL, BARE_TOOL],
    },
    "odd calls": {
        "messages": [
            user("?"),
            {
                "role": "assistant",
                "content": "well",
                "tool_calls": [
                    {**CALL, "function": {"name": "weather", "arguments": arguments}}
                    for arguments in ("", "{}", "[1]", "no JSON", "null", '"text"')
                ],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
        ]
    },
    "no calls": {"messages": [user("?"), {"role": "assistant", "content": "well", "tool_calls": []}]},
    "tools that are not to be used": {"messages": [user("hi")], "tools": [TOOL], "tool_choice": "none"},
    "a deferred tool": {"messages": [user("hi")], "tools": [{**TOOL, "defer_loading": True}]},
    "reasoning": {"messages": [user("?"), {"role": "assistant", "content": "yes", "reasoning": "hm"}, user("!")]},
    "reasoning content": {"messages": [user("?"), {"role": "assistant", "content": "y", "reasoning_content": "hm"}]},
    "a thought as a part": {
        "messages": [user("?"), {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, text("y")]}]
    },
    "a refusal": {
        "messages": [user("?"), {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, user("!")]
    },
    "a developer": {"messages": [{"role": "developer", "content": "be brief"}, user("hi")]},
    "a developer with tools": {
        "messages": [
            {"role": "system", "content": "first"},
            {"role": "developer", "content": [text("be brief"), text("please")], "tools": [TOOL]},
            user("hi"),
        ]
    },
    "effort": {"messages": [user("hi")], "reasoning_effort": "high"},
    "no effort": {"messages": [user("hi")], "reasoning_effort": "none"},
    "variables": {"messages": [user("hi")], "chat_template_kwargs": {"enable_thinking": False, "unknown": 3}},
    "documents": {"messages": [user("hi")], "documents": [{"title": "a", "text": "b"}]},
    "no generation prompt": {"messages": [user("hi")], "add_generation_prompt": False},
    "going on": {
        "messages": [user("hi"), {"role": "assistant", "content": "once upon"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    "special tokens": {"messages": [user("hi </s> <s>")], "add_special_tokens": True},
}
ANTHROPIC: Final[dict[str, Document]] = {
    "a text": {"messages": [user("hello")]},
    "a system prompt": {"system": "be brief", "messages": [user([text("hello"), text("you")])]},
    "a system array": {
        "system": [
            text("x-anthropic-billing-header: 7"),
            text("be brief", cache_control={"type": "ephemeral"}),
            text("!"),
        ],
        "messages": [user([text("hello", cache_control={"type": "ephemeral"})])],
    },
    "reminders": {
        "system": "be brief",
        "messages": [
            user("one"),
            {"role": "assistant", "content": [text("two")]},
            {"role": "system", "content": [text("x-anthropic-billing-header: 8"), text("remember")]},
            user("three"),
        ],
    },
    "tools": {
        "messages": [
            user("the weather?"),
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "redacted_thinking", "data": "x"},
                    text("I look"),
                    {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Lübeck"}},
                    {"type": "tool_use", "id": "toolu_2", "name": "now", "input": {}},
                ],
            },
            user(
                [
                    {"type": "tool_result", "tool_use_id": "toolu_1", "content": [text("rain"), text("wind")]},
                    {"type": "tool_result", "tool_use_id": "toolu_2", "content": "noon"},
                    text("so?"),
                ]
            ),
            {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_3", "name": "now", "input": {}}]},
            user([{"type": "tool_result", "tool_use_id": "toolu_3"}]),
        ],
        "tools": [
            {"name": "weather", "description": "Tells.", "input_schema": WEATHER},
            {"name": "now", "input_schema": {"properties": {}}},
        ],
        "tool_choice": {"type": "auto"},
    },
    "effort": {"messages": [user("hi")], "output_config": {"effort": "low"}},
    "no thinking": {"messages": [user("hi")], "thinking": {"type": "disabled"}},
    "thinking": {"messages": [user("hi")], "thinking": {"type": "enabled", "budget_tokens": 1024}},
}
RESPONSES: Final[dict[str, Document]] = {
    "a text": {"input": "hello"},
    "instructions": {"instructions": "be brief", "input": "hello"},
    "messages": {
        "input": [
            {"role": "developer", "content": [{"type": "input_text", "text": "be brief"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]},
            {"role": "assistant", "content": "yes"},
            user("and?"),
        ]
    },
    "a conversation": {
        "instructions": "be brief",
        "input": [
            user("the weather?"),
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look"}]},
            {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"city": "Kiel"}'},
            {"type": "function_call", "call_id": "call_2", "name": "now", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "call_1", "output": "rain"},
            {"type": "function_call_output", "call_id": "call_2", "output": "noon"},
            {"type": "function_call", "call_id": "call_3", "name": "now", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "call_3", "output": "later"},
        ],
        "tools": [
            {"type": "function", "name": "weather", "description": "Tells.", "parameters": WEATHER, "strict": False},
            {"type": "function", "name": "now", "parameters": {}},
        ],
    },
    "custom tools": {
        "input": [
            user("patch it"),
            {"type": "custom_tool_call", "call_id": "call_1", "name": "apply", "input": "*** Begin"},
            {"type": "custom_tool_call_output", "call_id": "call_1", "output": "done"},
        ],
        "tools": [{"type": "custom", "name": "apply", "description": "Applies."}],
    },
    "effort": {"input": "hi", "reasoning": {"effort": "high"}},
    "going on": {
        "input": [
            user("hi"),
            {
                "type": "message", "role": "assistant", "status": "incomplete", "id": "msg_1",
                "content": [{"type": "output_text", "text": "once upon", "annotations": []}],
            },
        ]
    },
}  # fmt: skip
CORPUS: Final = {Form.OPENAI: CHATS, Form.ANTHROPIC: ANTHROPIC, Form.RESPONSES: RESPONSES}
CASES: Final = [
    pytest.param(name, form, title, id=f"{name}-{form}-{title}")
    for name, (form, documents) in itertools.product(TEMPLATES, CORPUS.items())
    for title in documents
]
REFUSED: Final = ("strict", "a billing header")
"""The one prompt that vLLM refuses: this template takes no second system message."""


class Engine:
    """vLLM's own front end, without an engine behind it."""

    def __init__(self, model: Path) -> None:
        from vllm.config import ModelConfig, VllmConfig
        from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
        from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
        from vllm.renderers.online_renderer import OnlineRenderer
        from vllm.renderers.registry import renderer_from_config

        config = ModelConfig(model=str(model), max_model_len=8192)
        self._renderer = OnlineRenderer(
            config,
            renderer_from_config(VllmConfig(model_config=config)),
            request_logger=None,
            chat_template=None,
            chat_template_content_format="auto",
            enable_auto_tools=True,
            tool_parser="pythonic",
        )
        self._chat, self._responses, self._messages = ChatCompletionRequest, ResponsesRequest, AnthropicMessagesRequest
        self._anthropic = AnthropicServingMessages

    def token_ids(self, template: str | None, form: Form, document: Document) -> list[int]:
        return asyncio.run(self._token_ids(template, form, copy.deepcopy(document)))

    async def _token_ids(self, template: str | None, form: Form, document: Document) -> list[int]:
        """None of a request that it refuses."""
        from vllm.exceptions import VLLMValidationError

        self._renderer.chat_template = template
        told = {"model": "m", "max_tokens": 2000} | document
        try:
            match form:
                case Form.RESPONSES:
                    rendered = await self._renderer.render_responses(self._responses.model_validate(told))
                    prompt = rendered.engine_input
                case Form.ANTHROPIC:
                    asked = self._anthropic.to_chat_completion_request(
                        self._messages.model_validate(told),
                        merge_inline_system=self._anthropic._should_merge_inline_system(self._renderer),
                        disabled_thinking_effort=await self._effort(),
                    )
                    _, (prompt,) = await self._renderer.render_chat(asked)
                case _:
                    _, (prompt,) = await self._renderer.render_chat(self._chat.model_validate(told))
        except VLLMValidationError:
            return []
        ids: list[int] = prompt["prompt_token_ids"]
        return ids

    async def _effort(self) -> str:
        from vllm.entrypoints.anthropic import serving

        if hasattr(serving, "DisabledThinkingEffortResolver"):  # 0.33
            return str(await serving.DisabledThinkingEffortResolver(self._renderer)._probe())
        probe: Any = object.__new__(self._anthropic)
        probe.online_renderer, probe.model_config = self._renderer, self._renderer.model_config
        return str(await probe._probe_disabled_thinking_effort())


@pytest.fixture(scope="module")
def model() -> Path:
    return build(PRESETS["tiny"])


@pytest.fixture(scope="module")
def engine(model: Path) -> Engine:
    return Engine(model)


@pytest.fixture(scope="module")
def tokenizer_of(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ModelTokenizer]:
    found: dict[str, ModelTokenizer] = {}
    where = tmp_path_factory.mktemp("templates")

    def of(name: str) -> ModelTokenizer:
        if name not in found:
            (where / name).write_text(TEMPLATES[name])
            found[name] = ModelTokenizer(str(model), str(where / name))
        return found[name]

    return of


def ids_here(tokenizer: ModelTokenizer, form: Form, document: Mapping[str, Any]) -> list[int]:
    return list(prompts.count(tokenizer, json.loads(json.dumps(document)), form).token_ids)


@pytest.mark.parametrize(("template", "form", "title"), CASES)
def test_a_prompt_has_the_engines_token_ids(
    engine: Engine, tokenizer_of: Callable[[str], ModelTokenizer], template: str, form: Form, title: str
) -> None:
    document = CORPUS[form][title]
    expected = engine.token_ids(TEMPLATES[template], form, document)
    assert bool(expected) == ((template, title) != REFUSED)
    assert ids_here(tokenizer_of(template), form, document) == expected


@pytest.mark.parametrize("title", ["parts", "a call"])
def test_without_tools_the_processors_template_is_used(tmp_path: Path, title: str) -> None:
    """Of a model that looks at images, whose chats have none."""
    for path in vision_models.build(vision_models.VISION["paddleocr-vl"]).iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": f"processor {PARTS}"}))
    expected = Engine(tmp_path).token_ids(None, Form.OPENAI, CHATS[title])
    assert expected
    assert ids_here(ModelTokenizer(str(tmp_path)), Form.OPENAI, CHATS[title]) == expected


def vllm_templates() -> list[str]:
    import vllm.transformers_utils.chat_templates as package

    return [path.read_text() for path in sorted(Path(str(package.__file__)).parent.glob("*.jinja"))]


def test_a_template_is_read_as_vllm_reads_it() -> None:
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
    from vllm.renderers import hf

    templates = [*TEMPLATES.values(), *vllm_templates(), *ODD_TEMPLATES]
    assert len(templates) > 20
    for template in templates:
        has_parts = hf._detect_content_format(template, default="string") == "openai"
        assert content_format.takes_parts(template) is has_parts, template
        assert content_format.knows_developer(template) is hf._detect_developer_role_support(template), template
        system_first = AnthropicServingMessages._detect_merge_inline_system(template)
        assert content_format.wants_system_first(template) is system_first, template
    assert len({content_format.takes_parts(template) for template in ODD_TEMPLATES}) == 2


def test_models_that_vllm_renders_by_code_have_no_names_and_are_told(
    tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((model / name).read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GptOssForCausalLM"]}))
    assert ids_here(ModelTokenizer(str(tmp_path)), Form.OPENAI, CHATS["a text"]) == []
    assert "GptOssForCausalLM) by code of its own" in caplog.text


def test_every_model_that_vllm_renders_by_code_is_known() -> None:
    import vllm.config.model

    text = Path(vllm.config.model.__file__).read_text()
    choice = text.partition('if self.tokenizer_mode == "auto":')[2].partition('if self.tokenizer_mode != "auto":')[0]
    named = set(re.findall(r'"([A-Z]\w+)"', choice))
    assert len(named) > 5
    assert named < model_tokenizer._RENDERED_BY_CODE


def test_without_transformers_it_says_what_to_install(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    tokenizer = ModelTokenizer(str(model))
    assert "pip install transformers jinja2" in caplog.text
    assert prompts.count(tokenizer, CHATS["a text"]).num_tokens > 0
    assert ids_here(tokenizer, Form.OPENAI, {"prompt": "hello"})


def test_parts_have_the_fields_that_vllm_knows() -> None:
    from vllm.renderers import chat_utils

    of_version = getattr(chat_utils, "chat_message", chat_utils)  # a package in 0.33
    assert conversation.PART_FIELDS == of_version._KNOWN_CONTENT_PART_FIELDS
