# SPDX-License-Identifier: Apache-2.0
"""An engine dies or stops; its requests go on elsewhere with every token exactly once.

Two instances: `haven` survives nearly everything. The other one, the victim, is where things go wrong; new ones are
started when the last one is dead. Whatever happens, the client's stream must be the stream of an undisturbed run, its
longest pause bounded, and nothing may be held anywhere afterwards. In float32, because a request that is started again
is recomputed.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from llumlet.contract.client import LlumletClient
from llumlet.contract.errors import LlumletCallFailed
from llumlet.contract.types import Health
from tests.llumlet.fake_agent import until
from tests.support.client import Client, Stream
from tests.support.conservation import wait_idle
from tests.support.failures import failure
from tests.support.faults import with_faults
from tests.support.harness import Fleet, Server, ServerSpec, free_port
from tests.support.moves import move_stream

pytestmark = pytest.mark.asyncio

PROMPT = [100 + index * 7 % 900 for index in range(200)]
LENGTH = 300
AT = 40
"""Tokens that have arrived when the story begins."""
KILLED_S = 6.0
"""Pause when a process is gone: a missed heartbeat, a refused connection (2 s together), one prefill, and some for a
slow machine, as below."""
IN_DOUBT_S = {"live": 7.0, "blocking": 9.5}
"""Pause when the destination stops with Commit on its way: 3.5 s until the origin is asked, 6 s if everything was to be
copied then, and some for a slow machine."""
STOPPED_S = 10.0
"""Pause when it only is silent, or its loop hangs: 4.5 s until it counts as lost, one prefill, a second, and some for a
slow machine."""
COMPILES_S = 8.0
"""Nearly twice the time after which a step is a hang."""
SILENT_S = 40.0
"""More than the 30 s in which an engine expects a word of an API server."""
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.8, "seed": 7, "top_p": 0.9, "presence_penalty": 0.5},
    "logprobs": {"temperature": 0.0, "logprobs": 2},
}
SOURCE_POINTS = ("source.round", "source.frozen", "source.committed")
DESTINATION_POINTS = ("destination.reserved", "destination.commit_received", "destination.admitted")
FAULTS = [*((point, "kill") for point in SOURCE_POINTS + DESTINATION_POINTS), ("destination.commit_received", "stop")]


class Cast:
    """`haven`, and victims, which are used up. Engines start in pairs: on two cores, two take no longer than one."""

    def __init__(self, fleet: Fleet, model: Path, directory: Path) -> None:
        self._fleet = fleet
        self._model = model
        self._directory = directory
        self._port = free_port()
        self._haven, *self._living = fleet.start(self._haven_spec(), self._victim())
        self._given_up: Server | None = None
        self._starting: list[Server] = []
        self._dead: list[Server] = []

    @property
    def haven(self) -> Server:
        if self._given_up is not None:
            self._fleet.stop(self._given_up)
            self._given_up = None
            (self._haven,) = self._fleet.start(self._haven_spec())
        return self._haven

    def alone(self) -> Server:
        """`haven`, when no other one is left. It need not survive."""
        self._fleet.stop(*self._living, *self._starting)
        self._living.clear()
        self._starting.clear()
        self._given_up = self.haven
        return self._given_up

    def victims(self, count: int) -> list[Server]:
        """So many that live."""
        self._bury()
        if len(self._living) < count:
            self.prepare()
        self._living += [server.wait_ready() for server in self._starting]
        self._starting.clear()
        return self._living[:count]

    def prepare(self) -> None:
        """Two more start while something else goes on; the next story waits for them."""
        if not self._starting:
            self._starting = self._fleet.launch(self._victim(), self._victim())

    def victim(self) -> Server:
        return self.victims(1)[0]

    def dead(self) -> Server:
        """One whose engine is dead, best one that was killed in another story."""
        self._bury()
        if not self._dead:
            engine_of(self.victim()).kill()
            self._bury()
        return self._dead[-1]

    def _bury(self) -> None:
        for server in [server for server in self._living if not has_engine(server)]:
            self._fleet.stop(server)
            self._living.remove(server)
            self._dead.append(server)

    def kill_at(self, victim: Server, point: str) -> None:
        """From now on the victim's engine is killed when it gets to this fault point."""
        self._trigger(victim.name, point, "kill").touch()

    @contextlib.contextmanager
    def stopping_at(self, victim: Server, point: str) -> Iterator[None]:
        """The victim's engine is stopped when it gets to this fault point, and goes on in the end."""
        trigger = self._trigger(victim.name, point, "stop")
        trigger.touch()
        try:
            yield
        finally:
            trigger.unlink()
            engine_of(victim).send_signal(signal.SIGCONT)

    def compile_in_next_step(self, victim: Server) -> None:
        """The victim's worker compiles a kernel, once and for long."""
        self._trigger(victim.name, "worker.compile", "delay").touch()

    def _haven_spec(self) -> ServerSpec:
        return self._spec("haven", "--llumlet-port", str(self._port))

    def _victim(self) -> ServerSpec:
        name = f"v{uuid.uuid4().hex[:6]}"
        faults = [
            {
                "point": point,
                "action": action,
                "times": len(IN_DOUBT_S),
                "file": str(self._trigger(name, point, action)),
            }
            for point, action in FAULTS
        ]
        compiles = {"point": "worker.compile", "action": "delay", "seconds": COMPILES_S}
        faults.append({**compiles, "file": str(self._trigger(name, "worker.compile", "delay"))})
        return self._spec(name, "--llumlet-peers", f"127.0.0.1:{self._port}", env=with_faults(faults))

    def _trigger(self, name: str, point: str, action: str) -> Path:
        return self._directory / f"{name}.{point}.{action}"

    def _spec(self, name: str, *flags: str, env: dict[str, str] | None = None) -> ServerSpec:
        flags = ("--dtype", "float32", *flags)
        return ServerSpec(self._model, name=name, instance_id=name, flags=flags, env=env or {}, executor="mp")


