# SPDX-License-Identifier: Apache-2.0
"""Starting a stream's request again on another engine, from what its client has received.

The safety net under everything else: whatever became of the owner, the origin has the request and the delivered tokens.
Each attempt has an epoch of its own, so that one whose answer was lost cannot own the request beside a later one.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from llumlet.client import LlumletClient
from llumlet.credentials import Credentials
from llumlet.errors import LlumletCallFailed, LlumletError, LlumletUnreachable, NotALlumlet
from llumlet.types import AbortRequest, AdoptRequest, Reason
from llumlet.types import Epoch as WireEpoch
from vllm_llumnix.errors import Refused
from vllm_llumnix.frontend.owners import Owner, Owners
from vllm_llumnix.frontend.streams import Stream, Streams
from vllm_llumnix.request_wire import RequestState, encode, encode_params

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreRequest

    from vllm_llumnix.adapters import Adapters
    from vllm_llumnix.frontend.peers import Peers

logger = logging.getLogger("vllm.llumnix")

CALL_SECONDS = 5.0
"""One attempt: building the request, its grammar included, and a turn of the engine's loop."""
REPLAY_SECONDS = 60.0
"""How long it is tried before the client gets an error."""
RETRY_SECONDS = 0.2
HOPELESS = frozenset({Reason.INVALID_REQUEST})
"""Refusals that every engine would give."""


class Replay:
    """All replays of one API server process. On its event loop."""

    def __init__(
        self,
        streams: Streams,
        owners: Owners,
        peers: Peers,
        credentials: Credentials,
        relay_address: Callable[[], str],
        adapters: Adapters,
        give_up: Callable[[Stream], None],
    ) -> None:
        self._streams = streams
        self._owners = owners
        self._peers = peers
        self._credentials = credentials
        self._relay_address = relay_address
        self._adapters = adapters
        self._give_up = give_up
        self._clients: dict[str, LlumletClient] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.replayed = 0
        """Requests that went on elsewhere after their owner was lost."""

    @property
    def busy(self) -> bool:
        return bool(self._tasks)

    def targets(self, avoid: Owner | None) -> list[str]:
        """Addresses of llumlets that could take a request: engines that are known to live, then peers that may."""
        now = time.monotonic()
        living = [owner for owner in self._owners.all() if owner.llumlet and owner.may_take_requests(now)]
        alive = [owner.llumlet for owner in living]
        ailing = {owner.llumlet for owner in self._owners.all() if owner.is_ailing(now)}.difference(alive)
        peers = [peer for peer in self._peers.addresses if peer not in ailing]
        random.shuffle(peers)
        if avoid is not None:
            # Another life of the lost one may listen where it did.
            alive = [owner.llumlet for owner in living if owner is not avoid]
            peers = [peer for peer in peers if peer != avoid.llumlet]
        return list(dict.fromkeys(alive + peers))

    def begin(self, stream: Stream, lost: Owner | None, reason: str, digest: str) -> None:
        """Bar everybody who had the request, and find it a new engine."""
        logger.warning("llumlet: request %s goes on elsewhere: %s", stream.request_id, reason)
        self._streams.depose(stream)
        task = asyncio.get_running_loop().create_task(self._run(stream, lost, digest), name="llumnix-replay")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, stream: Stream, lost: Owner | None, digest: str) -> None:
        deadline = time.monotonic() + REPLAY_SECONDS
        holder = lost if lost is not None and lost.may_have_cache(time.monotonic()) else None
        first = True
        while self._streams.get(stream.request_id) is stream:
            # The lost one may come back when there is nobody else.
            for address in dict.fromkeys(self.targets(lost) + self.targets(None)):
                if not first:
                    self._streams.depose(stream)
                first = False
                try:
                    await self._attempt(stream, address, digest, holder)
                except (LlumletCallFailed, Refused) as error:
                    logger.info("llumlet: %s does not take request %s: %s", address, stream.request_id, error)
                    if isinstance(error, LlumletError) and error.reason in HOPELESS:
                        deadline = 0.0
                        break
                    if not isinstance(error, LlumletError) or error.reason == Reason.TRANSFER_FAILED:
                        holder = None
                else:
                    return
            if time.monotonic() > deadline:
                logger.error("llumlet: no engine takes request %s; its client gets an error", stream.request_id)
                self._give_up(stream)
                return
            await asyncio.sleep(RETRY_SECONDS)

    async def _attempt(self, stream: Stream, address: str, digest: str, holder: Owner | None) -> None:
        epoch = stream.epoch
        adapter = stream.request.lora_request
        lora_digest = await self._adapters.digest_of(adapter) if adapter is not None else None
        state = state_of(stream.request, stream.delivered, self._relay_address(), lora_digest)
        request = AdoptRequest(
            epoch=WireEpoch(term=epoch.term, hop=epoch.hop),
            compatibility_digest=digest,
            request_state=encode(state),
            weight_version=stream.weights_wanted(time.monotonic()),
        )
        if holder is not None:
            request.holder.instance_id, request.holder.incarnation = holder.instance, holder.incarnation
            request.holder.address = holder.llumlet
        client = self._clients.get(address)
        if client is None:
            client = self._clients[address] = LlumletClient(address, credentials=self._credentials)
        answer = await client.adopt(request, deadline_s=CALL_SECONDS)
        owner = self._owners.expected(answer.instance_id, answer.incarnation, address)
        if self._streams.get(stream.request_id) is not stream:
            await client.abort(AbortRequest(request_ids=[stream.request_id]))
            return
        stream.owned_by(owner, epoch, time.monotonic())
        stream.replaying = False
        stream.replays += 1
        self.replayed += 1
        logger.info(
            "llumlet: request %s goes on at %s: %.1f MB of KV cache copied, %d tokens computed again",
            stream.request_id,
            answer.instance_id,
            answer.copied_bytes / 1e6,
            answer.recomputed_tokens,
        )

    async def is_gone(self, owner: Owner) -> bool:
        """Whether nobody listens any more where the silent `owner` did: then it need not be waited for."""
        client = LlumletClient(owner.llumlet, credentials=self._credentials)
        try:
            await client.get_instance_metadata(deadline_s=1.0)
        except LlumletUnreachable as error:
            return error.nobody_listens or isinstance(error, NotALlumlet)
        except LlumletCallFailed:
            return False
        finally:
            await client.close()
        return False


