# SPDX-License-Identifier: Apache-2.0
"""vLLM's engine client, able to follow its requests to other engines.

`llumnix_client_class(cls)` mixes this into any of vLLM's asynchronous clients. What it changes:

- a generation request carries the address of this process's relay, for life;
- outputs of its own engine go through the streams' gates on their way to vLLM's queue (`process_engine_outputs`, a hook
  that vLLM's receive task awaits right before it enqueues);
- outputs that come over the relay go through the same gates into the same queue, dressed as the home engine's: its
  index (vLLM's statistics know no other) and this host's clock (vLLM computes latencies from differences);
- an abort goes to whoever runs the request as well as down vLLM's own path, where the home engine sends it after the
  request. Neither has to arrive: a sender of unwanted outputs is told so each time.

- a stream whose owner is lost goes on at another engine (`frontend.replay`), and the death of the home engine's process
  ends this one only when the last stream has ended.

Between a gate and the queue nothing is awaited: two tasks receive, and a suspension there would swap tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.serial_utils import MsgpackEncoder

from llumlet.protocol import wire
from llumlet.protocol.ids import Epoch
from vllm_llumnix import config
from vllm_llumnix.adapters import Adapters
from vllm_llumnix.errors import ConfigError
from vllm_llumnix.frontend import attempts, endings
from vllm_llumnix.frontend.deaths import is_gone, steps_of
from vllm_llumnix.frontend.drain import drain
from vllm_llumnix.frontend.metrics import MoveMetrics, Report
from vllm_llumnix.frontend.owners import PROBE_SECONDS, Owner, Owners
from vllm_llumnix.frontend.peers import Peers
from vllm_llumnix.frontend.relay import Complaints, Receive, Relay
from vllm_llumnix.frontend.replay import Replay, why_not
from vllm_llumnix.frontend.seams import SEAMS
from vllm_llumnix.frontend.streams import Orphan, Stream, Streams
from vllm_llumnix.frontend.suspects import Suspects, Verdict
from vllm_llumnix.relay_keys import OriginKeys

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine import EngineCoreRequest, PauseMode
    from vllm.v1.engine.core_client import AsyncMPClient as _Client
else:
    _Client = object

logger = logging.getLogger("vllm.llumnix")

WATCH_SECONDS = 0.25

OutputHook = Callable[[Any, EngineCoreOutputs], Awaitable[None]]


@functools.cache
def llumnix_client_class(cls: type) -> type:
    """The subclass of vLLM's client class `cls` that follows requests; the same one each time."""
    return type(
        f"Llumnix{cls.__name__}",
        (LlumnixClientMixin, cls),
        {"__module__": cls.__module__, "_stock_hook": getattr(cls, "process_engine_outputs", None)},
    )


