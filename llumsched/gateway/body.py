# SPDX-License-Identifier: Apache-2.0
"""A request's body: read once, forwarded byte for byte. Pure."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Final, NamedTuple, TypeVar

import msgspec

from llumsched.gateway.errors import InvalidRequest
from llumsched.gateway.forms import fields_of
from llumsched.gateway.objectives import NONE, Objectives
from llumsched.request import Priority, Request

_MOST_MODEL_CHARACTERS = 256
"""Longest name of a model, in characters: names end up in answers, logs and metrics."""


class Head(msgspec.Struct):
    """The fields of a body that decide its way; everything else is only checked to be JSON.

    Engines check the types of all other fields, so that the gateway accepts and refuses what they do.
    """

    model: Any = None
    stream: Any = None
    request_id: Any = None
    return_token_ids: Any = None
    n: Any = None
    echo: Any = None
    tools: Any = None
    include_reasoning: Any = None
    previous_response_id: Any = None
    mcp_servers: Any = None
    background: Any = None
    store: Any = None
    conversation: Any = None
    priority: Priority | None = None
    transfers: Any = None
    """Name of the field by which an engine would move caches for the client; "" if there is none. This field and those
    below are computed when a body has been read."""
    runs_tools: Any = False
    """True if tools are called by the server: all but the types that clients run."""
    num_prompts: Any = 1
    num_sequences: Any = 1
    """Number of sequences to compute: prompts times answers per prompt."""
    most_output: Any = None
    """Limit of the output tokens of each sequence; None if there is none."""


class _Read(Head):
    """Further fields that are read to fill in `Head`."""

    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
    vllm_xargs: Any = None
    sampling_params: Any = None
    best_of: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    prompt: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()


Content = tuple[bytes | bytearray | memoryview, ...]
"""A request to an engine, in parts, so that long bodies are not copied."""

PRIORITY_HEADERS: Final = ("X-Priority", "X-Vllm-Priority")
"""Headers that replace the body's `priority`, in order of precedence."""

_TRANSFERS: Final = ("kv_transfer_params", "ec_transfer_params")
"""Fields that make an engine fetch or keep a KV or encoder cache. They name hosts, ports and blocks, perhaps of another
client. Engines also read them from the arguments for extensions."""

_CLIENTS_TOOLS: Final = re.compile(
    r"function|custom|local_shell|shell|apply_patch|computer|computer_use_preview"
    r"|(?:bash|computer|memory|text_editor)_[0-9]+"
)
"""Types of tools that the client runs itself; the last ones are Anthropic's, followed by a date."""
_SEVERAL: Final = re.compile(rb"\s*\[\s*[\[\"]")
"""The beginning of an array of prompts or conversations."""
_MOST_SEQUENCES: Final = 1 << 20

_HEAD = msgspec.json.Decoder(_Read, strict=False)
"""A decoder that is as lenient as engines: "-1" is a number."""
_DOCUMENT = msgspec.json.Decoder(dict[str, Any])
_ANYTHING = msgspec.json.Decoder(Any)
_ARRAY = msgspec.json.Decoder(list[Any])

_MOST_NUMBER: Final = 1 << 31
_Count = Annotated[int, msgspec.Meta(ge=1, le=_MOST_NUMBER)]
_HALF_PAIR = re.compile(
    rb"(?<!\\)(?:\\\\)*(\\u[dD][89abAB]..(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..)\\u[dD][c-fC-F]..)", re.DOTALL
)
"""An escape that msgspec refuses with an unhelpful message."""

_T = TypeVar("_T")


def _decoded(decoder: msgspec.json.Decoder[_T], content: bytes | bytearray | msgspec.Raw) -> _T:
    try:
        return decoder.decode(content)
    except (msgspec.DecodeError, RecursionError) as error:
        why = str(error)
        if half := _HALF_PAIR.search(content):
            why = f"`{half[1].decode(errors='replace')}` is half of a surrogate pair, and no character"
        raise InvalidRequest(f"The body cannot be read as a JSON object: {why}") from None


def _checked(head: _Read) -> Head:
    if head.model is not None and not isinstance(head.model, str):
        raise InvalidRequest("`model` must be a string.")
    if len(head.model or "") > _MOST_MODEL_CHARACTERS:
        raise InvalidRequest(f"`model` has more than {_MOST_MODEL_CHARACTERS} characters.")
    sampling = head.sampling_params if isinstance(head.sampling_params, dict) else {}
    may_transfer = head.kv_transfer_params or head.ec_transfer_params or head.vllm_xargs or sampling
    head.transfers = _transfers(head, sampling.get("extra_args")) if may_transfer else ""
    tools = head.tools if isinstance(head.tools, list) else ()
    head.runs_tools = any(isinstance(tool, dict) and not _is_clients(tool.get("type")) for tool in tools)
    several = head.prompt if _SEVERAL.match(head.prompt) else head.messages if _SEVERAL.match(head.messages) else None
    head.num_prompts = 1 if several is None else len(_decoded(_ARRAY, several)) or 1
    num_each = max(_number(head.n) or 1, _number(head.best_of) or 1, _number(sampling.get("n")) or 1)
    head.num_sequences = min(head.num_prompts * num_each, _MOST_SEQUENCES)
    head.most_output = _number(head.max_completion_tokens) or _number(head.max_tokens)
    head.most_output = head.most_output or _number(head.max_output_tokens) or _number(sampling.get("max_tokens"))
    return head


