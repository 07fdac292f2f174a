# SPDX-License-Identifier: Apache-2.0
"""The way in which a request leaves: with its KV cache, or with its tokens alone.

A request whose KV cache cannot be moved is moved as tokens, unless the caller named a method that copies: then it
stays. A request without a KV cache loses nothing.
"""

from __future__ import annotations

import dataclasses

from llumlet.contract.bridge import METHODS
from llumlet.contract.types import Mode
from llumlet.protocol.errors import Reason, Refused
from llumlet.protocol.move.plan import Method
from vllm_llumnix.engine.compatibility.identity import EngineIdentity
from vllm_llumnix.engine.compatibility.portability import why_not_portable
from vllm_llumnix.engine.vllm_types import Request


@dataclasses.dataclass(frozen=True, slots=True)
class Way:
    """`tokens_alone`: why the KV cache stays behind, empty if it need not. `insists`: the request stays rather than go
    without the KV cache that it has."""

    method: Method
    tokens_alone: str = ""
    insists: bool = False


def way_of(request: Request, identity: EngineIdentity, asked: Mode) -> Way:
    """`asked` is MODE_UNSPECIFIED for "live, if it can be". Raises Refused(not_portable). Any thread."""
    if identity.unsupported is not None:
        raise Refused(Reason.NOT_PORTABLE, identity.unsupported)
    if (problem := why_request_not_portable(request, identity)) is not None:
        raise Refused(Reason.NOT_PORTABLE, problem)
    if request.resumable and (asked == Mode.RECOMPUTE or identity.kv_unsupported is not None):
        detail = identity.kv_unsupported or "its input comes in parts: it goes with its KV cache"
        raise Refused(Reason.NOT_PORTABLE, detail)
    if asked == Mode.RECOMPUTE:
        return Way(Method.RECOMPUTE)
    insists = asked != Mode.MODE_UNSPECIFIED or request.resumable
    if identity.kv_unsupported is None:
        return Way(METHODS.get(asked, Method.LIVE), insists=insists)
    if insists and has_kv(request):
        raise Refused(Reason.NOT_PORTABLE, identity.kv_unsupported)
    return Way(Method.RECOMPUTE, identity.kv_unsupported, insists)


def mode_of(request: Request, identity: EngineIdentity) -> Mode:
    """Mode in which a request that can be moved would arrive, if nobody asks for anything else."""
    if not has_kv(request):
        return Mode.RECOMPUTE if request.num_output_tokens else Mode.WAITING
    return Mode.LIVE if identity.kv_unsupported is None else Mode.RECOMPUTE


def has_kv(request: Request) -> bool:
    """True if its KV cache was begun. If not, no step in flight works on it either."""
    return bool(request.num_computed_tokens)


def why_request_not_portable(request: Request, identity: EngineIdentity) -> str | None:
    return why_not_portable(
        request,
        model_runner_v2=identity.model_runner_v2,
        device=identity.device,
        spec_decode=identity.spec_decode,
        features_stay=identity.features_stay,
    )