class LlumnixClientMixin(_Client):  # type: ignore[misc]
    """See the module docstring. All methods but `shutdown` run on the API server's event loop.

    Because of `process_engine_outputs`, vLLM's receive task holds the client from the first output on, as it does with
    its own data-parallel client: `shutdown`, not the garbage collector, ends it. Our own task holds nothing.
    """

    _stock_hook: OutputHook | None = None

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        settings = config.current()
        if settings is None:
            raise ConfigError([f"{config.CONFIG_VARIABLE} is not set"])
        self._settings = settings
        credentials = self._credentials = settings.credentials()
        self._relay_keys = OriginKeys(credentials) if credentials.tokens else None
        self.complaints = Complaints()
        """What went wrong on the relay, counted by kind."""
        self._owners = Owners()
        self._streams = Streams(vllm_config.model_config.get_vocab_size(), self.complaints.note)
        self._input_sessions: set[str] = set()
        self._relay: Relay | None = None
        self._adapters = Adapters(vllm_config.lora_config)
        self._peers = Peers(settings.peers, settings.cms, settings.own_ids, credentials, settings.reaches)
        self._suspects = Suspects(lambda: len(self._replay.targets(None)))
        self._replay = Replay(
            self._streams,
            self._owners,
            self._peers,
            credentials,
            lambda: self._ensure_relay().address,
            self._adapters,
            self._give_up,
            self._dismiss,
            self._suspects,
            self._dies,
        )
        self._watch: asyncio.Task[None] | None = None
        self._probes: dict[str, asyncio.Task[None]] = {}
        self._num_pauses = 0
        self._home_dead = False
        self._drained = False
        self._move_metrics = MoveMetrics(vllm_config.model_config.served_model_name, _settled_moves_of(self))
        super().__init__(vllm_config, *args, **kwargs)
        self._outlive_engine()

    @property
    def relay_address(self) -> str | None:
        """Where engines report our requests that moved; None until the event loop runs."""
        return self._relay.address if self._relay is not None else None

    def _ensure_output_queue_task(self) -> None:
        super()._ensure_output_queue_task()
        self._ensure_relay()

    def _ensure_relay(self) -> Relay:
        if self._relay is None:
            relay = Relay(self.ctx, self._settings.host, _receiver(self), self.complaints, self._relay_keys)
            relay.start()
            watch = asyncio.get_running_loop().create_task(_watch(weakref.ref(self)), name="llumnix-watch")
            weakref.finalize(self, _end, relay, watch, self._move_metrics, self._peers)
            self._relay, self._watch = relay, watch
            logger.info("llumlet: relay for requests that move listens on %s", relay.address)
        return self._relay

    def shutdown(self, timeout: float | None = None) -> None:
        self._drain(timeout or 0.0)
        if self._relay is not None and self._watch is not None:
            _end(self._relay, self._watch, self._move_metrics, self._peers)
        super().shutdown(timeout)

    def _drain(self, timeout: float) -> None:
        """Drain if a helper thread asks while the event loop serves streams, as vLLM's launcher does on SIGTERM."""
        loop = self._watch.get_loop() if self._watch is not None else None
        if loop is None or not loop.is_running() or loop is asyncio._get_running_loop():
            return
        if self._drained or self.resources.engine_dead or not self._finalizer.alive:
            return
        self._drained = True
        limit = config.drain_limit(self.vllm_config)
        seconds = max(timeout, self._settings.drain_seconds if self._peers.expected else 0.0)
        if limit is not None:
            seconds = min(seconds, limit)
        try:
            asyncio.run_coroutine_threadsafe(drain(self, seconds), loop).result()
        except Exception:
            # Outermost: whatever went wrong, the process has to end.
            logger.exception("llumlet: the drain failed")

    @property
    def peers(self) -> tuple[str, ...]:
        """Addresses of the llumlets that may take our engine's requests."""
        return self._peers.addresses

    @property
    def num_streams(self) -> int:
        """Generation requests whose clients are here, wherever they run."""
        return len(self._streams)

    def cut_streams(self) -> None:
        """End every stream with an error; vLLM's shutdown alone leaves clients waiting, and the server for them."""
        streams = self._streams.all()
        self._release(streams)
        for stream in streams:
            self._give_up(stream)

    # Requests

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        if not self._may_move(request):
            await super().add_request_async(request)
            return
        request.queue_server_address = self._ensure_relay().address
        if request.lora_request is not None:
            self._adapters.learn(request.lora_request)
        stream = Stream(request)
        self._streams.open(stream)
        try:
            await super().add_request_async(request)
        except BaseException:
            self._streams.close([request.request_id])
            raise
        if num_deaths := attempts.num_deaths.get():
            self._suspects.came_after(request.request_id, num_deaths, self._home_of(stream))

    def get_core_engine_for_request(self, request: EngineCoreRequest) -> bytes:
        """vLLM's choice, remembered: `reqs_in_flight` forgets it as soon as the engine reports the request finished."""
        engine: bytes = super().get_core_engine_for_request(request)
        stream = self._streams.get(request.request_id)
        if stream is not None:
            stream.home = engine
        return engine

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        closed = self._streams.close(request_ids)
        self._input_sessions.difference_update(request_ids)
        self._release(closed)
        unroutable = self._unroutable(closed)
        try:
            await super().abort_requests_async(request_ids)
            for engine, ids in unroutable.items():
                await self._send_input(EngineCoreRequestType.ABORT, ids, engine)
        finally:
            # The home engine reports the end of a request that it runs. If the request has moved, nobody does.
            self._settle(closed)

    async def add_lora_async(self, lora_request: LoRARequest) -> bool:
        added: bool = await super().add_lora_async(lora_request)
        self._adapters.learn(lora_request, reloaded=lora_request.load_inplace)
        return added

    async def remove_lora_async(self, lora_id: int) -> bool:
        self._adapters.forget(lora_id)
        removed: bool = await super().remove_lora_async(lora_id)
        return removed

    async def pause_scheduler_async(self, mode: PauseMode = "abort", clear_cache: bool = True) -> None:
        with self._expecting_aborts(mode):
            await super().pause_scheduler_async(mode, clear_cache)

    async def sleep_async(self, level: int = 1, mode: PauseMode = "abort") -> None:
        with self._expecting_aborts(mode):
            await super().sleep_async(level, mode)

    @contextlib.contextmanager
    def _expecting_aborts(self, mode: PauseMode) -> Iterator[None]:
        """While the engine is told to abort its requests, their ends are no sign of a lost owner."""
        self._num_pauses += mode == "abort"
        try:
            yield
        finally:
            self._num_pauses -= mode == "abort"

    def _may_move(self, request: EngineCoreRequest) -> bool:
        """Pooling requests, sessions with streaming input and requests that end at once keep to vLLM's own ways."""
        if request.sampling_params is None or request.abort_immediately:
            return False
        if request.resumable:
            self._input_sessions.add(request.request_id)
            return False
        if request.request_id in self._input_sessions:  # the end of a session's input
            self._input_sessions.discard(request.request_id)
            return False
        return True

    def _release(self, streams: list[Stream]) -> None:
        """Tell the owners of requests that have moved that nobody waits for them any more."""
        unwanted: dict[Owner, list[tuple[str, Epoch]]] = {}
        for stream in streams:
            if stream.owner is not None:
                unwanted.setdefault(stream.owner, []).append((stream.request_id, stream.epoch))
        for owner, requests in unwanted.items():
            self._ensure_relay().send(owner.identity, wire.Release(requests))

    def _unroutable(self, streams: list[Stream]) -> dict[bytes, list[str]]:
        """Aborts that vLLM's data-parallel client would drop, by home engine.

        It finds the engine in `reqs_in_flight`, and a request that left its engine may be there no more; but the home
        engine is where an abort is sent on from.
        """
        in_flight = getattr(self, "reqs_in_flight", None)
        by_engine: dict[bytes, list[str]] = {}
        if in_flight is not None and not self.resources.engine_dead:
            for stream in streams:
                if stream.home is not None and stream.request_id not in in_flight:
                    by_engine.setdefault(stream.home, []).append(stream.request_id)
        return by_engine

    def _settle(self, streams: list[Stream]) -> None:
        """Do what vLLM's data-parallel client does when the home engine reports requests finished; again is nothing."""
        in_flight = getattr(self, "reqs_in_flight", None)
        if in_flight is None:
            return
        for stream in streams:
            engine = in_flight.pop(stream.request_id, None)
            if engine is not None:
                self.engine_inflight[engine] -= 1

    # Outputs of our own engines

    @staticmethod
    async def process_engine_outputs(self: LlumnixClientMixin, outputs: EngineCoreOutputs) -> None:
        """vLLM's receive task awaits this, then enqueues `outputs`. Nothing may be awaited after the gate."""
        stock_hook = type(self)._stock_hook
        if stock_hook is not None:
            await stock_hook(self, outputs)
        if outputs.outputs and (ended := self._streams.take_home(outputs, self._abort_is_loss)):
            self._settle(ended)

    # Outputs and questions of other engines

    def _on_relay(self, identity: bytes, message: wire.ToOrigin) -> None:
        relay = self._relay
        assert relay is not None
        if isinstance(message, wire.TokenBatch | wire.HandedOver | wire.Hello) and not self._may_call(message.llumlet):
            return
        match message:
            case wire.TokenBatch():
                owner = self._owners.heard(identity, message.instance, message.incarnation)
                owner.llumlet = message.llumlet
                taken = self._streams.take_batch(message, owner, self._abort_is_loss)
                if self._suspects.any_tried:
                    for stream, _ in taken.delivered:
                        self._suspects.heard(stream.request_id, len(stream.delivered))
                self._enqueue(taken.delivered, message.weight_version)
                if taken.unwanted:
                    relay.send(identity, wire.Release(list(taken.unwanted.items())))
            case wire.Heartbeat():
                owner = self._owners.heard(identity, message.instance, message.incarnation)
                owner.says(message.health)
                relay.send(identity, wire.HeartbeatAck(self._streams.claim(owner, message.requests)))
            case wire.HandedOver():
                next_owner = self._owners.expected(message.instance, message.incarnation, message.llumlet)
                self._streams.hand_over(message, next_owner)
            case wire.Parting():
                self._owners.heard(identity, message.instance, message.incarnation).parted = True
            case wire.FenceQuestion():
                relay.send(identity, self._streams.fence(message, self._owners.at(identity)))
            case wire.Hello():
                owner = self._owners.heard(identity, message.instance, message.incarnation)
                owner.llumlet, owner.digest = message.llumlet, message.digest
                if message.version != wire.RELAY_VERSION:
                    self.complaints.note(
                        "version",
                        f"{message.instance} speaks version {message.version}, we {wire.RELAY_VERSION}",
                    )

    def _may_call(self, llumlet: str) -> bool:
        """Whether an engine may say that its llumlet, or another's, is there: silent owners are called."""
        problem = self._settings.reaches.why_not_llumlet(llumlet)
        if problem is not None:
            self.complaints.note("bad_address", problem)
        return problem is None

    # Lost owners

    def _look_after_streams(self) -> None:
        """Called several times a second: probe who is silent, and let orphans go on elsewhere."""
        now = time.monotonic()
        for owner in self._owners.all():
            silent = now - owner.last_heard > PROBE_SECONDS and not owner.parted
            if silent and owner.llumlet and not owner.dead and owner.llumlet not in self._probes:
                self._probes[owner.llumlet] = asyncio.get_running_loop().create_task(self._probe(owner))
        if not self._home_dead and self._homes_are_dead():
            self._engine_died()
        if self.client_index == 0 and not self._home_dead:
            # One of several API servers counts for all.
            self._move_metrics.look(self.core_engines)
        for orphan in self._streams.orphans(self._home_of):
            self._let_go_on(orphan)
        self._suspects.keep(self._streams)
        self._suspects.advance()
        if self._home_dead and not (len(self._streams) or self._replay.busy) and self._finalizer.alive:
            logger.warning("llumlet: the engine is dead and the last stream has ended; shutting down")
            asyncio.get_running_loop().run_in_executor(None, self.shutdown)

    def _homes_are_dead(self) -> bool:
        """For an API server among several, whose engines belong to their parent process: nobody else tells it."""
        if self.resources.engine_manager is not None:
            return False
        ranks = [int.from_bytes(engine, "little") for engine in self.core_engines]
        homes = [self._owners.named(self._settings.for_rank(rank).instance_id) for rank in ranks]
        return any(home is not None and home.dead for home in homes)

    async def _probe(self, owner: Owner) -> None:
        last_heard = owner.last_heard
        try:
            if await is_gone(owner.llumlet, self._credentials) and owner.last_heard == last_heard:
                owner.died("its process is gone", time.monotonic())
        finally:
            del self._probes[owner.llumlet]

    def _home_of(self, stream: Stream) -> Owner | None:
        """The engine that the request was sent to; None until it has said hello, or died."""
        rank = int.from_bytes(stream.home or self.core_engine, "little")
        instance = self._settings.for_rank(rank).instance_id
        home = self._owners.named(instance)
        if self._home_dead:
            # Also one that has died before it could say hello.
            home = home or self._owners.expected(instance, incarnation="", llumlet="")
            home.died("its engine has died", time.monotonic())
        return home

    def _abort_is_loss(self, stream: Stream) -> bool:
        """An engine ends a request as aborted, which nobody here has asked for: it shuts down, say."""
        if self._num_pauses or not self._finalizer.alive:
            return False
        return self._let_go_on(Orphan(stream, "its engine gave it up", stream.owner or self._home_of(stream)))

    def _let_go_on(self, orphan: Orphan) -> bool:
        """Start the request elsewhere. False if that cannot be: then it stays as it is, or ends if it is hopeless."""
        stream, home = orphan.stream, self._home_of(orphan.stream)
        if orphan.lost is not None and self._dies(stream, orphan.lost):
            self._dismiss(stream, orphan.lost)
            return True
        problem = never = why_not(stream.request, stream.delivered)
        if problem is None and (home is None or not home.digest):
            problem = "it is not known which engines could"
        if problem is None and not self._replay.targets(orphan.lost):
            problem = "there is no other engine (--llumlet-peers, --llumlet-cms)"
        if problem is None:
            assert home is not None
            self._dismiss(stream, orphan.lost or stream.owner or home)
            self._replay.begin(stream, orphan.lost, orphan.reason, home.digest)
            return True
        if orphan.hopeless or (never and orphan.lost is not None and orphan.lost.dead):
            logger.error("llumlet: request %s ends: %s, and %s", stream.request_id, orphan.reason, problem)
            self._give_up(stream)
        return False

    def _dies(self, stream: Stream, lost: Owner, ends: bool = False) -> bool:
        """Whether the request is the death of its engines, and was ended for that; else it may be a suspect now."""
        steps = steps_of(lost, time.monotonic(), ends)
        if steps is None:
            return False
        request_id, delivered = stream.request_id, len(stream.delivered)
        if self._suspects.judge(request_id, lost, steps, delivered) is not Verdict.GUILTY:
            return False
        names, num_before = self._suspects.deaths(request_id), self._suspects.num_before(request_id)
        names = ["unknown here"] * num_before + names
        reason = (
            f"This request was in the step in which {len(names)} engines died or hung, one after the other "
            f"({', '.join(names)}), the last time on trial. It is not sent to a third."
        )
        logger.error("llumlet: request %s ends: %s", request_id, reason)
        endings.explain(stream.request.external_req_id or request_id, reason)
        self._give_up(stream)
        return True

    def _dismiss(self, stream: Stream, owner: Owner) -> None:
        """Tell an owner that may wake up, or live, that its epoch counts no more."""
        if owner.identity:
            self._ensure_relay().send(owner.identity, wire.Release([(stream.request_id, stream.epoch)]))

    def _give_up(self, stream: Stream) -> None:
        failed = self._streams.fail(stream)
        self._enqueue([(stream, failed)], None)

    # The death of the home engine's process

    def start_engine_core_monitor(self) -> None:
        """vLLM's monitor shuts the client down when an engine process ends, and every stream with it."""
        manager = self.resources.engine_manager
        if manager is None:
            return
        reference = weakref.ref(self)

        def monitor() -> None:
            manager.monitor_engine_liveness()
            client = reference()
            if client is not None and client._finalizer.alive and not client.resources.engine_dead:
                client._engine_died()

        threading.Thread(target=monitor, daemon=True, name="llumnix-engine-monitor").start()

    def _outlive_engine(self) -> None:
        """vLLM's receive task ends when the engine says that it is dying; ours goes on with what the relay brings."""
        resources, reference = self.resources, weakref.ref(self)

        def validate_alive(frames: list[Any]) -> None:
            if len(frames) == 1 and frames[0].buffer == EngineCoreProc.ENGINE_CORE_DEAD:
                frames[:] = [_NO_OUTPUTS]
                if (client := reference()) is not None and not resources.engine_dead:
                    client._engine_died()

        SEAMS.wrap(resources, "BackgroundResources.validate_alive", validate_alive)

    def _engine_died(self) -> None:
        """Any thread."""
        # With this set, vLLM refuses new requests and reports itself unhealthy, but its output tasks go on.
        self.resources.engine_dead = True
        loop = self._watch.get_loop() if self._watch is not None else None
        if loop is None or loop.is_closed():
            self.shutdown()
            return
        logger.error("llumlet: the engine has died; its requests go on elsewhere if they can")
        with contextlib.suppress(RuntimeError):  # closed between the question and the call
            loop.call_soon_threadsafe(self._bury_home)

    def _bury_home(self) -> None:
        self._home_dead = True
        self._look_after_streams()

    def _enqueue(self, delivered: list[tuple[Stream, EngineCoreOutput]], weight_version: str | None) -> None:
        """Into vLLM's queue, as if each output had come from the engine that its request was sent to."""
        by_engine: dict[int, list[EngineCoreOutput]] = {}
        ended: list[Stream] = []
        for stream, output in delivered:
            index = int.from_bytes(stream.home or self.core_engine, "little")
            by_engine.setdefault(index, []).append(output)
            if output.finished:
                ended.append(stream)
        for index, outputs in by_engine.items():
            self.outputs_queue.put_nowait(
                EngineCoreOutputs(
                    engine_index=index,
                    outputs=outputs,
                    finished_requests={o.request_id for o in outputs if o.finished} or None,
                    weight_version=weight_version,
                )
            )
        self._settle(ended)


