# SPDX-License-Identifier: Apache-2.0
"""The pairs of real engines, and what requests of each kind do between them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import re
import signal
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from benchmarks.downtime import prompt_of
from benchmarks.gpu_check.budget import Budget
from benchmarks.gpu_check.cells import Cell, Engines, Machine
from benchmarks.gpu_check.verdicts import NotStarted, Numerics, Observed, Runs
from llumlet.contract.client import LlumletClient
from llumlet.contract.errors import LlumletCallFailed
from llumlet.contract.types import MigrateRequest, Mode, MovePhase, Reason
from tests.support.adapters import RANK, write_adapter
from tests.support.client import Client, Stream
from tests.support.harness import Fleet, Server, ServerDied, ServerSpec, command_line
from tests.support.model import PRESETS, build
from tests.support.moves import Move, engine_id, move_stream, requests, stall_of_move
from tests.support.stats import median

ADAPTER = "story"
LLUMLETS_OWN = 2
"""How many of a server's flags, the first ones, vLLM alone does not know."""
_ERROR = re.compile(r"(?:^|\s)([\w.]*(?:Error|Exception): .*)$", re.MULTILINE)
_RUNS = re.compile(r"this engine has (\S+) behind (\S+), steps in flight: (\d+)")
_ATTENTION = re.compile(r"Using (?:AttentionBackendEnum\.)?([A-Z0-9_]+) (?:attention )?backend\b")
"""vLLM's line, for a backend that it has chosen, or that it was told."""
START_TIMEOUT_S = 600.0
"""Time for a start with graphs, compiled for the first time."""
LEAST_START_S = 20.0
"""No engine starts in less."""
PATIENCE_S = 30.0
KV_BYTES = 2 << 30
GPU_SHARE = 0.3
"""Share of a GPU's memory for each of two engines on it."""
SLOW_BYTES_PER_S = 400_000
SPECULATION = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
REPEATING: dict[str, Any] = {"structured_outputs": {"regex": "(abcd efgh ){200}"}}
"""What the model would say by itself does not repeat."""
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "minLength": 400}},
    "required": ["name"],
    "additionalProperties": False,
}
JUST_ARRIVED = (Reason.HANDOVER_OPEN, Reason.NOT_STARTED)
"""Why a request may not move on yet that has just moved."""


@dataclasses.dataclass(frozen=True, slots=True)
class Scale:
    """How much is asked of engines: prompts of `lengths` tokens, answers of `tokens`, a move at `first` and every
    `between`; `killed` is the length of a prompt whose copy is interrupted."""

    lengths: tuple[int, ...]
    tokens: int
    first: int
    between: int
    moves: int
    killed: int


ON_GPU = Scale((256, 2048, 6000), tokens=2000, first=40, between=100, moves=4, killed=4000)
"""A millisecond a token: an answer must outlast its moves. Prompt and answer together fit the models' 8,192 tokens."""
STAND_IN = Scale((200,), tokens=44, first=10, between=12, moves=2, killed=1200)
"""Some 60 ms a token; a block of 128."""


class Two(NamedTuple):
    a: Server
    b: Server


