# SPDX-License-Identifier: Apache-2.0
"""The scheduler's HTTP API.

POST /schedule         200 the request with its `scheduling_result`; 404 nobody serves the model, nor did of late; 429
                       nobody takes it now; 400 the JSON is wrong, the prompt fits nowhere, the model is needed, or
                       nothing is known of any instance; 503 too little is known of them yet (`warming: …`)
POST /release          one or an array: 200, as often as one likes; 400 the JSON is wrong or names no result
POST /report           200; lite mode, from gateways
POST /complaints       200; instances to which a gateway sends nothing now, and why
POST /attainment       200; how many requests of a gateway met their objectives
GET  /keepalive        WebSocket, lite mode: while it stands the gateway lives. Of use to Llumnix's own gateways: ours
                       report what runs instead (`--requests-report-duration`)
GET  /healthz, /health 200: it runs; `degraded` if a part of the policy raised within a minute
GET  /ready            200, or 503 and why no instance would take a request now
GET  /metrics          Prometheus
GET  /scale            how many instances there should be (`scheduler.scaling`)
POST /debug/schedule   what `/schedule` would do, and why; GET with `model`, `prompt_num_tokens` and so on does as well
GET  /instances        the instances that are known, as `scheduling_result` names them
GET  /debug/view       everything that is known of them
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any, Final

import msgspec
from aiohttp import WSMsgType, web
from google.protobuf.json_format import MessageToDict
from msgspec import UNSET, UnsetType
from msgspec.structs import replace
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from llumlet.process.addresses import Address
from llumsched.cluster.instance import Instance
from llumsched.cluster.providers.lrs import RealtimeState, Update
from llumsched.cluster.providers.metadata import type_of
from llumsched.contract import (
    MAX_BODY_BYTES,
    MODEL_AWAY,
    MODEL_NEEDED,
    NOT_IN_TIME,
    Attaining,
    Complaining,
    HostPort,
    Instances,
    LLMInstance,
    Question,
    Report,
    SchedulingRequest,
    decode,
    encode,
)
from llumsched.dispatch.complaints import Complaint
from llumsched.dispatch.dispatcher import Dispatcher, NotPlaced, NotPlacedKind
from llumsched.dispatch.explain import explain
from llumsched.http_form import give_form
from llumsched.policy import raised
from llumsched.scheduler.recent import Attainment, RecentShares, Share
from llumsched.scheduler.scheduler_metrics import SchedulerMetrics

_log = logging.getLogger(__name__)
_KEEPALIVE_S: Final = 3.0
_MOST_REPORTS: Final = 100_000
_NAMED_AT_ONCE: Final = 200
"""Instances listed by `/instances` before requests are placed again; half a millisecond."""
_SHOWN_AT_ONCE: Final = 8
"""Instances listed by `/debug/view` before requests are placed again; a millisecond."""
_STATUS: Final = {
    NotPlacedKind.ENDPOINT_NOT_FOUND: 404,
    NotPlacedKind.NO_AVAILABLE_ENDPOINT: 429,
    NotPlacedKind.NO_ENDPOINT_IN_TIME: 429,
    NotPlacedKind.NO_MATCH_INFER_TYPE: 429,
    NotPlacedKind.MODEL_AWAY: 429,
    NotPlacedKind.WARMING: 503,
}


_TOLD: Final = {
    NotPlacedKind.NO_ENDPOINT_IN_TIME: NOT_IN_TIME,
    NotPlacedKind.MODEL_AWAY: MODEL_AWAY,
    NotPlacedKind.MODEL_NEEDED: MODEL_NEEDED,
}
"""Beginnings of texts by which a gateway recognises the reason."""
NOTHING_PREDICTED: Final[Mapping[str, float]] = MappingProxyType({})


class Api:
    def __init__(
        self, dispatcher: Dispatcher, registry: CollectorRegistry, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._dispatcher = dispatcher
        self._metrics = SchedulerMetrics(dispatcher, registry)
        self.attainment = Attainment(clock)
        self.cached = RecentShares(clock)
        """Cached tokens of prompts at their chosen instance, under the name ""."""

    def application(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_say_what_is_wrong])
        app.add_routes(
            [
                web.post("/schedule", self.schedule),
                web.post("/release", self.release),
                web.post("/report", self.report),
                web.post("/complaints", self.complaints),
                web.post("/attainment", self.attained),
                web.get("/keepalive", self.keepalive),
                web.get("/healthz", self.healthz),
                web.get("/health", self.healthz),
                web.get("/ready", self.ready),
                web.get("/metrics", self.metrics),
                web.post("/debug/schedule", self.debug_schedule),
                web.get("/debug/schedule", self.debug_schedule),
                web.get("/instances", self.instances),
                web.get("/debug/view", self.debug_view),
            ]
        )
        give_form(app)
        return app

    async def schedule(self, http: web.Request) -> web.Response:
        asked = decode(await http.read(), SchedulingRequest)
        request, stages = self._read(asked), asked.stages
        began_s = time.perf_counter()
        try:
            placements = self._dispatcher.schedule(request, stages, asked.gateway_id, self._tried(asked))
        except NotPlaced as error:
            self._metrics.refused(error.kind)
            told = _TOLD.get(error.kind)
            return web.Response(status=_STATUS.get(error.kind, 400), text=f"{told}: {error}" if told else str(error))
        self._metrics.placed(placements, request.prompt_num_tokens, time.perf_counter() - began_s)
        result = [
            self._named(placed.instance, placed.infer_type, asked.model, placed.predicted) for placed in placements
        ]
        if self._dispatcher.hits is not None:
            result[0].cached_tokens = placements[0].num_hit_tokens
            self.cached.add("", Share(placements[0].num_hit_tokens, request.prompt_num_tokens))
        echoed = replace(asked, excluded_endpoints=UNSET, prompt_blocks=b"", prompt_block_size=0)
        return _json(replace(echoed, scheduling_result=result))

    async def release(self, http: web.Request) -> web.Response:
        body = await http.read()
        if body.lstrip().startswith(b"["):
            ended = decode(body, list[SchedulingRequest])
        else:
            ended = [decode(body, SchedulingRequest)]
        if not all(one.scheduling_result for one in ended):
            raise ValueError("scheduling_result is missing or empty")
        for one in ended:
            placed = {instance.id for instance in one.scheduling_result or ()}
            self._dispatcher.release(one.id, placed, one.gateway_id)
        return web.Response()

    async def report(self, http: web.Request) -> web.Response:
        reports = decode(await http.read(), list[Report])
        if len(reports) > _MOST_REPORTS:
            raise ValueError(f"more than {_MOST_REPORTS} reports at once")
        if isinstance(state := self._dispatcher.ledger, RealtimeState):
            faults = Counter(
                fault
                for one in reports
                if (fault := state.reported(
                    Update(one.id, one.instance_id, one.infer_type, one.gateway_id, one.num_tokens,
                           prefill_done=one.kind == "prefill_done")
                ))
            )  # fmt: skip
            if faults:
                _log.debug("of %d reports were not taken: %s", len(reports), dict(faults))
        return web.Response()

    async def complaints(self, http: web.Request) -> web.Response:
        told = decode(await http.read(), Complaining)
        now_s = time.monotonic()
        self._dispatcher.complaints.complain(
            told.gateway_id,
            {
                Address(one.endpoint.host, one.endpoint.port): Complaint(one.cause, one.reason, now_s - one.since_s)
                for one in told.instances
            },
            told.ttl_s,
            told.host,
        )
        return web.Response()

    async def attained(self, http: web.Request) -> web.Response:
        told = decode(await http.read(), Attaining)
        self.attainment.told(told.gateway_id, told.models)
        return web.Response()

    async def keepalive(self, http: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(heartbeat=_KEEPALIVE_S, max_msg_size=4096)
        await socket.prepare(http)
        gateway_id = ""
        state = self._dispatcher.ledger
        try:
            async for message in socket:
                if message.type is not WSMsgType.TEXT:
                    break
                if not gateway_id:
                    gateway_id = _gateway_id(message.data)
                    if isinstance(state, RealtimeState):
                        state.connected(gateway_id)
                await socket.send_str("ok")
        except ValueError as error:
            await socket.close(code=1007, message=str(error).encode()[:100])
        finally:
            if gateway_id and isinstance(state, RealtimeState):
                state.disconnected(gateway_id)
        return socket

    async def healthz(self, http: web.Request) -> web.Response:
        view = self._dispatcher.view
        faults = [part for part in raised.lately() if part in self._dispatcher.policy.parts]
        status = "warming" if self._dispatcher.warmth.is_warming else "degraded" if faults else "ok"
        told = {"status": status, "instances": len(view), "view_age_s": round(view.age_s, 3)}
        return _json(told | ({"raised": faults} if faults else {}))

    async def ready(self, http: web.Request) -> web.Response:
        reason = self._dispatcher.refusal()
        return web.Response(status=503 if reason else 200, text=reason or "OK")

    async def metrics(self, http: web.Request) -> web.Response:
        return web.Response(body=await self._metrics.exposition(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def debug_schedule(self, http: web.Request) -> web.Response:
        asked = decode(await http.read(), Question) if http.method == "POST" else Question.of_query(http.query)
        try:
            decisions = self._dispatcher.decide(self._read(asked), asked.stages, asked.gateway_id, self._tried(asked))
        except NotPlaced as error:
            # 400 is for questions that are wrong.
            return web.Response(status=_STATUS.get(error.kind, 503), text=str(error))
        policy = self._dispatcher.policy
        return _json(
            {
                "policy": policy.name,
                "mode": policy.mode,
                "warming": self._dispatcher.warmth.is_warming,
                "view_age_s": round(self._dispatcher.view.age_s, 3),
                "stages": [
                    explain(
                        one,
                        self._dispatcher.step_models,
                        mode=policy.mode,
                        metrics=asked.metrics,
                        constants=policy.built_in_constants,
                    )
                    for one in decisions.values()
                ],
            }
        )

    async def instances(self, http: web.Request) -> web.Response:
        named: list[LLMInstance] = []
        for instance in list(self._dispatcher.view.values()):
            named.append(self._named(instance, type_of(instance), ""))
            if len(named) % _NAMED_AT_ONCE == 0:
                await asyncio.sleep(0)
        return _json(Instances(named))

    async def debug_view(self, http: web.Request) -> web.Response:
        view, instances = self._dispatcher.view, dict[str, msgspec.Raw]()
        for number, instance in enumerate(list(view.values()), 1):
            instances[instance.id] = msgspec.Raw(encode(self._shown(instance)))
            if number % _SHOWN_AT_ONCE == 0:
                await asyncio.sleep(0)
        is_warming = self._dispatcher.warmth.is_warming
        return _json(
            {
                "connected": view.connected,
                "age_s": round(view.age_s, 3),
                "warming": is_warming,
                "lost": {instance_id: round(age_s, 3) for instance_id, age_s in view.lost.ages_s().items()},
                "complaints": self._dispatcher.complaints.of(""),
                "instances": instances,
            }
        )

    def _read(self, asked: SchedulingRequest) -> SchedulingRequest:
        """The request with everything that follows from its token ids. Raises ValueError."""
        hits, counted = self._dispatcher.hits, asked.counted()
        return counted if hits is None else counted.named(hits.usual_block_size)

    def _shown(self, instance: Instance) -> dict[str, Any]:
        return {
            "age_s": round(instance.age_s(time.monotonic()), 3),
            "in_flight": self._dispatcher.ledger.in_flight.of(instance.id)._asdict(),
            "metadata": MessageToDict(instance.metadata, preserving_proto_field_name=True),
            "status": instance.status
            and MessageToDict(
                instance.status, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
            ),
        }

    def _named(
        self, instance: Instance, infer_type: str, model: str, predicted: Mapping[str, float] = NOTHING_PREDICTED
    ) -> LLMInstance:
        """An instance in the form for gateways."""
        metadata, hits = instance.metadata, self._dispatcher.hits
        return LLMInstance(
            id=metadata.instance_id,
            endpoint=HostPort(metadata.ip, metadata.api_server_port),
            model=model or metadata.model,
            infer_type=infer_type,
            aux_ip=metadata.ip_kvt,
            aux_port=metadata.kvt_port,
            dp_rank=metadata.dp_rank,
            dp_size=metadata.data_parallel_size,
            prompt_block_size=(hits.block_size_of(instance) if hits else 0) or UNSET,
            dp_rank_local=UNSET if self._is_alone(instance) else metadata.dp_local_rank,
            predicted_ttft=predicted.get("predicted_ttft", UNSET),
            predicted_tpot=predicted.get("predicted_tpot", UNSET),
            refuses_late=self._dispatcher.policy.refuses_late or UNSET,
        )

    def _is_alone(self, instance: Instance) -> bool:
        """True if an engine is alone behind its API server, which then refuses a rank."""
        if instance.metadata.data_parallel_size < 2:
            return True
        return len(self._dispatcher.complaints.ids_at(instance.api_server)) < 2

    def _tried(self, asked: SchedulingRequest) -> frozenset[str] | None:
        """Ids of the instances that failed the request, if its gateway tells."""
        excluded = asked.excluded_endpoints
        if isinstance(excluded, UnsetType):
            return None
        return frozenset().union(*map(self._dispatcher.complaints.ids_at, _addresses(excluded)))


_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def _say_what_is_wrong(request: web.Request, handler: _Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except (ValueError, msgspec.ValidationError) as error:
        return web.Response(status=400, text=str(error)[:1000])


def _addresses(texts: Iterable[str]) -> Iterator[Address]:
    """Addresses of `HOST:PORT`; other texts are skipped."""
    for text in texts:
        with suppress(ValueError):
            yield Address.parse(text)


def _gateway_id(text: str) -> str:
    """The id of a gateway: its endpoint, or any other JSON string."""
    said: Any = decode(text.encode(), HostPort | str)  # type: ignore[arg-type]
    return f"{said.host}:{said.port}" if isinstance(said, HostPort) else str(said)[:1024]


def _json(value: Any) -> web.Response:
    return web.Response(body=encode(value), content_type="application/json")
