# SPDX-License-Identifier: Apache-2.0
"""All paths of vLLM's HTTP front end, and what the gateway does with each. Pure.

They are an allow-list: other paths get an error that names them. So a new vLLM cannot expose an endpoint for operators,
and a test lists its routes that are missing here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, NamedTuple

from llumsched.gateway.chats.form import Form


class Kind(Enum):
    CONTINUED = auto()
    """Placed by its body's model; a stream continues elsewhere if its engine is lost."""
    PLACED = auto()
    """Placed by its body's model and passed unchanged."""
    STICKY = auto()
    """Passed to the one instance that has the named resource."""
    OWN = auto()
    """Answered by the gateway."""
    REFUSED = auto()
    """Refused with an error: the path is for operators."""
    CANNOT_PASS = auto()


class Work(Enum):
    """The process that does the work of an answer, and is thus proven to be alive by it."""

    TOKENS = auto()
    """The engine core, token by token."""
    BATCH = auto()
    """The engine core, in one piece."""
    TEXT = auto()
    """The API server alone."""


class Style(Enum):
    """The form of errors, and of the end of a stream."""

    OPENAI = auto()
    RESPONSES = auto()
    ANTHROPIC = auto()
    COHERE = auto()


@dataclass(frozen=True, slots=True)
class Path:
    kind: Kind
    methods: tuple[str, ...] = ("POST",)
    work: Work = Work.TOKENS
    style: Style = Style.OPENAI
    form: Form = Form.OTHER
    """Place of the prompt in the body."""
    is_form: bool = False
    """True if the body is a multipart form."""
    keeps_answers: bool = False
    """True if a client may ask for the answer again by its id."""
    may_rest: bool = False
    """True if a stream may be silent while the API server calls a tool."""
    is_played: bool = False
    """True if clients use an answer in one piece while it comes."""
    why: str = ""
    """The reason why it is refused or cannot be passed."""


_TOKENS: Final = Path(Kind.PLACED)
_BATCH: Final = Path(Kind.PLACED, work=Work.BATCH)
_TEXT: Final = Path(Kind.PLACED, work=Work.TEXT)
_AUDIO: Final = Path(Kind.PLACED, is_form=True)
_READ: Final = ("GET", "HEAD")

_ALL_METHODS: Final = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


def _refused(why: str) -> Path:
    return Path(Kind.REFUSED, _ALL_METHODS, why=why)


_CHANGES: Final = _refused("it changes one instance for all its clients; operators ask the instance itself")
_TELLS: Final = _refused("it tells of one instance; ask that instance itself")
_ABORTS: Final = _refused("it ends requests of any client; a client ends its own by closing the connection")
_ADAPTER: Final = _refused("it changes what one instance serves; operators load adapters at each instance")
_SOCKET: Final = Path(
    Kind.CANNOT_PASS, _ALL_METHODS, why="it is a WebSocket, whose model is not known before it is open"
)