class Engined:
    """Implements `verdicts.Bench` with `vllm serve`.

    logs: where the servers' logs go. flags, env: more of them for every server. start_timeout_s: the longest that a
    pair may take to start; the time that `budget` has left, if that is less.
    """

    def __init__(
        self,
        machine: Machine,
        logs: Path | None,
        scratch: Path,
        *,
        flags: Sequence[str] = (),
        env: Mapping[str, str] = MappingProxyType({}),
        start_timeout_s: float | None = None,
        budget: Budget | None = None,
    ) -> None:
        self._machine = machine
        self._logs = logs
        self._scratch = scratch
        self._flags = tuple(flags)
        self._env = dict(env)
        self._start_timeout_s = START_TIMEOUT_S if start_timeout_s is None else start_timeout_s
        self._budget = budget or Budget()
        self._scale = STAND_IN if machine.stand_in else ON_GPU
        self._num_fleets = 0

    @contextlib.contextmanager
    def pair(self, engines: Engines, numerics: Numerics) -> Iterator[Two]:
        specs = [self.spec(engines, numerics, name) for name in Two._fields]
        with self._fleet() as fleet:
            try:
                two = Two(*fleet.start(*specs, timeout_s=self._patience()))
            except ServerDied as error:
                fleet.close()
                raise self._not_started(error, specs[0]) from None
            yield two

    def observe(self, pair: Two, cell: Cell) -> Observed:
        seen = Observed([found_in(server) for server in pair])
        asyncio.run(_Task(pair, cell, self._scale, seen).run())
        return seen

    def spec(self, engines: Engines, numerics: Numerics, name: str) -> ServerSpec:
        on_gpu = not self._machine.stand_in
        flags = ["--llumlet-transport", engines.transport]
        assert len(flags) == LLUMLETS_OWN
        flags += ["--tensor-parallel-size", str(engines.ranks)]
        env = {}
        if engines.kv == "fp8":
            flags += ["--kv-cache-dtype", "fp8"]
        if engines.executor:
            flags += ["--distributed-executor-backend", engines.executor]
        if engines.executor == "uni" and not on_gpu:
            env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # or vLLM's platform for CPUs makes it an `mp`
        if engines.lora:
            story = write_adapter(self._scratch / ADAPTER, PRESETS["gqa"], 0)
            flags += ["--enable-lora", "--max-lora-rank", str(RANK), "--lora-modules", f"{ADAPTER}={story}"]
        if engines.ngram:
            flags += ["--speculative-config", json.dumps(SPECULATION)]
        if numerics == "float32":
            flags += ["--dtype", "float32"]
        if numerics == "batch invariant":
            env["VLLM_BATCH_INVARIANT"] = "1"
        if on_gpu:
            flags += ["--gpu-memory-utilization", str(GPU_SHARE), "--kv-cache-memory-bytes", str(KV_BYTES)]
            if engines.runner == "v1":
                env["VLLM_USE_V2_MODEL_RUNNER"] = "0"
            if engines.gpus > engines.ranks:  # each its own first, and sees the other's
                env["CUDA_VISIBLE_DEVICES"] = "0,1" if name == "a" else "1,0"
        return ServerSpec(
            build(PRESETS[engines.attention]),
            name=name,
            instance_id=name,
            block_size=engines.block_size,
            max_num_seqs=4,
            bandwidth_limit=SLOW_BYTES_PER_S if engines.slow_copy else None,
            flags=(*flags, *self._flags),
            env=env | self._env,
            runner="v2" if engines.runner == "v2" and not on_gpu else "",
            gpu=on_gpu,
            eager=not engines.graphs,
        )

    def _fleet(self) -> Fleet:
        """Each with logs of its own."""
        self._num_fleets += 1
        return Fleet(None if self._logs is None else self._logs / f"{self._num_fleets:02d}")

    def _patience(self) -> float:
        return min(self._start_timeout_s, self._budget.left)

    def _not_started(self, died: ServerDied, spec: ServerSpec) -> NotStarted:
        """Whether vLLM by itself starts so, is asked of vLLM."""
        if self._patience() < LEAST_START_S:
            return NotStarted(f"no time to try vLLM without the llumlet; with it: {cause_of(died)}", stock=False)
        stock = dataclasses.replace(spec, llumlet=False, flags=spec.flags[LLUMLETS_OWN:])
        with self._fleet() as fleet:
            try:
                fleet.start(stock, timeout_s=self._patience())
            except ServerDied as error:
                return NotStarted(f"vLLM does not start so: {cause_of(error)}", stock=True)
        return NotStarted(f"vLLM starts so without the llumlet only: {cause_of(died)}", stock=False)


def cause_of(died: ServerDied) -> str:
    """The first error of the log, which is the cause of the others; all that is known if there is none."""
    found = _ERROR.search(str(died))
    return found[1] if found else str(died)


def found_in(server: Server) -> Runs:
    """Raises LookupError."""
    found = _RUNS.search(server.log_text())
    if found is None:
        raise LookupError(f"{server.name} does not say which runner it has")
    workers = [pid for pid in server.pids() if "Worker" in command_line(pid)]
    attention = sorted(set(_ATTENTION.findall(server.log_text())))
    return Runs(found[1], found[2], int(found[3]), "mp" if workers else "uni", ", ".join(attention))


