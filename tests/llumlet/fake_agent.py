# SPDX-License-Identifier: Apache-2.0
"""An agent without an engine: it remembers what it was asked and answers as a test tells it to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

from llumlet.contract.agent import DrainReport, Report
from llumlet.contract.types import (
    AbortMigrateInRequest,
    AbortMigrateInResponse,
    AbortRequest,
    AbortResponse,
    AdoptRequest,
    AdoptResponse,
    CacheChanges,
    CachedPrefixRequest,
    CachedPrefixResponse,
    ClaimRequest,
    ClaimResponse,
    CommitRequest,
    CommitResponse,
    CopyRoundRequest,
    CopyRoundResponse,
    DrainProgress,
    DrainRequest,
    EndClaimRequest,
    EndClaimResponse,
    Epoch,
    Handover,
    Health,
    InstanceMetadata,
    InstanceStatus,
    ListRequestsResponse,
    MigrateInRequest,
    MigrateRequest,
    Mode,
    MoveInfo,
    MovePhase,
    MoveProgress,
    MoveSummary,
    Reason,
    RequestInfo,
    ReserveRequest,
    ReserveResponse,
    SettleRequest,
    SettleResponse,
    WatchCacheRequest,
)

Outcome = tuple[MovePhase, Reason, str]


class FakeAgent:
    """`failures`, `delays` and `gates`, which calls wait for, are by method name; `outcomes` by request id (default:
    MOVED), as is `tokens_alone`: why the request leaves its KV cache behind.

    A move waits in COPYING until `go` is set, which it is at first. `calls` is what was asked.
    """

    def __init__(self, instance_id: str = "fake-a", requests: list[RequestInfo] | None = None) -> None:
        self.instance_id = instance_id
        self.incarnation = "i-1"
        self.requests = list(requests or [])
        self.failures: dict[str, BaseException] = {}
        self.delays: dict[str, float] = {}
        self.gates: dict[str, asyncio.Event] = {}
        self.outcomes: dict[str, Outcome] = {}
        self.tokens_alone: dict[str, str] = {}
        self.kv_unsupported = ""
        self.calls: list[tuple[str, Any]] = []
        self.completed: list[str] = []
        self.moved: list[str] = []
        self.health = Health.OK
        self.num_cut = 0
        self.num_streams = 0
        """Streams that go on at others when it ends."""
        self.given_up = asyncio.Event()
        """Of the last Adopt."""
        self.copying = asyncio.Event()
        self.go = asyncio.Event()
        self.go.set()
        self.cache: list[CacheChanges] = []
        """What a watcher is told."""
        self.num_cached = 0
        """Tokens of any request that it has in its cache, as it says."""
        self.cache_ends = False
        """Whether a watcher is dismissed then; else it waits until it leaves."""
        self.left = asyncio.Event()
        """A watcher has left."""

    def asked(self, method: str) -> list[Any]:
        return [request for name, request in self.calls if name == method]

    async def migrate(self, request: MigrateRequest, report: Report) -> MoveSummary:
        await self._enter("migrate", request)
        ids = list(request.request_ids) or [info.request_id for info in self.requests]
        if not request.request_ids and request.num_reqs > 0:
            ids = ids[: request.num_reqs]
        counts = dict.fromkeys(("moved", "stayed", "gone", "lost"), 0)
        for request_id in ids:
            outcome = await self._move(request_id, request, report)
            counts[MovePhase.Name(outcome).lower()] += 1
        self.completed.append("migrate")
        recomputed = sum(request_id in self.tokens_alone for request_id in self.moved)
        return MoveSummary(selected=len(ids), total_ms=12.5, recomputed=recomputed, **counts)

    async def _move(self, request_id: str, request: MigrateRequest, report: Report) -> MovePhase:
        info = next((info for info in self.requests if info.request_id == request_id), RequestInfo())

        def progress(phase: MovePhase, **more: Any) -> MoveProgress:
            return MoveProgress(
                migration_id=f"m-{request_id}",
                request_id=request_id,
                external_request_id=info.external_request_id,
                phase=phase,
                **({"mode": request.method or Mode.LIVE} | more),
            )

        report(progress(MovePhase.SELECTED))
        report(progress(MovePhase.COPYING, rounds=1, copied_bytes=1 << 20, transport="local"))
        self.copying.set()
        await self.go.wait()
        default = (MovePhase.MOVED, Reason.REASON_NONE, "")
        phase, reason, detail = self.outcomes.get(request_id, default)
        tokens_alone = self.tokens_alone.get(request_id, "")
        report(
            progress(
                phase,
                reason=reason,
                detail=detail,
                rounds=3,
                copied_bytes=5 << 32,
                recomputed_tokens=1,
                context_tokens=256,
                hit_tokens=32,
                epoch=Epoch(hop=1),
                transport="local",
                phase_ms={"copying": 40.25, "pull": 9.5, "reserving": 1.5},
                tokens_alone=tokens_alone,
                mode=Mode.RECOMPUTE if tokens_alone else request.method or Mode.LIVE,
            )
        )
        if phase == MovePhase.MOVED:
            self.moved.append(request_id)
        return phase

    async def migrate_in(self, request: MigrateInRequest, report: Report) -> MoveSummary:
        await self._enter("migrate_in", request)
        return await self.migrate(request.request, report)

    async def drain(self, request: DrainRequest, report: DrainReport) -> DrainProgress:
        await self._enter("drain", request)
        here = len(self.requests)
        report(DrainProgress(timeout_s=25, num_streams=here, num_requests=here, refusals={"destination_full": 2}))
        self.copying.set()
        await self.go.wait()
        self.completed.append("drain")
        return DrainProgress(
            elapsed_s=1.5, timeout_s=25, num_moved=here, num_streams=self.num_streams, done=True, num_cut=self.num_cut
        )

    async def abort(self, request: AbortRequest) -> AbortResponse:
        await self._enter("abort", request)
        known = {info.request_id for info in self.requests}
        Result = AbortResponse.Result
        return AbortResponse(
            results=[
                Result(request_id=text, outcome="ABORTED")
                if text in known
                else Result(request_id=text, outcome="NOT_FOUND")
                for text in request.request_ids
            ]
        )

    async def abort_migrate_in(self, request: AbortMigrateInRequest) -> AbortMigrateInResponse:
        await self._enter("abort_migrate_in", request)
        ids = [*request.migration_ids, *request.request_ids]
        Result = AbortMigrateInResponse.Result
        return AbortMigrateInResponse(
            results=[Result(id=text, migration_id=f"m-{text}", state="BARRED") for text in ids]
        )

    async def get_instance_status(self) -> InstanceStatus:
        await self._enter("get_instance_status", None)
        return InstanceStatus(
            instance_id=self.instance_id,
            schedulable=True,
            timestamp_ms=int(time.time() * 1000),
            num_running_requests=len(self.requests),
            num_total_gpu_tokens=3200,
            num_used_gpu_tokens=800,
            num_total_blocks=100,
            num_free_blocks=75,
            num_pinned_blocks=4,
            num_migrate_out_reqs=1,
            incarnation=self.incarnation,
            kv_unsupported=self.kv_unsupported,
            health=self.health,
            loop_age_ms=5400 if self.health == Health.HUNG else 3,
        )

    async def get_instance_metadata(self) -> InstanceMetadata:
        await self._enter("get_instance_metadata", None)
        return InstanceMetadata(
            instance_id=self.instance_id,
            instance_type="neutral",
            block_size=32,
            model="tiny-llama",
            version="0.1.0",
            transports=["local", "tcp"],
            max_migrations_in=2,
            max_migrations_out=3,
            bytes_per_block=1 << 20,
            incarnation=self.incarnation,
        )

    async def list_requests(self) -> ListRequestsResponse:
        await self._enter("list_requests", None)
        return ListRequestsResponse(instance_id=self.instance_id, incarnation=self.incarnation, requests=self.requests)

    async def watch_cache(self, request: WatchCacheRequest) -> AsyncGenerator[CacheChanges, None]:
        await self._enter("watch_cache", request)
        try:
            for changes in self.cache:
                yield changes
            if not self.cache_ends:
                await asyncio.Event().wait()
        finally:
            self.left.set()

    async def reserve(self, request: ReserveRequest) -> ReserveResponse:
        await self._enter("reserve", request)
        return ReserveResponse(hit_blocks=2, lease_s=5.0, dst_incarnation=self.incarnation, transport="local")

    async def copy_round(self, request: CopyRoundRequest) -> CopyRoundResponse:
        await self._enter("copy_round", request)
        return CopyRoundResponse(round=request.round, copied_bytes=1 << 33, seconds=0.5, lease_s=5.0)

    async def commit(self, request: CommitRequest) -> CommitResponse:
        await self._enter("commit", request)
        return CommitResponse(state=Handover.COMMITTED, dst_incarnation=self.incarnation)

    async def withdraw(self, request: SettleRequest) -> SettleResponse:
        return await self._settle("withdraw", request, Handover.BARRED)

    async def cancel(self, request: SettleRequest) -> SettleResponse:
        return await self._settle("cancel", request, Handover.BARRED)

    async def abort_handover(self, request: SettleRequest) -> SettleResponse:
        return await self._settle("abort_handover", request, Handover.BARRED)

    async def close_handover(self, request: SettleRequest) -> SettleResponse:
        return await self._settle("close_handover", request, Handover.COMMITTED)

    async def query(self, request: SettleRequest) -> SettleResponse:
        return await self._settle("query", request, Handover.UNKNOWN)

    async def adopt(self, request: AdoptRequest, given_up: asyncio.Event) -> AdoptResponse:
        self.given_up = given_up
        await self._enter("adopt", request)
        return AdoptResponse(instance_id=self.instance_id, incarnation=self.incarnation)

    async def cached_prefix(self, request: CachedPrefixRequest) -> CachedPrefixResponse:
        await self._enter("cached_prefix", request)
        return CachedPrefixResponse(num_tokens=self.num_cached)

    async def claim(self, request: ClaimRequest) -> ClaimResponse:
        await self._enter("claim", request)
        return ClaimResponse(claim_id="c-1", computed_tokens=119, block_ids=[4, 5, 6, 7])

    async def end_claim(self, request: EndClaimRequest) -> EndClaimResponse:
        await self._enter("end_claim", request)
        return EndClaimResponse(intact=True)

    async def _settle(self, method: str, request: SettleRequest, state: Handover.State) -> SettleResponse:
        await self._enter(method, request)
        return SettleResponse(state=state, dst_incarnation=self.incarnation)

    async def _enter(self, method: str, request: Any) -> None:
        self.calls.append((method, request))
        failure = self.failures.get(method)  # as of now: whoever waits for the call may change it
        await asyncio.sleep(self.delays.get(method, 0))
        if method in self.gates:
            await self.gates[method].wait()
        if failure is not None:
            raise failure
        if method != "migrate":
            self.completed.append(method)


async def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait for `condition`; fails after `seconds`."""
    for _ in range(int(seconds / 0.005)):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"not within {seconds} s")


def request_info(request_id: str = "cmpl-7-0a1b2c3d", **more: Any) -> RequestInfo:
    """A decoding request; the client's id is the engine's without its last nine characters."""
    fields: dict[str, Any] = {
        "request_id": request_id,
        "external_request_id": request_id[:-9],
        "phase": RequestInfo.DECODE,
        "status": "RUNNING",
        "prompt_tokens": 100,
        "output_tokens": 20,
        "computed_tokens": 119,
        "num_blocks": 4,
        "origin": "tcp://127.0.0.1:7001",
        "movable": True,
        "moves_as": Mode.LIVE,
        "arrival_time": time.time() - 3,
    }
    return RequestInfo(**(fields | more))


def moving_request_info(request_id: str) -> RequestInfo:
    move = MoveInfo(
        migration_id="m-1",
        direction=MoveInfo.OUT,
        phase=MovePhase.COPYING,
        peer_instance_id="fake-b",
        peer_address="127.0.0.1:9",
        transport="local",
    )
    return request_info(request_id, movable=False, reason=Reason.ALREADY_MIGRATING, move=move, epoch=Epoch(hop=2))
