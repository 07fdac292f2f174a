# SPDX-License-Identifier: Apache-2.0
"""Instances made of production parts around fake workers, their clients, and what must hold in the end.

An instance is an engine (`engine.Engine`) and its API server: vLLM's own client class, made to follow moves, on the
test's event loop. The network between them is `network.Network`. Deadlines are those of production divided by ten or
so: `HURRIED`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import random
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from unittest import mock

import numpy as np
import zmq.asyncio
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import FinishReason, core_client
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.request import Request

from llumlet.contract.client import LlumletClient
from llumlet.contract.errors import LlumletCallFailed
from llumlet.contract.types import MigrateRequest, MovePhase, MoveProgress
from llumlet.process.addresses import Address
from llumlet.protocol.move.destination import State as DestinationState
from llumlet.protocol.move.plan import Plan
from llumlet.protocol.origin import origin, owners, replay, streams
from llumsched.up.ports import free_ports
from tests.frontend.fakes import close_client, new_client, request
from tests.shells.engine import NO_MESSAGE, Engine, engine_config
from tests.shells.model import BLOCK_SIZE, FIRST_TOKEN, NUM_TOKENS, Reference, cells_of
from tests.shells.network import Network, RelayProxy
from vllm_llumnix.config import LlumletConfig
from vllm_llumnix.engine.load import progress
from vllm_llumnix.engine.moves import migrations
from vllm_llumnix.engine.recovery import claims
from vllm_llumnix.engine.service import agent as agent_module
from vllm_llumnix.engine.service import relay_sender as engine_relay
from vllm_llumnix.frontend import liveness
from vllm_llumnix.switch import CONFIG_VARIABLE

T = TypeVar("T")

LEASE_SECONDS = 0.6
HURRIED: dict[tuple[Any, str], float] = {
    (agent_module, "CALL_SECONDS"): 3.0,
    (engine_relay, "HEARTBEAT_SECONDS"): 0.05,
    (engine_relay, "ORIGIN_SECONDS"): 3.0,
    (progress, "PATIENCE_SECONDS"): 0.5,
    (progress, "RESCUE_SECONDS"): 0.3,
    (claims, "LEASE_SECONDS"): 3.0,
    (streams, "GAP_SECONDS"): 0.15,
    (streams, "GRACE_SECONDS"): 0.3,
    (streams, "PATIENCE_SECONDS"): 0.5,
    (streams, "CONFIRM_SECONDS"): 0.4,
    (streams, "WEIGHTS_SECONDS"): 0.5,
    (owners, "PROBE_SECONDS"): 0.2,
    (origin, "PROBE_SECONDS"): 0.2,
    (owners, "SUSPECT_SECONDS"): 0.3,
    (owners, "LOST_SECONDS"): 0.7,
    (liveness, "LOOK_SECONDS"): 0.05,
    (replay, "CALL_SECONDS"): 1.0,
    (replay, "RETRY_SECONDS"): 0.05,
}
PLAN = {
    "reserve_s": 3.0,
    "loop_s": 3.0,
    "round_s": 3.0,
    "commit_s": 3.0,
    "withdraw_s": 3.0,
    "fence_s": 3.0,
    "ask_s": 0.1,
}
SECONDS = 15.0
"""How long anything is waited for before the test fails; `Cluster.seconds` for the end of all moves, and until nothing
is held."""
LET_GO_SECONDS = 0.5
"""In which an engine that is not the owner hears of it."""
MAX_TOKENS = 350
SIDE_BY_SIDE = 6
LATE_SECONDS = 0.1
REPETITIONS = 3


Story = Callable[[], Coroutine[Any, Any, list[str]]]


async def side_by_side(stories: Iterable[Story]) -> list[str]:
    """What all of them find, a few clusters at a time: most of their time is waiting for deadlines.

    A machine that is late to the deadlines makes engines look lost. What a story finds then counts for nothing: it is
    told again when the others have ended.
    """
    turn = asyncio.Semaphore(SIDE_BY_SIDE)

    async def take_turn(story: Story) -> _Told:
        async with turn:
            return await _tell(story)

    async with asyncio.TaskGroup() as group:
        first = {story: group.create_task(take_turn(story)) for story in stories}
    found = []
    for story, task in first.items():
        told = task.result()
        for _ in range(REPETITIONS):
            if not told.void:
                break
            told = await _tell(story)
        found += told.found
    return found


def retold(story: Callable[..., Coroutine[Any, Any, list[str]]]) -> Callable[..., Coroutine[Any, Any, None]]:
    """A test of one story, which returns what is wrong; told again as by `side_by_side`."""

    @functools.wraps(story)
    async def test(*args: Any, **kwargs: Any) -> None:
        found = await side_by_side([functools.partial(story, *args, **kwargs)])
        assert not found, "\n".join(found)

    return test


class _Told(NamedTuple):
    found: list[str]
    late: float
    """Seconds; how long the event loop once took too long to come to what was due."""

    @property
    def void(self) -> bool:
        return bool(self.found) and self.late > LATE_SECONDS


async def _tell(story: Story) -> _Told:
    late = 0.0

    async def watch() -> None:
        nonlocal late
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.01)
            late = max(late, time.monotonic() - began - 0.01)

    watching = asyncio.create_task(watch())
    try:
        found = await story()
    except (AssertionError, TimeoutError):
        found = [traceback.format_exc()]
    finally:
        watching.cancel()
    return _Told(found, late)


class Stream:
    """One client's request: what it has received, and what it should have."""

    def __init__(self, at: Instance, request_id: str, reference: Reference, max_tokens: int) -> None:
        self.at = at
        self.request_id = request_id
        self.reference = reference
        self.max_tokens = max_tokens
        self.tokens: list[int] = []
        self.finish: FinishReason | None = None
        self.left = False
        """The client has gone away."""

    def take(self, tokens: list[int], finish: FinishReason | None) -> None:
        """What comes after the last is ignored, as by vLLM's output processor: its home engine may not have heard yet
        that the request went on, and ended, elsewhere.
        """
        if self.finish is not None or self.left:
            return
        self.tokens += tokens
        self.finish = finish

    async def reaches(self, num_tokens: int, seconds: float = SECONDS) -> None:
        """Returns when so many tokens have arrived, or the last."""
        arrived = lambda: len(self.tokens) >= num_tokens or self.finish is not None  # noqa: E731
        await until(arrived, lambda: f"{self.request_id} has only {len(self.tokens)} tokens", seconds)

    @property
    def faults(self) -> list[str]:
        """What a client could complain about."""
        expected = self.reference(len(self.tokens))
        wrong = next((at for at, pair in enumerate(zip(self.tokens, expected, strict=True)) if len({*pair}) > 1), None)
        faults = []
        if wrong is not None:
            faults.append(f"{self.request_id}: token {wrong} of {len(self.tokens)} is wrong")
        if not self.left and self.finish is not FinishReason.LENGTH:
            faults.append(f"{self.request_id}: ended with {self.finish} after {len(self.tokens)} tokens")
        if not self.left and len(self.tokens) != self.max_tokens:
            faults.append(f"{self.request_id}: {len(self.tokens)} tokens instead of {self.max_tokens}")
        return faults