def state_of(request: EngineCoreRequest, delivered: list[int], origin: str, lora_digest: str | None) -> RequestState:
    """The request as an engine needs it that goes on after `delivered`."""
    params = request.sampling_params
    assert params is not None
    return RequestState(
        request_id=request.request_id,
        external_request_id=request.external_req_id or request.request_id,
        origin=origin,
        prompt_token_ids=list(request.prompt_token_ids or ()),
        output_token_ids=list(delivered),
        sampling_params=encode_params(params),
        arrival_time=request.arrival_time,
        priority=request.priority,
        lora_name=request.lora_request.lora_name if request.lora_request else None,
        lora_digest=lora_digest,
        cache_salt=request.cache_salt,
        trace_headers=dict(request.trace_headers) if request.trace_headers else None,
        session_id=request.session_id,
        structured_backend=params.structured_outputs._backend if params.structured_outputs else None,
        reasoning_ended=request.reasoning_ended,
    )


def why_not(request: EngineCoreRequest, delivered: list[int]) -> str | None:
    """Why this request cannot be started again somewhere else; None if it can."""
    params = request.sampling_params
    assert params is not None
    if request.mm_features or request.prompt_embeds is not None or request.prompt_token_ids is None:
        return "its prompt is more than tokens"
    if params.extra_args:
        return "it has parameters for this engine alone"
    if params.prompt_logprobs is not None and not delivered:
        return "its prompt logprobs are not there yet"
    return None