def _is_clients(tool_type: Any) -> bool:
    return tool_type is None or (isinstance(tool_type, str) and _CLIENTS_TOOLS.fullmatch(tool_type) is not None)


def _number(value: Any) -> int | None:
    """A number as engines read it; None if they would refuse it."""
    if value is None or type(value) is int:  # the usual ones, in a fiftieth of the time
        return value if value and 0 < value <= _MOST_NUMBER else None
    with suppress(msgspec.ValidationError):
        return msgspec.convert(value, _Count, strict=False)
    return None


def _transfers(head: _Read, extra: Any) -> str:
    own = {name: getattr(head, name) for name in _TRANSFERS}
    for place, given in (("", own), ("vllm_xargs.", head.vllm_xargs), ("sampling_params.extra_args.", extra)):
        for name in _TRANSFERS:
            if isinstance(given, dict) and given.get(name):
                return place + name
    return ""


class Prompt(NamedTuple):
    """The prompt of a body, as far as it is known."""

    num_tokens: int = 0
    blocks: bytes = b""
    """Names of its first full blocks (`llumlet.contract.block_hashes`)."""
    block_size: int = 0


@dataclass(frozen=True, slots=True)
class Body:
    content: bytes | bytearray
    head: Head

    @classmethod
    def read(cls, content: bytes | bytearray) -> Body:
        """Reads the head of a body. Raises InvalidRequest if no engine could take it."""
        try:
            if not content.isascii():
                content.decode()  # what is skipped is not looked at
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"The body is not UTF-8: {error}") from None
        return cls(content, _checked(_decoded(_HEAD, content)))

    @classmethod
    def read_form(cls, content: bytes | bytearray, content_type: str) -> Body:
        """Reads the head of a multipart form. Raises InvalidRequest."""
        fields = fields_of(content, content_type, ("model", "vllm_xargs"))
        head = _Read(model=fields.get("model") or None)
        if "vllm_xargs" in fields:
            head.vllm_xargs = _decoded(_ANYTHING, fields["vllm_xargs"].encode())
        return cls(content, _checked(head))

    def prioritized(self, said: tuple[str, str] | None, *, in_body: bool) -> Body:
        """The request with the priority of a header (name and value) in place of the body's, if there is one.
        `in_body`: the engine is told too. Raises InvalidRequest."""
        if said is None:
            return self
        name, value = said
        try:
            priority = msgspec.convert(value, Priority, strict=False)
        except msgspec.ValidationError as error:
            raise InvalidRequest(f"`{name}` is {value!r}: {error}") from None
        body = self.with_fields(priority=priority) if in_body else self
        return Body(body.content, msgspec.structs.replace(self.head, priority=priority))

    def with_fields(self, **fields: str | int) -> Body:
        """The body with these fields appended, which override those that the client set."""
        content = self.content
        end = content.rindex(b"}")
        comma = b"" if content[:end].rstrip().endswith(b"{") else b","
        return Body(b"".join((memoryview(content)[:end], comma, msgspec.json.encode(fields)[1:])), self.head)

    @property
    def model(self) -> str:
        return self.head.model or ""

    def request(self, request_id: str, prompt: Prompt, objectives: Objectives = NONE, waited_s: float = 0.0) -> Request:
        """The request as told to schedulers. `request_id` is the engine's name for it."""
        return Request(
            request_id,
            self.model,
            prompt.num_tokens,
            self.head.priority or 0,
            objectives.ttft_ms,
            objectives.tpot_ms,
            waited_s * 1e3,
            prompt_blocks=prompt.blocks,
            prompt_block_size=prompt.block_size,
        )

    @property
    def is_streamed(self) -> bool:
        return self.head.stream is True

    def document(self) -> dict[str, Any]:
        """All fields of the body. Takes time in proportion to its length. Raises InvalidRequest if a number is out of
        range."""
        return _decoded(_DOCUMENT, self.content)

    def with_token_ids(self) -> Content:
        """The body with the wish for token ids appended, which overrides the client's."""
        end = self.content.rindex(b"}")
        return memoryview(self.content)[:end], b',"return_token_ids":true}'