class Instance:
    """An engine and its API server. Made by `Cluster`."""

    def __init__(
        self, name: str, config: LlumletConfig, model: Path, asynchronous: bool, directory: Path, cache_stays: bool
    ) -> None:
        self.name = name
        with (
            mock.patch.dict("os.environ", {CONFIG_VARIABLE: config.to_json()}),
            mock.patch.object(core_client, "VLLM_ENGINE_READY_TIMEOUT_S", 20),
            ThreadPoolExecutor(1) as starter,
        ):
            # Each waits for the other.
            vllm_config = engine_config(model, asynchronous=asynchronous)
            starting = starter.submit(lambda: Engine(vllm_config, directory, cache_stays=cache_stays))
            self.client = new_client(AsyncMPClient, directory)
            self.engine = starting.result()
        self.engine.start()
        self.streams: dict[str, Stream] = {}
        self.dead = False
        """The engine; its API server outlives it."""
        self._slots = self.engine.scheduler.max_num_active_reqs
        self._reader: asyncio.Task[None] | None = None
        self.proxy: RelayProxy | None = None
        self._ending = contextlib.ExitStack()

    @property
    def address(self) -> Address:
        return self.engine.agent.context.address

    def listen(self, network: Network, context: zmq.asyncio.Context) -> None:
        network.name(self.name, self.engine.kvconn.thread.event_loop, self.address.port)
        relay = self.client.origin.ensure_relay()
        self.proxy = RelayProxy(network, context, relay.address)
        relay.address = self.proxy.address
        self._reader = asyncio.create_task(self._read(), name=f"reader-{self.name}")

    async def _read(self) -> None:
        while True:
            outputs = await self.client.get_output_async()
            for output in outputs.outputs:
                stream = self.streams.get(output.request_id)
                if stream is not None:
                    stream.take(list(output.new_token_ids), output.finish_reason)

    async def die(self) -> None:
        """As with `kill -9` of the engine: its loop stands still, nobody listens any more, and its API server knows."""
        self.dead = True
        self.engine.model_executor.turns.clear()
        thread = self.engine.kvconn.thread
        await asyncio.to_thread(thread.stop)
        thread.stop = lambda: None  # type: ignore[method-assign]
        # Its sockets are the test's to close.
        self._ending.enter_context(mock.patch.object(self.client, "shutdown"))
        self.client.origin.engine_died()

    async def close(self) -> None:
        """Also of one that listens to nobody yet, as another could not be made."""
        self._ending.close()
        self.engine.model_executor.pace = 0.0
        self.engine.model_executor.turns.set()
        # Its end is no surprise, and nothing is to go on elsewhere; nor does the client end by itself on hearing of it.
        self.client.resources.engine_dead = True
        if self.client.origin.watch is not None:
            self.client.origin.watch.cancel()
        await asyncio.to_thread(self.engine.stop_loop)
        await self.client.input_socket.send_multipart([self.client.core_engine, NO_MESSAGE])
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        await asyncio.to_thread(self.engine.stop_sockets)
        if self.proxy is not None:
            await self.proxy.close()
        close_client(self.client)
        await asyncio.sleep(0)

    @property
    def held(self) -> list[str]:
        """What is still held here; nothing when no request and no move is left."""
        engine, client = self.engine, self.client
        port, agent, kvconn = engine.kvconn.port, engine.agent, engine.kvconn
        pool = port.block_pool
        moves = list(agent.arrivals.moves.values())
        counts = {
            "requests": len(engine.scheduler.requests),
            "blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
            "pins": len(port._pins),
            "reservations": len(port.reservations._reserved),
            "slots of reservations": len(port.reservations._with_slot),
            "batch slots": self._slots - engine.scheduler.max_num_active_reqs,
            "frozen": len(port._frozen) + len(port._parked) + len(port._eligible),
            "fences": len(kvconn._fences),
            "newcomers": len(port.newcomers),
            "departures": len(kvconn._leaving) + len(agent.departures.moves),
            "moves out": agent.departures.slots.num_requests,
            "moves in": agent.arrivals.slots.num_requests + len(agent.arrivals._unsettled),
            "draining": sum(1 for move in moves if move.machine.state is DestinationState.DRAINING),
            "callers": sum(len(move.callers) for move in moves),
            "what was moved": sum(1 for move in moves if move.request or move.blocks._at_source),
            "claims": len(agent.claims._claims) + len(agent.claims._waiting),
            "guests": len(agent.context.relay._guests),
            "questions": len(agent.context.relay._questions),
            "load": sum(port.load.snapshot().load),
            "names": len(port.load.snapshot().waiting) + len(port.load._entries) + len(port.load._exact),
            "blocks by the counters": port.num_blocks - port.load.snapshot().num_free_blocks,
            "streams": len(client.origin.core.streams),
            "replays": len(client.origin.core.replays),
            "suspects": len(client.origin.core.suspects),
            "trials": int(engine.kvconn.trials._open is not None and not engine.kvconn.trials._open.is_over),
        }
        return [f"{self.name} holds {count} {what}" for what, count in counts.items() if count]

    def published_wrongly(self, stream: Stream) -> list[str]:
        """Blocks that this engine would share for the stream's tokens, whose bytes are not those tokens'."""
        engine = self.engine
        tokens = stream.reference.prompt + stream.reference.output[: len(stream.tokens)]
        twin = Request("twin", tokens, SamplingParams(max_tokens=1), None, block_hasher=engine.request_block_hasher)
        expected = cells_of(tokens)
        cells = engine.model_executor.runner.cells
        wrong = []
        for index, block_hash in enumerate(twin.block_hashes):
            found = engine.kvconn.port.block_pool.get_cached_block(block_hash, [0])
            here = slice(index * BLOCK_SIZE, (index + 1) * BLOCK_SIZE)
            if found and not np.array_equal(cells[:, found[0].block_id], expected[:, here]):
                wrong.append(f"{self.name} publishes wrong bytes of {stream.request_id} as block {index}")
        return wrong


