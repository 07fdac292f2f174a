# SPDX-License-Identifier: Apache-2.0
"""Calls to other engines' llumlets, which the origin asks for: Adopt, and what belongs to it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final

from llumlet.contract.block_hashes import held_names
from llumlet.contract.bridge import epoch_message, reason_of
from llumlet.contract.errors import LlumletCallFailed, LlumletError, LlumletUnreachable
from llumlet.contract.types import AbortRequest, AdoptRequest, CachedPrefixRequest
from llumlet.process.credentials import Credentials
from llumlet.process.tasks import Tasks
from llumlet.protocol.errors import Refused
from llumlet.protocol.origin import replay_words as words
from vllm_llumnix.adapters import Adapters
from vllm_llumnix.frontend.kept_inputs import named_tokens
from vllm_llumnix.frontend.liveness import is_gone
from vllm_llumnix.frontend.vllm_client_types import CacheConfig
from vllm_llumnix.wire.peer_clients import PeerClients
from vllm_llumnix.wire.request_wire import RequestState, encode, state_from, without_name

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreRequest

logger = logging.getLogger("vllm.llumnix")

MOST_COMPARING: Final = 32
"""Requests at a time for which it is asked who has them cached. Of those that are lost with one engine there may be
more: they go on unasked, for the engines that are left have other things to do."""
Answered = Callable[[str, int, words.ReplayEvent], None]
"""Told what came of a call, of the request's attempt of that number."""


