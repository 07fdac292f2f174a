# SPDX-License-Identifier: Apache-2.0
"""Starting a stream's request again on another engine, from what its client has received.

The safety net under everything else: whatever became of the owner, the origin has the request and the delivered tokens.
Each attempt has an epoch of its own, so that one whose answer was lost cannot own the request beside a later one.

All streams of a dead engine come here at once. `frontend.placement` spreads them, and lets a few at a time go to each
engine: an attempt's time begins with its turn. An engine that is at it shows that on the relay; it may take as long as
a grammar does. What is given up is called off.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from llumlet.bridge import epoch_message
from llumlet.client import LlumletClient
from llumlet.credentials import Credentials
from llumlet.errors import LlumletCallFailed, LlumletError, LlumletUnreachable
from llumlet.protocol.errors import Refused
from llumlet.protocol.wire import Health
from llumlet.types import AbortRequest, AdoptRequest, AdoptResponse, Reason
from vllm_llumnix.frontend.deaths import is_gone
from vllm_llumnix.frontend.owners import Owner, Owners
from vllm_llumnix.frontend.placement import Placement, Turn
from vllm_llumnix.frontend.streams import Stream, Streams
from vllm_llumnix.frontend.suspects import Suspects
from vllm_llumnix.request_wire import RequestState, encode, encode_params

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreRequest

    from vllm_llumnix.adapters import Adapters
    from vllm_llumnix.frontend.peers import Peers

logger = logging.getLogger("vllm.llumnix")

CALL_SECONDS = 5.0
"""How long nothing is heard of an engine that was asked, before another one is."""
ATTEMPT_SECONDS = 25.0
"""For the answer of one that is heard of: building the request, its grammar included, and a turn of its loop."""
WATCH_SECONDS = 0.25
REPLAY_SECONDS = 60.0
"""How long it is tried, once no engine has taken the request, before the client gets an error."""
RETRY_SECONDS = 0.2
HOPELESS = frozenset({Reason.INVALID_REQUEST})
"""Refusals that every engine would give."""
OF_THE_REQUEST = HOPELESS | {
    Reason.HANDOVER_OPEN,
    Reason.BARRED,
    Reason.DEADLINE,
    Reason.LORA_NOT_AVAILABLE,
    Reason.OTHER_WEIGHTS,
    Reason.REQUEST_TOO_LONG,
    Reason.TRANSFER_FAILED,
}
"""Refusals that say nothing of how others would fare at that engine."""


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
        dismiss: Callable[[Stream, Owner], None],
        suspects: Suspects,
        dies: Callable[[Stream, Owner, bool], bool],
    ) -> None:
        """`give_up` ends a stream with an error; `dismiss` tells an engine that it has lost the stream's request.
        `dies` is told of a request whose new owner was lost, or says that it ends, before it answered; it says whether
        that is the end of the request."""
        self._streams = streams
        self._owners = owners
        self._peers = peers
        self._credentials = credentials
        self._relay_address = relay_address
        self._adapters = adapters
        self._give_up = give_up
        self._dismiss = dismiss
        self._suspects = suspects
        self._dies = dies
        self._placement = Placement()
        self._clients: dict[str, LlumletClient] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.replayed = 0
        """Requests that went on elsewhere after their owner was lost."""

    @property
    def busy(self) -> bool:
        return bool(self._tasks)

    def targets(self, avoid: Owner | None) -> list[str]:
        """Addresses of llumlets that could take a request: engines that are known to live, and peers that may."""
        now = time.monotonic()
        living = [owner for owner in self._owners.all() if owner.llumlet and owner.may_take_requests(now)]
        alive = [owner.llumlet for owner in living]
        ailing = {owner.llumlet for owner in self._owners.all() if owner.is_ailing(now)}.difference(alive)
        peers = [peer for peer in self._peers.addresses if peer not in ailing]
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
        await self._suspects.turn(stream.request_id)
        # What it insists on for a while, it insists on from here.
        stream.deposed_at = now = time.monotonic()
        search = _Search(stream, lost, digest, lost if lost is not None and lost.may_have_cache(now) else None)
        try:
            await self._find_engine(search)
        finally:
            if stream.replaying:
                self._suspects.step_back(stream.request_id)

    async def _find_engine(self, search: _Search) -> None:
        stream, deadline = search.stream, math.inf
        while not await self._ask_around(search) and self._is_open(stream):
            now = time.monotonic()
            deadline = min(deadline, now + REPLAY_SECONDS)
            if search.hopeless or now > deadline:
                logger.error("llumlet: no engine takes request %s; its client gets an error", stream.request_id)
                self._give_up(stream)
                return
            await asyncio.sleep(RETRY_SECONDS)

    async def _ask_around(self, search: _Search) -> bool:
        """Ask every engine once, until one takes the request. Whether one has."""
        stream, asked = search.stream, set[str]()
        num_tokens = len(stream.request.prompt_token_ids or ()) + len(stream.delivered)
        while self._is_open(stream) and (left := self._left(search.lost, asked)):
            await self._suspects.turn(stream.request_id)
            if self._suspects.trial_tokens(stream.request_id):
                left = self._suspects.without_trial(left)
            address = self._placement.choose(stream.request_id, num_tokens, left, self._peers.room)
            async with self._placement.turn(address, num_tokens) as turn:
                if turn.is_stale or not self._is_open(stream):
                    continue
                asked.add(address)
                turn.taken = await self._try(search, address, turn)
            if turn.taken or search.hopeless:
                return turn.taken
        return False

    def _left(self, lost: Owner | None, asked: set[str]) -> list[str]:
        """Whom to choose from. The lost one may come back when there is nobody else."""
        left = [address for address in self.targets(lost) if address not in asked]
        return left or [address for address in self.targets(None) if address not in asked]

    def _is_open(self, stream: Stream) -> bool:
        return self._streams.get(stream.request_id) is stream

    async def _try(self, search: _Search, address: str, turn: Turn) -> bool:
        """One attempt, and what its failure says. Whether the engine has the request."""
        stream = search.stream
        if search.num_attempts:
            self._streams.depose(stream)
        search.num_attempts += 1
        try:
            await self._attempt(search, address)
        except Refused as error:
            logger.info("llumlet: request %s cannot be sent to %s: %s", stream.request_id, address, error)
            search.holder = None
        except LlumletError as error:
            logger.info("llumlet: %s does not take request %s: %s", address, stream.request_id, error)
            search.hopeless = error.reason in HOPELESS
            if error.reason == Reason.TRANSFER_FAILED:
                search.holder = None
            if not self._is_of_the_request(error, stream):
                turn.shun()
            await self._look_into(stream, error)
        except LlumletCallFailed as error:
            logger.info("llumlet: %s is not waited for with request %s: %s", address, stream.request_id, error)
            search.holder = None
            turn.shun()
            await self._look_into(stream, error)
            if (owner := self._owners.at_llumlet(address)) is not None:
                # Should it have the request after all: before the heartbeat that would show it.
                self._dismiss(stream, owner)
        else:
            return True
        return False

    def _is_of_the_request(self, error: LlumletError, stream: Stream) -> bool:
        """Whether a refusal says nothing of how others would fare at that engine; that one trial keeps another waiting
        does not."""
        on_trial = self._suspects.trial_tokens(stream.request_id) > 0
        return error.reason in OF_THE_REQUEST or (on_trial and error.reason == Reason.DESTINATION_BUSY)

    async def _attempt(self, search: _Search, address: str) -> None:
        stream, holder = search.stream, search.holder
        epoch = stream.epoch
        adapter = stream.request.lora_request
        lora_digest = await self._adapters.digest_of(adapter) if adapter is not None else None
        state = state_of(stream.request, stream.delivered, self._relay_address(), lora_digest)
        request = AdoptRequest(
            epoch=epoch_message(epoch),
            compatibility_digest=search.digest,
            request_state=encode(state),
            weight_version=stream.weights_wanted(time.monotonic()),
            trial_tokens=self._suspects.trial_tokens(stream.request_id),
        )
        if holder is not None:
            request.holder.instance_id, request.holder.incarnation = holder.instance, holder.incarnation
            request.holder.address = holder.llumlet
        client = self._clients.get(address)
        if client is None:
            client = self._clients[address] = LlumletClient(address, credentials=self._credentials)
        if request.trial_tokens:
            self._suspects.sent(stream.request_id, await self._whose_record(client), len(stream.delivered))
        answer = await self._answer(client.adopt(request, deadline_s=ATTEMPT_SECONDS), address)
        owner = self._owners.expected(answer.instance_id, answer.incarnation, address)
        if not self._is_open(stream):
            await client.abort(AbortRequest(request_ids=[stream.request_id]))
            return
        stream.owned_by(owner, epoch, time.monotonic())
        self._suspects.sent(stream.request_id, owner, len(stream.delivered))
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

    async def _answer(self, call: Coroutine[Any, Any, AdoptResponse], address: str) -> AdoptResponse:
        """The engine's answer. Raises what `call` does, and LlumletUnreachable when the engine is not heard of, or says
        that its loop hangs. Who does not wait for the answer calls the attempt off: see `Destination.adopt`."""
        asked_at = time.monotonic()
        answering = asyncio.ensure_future(call)
        try:
            while not (await asyncio.wait({answering}, timeout=WATCH_SECONDS))[0]:
                owner = self._owners.at_llumlet(address)
                heard_at = asked_at if owner is None else max(asked_at, owner.last_heard)
                if owner is not None and owner.health is Health.HUNG and owner.last_heard > asked_at:
                    raise LlumletUnreachable(address, "its loop hangs", timed_out=True)
                if (silent := time.monotonic() - heard_at) > CALL_SECONDS:
                    raise LlumletUnreachable(address, f"nothing heard of it for {silent:.1f} s", timed_out=True)
            return answering.result()
        finally:
            answering.cancel()

    async def _whose_record(self, client: LlumletClient) -> Owner:
        """Who listens there: should the answer to Adopt never come, this is whose last steps tell why."""
        owner = self._owners.at_llumlet(client.address)
        if owner is None or owner.dead:
            found = await client.get_instance_metadata(deadline_s=1.0)
            owner = Owner(found.instance_id, found.incarnation, identity=b"", llumlet=client.address)
        return owner

    async def _look_into(self, stream: Stream, error: LlumletCallFailed) -> None:
        """Adopt has failed. The request may have been there long enough to be the end of the engine, and of itself."""
        owner = self._suspects.tried_at(stream.request_id) or self._owners.at_llumlet(error.address)
        owner = owner or Owner(error.address, incarnation="", identity=b"", llumlet=error.address)
        ends = isinstance(error, LlumletError) and error.reason == Reason.SHUTTING_DOWN
        broken = isinstance(error, LlumletUnreachable) and not error.nobody_listens
        if broken and await is_gone(owner.llumlet, self._credentials):
            owner.died("its process is gone", time.monotonic())
        if not ((broken or ends) and self._dies(stream, owner, ends)):
            self._suspects.sent(stream.request_id, None, len(stream.delivered))


@dataclasses.dataclass(slots=True)
class _Search:
    """For an engine that goes on with a stream's request."""

    stream: Stream
    lost: Owner | None
    digest: str
    holder: Owner | None
    """Who may still have its KV cache."""
    num_attempts: int = 0
    hopeless: bool = False
    """Nobody would take it."""


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