@pytest.fixture(scope="module")
def stage(model_dir: Path, log_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cast]:
    with Fleet(log_dir / "lost") as fleet:
        yield Cast(fleet, model_dir, tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def expected(stage: Cast) -> dict[str, Stream]:
    """The undisturbed streams."""

    async def run() -> dict[str, Stream]:
        async with Client(stage.haven.base_url) as client:
            streams = {name: await begin(client, name) for name in SAMPLINGS}
            return {name: await stream.result() for name, stream in streams.items()}

    streams = asyncio.run(run())
    assert len({tuple(stream.token_ids) for stream in streams.values()}) == 2, "the seed changes nothing"
    return streams


async def begin(client: Client, sampling: str) -> Stream:
    return await client.complete(PROMPT, LENGTH, ignore_eos=True, cache_salt=uuid.uuid4().hex, **SAMPLINGS[sampling])


def engine_of(server: Server) -> psutil.Process:
    return psutil.Process(server.process("EngineCore"))


def worker_of(server: Server) -> psutil.Process:
    return psutil.Process(server.process("Worker"))


def api_server_of(server: Server) -> psutil.Process:
    return psutil.Process(server.pid)


def has_engine(server: Server) -> bool:
    """And one that is not about to end: its process may take seconds for that, on a machine that has other work."""
    with contextlib.suppress(Exception):
        return engine_of(server).is_running() and server.healthy()
    return False


@contextlib.asynccontextmanager
async def stopped(*processes: psutil.Process) -> AsyncIterator[None]:
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for process in processes:
            process.send_signal(signal.SIGCONT)


async def healths_until(server: Server, condition: Callable[[], bool]) -> list[Health]:
    """What the engine's status said of its loop meanwhile, each word once, in order."""
    seen: list[Health] = []
    async with LlumletClient(str(server.llumlet)) as client:
        while not condition():
            with contextlib.suppress(LlumletCallFailed):
                status = await client.get_instance_status(deadline_s=1.0)
                if status.health not in seen:
                    seen.append(status.health)
            await asyncio.sleep(0.1)
    return seen


def token_logprobs(stream: Stream) -> list[float]:
    return [value for entry in stream.logprobs for value in entry["token_logprobs"]]


def assert_goes_on(stream: Stream, expected: Stream, longest_s: float) -> None:
    assert stream.token_ids == expected.token_ids
    assert stream.text == expected.text
    assert stream.finish_reason == "length"
    assert stream.usage == expected.usage
    assert token_logprobs(stream) == pytest.approx(token_logprobs(expected), abs=1e-4)
    assert max(stream.gaps) < longest_s


Story = Callable[[Server], psutil.Process]


def _last(points: Sequence[str]) -> list[Any]:
    """The last in `make test`, and the first, at which nothing is frozen yet, in the large suite only."""
    marks = [pytest.mark.full, *(pytest.mark.rest for _ in points[1:-1]), ()]
    return [pytest.param(point, marks=mark) for point, mark in zip(points, marks, strict=True)]


@failure(
    "kill -9 of the destination's engine",
    "committed",
    "noticed in about a second; the origin replays on its own engine",
)
@failure(
    "kill -9 of the destination's worker",
    "committed",
    "its engine ends with it; the same",
)
@pytest.mark.parametrize(
    ("victim_of", "sampling"),
    [
        pytest.param(engine_of, "greedy", id="engine"),
        pytest.param(worker_of, "seeded", id="worker", marks=pytest.mark.full),
    ],
)
async def test_the_destination_is_killed_after_the_move(
    stage: Cast, expected: dict[str, Stream], victim_of: Story, sampling: str
) -> None:
    victim = stage.victim()
    async with Client(stage.haven.base_url) as client:
        stream = await begin(client, sampling)
        await stream.wait_for(AT)
        assert (await move_stream(stage.haven, victim, stream)).live
        await stream.wait_for(2 * AT)
        victim_of(victim).kill()
        assert_goes_on(await stream.result(), expected[sampling], KILLED_S)
    await wait_idle(stage.haven)


@failure(
    "kill -9 of the origin's engine",
    "not moving",
    "replayed on a peer at once; the API server stays up, unhealthy, until its last stream has ended",
)
@failure(
    "kill -9 of its worker",
    "not moving",
    "the same",
)
@pytest.mark.parametrize(
    ("victim_of", "sampling"),
    [
        pytest.param(engine_of, "seeded", id="engine"),
        pytest.param(worker_of, "logprobs", id="worker", marks=pytest.mark.rest),
    ],
)
async def test_the_own_engine_is_killed(
    stage: Cast, expected: dict[str, Stream], victim_of: Story, sampling: str
) -> None:
    """The API server outlives its engine for as long as it has streams, and takes nothing new meanwhile."""
    victim = stage.victim()
    async with Client(victim.base_url) as client:
        stream = await begin(client, sampling)
        await stream.wait_for(AT)
        healths, lives = {await client.status("/health")}, set()
        victim_of(victim).kill()
        while not stream.done:
            healths.add(await client.status("/health"))
            lives.add(await client.status("/live"))
        assert_goes_on(await stream.result(), expected[sampling], KILLED_S)
    assert (healths, lives) == ({200, 503}, {200})
    await ends(victim)
    await wait_idle(stage.haven)


@pytest.mark.full
async def test_replayed_stream_overtakes_waiting_requests(stage: Cast, expected: dict[str, Stream]) -> None:
    """Its client has waited for the loss to be noticed. The other engine's batch is full, and others wait there."""
    victim, haven = stage.victim(), stage.haven
    async with Client(victim.base_url) as client, Client(haven.base_url) as there:
        stream = await begin(client, "greedy")
        await stream.wait_for(AT)
        lengths = range(240, 240 + 12 * haven.spec.max_num_seqs, 12)
        batch = [await there.complete(PROMPT, length, ignore_eos=True) for length in lengths]
        await asyncio.gather(*(one.wait_for(1) for one in batch))
        waiting = [asyncio.create_task(there.complete(PROMPT, 4, ignore_eos=True)) for _ in range(6)]
        async with LlumletClient(str(haven.llumlet)) as llumlet:
            status = await llumlet.get_instance_status()
            while status.num_waiting_requests < len(waiting):
                await asyncio.sleep(0.02)
                status = await llumlet.get_instance_status()
        engine_of(victim).kill()
        assert (await stream.result()).token_ids == expected["greedy"].token_ids
        others = [await (await one).result() for one in waiting]
        await asyncio.gather(*(one.result() for one in batch))
    began_again_s = stream.times[1 + max(range(len(stream.gaps)), key=stream.gaps.__getitem__)]
    assert began_again_s < min(other.times[0] for other in others)
    await ends(victim)
    await wait_idle(stage.haven)


@failure(
    "kill -9 of the source",
    "committed",
    "nothing: the destination owns the request, the API server lives",
)
@pytest.mark.rest
async def test_the_source_is_killed_after_the_move(stage: Cast, expected: dict[str, Stream]) -> None:
    """Nothing is recomputed, and nobody notices: the owner is elsewhere, the API server lives."""
    victim = stage.victim()
    async with Client(victim.base_url) as client:
        stream = await begin(client, "seeded")
        await stream.wait_for(AT)
        assert (await move_stream(victim, stage.haven, stream)).live
        await stream.wait_for(2 * AT)
        engine_of(victim).kill()
        assert_goes_on(await stream.result(), expected["seeded"], STOPPED_S)
    assert "goes on elsewhere" not in victim.log_text()
    await ends(victim)
    await wait_idle(stage.haven)


@failure(
    "SIGSTOP of the destination's engine, later SIGCONT",
    "committed",
    "lost after 4.5 s, replayed; on waking up it is told that it counts no more",
)
@failure(
    "SIGSTOP of the destination's worker, later SIGCONT",
    "committed",
    "its loop hangs and says so: replayed; the same",
)
@pytest.mark.parametrize(
    "part", [pytest.param(engine_of, id="engine", marks=pytest.mark.full), pytest.param(worker_of, id="worker")]
)
@pytest.mark.rest
async def test_the_destination_stops_and_wakes_up(stage: Cast, expected: dict[str, Stream], part: Story) -> None:
    victim = stage.victim()
    async with Client(stage.haven.base_url) as client:
        stream = await begin(client, "seeded")
        await stream.wait_for(AT)
        assert (await move_stream(stage.haven, victim, stream)).live
        await stream.wait_for(2 * AT)
        async with stopped(part(victim)):
            await stream.wait_for(3 * AT)
        assert_goes_on(await stream.result(), expected["seeded"], STOPPED_S)
    await wait_idle(stage.haven)
    await wait_idle(victim)


@failure(
    "SIGSTOP of the origin's engine, later SIGCONT",
    "not moving",
    "lost after 4.5 s, replayed on a peer; what it sends on waking up is stale, and it is told",
)
@failure(
    "SIGSTOP of its worker, later SIGCONT",
    "not moving",
    "suspect after 1.5 s, hung 3 s later, both in the status; replayed on a peer",
)
@pytest.mark.parametrize(
    "part", [pytest.param(engine_of, id="engine"), pytest.param(worker_of, id="worker", marks=pytest.mark.full)]
)
async def test_the_own_engine_stops_and_wakes_up(stage: Cast, expected: dict[str, Stream], part: Story) -> None:
    """A stopped worker is a loop that hangs in a step: the engine's other threads say so."""
    victim = stage.victim()
    async with Client(victim.base_url) as client:
        stream = await begin(client, "greedy")
        await stream.wait_for(AT)
        async with stopped(part(victim)):
            healths = await healths_until(victim, lambda: len(stream.token_ids) >= 2 * AT)
        assert_goes_on(await stream.result(), expected["greedy"], STOPPED_S)
    await wait_idle(stage.haven)
    await wait_idle(victim)
    if part is worker_of:
        # It is well until it is late; whether that is seen depends on when it is asked.
        assert [health for health in healths if health != Health.OK] == [Health.SUSPECT, Health.HUNG]


@failure(
    "its worker compiles a kernel for 8 s",
    "not moving, in a step",
    "suspect, sent nothing new, and busy with that in the status; its streams stay",
)
@pytest.mark.rest
async def test_the_own_engine_compiles_a_kernel(stage: Cast, expected: dict[str, Stream]) -> None:
    victim = stage.victim()
    before = victim.log_text().count("goes on elsewhere")
    async with Client(victim.base_url) as client:
        stream = await begin(client, "greedy")
        await stream.wait_for(AT)
        stage.compile_in_next_step(victim)
        healths = await healths_until(victim, lambda: len(stream.token_ids) >= 3 * AT)
        assert_goes_on(await stream.result(), expected["greedy"], COMPILES_S + STOPPED_S)
    assert Health.SUSPECT in healths
    assert Health.HUNG not in healths
    assert victim.log_text().count("goes on elsewhere") == before
    await wait_idle(victim)


@pytest.mark.full
@failure("SIGSTOP of the origin's engine for 40 s", "not moving", "the same; requests that come later stay with it")
@failure("SIGSTOP of an API server for 40 s", "not moving", "stands still, then goes on; later ones as before")
async def test_two_instances_are_silent_for_long(stage: Cast, expected: dict[str, Stream]) -> None:
    """Longer than an engine waits for API servers other than its own."""
    stories = zip(stage.victims(2), (engine_of, api_server_of), strict=True)
    stage.prepare()
    await asyncio.gather(*(_is_silent_for_long(victim, part, expected["greedy"]) for victim, part in stories))
    await wait_idle(stage.haven)


async def _is_silent_for_long(victim: Server, part: Story, expected: Stream) -> None:
    async with Client(victim.base_url) as client:
        stream = await begin(client, "greedy")
        await stream.wait_for(AT)
        async with stopped(part(victim)):
            await asyncio.sleep(SILENT_S)
        assert_goes_on(await stream.result(), expected, SILENT_S + STOPPED_S)

        async def stays() -> bool:
            before = victim.log_text().count("goes on elsewhere")
            assert (await (await begin(client, "greedy")).result()).token_ids == expected.token_ids
            return victim.log_text().count("goes on elsewhere") == before

        async with asyncio.timeout(30.0):
            while not await stays():
                pass
    await wait_idle(victim)


@failure(
    "SIGSTOP of the destination's engine, later SIGCONT",
    "Commit has arrived",
    "frozen for 3.5 s, 6 s if everything was to be copied, then settled by the origin's fence: goes on at the source",
)
@pytest.mark.parametrize("method", ["live", pytest.param("blocking", marks=pytest.mark.rest)])
async def test_the_destination_stops_during_the_move(stage: Cast, expected: dict[str, Stream], method: str) -> None:
    """Nobody but the source sees it: the owner that the origin knows is well."""
    victim = stage.victim()
    async with Client(stage.haven.base_url) as client:
        stream = await begin(client, "seeded")
        await stream.wait_for(AT)
        with stage.stopping_at(victim, "destination.commit_received"):
            move = await move_stream(stage.haven, victim, stream, method=method, force=True)
            assert engine_of(victim).status() == psutil.STATUS_STOPPED, "the fault was not reached"
            assert (move.phase, move.reason) == ("stayed", "deadline")
            await stream.wait_for(len(stream.token_ids) + AT)
        assert_goes_on(await stream.result(), expected["seeded"], IN_DOUBT_S[method])
    await wait_idle(stage.haven, timeout_s=40.0)
    await wait_idle(victim)


@failure(
    "kill -9 of the source",
    "copying",
    "replayed on a peer, also on the very destination: the reservation there is barred first",
)
@failure(
    "kill -9 of the source",
    "frozen, Commit not sent",
    "the same",
)
@failure(
    "kill -9 of the source",
    "Committed has arrived",
    "the destination owns the request; or, if the origin has not heard of it, it is replayed",
)
@pytest.mark.parametrize("point", _last(SOURCE_POINTS))
async def test_the_source_is_killed_during_the_move(stage: Cast, expected: dict[str, Stream], point: str) -> None:
    victim = stage.victim()
    stage.kill_at(victim, point)
    async with Client(victim.base_url) as client:
        stream = await begin(client, "seeded")
        await stream.wait_for(AT)
        with contextlib.suppress(LlumletCallFailed):
            await move_stream(victim, stage.haven, stream)
        assert_goes_on(await stream.result(), expected["seeded"], KILLED_S)
    assert not has_engine(victim), "the fault was not reached"
    await ends(victim)
    await wait_idle(stage.haven, timeout_s=40.0)


@failure(
    "kill -9 of the destination",
    "reserved",
    "the request goes on at the source",
)
@failure(
    "kill -9 of the destination",
    "Commit has arrived",
    "settled by the origin's fence: goes on at the source",
)
@failure(
    "kill -9 of the destination",
    "admitted, not yet answered",
    "the same",
)
@pytest.mark.parametrize("point", _last(DESTINATION_POINTS))
@pytest.mark.rest
async def test_the_destination_is_killed_during_the_move(stage: Cast, expected: dict[str, Stream], point: str) -> None:
    victim = stage.victim()
    stage.kill_at(victim, point)
    async with Client(stage.haven.base_url) as client:
        stream = await begin(client, "seeded")
        await stream.wait_for(AT)
        await move_stream(stage.haven, victim, stream)
        assert_goes_on(await stream.result(), expected["seeded"], STOPPED_S)
    assert not has_engine(victim), "the fault was not reached"
    await wait_idle(stage.haven)


@failure(
    "the destination's engine is dead",
    "reserving",
    "peer_unreachable: goes on at the source",
)
@pytest.mark.rest
async def test_the_destination_is_dead_already(stage: Cast, expected: dict[str, Stream]) -> None:
    dead, before = stage.dead(), stage.haven.log_text().count("goes on elsewhere")
    async with Client(stage.haven.base_url) as client:
        stream = await begin(client, "seeded")
        await stream.wait_for(AT)
        move = await move_stream(stage.haven, dead, stream)
        assert (move.phase, move.reason) == ("stayed", "peer_unreachable")
        assert_goes_on(await stream.result(), expected["seeded"], STOPPED_S)
    assert stage.haven.log_text().count("goes on elsewhere") == before
    await wait_idle(stage.haven)


@failure(
    "kill -9 of the only engine",
    "not moving",
    "the client gets an error, and the API server ends",
)
async def test_without_another_engine_the_client_gets_an_error(stage: Cast) -> None:
    alone = stage.alone()
    async with Client(alone.base_url) as client:
        stream = await begin(client, "greedy")
        await stream.wait_for(AT)
        engine_of(alone).kill()
        with contextlib.suppress(Exception):
            await stream.result(timeout_s=20.0)
    assert stream.done
    assert stream.finish_reason != "length"
    await ends(alone)


async def ends(server: Server, timeout_s: float = 20.0) -> None:
    """The API server of a dead engine ends by itself."""
    await until(lambda: not server.alive(), timeout_s)