class Calls:
    """Calls under way, of one API server process. On its event loop."""

    def __init__(
        self,
        clients: PeerClients,
        credentials: Credentials,
        relay_address: Callable[[], str],
        adapters: Adapters,
        cache: CacheConfig,
        answered: Answered,
    ) -> None:
        self._clients = clients
        self._credentials = credentials
        self._relay_address = relay_address
        self._adapters = adapters
        self._cache = cache
        self._answered = answered
        self._attempts: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._others = Tasks()
        self._num_comparing = 0

    def ask_cached(self, effect: words.AskCached, request: EngineCoreRequest) -> None:
        self._begin(effect, self._ask_cached(effect, request), words.CachedKnown({}))

    def identify(self, effect: words.Identify) -> None:
        self._begin(effect, self._identify(effect), words.AnswerLost(broken=False))

    def adopt(self, effect: words.Adopt, request: EngineCoreRequest) -> None:
        self._begin(effect, self._adopt(effect, request), words.AnswerLost(broken=False))

    def ask_whether_gone(self, effect: words.AskWhetherGone) -> None:
        self._begin(effect, self._ask_whether_gone(effect), words.GoneKnown(gone=False))

    def call_off(self, effect: words.CallOff) -> None:
        """Whoever does not wait for the answer calls the attempt off: see `Destination.adopt`."""
        task = self._attempts.pop((effect.request_id, effect.attempt), None)
        if task is not None:
            task.cancel()

    def abort(self, effect: words.AbortAt) -> None:
        self.spawn(self._abort(effect))

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run it to its end."""
        self._others.spawn(coroutine, "llumnix-call")

    def _begin(
        self,
        effect: words.AskCached | words.Identify | words.Adopt | words.AskWhetherGone,
        call: Coroutine[Any, Any, words.ReplayEvent],
        failure: words.ReplayEvent,
    ) -> None:
        """`failure` is answered if the call cannot even be made."""
        key = (effect.request_id, effect.attempt)

        async def answer() -> None:
            try:
                event = await call
            except Exception:
                # Outermost: the replay goes on, whatever this was.
                logger.exception("llumlet: a call for request %s failed", effect.request_id)
                event = failure
            if self._attempts.get(key) is task:
                del self._attempts[key]
                self._answered(*key, event)

        task = self._attempts[key] = asyncio.get_running_loop().create_task(answer(), name="llumnix-replay")

    async def _ask_cached(self, effect: words.AskCached, request: EngineCoreRequest) -> words.ReplayEvent:
        if self._num_comparing >= MOST_COMPARING:
            return words.CachedKnown({})
        self._num_comparing += 1
        try:
            tokens, size = named_tokens(request, effect.delivered), self._cache.block_size
            adapter = request.lora_request.lora_name if request.lora_request is not None else ""
            names = held_names(tokens, size, request.cache_salt or "", adapter)
            asked = CachedPrefixRequest(blocks=names, block_size=size)
            found = await asyncio.gather(*(self._num_cached(at, asked, effect.seconds) for at in effect.addresses))
        finally:
            self._num_comparing -= 1
        return words.CachedKnown(dict(zip(effect.addresses, found, strict=True)))

    async def _num_cached(self, address: str, asked: CachedPrefixRequest, seconds: float) -> int:
        """0 for who does not answer, or cannot: it is of another version, say."""
        try:
            return (await self._clients.at(address).cached_prefix(asked, deadline_s=seconds)).num_tokens
        except (LlumletCallFailed, ValueError):
            return 0

    async def _identify(self, effect: words.Identify) -> words.ReplayEvent:
        try:
            found = await self._clients.at(effect.address).get_instance_metadata(deadline_s=effect.seconds)
        except LlumletCallFailed as error:
            return _failure(error)
        return words.Identified(found.instance_id, found.incarnation)

    async def _adopt(self, effect: words.Adopt, request: EngineCoreRequest) -> words.ReplayEvent:
        adapter, holder = request.lora_request, effect.holder
        try:
            lora_digest = await self._adapters.digest_of(adapter) if adapter is not None else None
            state = state_of(request, effect.delivered, self._relay_address(), lora_digest)
            asked = AdoptRequest(
                epoch=epoch_message(effect.epoch),
                compatibility_digest=effect.digest,
                request_state=encode(state),
                weight_version=effect.weight_version,
                trial_tokens=effect.trial_tokens,
            )
            if holder is not None:
                asked.holder.instance_id, asked.holder.incarnation = holder.instance, holder.incarnation
                asked.holder.address = holder.llumlet
            answer = await self._clients.at(effect.address).adopt(asked, deadline_s=effect.seconds)
        except Refused as error:
            return words.NotSent(str(error))
        except LlumletCallFailed as error:
            return _failure(error)
        logger.info(
            "llumlet: request %s goes on at %s: %.1f MB of KV cache copied, at most %d tokens computed again",
            effect.request_id,
            answer.instance_id,
            answer.copied_bytes / 1e6,
            answer.recomputed_tokens,
        )
        return words.Adopted(answer.instance_id, answer.incarnation)

    async def _ask_whether_gone(self, effect: words.AskWhetherGone) -> words.ReplayEvent:
        return words.GoneKnown(await is_gone(effect.address, self._credentials))

    async def _abort(self, effect: words.AbortAt) -> None:
        try:
            await self._clients.at(effect.address).abort(AbortRequest(request_ids=[effect.request_id]))
        except LlumletCallFailed as error:
            # Its next heartbeat is answered that nobody waits for the request.
            logger.info("llumlet: request %s is not wanted any more: %s", effect.request_id, error)


def _failure(error: LlumletCallFailed) -> words.AdoptRefused | words.AnswerLost:
    if isinstance(error, LlumletError):
        return words.AdoptRefused(reason_of(error.reason), error.detail)
    broken = isinstance(error, LlumletUnreachable) and not error.nobody_listens
    return words.AnswerLost(broken, str(error))


def state_of(request: EngineCoreRequest, delivered: list[int], origin: str, lora_digest: str | None) -> RequestState:
    """The request as an engine needs it that goes on after `delivered`."""
    return state_from(
        request,
        external_request_id=request.external_req_id or request.request_id,
        name=without_name(request.trace_headers)[0],
        origin=origin,
        output_token_ids=list(delivered),
        lora_digest=lora_digest,
        reasoning_ended=request.reasoning_ended,
    )