_NO_OUTPUTS = MsgpackEncoder().encode(EngineCoreOutputs())[0]


async def _watch(reference: weakref.ref[LlumnixClientMixin]) -> None:
    """Look after the client's streams for as long as there is a client."""
    while True:
        await asyncio.sleep(WATCH_SECONDS)
        client = reference()
        if client is None:
            return
        try:
            client._look_after_streams()
            client._peers.keep_fresh()
        except Exception:
            # Outermost: the next look may find what this one stumbled over gone.
            logger.exception("llumlet: looking after the streams failed")
        del client


def _end(relay: Relay, watch: asyncio.Task[None], metrics: MoveMetrics, peers: Peers) -> None:
    """From any thread. Again is nothing."""
    relay.close()
    loop = watch.get_loop()
    if not loop.is_closed():
        with contextlib.suppress(RuntimeError):  # closed between the question and the call
            loop.call_soon_threadsafe(watch.cancel)
            loop.call_soon_threadsafe(metrics.cancel)
            loop.call_soon_threadsafe(peers.cancel)


def _settled_moves_of(client: LlumnixClientMixin) -> Report:
    """Asks an engine of the client's, without keeping the client alive."""
    reference = weakref.ref(client)

    async def report(engine: bytes, since: int) -> tuple[int, list[dict[str, Any]]]:
        client = reference()
        if client is None:
            return since, []
        last, records = await client._call_utility_async("llumlet_moves", since, engine=engine)
        return last, records

    return report


def _receiver(client: LlumnixClientMixin) -> Receive:
    """A callback that does not keep the client alive: the relay's task runs as long as the client does, not longer."""
    reference = weakref.ref(client)

    def receive(identity: bytes, message: wire.ToOrigin) -> None:
        client = reference()
        if client is not None:
            client._on_relay(identity, message)

    return receive
