# SPDX-License-Identifier: Apache-2.0
"""The shell of `llumlet.protocol.origin.origin`: the relay's socket, calls, timers, and the way into vLLM's queue.

One in each of vLLM's engine clients, on its event loop; only `shutdown` and `engine_died` come from other threads.
Between a gate and the queue nothing is awaited: two tasks receive, and a suspension there would swap tokens. So effects
are carried out at once, in order, by whoever has told the origin something.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

from llumlet.process.tasks import post
from llumlet.protocol import wire
from llumlet.protocol.origin import replay_words as words
from llumlet.protocol.origin.inputs import SendPart
from llumlet.protocol.origin.origin import Deliver, Fail, Origin, OriginEffect, Probe, Send, Surroundings
from llumlet.protocol.origin.owners import Owner
from llumlet.protocol.origin.streams import Input, Part, Stream
from vllm_llumnix.adapters import Adapters
from vllm_llumnix.config import LlumletConfig, drain_limit
from vllm_llumnix.frontend import endings
from vllm_llumnix.frontend.calls import Calls
from vllm_llumnix.frontend.kept_inputs import num_prompt_tokens, room_for, why_never, without_inputs
from vllm_llumnix.frontend.liveness import Standstills, is_gone, watch
from vllm_llumnix.frontend.metrics import MoveMetrics, Report
from vllm_llumnix.frontend.peers import Peers
from vllm_llumnix.frontend.relay_socket import Complaints, Receive, RelaySocket, output_form_of
from vllm_llumnix.frontend.server_drain import drain
from vllm_llumnix.frontend.session_inputs import send_part
from vllm_llumnix.frontend.vllm_client_types import BalancingClient, Client, ClientVllmConfig
from vllm_llumnix.steps import step_record
from vllm_llumnix.wire.peer_clients import PeerClients
from vllm_llumnix.wire.relay_convert import check, engine_output_from, sliced
from vllm_llumnix.wire.relay_keys import OriginKeys

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreRequest

logger = logging.getLogger("vllm.llumnix")


class ClientStream(Stream):
    """A stream with its request. `engine` is vLLM's name of the engine it was sent to; None: the only one. `room`: see
    `kept_inputs`."""

    __slots__ = ("engine", "request")

    def __init__(self, request: EngineCoreRequest, home: str, room: int = 0) -> None:
        params = request.sampling_params
        assert params is not None
        super().__init__(
            request.request_id,
            num_prompt_tokens(request),
            home,
            input=Input() if request.resumable else None,
            wants_logprobs=params.num_logprobs is not None,
            never=why_never(request, room),
            owes_prompt_logprobs=params.prompt_logprobs is not None,
        )
        self.request = without_inputs(request) if self.never else request
        self.engine: bytes | None = None


class OriginShell:
    """The origin of the requests of vLLM's `client`. Made before vLLM has constructed the rest of the client."""

    def __init__(self, client: Client, vllm_config: ClientVllmConfig, settings: LlumletConfig) -> None:
        self.client = client
        self.settings = settings
        self.credentials = settings.credentials()
        self.complaints = Complaints()
        """Faults on the relay, counted by kind."""
        self.adapters = Adapters(vllm_config.lora_config)
        self.peers = Peers(settings.peers, settings.cms, settings.own_ids, self.credentials, settings.reaches)
        self.relay: RelaySocket | None = None
        self.watch: asyncio.Task[None] | None = None
        self._form = form = output_form_of(vllm_config)
        self.core = Origin(
            Surroundings(
                check=lambda token, stream: check(token, form, wants_logprobs=stream.wants_logprobs),
                complain=self.complaints.note,
                read_steps=step_record.read,
                peers=lambda: self.peers.addresses,
                room=lambda: self.peers.room,
                takes_aborts=lambda: not self._num_pauses and client._finalizer.alive,
            )
        )
        self._keys = OriginKeys(self.credentials) if self.credentials.tokens else None
        self._calls = Calls(
            PeerClients(self.credentials, settings.reaches),
            self.credentials,
            lambda: self.ensure_relay().address,
            self.adapters,
            vllm_config.cache_config,
            self._answered,
        )
        self._metrics = MoveMetrics(vllm_config.model_config.served_model_name, _settled_moves_of(self))
        self._num_pauses = 0
        self._has_drained = False
        self._timer: asyncio.TimerHandle | None = None
        self._standstills = Standstills()

    # Its life

    def ensure_relay(self) -> RelaySocket:
        """The relay, from the moment that the event loop runs."""
        if self.relay is None:
            relay = RelaySocket(self.client.ctx, self.settings.host, _receiver(self), self.complaints, self._keys)
            relay.start()
            self.watch = asyncio.get_running_loop().create_task(watch(weakref.ref(self)), name="llumnix-watch")
            weakref.finalize(self, _end, relay, self.watch, self._metrics, self.peers)
            self.relay = relay
            logger.info("llumlet: relay for requests that move listens on %s", relay.address)
        return self.relay

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        return self.watch.get_loop() if self.watch is not None else None

    def shutdown(self, timeout: float) -> None:
        """Before the client's. From any thread."""
        self._drain(timeout)
        if self.relay is not None and self.watch is not None:
            _end(self.relay, self.watch, self._metrics, self.peers)

    def _drain(self, timeout: float) -> None:
        """Drain if a helper thread asks while the event loop serves streams, as vLLM's launcher does on SIGTERM."""
        client, loop = self.client, self.loop
        if loop is None or not loop.is_running() or loop is asyncio._get_running_loop():
            return
        if self._has_drained or client.resources.engine_dead or not client._finalizer.alive:
            return
        self._has_drained = True
        limit = drain_limit(client.vllm_config)
        seconds = max(timeout, self.settings.drain_seconds if self.peers.expected else 0.0)
        if limit is not None:
            seconds = min(seconds, limit)
        try:
            asyncio.run_coroutine_threadsafe(drain(self, seconds), loop).result()
        except Exception:
            # Outermost: whatever went wrong, the process has to end.
            logger.exception("llumlet: the drain failed")

    @property
    def num_streams(self) -> int:
        """Generation requests whose clients are here, wherever they run."""
        return len(self.core.streams)

    @property
    def num_at_home(self) -> int:
        """Number of open requests that no other engine has taken over."""
        return sum(stream.owner is None for stream in self.core.streams.all())

    @property
    def owns_engine(self) -> bool:
        """True if this process ends the engine."""
        return self.client.resources.engine_manager is not None

    async def end_engine(self) -> None:
        """Ends the engine, of which nothing is wanted any more. What its death means otherwise, it means here, too."""
        if (manager := self.client.resources.engine_manager) is not None:
            await asyncio.to_thread(manager.shutdown)

    def cut_streams(self) -> None:
        """End every stream with an error; vLLM's shutdown alone leaves clients waiting, and the server for them."""
        self.core.cut(time.monotonic())
        self.carry_out()

    @contextlib.contextmanager
    def expecting_aborts(self, mode: str) -> Iterator[None]:
        """While the engine is told to abort its requests, their ends are no sign of a lost owner."""
        self._num_pauses += mode == "abort"
        try:
            yield
        finally:
            self._num_pauses -= mode == "abort"

    # Requests

    def open(self, request: EngineCoreRequest) -> ClientStream:
        room = room_for(request, map(_ours, self.core.streams.all()))
        stream = ClientStream(request, self._instance_of(self.client.core_engine), room)
        self.core.open(stream, time.monotonic())
        return stream

    def sent_to(self, request_id: str, engine: bytes) -> None:
        """vLLM's choice, remembered: `reqs_in_flight` forgets it as soon as the engine reports the request finished."""
        stream = self.core.streams.get(request_id)
        if isinstance(stream, ClientStream):
            stream.engine, stream.home = engine, self._instance_of(engine)

    def came_after(self, stream: ClientStream, num_deaths: int) -> None:
        self.core.came_after(stream, num_deaths, time.monotonic())

    def close(self, request_ids: list[str]) -> list[ClientStream]:
        """The client left, or a stop string was found."""
        closed = self.core.close(request_ids, time.monotonic())
        self.carry_out()
        return [_ours(stream) for stream in closed]

    @functools.cached_property
    def _balancing(self) -> BalancingClient | None:
        """The client, if it spreads requests over engines; asked for at each step, and known once vLLM has made it."""
        return self.client if isinstance(self.client, BalancingClient) else None

    def unroutable(self, streams: list[ClientStream]) -> dict[bytes, list[str]]:
        """Aborts that vLLM's data-parallel client would drop, by home engine.

        It finds the engine in `reqs_in_flight`, and a request that left its engine may be there no more; but the home
        engine is where an abort is sent on from.
        """
        by_engine: dict[bytes, list[str]] = {}
        if self._balancing is not None and not self.client.resources.engine_dead:
            for stream in streams:
                if stream.engine is not None and stream.request_id not in self._balancing.reqs_in_flight:
                    by_engine.setdefault(stream.engine, []).append(stream.request_id)
        return by_engine

    def settle(self, streams: list[ClientStream]) -> None:
        """Do what vLLM's data-parallel client does when the home engine reports requests finished; again is nothing."""
        if self._balancing is None:
            return
        for stream in streams:
            engine = self._balancing.reqs_in_flight.pop(stream.request_id, None)
            if engine is not None:
                self._balancing.engine_inflight[engine] -= 1

    def _instance_of(self, engine: bytes) -> str:
        return str(self.settings.for_rank(int.from_bytes(engine, "little")).instance_id)

    # Outputs

    def take_home(self, outputs: EngineCoreOutputs) -> None:
        """Keep in `outputs` of our own engine what the gates release."""
        taken = self.core.take_home(outputs.outputs, outputs.weight_version, time.monotonic())
        if taken is not None:
            outputs.outputs = [self._output_of(part) for part in taken.parts]
            self.settle([_ours(stream) for stream in taken.ended])
            self.carry_out()

    def hear(self, identity: bytes, message: wire.ToOrigin) -> None:
        """An engine has said this on the relay."""
        if isinstance(message, wire.TokenBatch | wire.HandedOver | wire.Hello):
            # Silent owners are called; not every address is one to be called.
            problem = self.settings.reaches.why_not_llumlet(message.llumlet)
            if problem is not None:
                self.complaints.note("bad_address", problem)
                return
        self.core.hear(identity, message, time.monotonic())
        self.carry_out()

    def _enqueue(self, outputs: list[tuple[ClientStream, EngineCoreOutput]], weight_version: str | None) -> None:
        """Into vLLM's queue, as if each output had come from the engine that its request was sent to."""
        by_engine: dict[int, list[EngineCoreOutput]] = {}
        for stream, output in outputs:
            index = int.from_bytes(stream.engine or self.client.core_engine, "little")
            by_engine.setdefault(index, []).append(output)
        for index, ours in by_engine.items():
            self.client.outputs_queue.put_nowait(
                EngineCoreOutputs(
                    engine_index=index,
                    outputs=ours,
                    finished_requests={o.request_id for o in ours if o.finished} or None,
                    weight_version=weight_version,
                )
            )
        self.settle([stream for stream, output in outputs if output.finished and not self.core.streams.is_open(stream)])

    # What the origin asks for

    def carry_out(self) -> None:
        while effects := self.core.ready():
            for effect in effects:
                self._perform(effect)
        self._set_timer()

    def _perform(self, effect: OriginEffect) -> None:
        match effect:
            case Send(identity=identity, message=message):
                self.ensure_relay().send(identity, message)
            case SendPart():
                if (why := send_part(self.ensure_relay(), effect)) is not None:
                    self.core.cannot_send(effect, why, time.monotonic())
            case Deliver(parts=parts, weight_version=weight_version):
                self._enqueue([(_ours(part.stream), self._output_of(part)) for part in parts], weight_version)
            case Fail(stream=stream, explanation=explanation):
                self._fail(_ours(stream), explanation)
            case Probe(owner=owner):
                self._calls.spawn(self._probe(owner))
            case words.Log(text=text, level=level):
                logger.log(level, "llumlet: %s", text)
            case words.AskCached():
                self._calls.ask_cached(effect, _ours(effect.stream).request)
            case words.Identify():
                self._calls.identify(effect)
            case words.Adopt():
                self._calls.adopt(effect, _ours(effect.stream).request)
            case words.AskWhetherGone():
                self._calls.ask_whether_gone(effect)
            case words.CallOff():
                self._calls.call_off(effect)
            case words.AbortAt():
                self._calls.abort(effect)

    def _fail(self, stream: ClientStream, explanation: str) -> None:
        if explanation:
            endings.explain(stream.request.external_req_id or stream.request_id, explanation)
        self._enqueue([(stream, EngineCoreOutput(stream.request_id, [], finish_reason=FinishReason.ERROR))], None)

    async def _probe(self, owner: Owner) -> None:
        last_heard = owner.last_heard
        gone = await is_gone(owner.llumlet, self.credentials)
        self.core.probed(owner, last_heard, gone, time.monotonic())
        self.carry_out()

    def _answered(self, request_id: str, attempt: int, event: words.ReplayEvent) -> None:
        self.core.answered(request_id, attempt, event, time.monotonic())
        self.carry_out()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.core.due is not None:
            now = time.monotonic()
            due = max(self.core.due, now)
            self._timer = asyncio.get_running_loop().call_later(due - now, self._tick, due)

    def _tick(self, due: float) -> None:
        self.catch_up(due)
        self.core.tick(time.monotonic())
        self.carry_out()

    # Watching

    def catch_up(self, due: float) -> bool:
        """Forgives others the time for which this process stood still, if it comes only now to what was `due`. Returns
        whether it has stood still."""
        seconds = self._standstills.since(due)
        if seconds:
            self.core.forgive(seconds, time.monotonic())
        return seconds > 0

    def look(self) -> None:
        """Several times a second."""
        client, core = self.client, self.core
        if not core.home_dead and self._homes_are_dead():
            self.engine_died()
        if client.client_index == 0 and not core.home_dead:
            # One of several API servers counts for all.
            self._metrics.look(client.core_engines)
        core.look(time.monotonic())
        self.carry_out()
        self._metrics.count_replays(core.num_replayed)
        over = core.home_dead and not (len(core.streams) or core.is_busy)
        if over and not self._has_drained and client._finalizer.alive:
            logger.warning("llumlet: the engine is dead and the last stream has ended; shutting down")
            asyncio.get_running_loop().run_in_executor(None, client.shutdown)
        self.peers.keep_fresh()

    def _homes_are_dead(self) -> bool:
        """True if the own engines are dead, for an API server among several, whose engines belong to their parent
        process: nobody else tells it."""
        if self.client.resources.engine_manager is not None:
            return False
        homes = [self.core.own_engine(self._instance_of(engine)) for engine in self.client.core_engines]
        return any(home is not None and home.dead for home in homes)

    def engine_died(self) -> None:
        """The process of the home engine has ended. Any thread."""
        # With this set, vLLM refuses new requests and reports itself unhealthy, but its output tasks go on.
        self.client.resources.engine_dead = True
        loop = self.loop
        if loop is None or loop.is_closed():
            self.client.shutdown()
            return
        if self._has_drained:
            logger.info("llumlet: the engine has ended")
        else:
            logger.error("llumlet: the engine has died; its requests go on elsewhere if they can")
        post(loop, self.bury_home)

    def _output_of(self, part: Part) -> EngineCoreOutput:
        payload = part.payload
        if isinstance(payload, wire.TokenOutput):
            output = engine_output_from(payload, part.skip, part.count, part.finished, self._form.experts)
            output.trace_headers = _ours(part.stream).request.trace_headers
            return output
        assert isinstance(payload, EngineCoreOutput)
        return sliced(payload, part.skip, part.count, part.finished)

    def bury_home(self) -> None:
        self.core.home_died(time.monotonic())
        self.carry_out()


def _ours(stream: Stream | None) -> ClientStream:
    assert isinstance(stream, ClientStream)
    return stream


def _settled_moves_of(shell: OriginShell) -> Report:
    """Asks an engine of the client's, without keeping the client alive."""
    reference = weakref.ref(shell)

    async def report(engine: bytes, since: int) -> tuple[int, list[dict[str, Any]], dict[str, int]]:
        shell = reference()
        if shell is None:
            return since, [], {}
        last, records, counts = await shell.client._call_utility_async("llumlet_moves", since, engine=engine)
        return last, records, counts

    return report


def _receiver(shell: OriginShell) -> Receive:
    """A callback that does not keep the shell alive: the relay's task runs as long as the client does, not longer."""
    reference = weakref.ref(shell)

    def receive(identity: bytes, message: wire.ToOrigin) -> None:
        shell = reference()
        if shell is not None:
            shell.hear(identity, message)

    return receive


def _end(relay: RelaySocket, watch: asyncio.Task[None], metrics: MoveMetrics, peers: Peers) -> None:
    """Ends it, from any thread; once more does nothing."""
    relay.close()
    for stop in (watch.cancel, metrics.cancel, peers.cancel):
        post(watch.get_loop(), stop)