class _Task:
    """What one cell does on its two engines; fills in what is seen."""

    def __init__(self, pair: Two, cell: Cell, scale: Scale, seen: Observed) -> None:
        self._pair = pair
        self._cell = cell
        self._scale = scale
        self._seen = seen
        self._parameters: dict[str, Any] = {"ignore_eos": True}
        self._lengths = scale.lengths if cell.task == "move" and cell.engines.block_size is None else scale.lengths[:1]
        match cell.task:
            case "lora":
                self._parameters["model"] = ADAPTER
            case "ngram":
                self._parameters = REPEATING
            case "json":
                self._parameters = {"structured_outputs": {"json": SCHEMA}}

    async def run(self) -> None:
        if self._cell.task == "kill":
            await self._kill_the_source()
            return
        before = [await accepted(server) for server in self._pair]
        rows = [await self._compare(length) for length in self._lengths]
        self._seen.figures["lengths"] = rows
        if self._cell.task == "prefix" and not self._seen.moves[0].hit_tokens:
            self._seen.faults.append("no block of the prompt was found at the destination")
        if self._cell.task == "ngram":
            drafts = [await accepted(server) - old for server, old in zip(self._pair, before, strict=True)]
            self._seen.figures["accepted_drafts"] = drafts
            if not all(drafts):
                self._seen.faults.append(f"no draft was accepted on one of the engines: {drafts}")

    async def _compare(self, length: int) -> dict[str, Any]:
        """Two unmoved runs, one on either engine, and a moved one; the figures of its moves."""
        one, other = [await (await self._begin(client, length)).result() async for client in self._clients()]
        moved, moves = await self._moved(length)
        self._seen.unmoved.append((one.token_ids, other.token_ids))
        self._seen.moved.append(moved.token_ids)
        self._seen.moves += moves
        stalls = [stall_of_move(moved, move) for move in moves if move.moved]
        return {
            "context_tokens": length,
            "stall_ms_p50": round(1e3 * median(stall.stall for stall in stalls), 3) if stalls else None,
            "itl_ms_p50": round(1e3 * median(stall.itl for stall in stalls), 3) if stalls else None,
            "copied_bytes": [move.copied_bytes for move in moves],
            "hit_tokens": [move.hit_tokens for move in moves],
        }

    async def _clients(self) -> Any:
        for server in self._pair:
            async with Client(server.base_url) as client:
                yield client

    async def _begin(self, client: Client, length: int, salt: str = "") -> Stream:
        prompt = list(range(100, 130)) * (length // 30) if self._cell.task == "ngram" else prompt_of(length, 1)
        more = self._parameters | {"cache_salt": salt or uuid.uuid4().hex}
        return await client.complete(prompt, self._scale.tokens, **more)

    async def _moved(self, length: int) -> tuple[Stream, list[Move]]:
        source, destination = self._pair
        salt, moves = uuid.uuid4().hex, list[Move]()
        async with Client(source.base_url) as client, Client(destination.base_url) as there:
            if self._cell.task == "prefix":
                await (await self._begin(there, length, salt)).result()
            stream = await self._begin(client, length, salt)
            for number in range(self._scale.moves):
                await stream.wait_for(self._scale.first + number * self._scale.between)
                await _may_move(source, stream)
                moves.append(await move_stream(source, destination, stream))
                if not moves[-1].moved:
                    break  # the stream is where it was, and the move says why
                source, destination = destination, source
            return await stream.result(), moves

    async def _kill_the_source(self) -> None:
        """While the destination reads its memory: that must go on with what it has, take new requests and move them."""
        a, b = self._pair
        async with Client(a.base_url) as at_a, Client(b.base_url) as at_b:
            before = await (await self._begin(at_b, 60)).result()
            stays = await self._begin(at_b, 60)
            await stays.wait_for(2)
            lost = await self._begin(at_a, self._scale.killed)
            await lost.wait_for(2)
            copying = await self._while_copying(lost)
            survivors = set(b.pids())
            for pid in a.pids():
                if any(title in command_line(pid) for title in ("EngineCore", "Worker")):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            await asyncio.wait([copying], timeout=PATIENCE_S)
            copying.cancel()
            stayed = await stays.result()
            again = await (await self._begin(at_b, 60)).result()
        self._seen.unmoved.append((before.token_ids, before.token_ids))
        self._seen.moved.append(again.token_ids)
        if len(stayed.token_ids) != len(before.token_ids):
            self._seen.faults.append("a stream of the destination did not come to its end")
        if not survivors <= set(b.pids()):
            self._seen.faults.append("a process of the destination has ended")
        left = [info.request_id for info in await requests(b)]
        if left:
            self._seen.faults.append(f"the destination still holds {left}")

    async def _while_copying(self, stream: Stream) -> asyncio.Task[None]:
        """A move of `stream` that has begun to copy; raises RuntimeError if it never does."""
        a, b = self._pair
        assert a.llumlet is not None
        assert b.llumlet is not None
        copying = asyncio.Event()
        target = b.llumlet
        order = MigrateRequest(
            src_engine_id=a.llumlet.instance_id,
            dst_engine_id=target.instance_id,
            dst_engine_ip=target.host,
            dst_engine_port=target.port,
            request_ids=[await engine_id(a, stream)],
            method=Mode.LIVE,
            force=True,
            trigger_policy="benchmark",
        )

        async def move(address: str) -> None:
            async with contextlib.AsyncExitStack() as stack:
                stack.enter_context(contextlib.suppress(LlumletCallFailed))  # who answers is killed
                client = await stack.enter_async_context(LlumletClient(address))
                async for event in client.migrate(order, deadline_s=60):
                    if event.WhichOneof("event") == "progress" and event.progress.phase == MovePhase.COPYING:
                        copying.set()

        task = asyncio.create_task(move(str(a.llumlet)))
        waiting = asyncio.create_task(copying.wait())
        await asyncio.wait([task, waiting], timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
        if not copying.is_set():
            waiting.cancel()
            raise RuntimeError("the move that was to be interrupted never copied anything")
        return task


async def _may_move(server: Server, stream: Stream) -> None:
    """Waits until its last move is over on either side. Raises RuntimeError."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        held = [info for info in await requests(server) if stream.is_engine_id(info.request_id)]
        if held and held[0].reason not in JUST_ARRIVED:
            return
        if stream.done:
            raise RuntimeError(f"the stream ended after {len(stream.token_ids)} tokens, before its move")
        await asyncio.sleep(0.01)
    raise RuntimeError(f"{server.name} did not let the stream move on within {PATIENCE_S:.0f} s")


async def accepted(server: Server) -> int:
    """Draft tokens that `server` has accepted so far."""
    async with Client(server.base_url) as client:
        counts = re.findall(r"^vllm:spec_decode_num_accepted_tokens_total.* (\S+)$", await client.metrics(), re.M)
    return round(sum(map(float, counts)))