PATHS: Final[Mapping[str, Path]] = {
    "/v1/chat/completions": Path(Kind.CONTINUED, form=Form.OPENAI),
    "/v1/completions": Path(Kind.CONTINUED, form=Form.OPENAI),
    # Generation
    "/v1/chat/completions/batch": _TOKENS,
    "/v1/responses": Path(
        Kind.PLACED, style=Style.RESPONSES, form=Form.RESPONSES, keeps_answers=True, may_rest=True
    ),
    "/v1/messages": Path(Kind.PLACED, style=Style.ANTHROPIC, form=Form.ANTHROPIC),
    "/cohere/v2/chat": Path(Kind.PLACED, style=Style.COHERE),
    "/inference/v1/generate": Path(Kind.PLACED, form=Form.TOKENS),
    "/invocations": _TOKENS,
    "/v1/audio/transcriptions": _AUDIO,
    "/v1/audio/translations": _AUDIO,
    "/v1/audio/speech": Path(Kind.PLACED, is_played=True),
    # One step of the engine, or a few
    "/v1/systemone": _BATCH,
    "/generative_scoring": _BATCH,
    "/v1/embeddings": _BATCH,
    "/v2/embed": _BATCH,
    "/pooling": _BATCH,
    "/classify": _BATCH,
    "/score": _BATCH,
    "/v1/score": _BATCH,
    "/rerank": _BATCH,
    "/v1/rerank": _BATCH,
    "/v2/rerank": _BATCH,
    # The tokenizer and the chat template
    "/tokenize": _TEXT,
    "/detokenize": _TEXT,
    "/v1/messages/count_tokens": Path(Kind.PLACED, work=Work.TEXT, style=Style.ANTHROPIC),
    "/v1/chat/completions/render": _TEXT,
    "/v1/completions/render": _TEXT,
    "/v1/messages/render": _TEXT,
    "/v1/responses/render": _TEXT,
    "/cohere/v2/chat/render": Path(Kind.PLACED, work=Work.TEXT, style=Style.COHERE),
    "/v1/chat/completions/derender": _TEXT,
    "/v1/completions/derender": _TEXT,
    # What one instance has stored
    "/v1/responses/{response_id}": Path(Kind.STICKY, ("GET",), Work.TEXT, Style.RESPONSES),
    "/v1/responses/{response_id}/cancel": Path(Kind.STICKY, ("POST",), Work.TEXT, Style.RESPONSES),
    # The gateway's own
    "/v1/models": Path(Kind.OWN, _READ),
    "/v1/models/{model}": Path(Kind.OWN, _READ),
    "/health": Path(Kind.OWN, _READ),
    "/healthz": Path(Kind.OWN, _READ),
    "/ready": Path(Kind.OWN, _READ),
    "/ping": Path(Kind.OWN, (*_READ, "POST")),
    # Refused
    "/metrics": _refused("the gateway's own are for operators, at --metrics-port"),
    "/v1/realtime": _SOCKET,
    "/abort_requests": _ABORTS,
    "/inference/v1/abort_requests": _ABORTS,
    "/v1/load_lora_adapter": _ADAPTER,
    "/v1/unload_lora_adapter": _ADAPTER,
    **dict.fromkeys(
        ("/collective_rpc", "/fault_tolerance/apply", "/finish_weight_update", "/init_weight_transfer_engine", "/pause",
         "/release_kv_cache_memory", "/reset_encoder_cache", "/reset_mm_cache", "/reset_prefix_cache", "/resume",
         "/scale_elastic_ep", "/shutdown_weight_transfer_engine", "/sleep", "/start_draft_weight_update",
         "/start_profile", "/start_weight_update", "/stop_profile", "/update_weight_version", "/update_weights",
         "/wake_up", "/weight_checker"),
        _CHANGES,
    ),
    **dict.fromkeys(
        ("/docs", "/docs/oauth2-redirect", "/fault_tolerance/status", "/get_world_size", "/is_paused",
         "/is_scaling_elastic_ep", "/is_sleeping", "/kv_event_sources", "/load", "/openapi.json", "/redoc",
         "/server_info", "/static", "/tokenizer_info", "/version", "/weight_info"),
        _TELLS,
    ),
}  # fmt: skip
"""All paths, as in vLLM 0.32; `/v1/audio/speech` is vllm-omni's."""

_NAME: Final = re.compile(r"(?!\.\.?$)[A-Za-z0-9._:@=-]{1,256}", re.ASCII)
"""A name in a path, without characters that URLs escape and without `..`. A match is passed on unchanged."""
_TEMPLATES: Final = tuple(
    (re.compile(re.sub(r"\\{\w+\\}", "(.+)", re.escape(path))), one) for path, one in PATHS.items() if "{" in path
)


class Found(NamedTuple):
    path: Path
    name: str = ""
    """The response or model named by the path; a model's name may be any text."""


def is_name(text: str) -> bool:
    """True if the text may stand for such a name in a path."""
    return _NAME.fullmatch(text) is not None


def find(path: str) -> Found | None:
    """The path's entry and the name in it. `path` is decoded and without the query."""
    if (one := PATHS.get(path)) is not None:
        return None if "{" in path else Found(one)
    for pattern, one in _TEMPLATES:
        if (match := pattern.fullmatch(path)) and (one.kind is Kind.OWN or is_name(match[1])):
            return Found(one, match[1])
    return None