class Cluster:
    """Instances A, B, … around one network. `deadlines` are given to the plan of every move from then on."""

    def __init__(self, network: Network, seed: int) -> None:
        self.network = network
        self.random = random.Random(seed)
        self.instances: dict[str, Instance] = {}
        self.streams: list[Stream] = []
        self.deadlines: dict[str, Any] = dict(PLAN)
        self.outcomes: Counter[str] = Counter()
        """Of moves."""
        self.last_report = MoveProgress()
        self.seconds = SECONDS
        self._numbers = itertools.count(1)
        self._clients: dict[str, LlumletClient] = {}
        self._tasks: list[asyncio.Task[Any]] = []

    def __getitem__(self, name: str) -> Instance:
        return self.instances[name]

    async def stream(
        self, at: str = "A", num_prompt: int = 100, max_tokens: int = MAX_TOKENS, request_id: str = ""
    ) -> Stream:
        """A request of a client of `at`."""
        instance = self[at]
        prompt = [FIRST_TOKEN + self.random.randrange(NUM_TOKENS) for _ in range(num_prompt)]
        stream = Stream(instance, request_id or f"{at}-{next(self._numbers)}", Reference(prompt), max_tokens)
        instance.streams[stream.request_id] = stream
        self.streams.append(stream)
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        await instance.client.add_request_async(
            request(stream.request_id, prompt_token_ids=prompt, sampling_params=params)
        )
        return stream

    async def leave(self, stream: Stream) -> None:
        """The client goes away."""
        stream.left = True
        await stream.at.client.abort_requests_async([stream.request_id])

    @property
    def living(self) -> list[Instance]:
        return [instance for instance in self.instances.values() if not instance.dead]

    def llumlet(self, name: str) -> LlumletClient:
        client = self._clients.get(name)
        if client is None:
            client = self._clients[name] = LlumletClient(self[name].address)
        return client

    async def migrate(self, stream: Stream, source: str = "A", destination: str = "B", **more: Any) -> MoveProgress:
        """Returns the last report: what became of the move."""
        address = self[destination].address
        asked = MigrateRequest(
            src_engine_id=source,
            dst_engine_id=destination,
            dst_engine_ip=address.host,
            dst_engine_port=address.port,
            request_ids=[stream.request_id],
            **more,
        )
        last = MoveProgress()
        async for event in self.llumlet(source).migrate(asked, deadline_s=SECONDS):
            if event.WhichOneof("event") == "progress":
                last = event.progress
        self.outcomes[MovePhase.Name(last.phase).lower()] += 1
        self.last_report = last
        return last

    def begin(self, action: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run it beside the test; `close` waits for it."""
        task = asyncio.create_task(action)
        self._tasks.append(task)
        return task

    def on_loop(self, at: str, action: Callable[[], None]) -> None:
        """Between two steps of an engine."""
        kvconn = self[at].engine.kvconn

        def call() -> None:
            kvconn.call(action)

        kvconn.thread.post(call)

    @staticmethod
    async def try_call(call: Awaitable[Any]) -> None:
        """A call whose answer matters to nobody."""
        with contextlib.suppress(LlumletCallFailed):
            await call

    def owners(self, stream: Stream) -> set[str]:
        """Engines that would go on with the request."""
        return {
            instance.name
            for instance in self.living
            if (request := instance.engine.scheduler.requests.get(stream.request_id)) is not None
            and not request.is_finished()
        }

    def published(self, stream: Stream, since: float = 0.0) -> dict[str, int]:
        """How many tokens of the request each engine has put out since then."""
        return {
            name: sum(count for at, one, count in instance.engine.published if at > since and one == stream.request_id)
            for name, instance in self.instances.items()
        }

    async def settled(self, stream: Stream) -> list[str]:
        """Returns when every move's fate is known, nothing is on its way, and not more than one engine has the request.

        What is wrong: that it took long after the last of these for the others to let it go.
        """
        several_since: float | None = None
        several_seconds = 0.0

        def holds() -> bool:
            nonlocal several_since, several_seconds
            several = len(self.owners(stream)) > (not stream.left)
            if not (several and self._is_calm()):
                several_since = None
            else:
                several_since = several_since or time.monotonic()
                several_seconds = max(several_seconds, time.monotonic() - several_since)
            return self._is_calm() and not several and not self._is_waiting(stream)

        problem = lambda: f"not settled: {self.owners(stream)}, {self.held()}"  # noqa: E731
        wait = functools.partial(until, holds, problem, self.seconds)
        await wait()
        # Missing tokens show only when later ones arrive: it must still hold after some.
        while not (stream.finish or stream.left):
            await stream.reaches(len(stream.tokens) + 20, self.seconds)
            if holds():
                break
            await wait()
        late = f"{stream.request_id}: too many engines went on with it for {several_seconds:.1f} s"
        return [late] if several_seconds > LET_GO_SECONDS else []

    def _is_calm(self) -> bool:
        """All messages have arrived, and nobody decides anything any more."""
        agents = [instance.engine.agent for instance in self.living]
        return (
            self.network.quiet
            and not any(agent.departures.moves or agent.arrivals.pending() for agent in agents)
            and not any(instance.client.origin.core.is_busy for instance in self.instances.values())
        )

    def _is_waiting(self, stream: Stream) -> bool:
        """Whether the client waits for a request that nobody has."""
        return not (stream.left or stream.finish or self.owners(stream))

    async def lose(self, name: str) -> None:
        """An engine dies. Returns when all streams of its API server go on elsewhere."""
        core = self[name].client.origin.core
        await self[name].die()
        await until(lambda: core.num_replayed and not core.is_busy, lambda: "streams still wait for an engine", SECONDS)

    def hurry(self) -> None:
        for instance in self.instances.values():
            instance.engine.model_executor.pace = 0.0

    def held(self) -> list[str]:
        return [line for instance in self.living for line in instance.held]

    async def verdict(self, watched: Stream) -> list[str]:
        """Let all streams end, and say what is wrong: nothing, one hopes."""
        faults: list[str] = []
        try:
            faults += await self.settled(watched)
            since = time.monotonic()
            self.hurry()
            await until(
                lambda: all(stream.finish or stream.left for stream in self.streams),
                lambda: "streams do not end",
                SECONDS,
            )
            publishers = [name for name, count in self.published(watched, since).items() if count]
            if len(publishers) > 1:
                faults.append(f"{publishers} all publish {watched.request_id}")
            await until(lambda: not self.held(), lambda: "; ".join(self.held()), self.seconds)
        except TimeoutError as error:
            faults.append(str(error))
        faults += [fault for stream in self.streams for fault in stream.faults]
        for instance in self.living:
            faults += [f"{instance.name}: {instance.engine.failure!r}"] if instance.engine.failure else []
            faults += [fault for stream in self.streams for fault in instance.published_wrongly(stream)]
        return faults

    async def close(self) -> None:
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for client in self._clients.values():
            await client.close()
        for instance in self.instances.values():
            await instance.close()


_clusters: dict[Any, Cluster] = {}
"""By the event loops of their llumlets."""


@contextlib.contextmanager
def hurried() -> Iterator[None]:
    """Production code with short deadlines; those of a move's plan are what its cluster says."""

    def plan(**fields: Any) -> Plan:
        return Plan(**(fields | _clusters[asyncio.get_running_loop()].deadlines))

    with contextlib.ExitStack() as stack:
        for (module, name), value in HURRIED.items():
            stack.enter_context(mock.patch.object(module, name, value))
        stack.enter_context(mock.patch.object(migrations, "Plan", plan))
        yield


@contextlib.asynccontextmanager
async def cluster_of(
    model: Path, names: str = "ABC", *, seed: int = 0, asynchronous: bool = False, cache_stays: bool = False
) -> AsyncIterator[Cluster]:
    """A running cluster, each instance a peer of the others. Inside `hurried` and `intercepted`."""
    network = Network()
    cluster = Cluster(network, seed)
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    context = zmq.asyncio.Context()
    with tempfile.TemporaryDirectory(prefix="llx-") as directory:
        try:
            for name in names:
                (sockets := Path(directory) / name).mkdir()
                config = LlumletConfig(
                    instance_id=name,
                    port=ports[name],
                    lease_seconds=LEASE_SECONDS,
                    peers=tuple(f"127.0.0.1:{port}" for other, port in ports.items() if other != name),
                )
                instance = cluster.instances[name] = Instance(name, config, model, asynchronous, sockets, cache_stays)
                _clusters[instance.engine.kvconn.thread.event_loop] = cluster
            for instance in cluster.instances.values():
                instance.listen(network, context)
            yield cluster
        finally:
            await cluster.close()
            context.destroy(linger=0)
            network.forget()
            for instance in cluster.instances.values():
                del _clusters[instance.engine.kvconn.thread.event_loop]


async def until(condition: Callable[[], bool], failure: Callable[[], str], seconds: float = SECONDS) -> None:
    """Returns when it holds; raises TimeoutError if it does not come to hold."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(failure())
        await asyncio.sleep(0.005)
