# SPDX-License-Identifier: Apache-2.0
"""The gateway and a scheduler: a mock one that fails in all ways, and the real one in lite mode."""

from __future__ import annotations

import asyncio
import json
import time
from base64 import b64encode
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from msgspec import to_builtins
from tokenizers import Tokenizer, models, pre_tokenizers

from llumlet.contract.block_hashes import chain, root_of
from llumlet.process.addresses import Address
from llumlet.protocol.infer_type import InferType
from llumsched.contract import MODEL_AWAY, MODEL_NEEDED, HostPort, LLMInstance, Report, SchedulingRequest
from llumsched.gateway import scheduler_client
from llumsched.gateway.access_log import AccessLogger
from llumsched.gateway.config import Config
from llumsched.gateway.errors import Overloaded
from llumsched.gateway.exchange import failure
from llumsched.gateway.gateway_metrics import Record
from llumsched.gateway.scheduled import _PREFILL_REPORT_S
from llumsched.gateway.scheduler_client import SchedulerAnswer, SchedulerClient
from llumsched.model_memory import AWAY_RETRY_S, ModelMemory
from llumsched.policy.document import Mode, load_policy
from llumsched.prefix.hits import SENT_BLOCK_SIZE
from llumsched.request import Request
from llumsched.scheduler.process import RunningScheduler, SchedulerConfig, serve
from tests.llumsched.gateway.support import DEADLINE_S, Cluster, cluster, engine, turns, until
from tests.support.mock_api import Mock

COMPLETIONS = "/v1/completions"
BODY: dict[str, Any] = {"model": "mock", "prompt": [1, 2, 3, 4, 5], "max_tokens": 4}


@pytest.fixture(autouse=True)
def _nothing_is_told_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it would be after three seconds in which the machine was busy with something else."""
    monkeypatch.setattr(scheduler_client, "_SHORT", aiohttp.ClientTimeout(DEADLINE_S))


@dataclass
class MockScheduler:
    ports: list[int] = field(default_factory=list)
    """Of the instances it names, in turn."""
    status: int = 200
    said: str = ""
    """Its reason for that status."""
    release_status: int = 200
    hangs: bool = False
    may_place: asyncio.Event | None = None
    """Placements wait for it."""
    dp_rank_local: int | None = None
    prompt_block_size: int | None = None
    cached_tokens: int | None = None
    refuses_late: bool = False
    predicted_ms: tuple[float, float] | None = None
    """To the first token, and between two."""
    is_warming: bool = False
    may_be_told: asyncio.Event | None = None
    """Reports wait for it."""
    calls: list[tuple[str, Any]] = field(default_factory=list)

    def of(self, path: str) -> list[Any]:
        """The bodies; of releases that were told at once, each."""
        bodies = [body for called, body in self.calls if called == path]
        if path == "/release":
            return [one for body in bodies for one in (body if isinstance(body, list) else [body])]
        return bodies

    @property
    def reports(self) -> list[Any]:
        return [report for batch in self.of("/report") for report in batch]

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        body = json.loads(await request.read() or b"null")
        self.calls.append((request.path, body))
        if self.hangs:
            await asyncio.sleep(3600)
        if request.path == "/release":
            return web.Response(status=self.release_status)
        if request.path == "/report" and self.may_be_told is not None:
            await self.may_be_told.wait()
        if request.path != "/schedule":
            return web.Response(status=404 if request.path == "/instances" else 200)
        if self.is_warming:
            return web.Response(status=503, text="warming: 3 instances are known so far")
        if self.status != 200:
            said = self.said or {404: "endpoint not found"}.get(self.status, "no")
            return web.Response(status=self.status, text=said)
        if self.may_place is not None:
            await self.may_place.wait()
        port = self.ports[len(self.of("/schedule")) % len(self.ports)]
        instance: dict[str, Any] = {
            "id": f"engine-{port}",
            "endpoint": {"host": "127.0.0.1", "port": port},
            "infer_type": "neutral",
        }
        if self.dp_rank_local is not None:
            instance["dp_rank_local"] = self.dp_rank_local
        if self.prompt_block_size is not None:
            instance["prompt_block_size"] = self.prompt_block_size
        if self.refuses_late:
            instance["refuses_late"] = True
        if self.cached_tokens is not None:
            instance["cached_tokens"] = self.cached_tokens
        if self.predicted_ms is not None:
            instance["predicted_ttft"], instance["predicted_tpot"] = self.predicted_ms
        return web.json_response(body | {"scheduling_result": [instance]})


@asynccontextmanager
async def scheduled(**settings: Any) -> AsyncIterator[tuple[Cluster, MockScheduler]]:
    async with scheduled_by(1, **settings) as (it, (scheduler,)):
        yield it, scheduler


@asynccontextmanager
async def scheduled_by(number: int, **settings: Any) -> AsyncIterator[tuple[Cluster, list[MockScheduler]]]:
    """Several schedulers, in the order in which they are asked: another one if one fails."""
    schedulers = [MockScheduler() for _ in range(number)]
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(engine(one)) for one in schedulers]  # type: ignore[arg-type]
        defaults: dict[str, Any] = {
            "scheduling_policy": "load-balance",
            "scheduler_endpoints": tuple(Address("127.0.0.1", port) for port, _, _ in servers),
            "backend_endpoints": (),
            "schedule_timeout_s": DEADLINE_S,
            "wait_scheduling_retry_interval_s": 0.05,
        }
        it = await stack.enter_async_context(cluster(**defaults | settings))
        for scheduler in schedulers:
            scheduler.ports = it.ports
        first = it.gateway.placement._client._current  # type: ignore[attr-defined]
        yield it, schedulers[first:] + schedulers[:first]


@pytest.mark.asyncio
async def test_the_scheduler_is_told_the_same_id_as_the_engine() -> None:
    async with scheduled() as (it, scheduler):
        await it.post(COMPLETIONS, BODY, {"X-Request-Id": "mine"})
        (asked,) = scheduler.of("/schedule")
        assert (asked["id"], asked["model"], asked["prompt_num_tokens"]) == ("mine", "mock", 5)
        assert asked["scheduling_mode"] == "neutral"
        assert (it.engines.seen or [])[0]["headers"]["X-Request-Id"] == "mine"
        assert not scheduler.of("/release")  # full mode: the engine's status tells


@pytest.mark.asyncio
@pytest.mark.parametrize(("status", "said"), [(429, MODEL_AWAY), (404, "")])
async def test_model_that_is_away_is_waited_for_and_then_503(status: int, said: str) -> None:
    """True if the scheduler remembers it, or this gateway, as the scheduler was restarted."""
    async with scheduled(wait_scheduling_timeout_s=0.3) as (it, scheduler):
        assert (await it.post(COMPLETIONS, BODY)).status == 200
        scheduler.status, scheduler.said = status, said
        reply = await it.post(COMPLETIONS, BODY)
        assert (reply.status, int(reply.headers["Retry-After"]) >= AWAY_RETRY_S) == (503, True)
        assert len(scheduler.of("/schedule")) > 2
        assert status == 429 or (await it.post(COMPLETIONS, BODY | {"model": "never"})).status == 404


@pytest.mark.asyncio
async def test_request_without_a_model_is_refused_where_there_are_several() -> None:
    async with scheduled() as (it, scheduler):
        scheduler.status, scheduler.said = 400, f"{MODEL_NEEDED}: instances serve several"
        reply = await it.post(COMPLETIONS, {name: value for name, value in BODY.items() if name != "model"})
        assert (reply.status, "`model` is needed" in reply.json["error"]["message"]) == (400, True)
        assert not it.engines.seen


@pytest.mark.asyncio
async def test_real_scheduler_remembers_models_of_engines_that_are_gone() -> None:
    mock = Mock(seen=[], models=("mock", "adapter"))
    async with _real(mock, wait_scheduling_timeout_s=0.2) as (it, scheduler):
        assert (await it.post(COMPLETIONS, BODY | {"model": "adapter"})).status == 200
        mock.models = ("mock",)
        await until(lambda: all(list(one.metadata.served_models) == ["mock"] for one in scheduler.view.values()))
        it.gateway.backends.names = ModelMemory(time.monotonic)
        for backend in it.gateway.backends:
            backend.models = None
        assert (await it.post(COMPLETIONS, BODY | {"model": "adapter"})).status == 503
        assert (await it.post(COMPLETIONS, BODY | {"model": "never"})).status == 404


def _tokenizer(directory: Path) -> str:
    """Of the words one and two, which are the tokens 1 and 2."""
    path = str(directory / "tokenizer.json")
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "one": 1, "two": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(path)
    return path


def _places(scheduler: RunningScheduler, prompt: str) -> list[int]:
    """Tokens of a prompt that each engine is taken to hold."""
    hits = scheduler.dispatcher.hits
    assert hits is not None
    ids = [{"one": 1, "two": 2}[word] for word in prompt.split()]
    names = b"".join(chain(ids, SENT_BLOCK_SIZE, root_of(SENT_BLOCK_SIZE)))
    asked = Request("", "mock", len(ids), prompt_blocks=names, prompt_block_size=SENT_BLOCK_SIZE)
    (values,) = hits.of_request(asked, scheduler.dispatcher.table)
    return [int(value) for value in values]


@pytest.mark.asyncio
async def test_blocks_are_named_for_a_scheduler_that_wants_them(tmp_path: Path) -> None:
    path = _tokenizer(tmp_path)
    body = BODY | {"prompt": "one two one two two"}
    async with scheduled(tokenizers={"mock": path}) as (it, scheduler):
        await it.post(COMPLETIONS, body)
        scheduler.prompt_block_size = 2
        await it.post(COMPLETIONS, body)
        await it.post(COMPLETIONS, body)
        scheduler.prompt_block_size = None
        await it.post(COMPLETIONS, body)
        await it.post(COMPLETIONS, body)
        told = [(one.get("prompt_block_size", 0), one.get("prompt_blocks", "")) for one in scheduler.of("/schedule")]
        named = b64encode(b"".join(chain([1, 2, 1, 2, 2], 2, root_of(2)))).decode()
        assert told == [(0, ""), (0, ""), (2, named), (2, named), (0, "")]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("path", "body", "ids"),
    [
        (COMPLETIONS, {"prompt": [7, 8, 9, 7, 8]}, [7, 8, 9, 7, 8]),
        ("/inference/v1/generate", {"token_ids": [7, 8, 9], "sampling_params": {}}, [7, 8, 9]),
        ("/inference/v1/generate", {"token_ids": [7, 8, 9], "features": {"mm_hashes": {}}}, []),
        (COMPLETIONS, {"prompt": "one two one two"}, []),
    ],
    ids=str,
)
async def test_token_ids_are_named_without_a_tokenizer(path: str, body: dict[str, Any], ids: list[int]) -> None:
    async with scheduled() as (it, scheduler):
        scheduler.prompt_block_size = 2
        for _ in range(2):
            await it.post(path, {"model": "mock"} | body)
        told = scheduler.of("/schedule")[1].get("prompt_blocks", "")
        assert told == b64encode(b"".join(chain(ids, 2, root_of(2)))).decode()


@pytest.mark.asyncio
async def test_missing_names_are_told_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    async with scheduled() as (it, scheduler):
        await it.post(COMPLETIONS, BODY | {"prompt": "one two one two"})
        assert "gateway_prompts_unnamed_total{" not in (await it.get("/metrics")).content.decode(), (
            "nobody asked for names"
        )
        scheduler.prompt_block_size = 1
        for path, form in ((COMPLETIONS, {"prompt": "one two"}), ("/v1/messages", {"messages": [], "system": "x" * 9})):
            for _ in range(2):
                await it.post(path, {"model": "mock", "max_tokens": 1} | form)
        await it.post("/v1/embeddings", {"model": "mock", "input": "one two"})
        text = (await it.get("/metrics")).content.decode()
        assert 'gateway_prompts_unnamed_total{api="openai"} 1.0' in text
        assert 'gateway_prompts_unnamed_total{api="anthropic"} 2.0' in text
        assert text.count("gateway_prompts_unnamed_total{") == 2
    (told,) = [record.getMessage() for record in caplog.records if "--tokenizer-path" in record.getMessage()]
    assert "no tokenizer for the model mock" in told


@pytest.mark.asyncio
async def test_expected_hits_are_counted() -> None:
    async with scheduled() as (it, scheduler):
        scheduler.cached_tokens = 3
        for body in (BODY, BODY | {"stream": True}):
            assert (await it.post(COMPLETIONS, body)).status == 200
        assert 'gateway_prefix_expected_tokens_total{api="openai"} 6.0' in (await it.get("/metrics")).content.decode()


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("said", "told"), [({}, 0), ({"priority": None}, 0), ({"priority": -3}, -3), ({"priority": "7"}, 7)]
)
async def test_the_scheduler_is_told_the_priority_and_the_engine_as_the_client_wrote_it(
    said: dict[str, Any], told: int
) -> None:
    async with scheduled() as (it, scheduler):
        assert (await it.post(COMPLETIONS, BODY | said)).status == 200
        (asked,) = scheduler.of("/schedule")
        assert asked.get("priority", 0) == told
        (seen,) = it.engines.seen or []
        assert json.loads(seen["content"]).items() >= said.items()


@pytest.mark.asyncio
async def test_a_priority_that_is_no_whole_number_is_refused_before_anybody_is_asked() -> None:
    async with scheduled() as (it, scheduler):
        for wrong in (0.5, "first", [0], 2**63):
            reply = await it.post(COMPLETIONS, BODY | {"priority": wrong})
            assert (reply.status, "`$.priority`" in reply.json["error"]["message"]) == (400, True)
        assert not scheduler.of("/schedule")


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("headers", "settings", "told"),
    [
        ({}, {}, (0, 0)),
        ({"x-llm-d-slo-ttft-ms": "500"}, {}, (500, 0)),
        ({"X-LLM-D-SLO-TPOT-MS": "12.5", "x-llm-d-slo-ttft-ms": "1e3"}, {}, (1000, 12.5)),
        ({}, {"ttft_slo_ms": {"": 900.0, "mock": 700.0}, "tpot_slo_ms": {"other": 40.0}}, (700, 0)),
        ({"x-llm-d-slo-tpot-ms": "50"}, {"ttft_slo_ms": {"": 900.0}, "tpot_slo_ms": {"": 40.0}}, (900, 50)),
    ],
)
async def test_the_scheduler_is_told_the_objectives(
    headers: dict[str, str], settings: dict[str, Any], told: tuple[float, float]
) -> None:
    async with scheduled(**settings) as (it, scheduler):
        assert (await it.post(COMPLETIONS, BODY, headers)).status == 200
        (asked,) = scheduler.of("/schedule")
        assert (asked.get("ttft_slo_ms", 0), asked.get("tpot_slo_ms", 0)) == told
        assert asked.get("may_wait", False) == any(told)
        assert 0 < asked["waited_ms"] < DEADLINE_S * 1e3


@pytest.mark.asyncio
async def test_predictions_are_measured() -> None:
    body = BODY | {"stream": True, "max_tokens": 8}
    async with scheduled() as (it, scheduler):
        await it.post(COMPLETIONS, body)
        scheduler.predicted_ms = 0.001, 3_600_000.0
        await it.post(COMPLETIONS, body)
        await it.until_idle()
        text = (await it.get("/metrics")).content.decode()
        assert 'request_ttft_prediction_ratio_bucket{le="4.0",model="mock"} 0.0' in text
        assert 'request_ttft_prediction_ratio_count{model="mock"} 1.0' in text
        assert 'request_tpot_prediction_ratio_bucket{le="0.25",model="mock"} 1.0' in text
        assert 'request_tpot_prediction_ratio_count{model="mock"} 1.0' in text


@pytest.mark.asyncio
async def test_all_schedulers_are_told_how_objectives_are_met() -> None:
    body = BODY | {"stream": True}
    async with scheduled_by(2) as (it, schedulers):
        await until(lambda: all(one.of("/attainment") for one in schedulers))
        for milliseconds in ("1e7", "1e7", "0.001"):
            await it.post(COMPLETIONS, body, {"x-llm-d-slo-ttft-ms": milliseconds})
        await it.post(COMPLETIONS, body)
        expected = [{"model": "mock", "num_met": 2, "num_missed": 1}]
        for one in schedulers:
            assert one.of("/attainment")[0]["models"] == []
            await until(lambda one=one: one.of("/attainment")[-1]["models"] == expected)
            assert one.of("/attainment")[-1]["gateway_id"] == it.gateway.placement.gateway_id  # type: ignore[attr-defined]


@pytest.mark.asyncio
@pytest.mark.parametrize("name", ["x-llm-d-slo-ttft-ms", "x-llm-d-slo-tpot-ms"])
async def test_an_objective_that_is_none_is_refused_before_anybody_is_asked(name: str) -> None:
    async with scheduled() as (it, scheduler):
        for wrong in ("", "0", "-5", "nan", "inf", "soon", "1e300", "500ms"):
            reply = await it.post(COMPLETIONS, BODY, {name: wrong})
            assert (reply.status, f"`{name}`" in reply.json["error"]["message"]) == (400, True), wrong
        assert not scheduler.of("/schedule")


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b'{"model": "mock", "prompt": [1], "max_tokens": 1}\n', {"prompt": [1]}),
        (b'{"model": "mock", "prompt": [1], "priority": 9, "max_tokens": 1}', {"max_tokens": 1}),
        (b"{ }", {}),
    ],
)
async def test_the_header_says_a_priority_in_the_place_of_the_body(content: bytes, told: dict[str, Any]) -> None:
    """To the engine as well, which reads the body alone."""
    async with scheduled() as (it, scheduler):
        assert (await it.post(COMPLETIONS, content, {"X-Priority": "-2"})).status == 200
        (asked,) = scheduler.of("/schedule")
        assert asked["priority"] == -2
        (seen,) = it.engines.seen or []
        assert json.loads(seen["content"]).items() >= (told | {"priority": -2}).items()


@pytest.mark.asyncio
async def test_a_header_that_says_no_priority_is_refused_before_anybody_is_asked() -> None:
    async with scheduled() as (it, scheduler):
        for wrong in ("", "high", "0.5", str(2**63)):
            reply = await it.post(COMPLETIONS, BODY, {"X-Priority": wrong})
            assert (reply.status, "`X-Priority`" in reply.json["error"]["message"]) == (400, True)
        assert not scheduler.of("/schedule")


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("settings", "refuses_late", "told"),
    [
        ({"shed_priority": 5}, False, "--shed-priority has no effect"),
        ({"late_wait_s": 5.0}, False, "--late-wait has no effect"),
        ({"shed_priority": 5}, True, ""),
        ({}, False, ""),
    ],
)
async def test_settings_for_late_requests_without_a_policy_for_them_are_told_once(
    caplog: pytest.LogCaptureFixture, settings: dict[str, Any], refuses_late: bool, told: str
) -> None:
    async with scheduled(**settings) as (it, scheduler):
        scheduler.refuses_late = refuses_late
        await it.post(COMPLETIONS, BODY)
        assert "no effect" not in caplog.text, "it has no objectives"
        for _ in range(2):
            await it.post(COMPLETIONS, BODY, {"x-llm-d-slo-ttft-ms": "500"})
    assert caplog.text.count("no effect") == bool(told)
    assert told in caplog.text


@pytest.mark.asyncio
async def test_begun_stream_continues_where_it_can() -> None:
    async with scheduled() as (it, scheduler):
        it.engines.fail_at = 3
        body = BODY | {"stream": True, "max_tokens": 20}
        assert (await it.post(COMPLETIONS, body, {"x-llm-d-slo-ttft-ms": "500"})).status == 200
        first, *later = scheduler.of("/schedule")
        assert (first["ttft_slo_ms"], first["may_wait"]) == (500, True)
        assert later
        assert not any(asked.get("ttft_slo_ms") or asked.get("may_wait") for asked in later)


@pytest.mark.asyncio
async def test_a_body_that_cannot_be_counted_is_counted_by_length_and_for_the_engine_to_refuse() -> None:
    async with scheduled() as (it, scheduler):
        body = b'{"model": "mock", "prompt": "x", "max_tokens": 1, "temperature": 1e999}'
        assert (await it.post(COMPLETIONS, body)).status == 200
        assert (it.engines.seen or [])[0]["content"] == body
        (asked,) = scheduler.of("/schedule")
        assert asked["prompt_num_tokens"] == 18


@pytest.mark.asyncio
async def test_a_clients_template_is_for_the_engine_to_refuse() -> None:
    told = {"chat_template": "{{ 1 }}", "chat_template_kwargs": {"tokenize": True}}
    body = json.dumps({"model": "mock", "messages": [{"role": "user", "content": "x" * 8}], "max_tokens": 1} | told)
    async with scheduled() as (it, scheduler):
        assert (await it.post("/v1/chat/completions", body.encode())).status == 200
        assert (it.engines.seen or [])[0]["content"] == body.encode()
        assert scheduler.of("/schedule")[0]["prompt_num_tokens"] == 6


@pytest.mark.asyncio
async def test_the_engine_is_told_the_rank_that_the_scheduler_chose() -> None:
    """And not the one that a client would have."""
    async with scheduled() as (it, scheduler):
        for rank in (None, 2):
            scheduler.dp_rank_local = rank
            await it.post(COMPLETIONS, BODY, {"X-Data-Parallel-Rank": "1"})
        told = [seen["headers"].get("X-data-parallel-rank") for seen in it.engines.seen or []]
        assert told == [None, "2"]


@pytest.mark.asyncio
async def test_while_the_scheduler_warms_up_requests_go_round_what_is_known() -> None:
    async with scheduled(num_engines=3) as (it, scheduler):
        for _ in range(3):
            await it.post(COMPLETIONS, BODY)
        scheduler.is_warming = True
        it.engines.seen = []
        assert {(await it.post(COMPLETIONS, BODY)).status for _ in range(6)} == {200}
        assert Counter(seen["headers"]["Host"] for seen in it.engines.seen) == {
            f"127.0.0.1:{port}": 2 for port in it.ports
        }
        assert len(scheduler.of("/schedule")) == 9, "it is asked for each: it is not away"
        scheduler.is_warming = False
        await it.post(COMPLETIONS, BODY)
        assert b'request_fallback_total{model="mock",status_code="200"} 6.0' in (await it.get("/metrics")).content


@pytest.mark.asyncio
async def test_where_nothing_is_known_a_request_waits_until_the_scheduler_is_warm() -> None:
    async with scheduled() as (it, scheduler):
        scheduler.is_warming = True
        asked = asyncio.create_task(it.post(COMPLETIONS, BODY))
        await until(lambda: len(scheduler.of("/schedule")) == 2)
        scheduler.is_warming = False
        assert (await asked).status == 200


@pytest.mark.asyncio
@pytest.mark.parametrize("returns", [True, False])
async def test_first_requests_wait_for_a_scheduler_that_does_not_answer_yet(
    returns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when gateway and scheduler are started at once."""
    monkeypatch.setattr(scheduler_client, "_AWAY_S", 0.0)
    async with scheduled(wait_scheduling_timeout_s=DEADLINE_S if returns else 0.2) as (it, scheduler):
        scheduler.status = 500
        asked = asyncio.create_task(it.post(COMPLETIONS, BODY))
        if returns:
            await until(lambda: it.gateway.placement.num_waiting == 1)
            scheduler.status = 200
        reply = await asked
        assert reply.status == (200 if returns else 503)
        assert returns or "no instance is known yet" in reply.json["error"]["message"]


@pytest.mark.asyncio
async def test_gateways_begin_with_different_schedulers() -> None:
    config = Config(scheduler_endpoints=tuple(Address("127.0.0.1", port) for port in (1, 2, 3)))
    async with aiohttp.ClientSession() as session:
        assert {SchedulerClient(config, session)._current for _ in range(200)} == {0, 1, 2}


@pytest.mark.asyncio
async def test_lite_mode_reports_and_releases() -> None:
    settings = {"full_mode": False, "requests_report_duration_s": 0.05, "mock": Mock(interval_s=0.05)}
    async with scheduled(**settings) as (it, scheduler):

        def counts() -> list[int]:
            return [report["num_tokens"] for report in scheduler.reports if report["kind"] == "state_update"]

        body = BODY | {"stream": True, "max_tokens": 4000}
        asked = asyncio.create_task(it.post(COMPLETIONS, body, {"X-Request-Id": "s"}))
        await until(lambda: len(set(counts())) > 4)
        asked.cancel()
        await until(lambda: len(scheduler.of("/release")) == 1)
        assert counts() == sorted(counts())
        assert counts()[0] >= 5
        await it.post(COMPLETIONS, BODY)
        await until(lambda: len(scheduler.of("/release")) == 2)
        (begun,) = (report for report in scheduler.reports if report["kind"] == "prefill_done")
        assert (begun["id"], begun["num_tokens"]) == ("s", 5)
        assert {report["instance_id"] for report in scheduler.reports} <= {f"engine-{port}" for port in it.ports}
        released = scheduler.of("/release")[0]
        assert (released["id"], len(released["scheduling_result"])) == ("s", 1)


@pytest.mark.asyncio
async def test_messages_to_a_scheduler_stay_in_order() -> None:
    """What waits meanwhile is told as it is by then, and not at all if it is over."""
    scheduler = MockScheduler(may_be_told=(may_be_told := asyncio.Event()))
    async with engine(scheduler) as (port, _, _), aiohttp.ClientSession() as session:  # type: ignore[arg-type]
        address = Address("127.0.0.1", port)
        client = SchedulerClient(Config(scheduler_endpoints=(address,)), session)

        def report(request_id: str, num_tokens: int, kind: Any = "state_update") -> dict[str, Any]:
            told = Report(request_id, "i", kind, num_tokens=num_tokens)
            client.report(address, [told])
            return dict(to_builtins(told))

        def release(request_id: str) -> dict[str, Any]:
            result = [LLMInstance("i", HostPort("10.0.0.1", 8000))]
            client.release(SchedulerAnswer(address, SchedulingRequest(id=request_id), result))
            return dict(to_builtins(SchedulingRequest(id=request_id, scheduling_result=result)))

        first = report("a", 5)
        await until(lambda: scheduler.calls)
        begun = report("a", 5, "prefill_done")
        report("a", 6)
        report("over", 9)
        over = release("over")
        newest = report("a", 7)
        too = release("over too")
        may_be_told.set()
        await until(lambda: len(scheduler.of("/release")) == 2)
        await client.close()
    assert scheduler.calls == [
        ("/report", [first]),
        ("/release", [over, too]),
        ("/report", [begun, newest]),
    ]


@pytest.mark.asyncio
async def test_ends_are_told_together_and_none_is_left_out_in_silence(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """More come in a second than could be told one after the other."""
    scheduler = MockScheduler(may_be_told=(may_be_told := asyncio.Event()))
    async with engine(scheduler) as (port, _, _), aiohttp.ClientSession() as session:  # type: ignore[arg-type]
        address = Address("127.0.0.1", port)
        client = SchedulerClient(Config(scheduler_endpoints=(address,)), session)
        client.report(address, [Report("a", "i")])
        await until(lambda: scheduler.calls)
        ended = [str(number) for number in range(1000)]
        for request_id in ended:
            client.release(SchedulerAnswer(address, SchedulingRequest(id=request_id, prompt_num_tokens=9), []))
        monkeypatch.setattr("llumsched.gateway.scheduler_client._MOST_RELEASES", len(ended))
        client.release(SchedulerAnswer(address, SchedulingRequest(id="one too many"), []))
        may_be_told.set()
        await until(lambda: len(scheduler.of("/release")) == len(ended))
        await client.close()
    assert [one["id"] for one in scheduler.of("/release")] == ended
    assert not any("prompt_num_tokens" in one for one in scheduler.of("/release"))
    assert len(scheduler.calls) == 5
    assert "not told of 1 ended requests" in caplog.text


@pytest.mark.asyncio
async def test_short_request_is_only_released() -> None:
    async with scheduled(full_mode=False) as (it, scheduler):
        await it.post(COMPLETIONS, BODY | {"stream": True})
        await until(lambda: scheduler.of("/release"))
        await asyncio.sleep(2 * _PREFILL_REPORT_S)
    assert scheduler.calls[-1][0] == "/release"


@pytest.mark.asyncio
async def test_a_retry_releases_the_first_place_and_excludes_it() -> None:
    async with scheduled() as (it, scheduler):
        await it.lose(1)
        assert (await it.post(COMPLETIONS, BODY, {"X-Request-Id": "r"})).status == 200
        first, second = scheduler.of("/schedule")
        assert (first["id"], second["id"]) == ("r", "r-r1")
        assert second["excluded_endpoints"] == [f"127.0.0.1:{it.ports[1]}"]
        await until(lambda: [released["id"] for released in scheduler.of("/release")] == ["r"])


@pytest.mark.asyncio
async def test_a_continuation_is_placed_by_all_of_its_tokens() -> None:
    async with scheduled() as (it, scheduler):
        it.engines.fail_at = 3
        reply = await it.post(COMPLETIONS, BODY | {"stream": True, "return_token_ids": True})
        assert reply.status == 200
        assert [asked["prompt_num_tokens"] for asked in scheduler.of("/schedule")] == [5, 8]


@pytest.mark.asyncio
async def test_the_scheduler_is_told_which_instances_hang() -> None:
    """It may see nothing of it, and a hung one that has lost all its requests looks idle."""
    async with scheduled() as (it, scheduler):
        for _ in range(2):
            await it.post(COMPLETIONS, BODY)
        hung = it.gateway.backends.at(Address("127.0.0.1", it.ports[0]))
        hung.is_stalled = True
        await until(lambda: scheduler.of("/complaints")[-1]["instances"])
        (told,) = scheduler.of("/complaints")[-1]["instances"]
        assert told["endpoint"] == {"host": "127.0.0.1", "port": it.ports[0]}
        assert (told["cause"], told["reason"]) == ("hang", "its engine core hangs")
        text = (await it.get("/metrics")).content
        assert b'gateway_ejections_total{cause="hang"} 1.0' in text
        assert b"gateway_avoided_instances 1.0" in text
        hung.is_stalled = False
        await until(lambda: not scheduler.of("/complaints")[-1]["instances"])


@pytest.mark.asyncio
async def test_a_scheduler_that_names_an_avoided_instance_is_asked_again_for_another() -> None:
    async with scheduled() as (it, scheduler):
        for _ in range(2):
            await it.post(COMPLETIONS, BODY)
        hung = it.gateway.backends.at(Address("127.0.0.1", it.ports[1]))
        hung.is_stalled = True
        scheduler.calls.clear()
        await it.post(COMPLETIONS, BODY, {"X-Request-Id": "r"})  # the mock names the instance of this number
        first, second = scheduler.of("/schedule")
        assert (first["excluded_endpoints"], second["excluded_endpoints"]) == ([], [str(hung)])
        await until(lambda: [released["id"] for released in scheduler.of("/release")] == ["r"])
        assert (it.engines.seen or [])[-1]["headers"]["Host"] == f"127.0.0.1:{it.ports[0]}"


@pytest.mark.asyncio
async def test_waiting_for_an_instance_is_bounded_in_number() -> None:
    async with scheduled(wait_scheduling_timeout_s=DEADLINE_S, max_queue_size=3) as (it, scheduler):
        scheduler.status = 429
        asked = [asyncio.create_task(it.post(COMPLETIONS, BODY)) for _ in range(6)]
        await until(lambda: sum(one.done() for one in asked) == 3)
        refused = [one.result() for one in asked if one.done()]
        assert [reply.status for reply in refused] == [429] * 3
        assert {reply.headers["Retry-After"] for reply in refused} <= {"1", "2", "3"}
        assert it.gateway.placement.num_waiting == 3
        scheduler.status = 200
        assert sorted(reply.status for reply in await asyncio.gather(*asked)) == [200] * 3 + [429] * 3


@pytest.mark.asyncio
async def test_waiting_for_an_instance_is_bounded_in_time() -> None:
    async with scheduled(wait_scheduling_timeout_s=0.5) as (it, scheduler):
        scheduler.status = 429
        reply = await it.post(COMPLETIONS, BODY)
        assert (reply.status, reply.headers["Retry-After"] in ("1", "2", "3")) == (503, True)


def test_immediate_refusals_spread_their_retries() -> None:
    for told_s, expected in ((0.2, {"1", "2", "3"}), (59.2, {"60", "61", "62"})):
        errors = [Overloaded("", retry_after_s=told_s) for _ in range(100)]
        assert {failure(error, "").headers["Retry-After"] for error in errors} == expected


@pytest.mark.asyncio
async def test_a_burst_that_an_idle_cluster_takes_does_not_wait() -> None:
    """However many ask the scheduler at the same time."""
    async with scheduled(max_queue_size=2) as (it, scheduler):
        scheduler.may_place = asyncio.Event()
        burst = [asyncio.create_task(it.post(COMPLETIONS, BODY)) for _ in range(10)]
        await until(lambda: len(scheduler.of("/schedule")) == 10 or any(one.done() for one in burst))
        assert b"gateway_pending_requests 0.0" in (await it.get("/metrics")).content
        scheduler.may_place.set()
        assert {reply.status for reply in await asyncio.gather(*burst)} == {200}


@pytest.mark.asyncio
async def test_requests_beyond_the_limit_are_refused_at_once() -> None:
    async with scheduled(max_requests=2) as (it, scheduler):
        scheduler.may_place = asyncio.Event()
        asked = [asyncio.create_task(it.post(COMPLETIONS, BODY)) for _ in range(5)]
        await until(lambda: sum(one.done() for one in asked) == 3)
        scheduler.may_place.set()
        assert sorted(reply.status for reply in await asyncio.gather(*asked)) == [200, 200, 429, 429, 429]
        assert (await it.post(COMPLETIONS, BODY)).status == 200


@pytest.mark.asyncio
async def test_an_unknown_model_is_the_schedulers_to_say() -> None:
    async with scheduled() as (it, scheduler):
        scheduler.status = 404
        reply = await it.post(COMPLETIONS, BODY | {"model": "other"})
        assert (reply.status, reply.json["error"]["type"]) == (404, "NotFoundError")


@pytest.mark.asyncio
@pytest.mark.parametrize("trouble", ["hangs", "status"])
async def test_without_its_scheduler_requests_go_round_what_is_known(
    trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0
    monkeypatch.setattr(scheduler_client, "time", SimpleNamespace(monotonic=lambda: now_s))
    async with scheduled() as (it, scheduler):
        for _ in range(2):
            await it.post(COMPLETIONS, BODY)
        setattr(scheduler, trouble, {"hangs": True, "status": 500}[trouble])
        _answers_within(it, 0.3)
        for _ in range(6):
            assert (await it.post(COMPLETIONS, BODY)).status == 200
        assert len(scheduler.of("/schedule")) == 3  # it is not asked again by everyone
        assert b'request_fallback_total{model="mock",status_code="200"} 6.0' in (await it.get("/metrics")).content
        setattr(scheduler, trouble, {"hangs": False, "status": 200}[trouble])
        _answers_within(it, DEADLINE_S)
        now_s += scheduler_client._AWAY_S
        await until(lambda: all(one.answers for one in _client(it)._in_turn))
        for _ in range(2):
            assert (await it.post(COMPLETIONS, BODY)).status == 200
        assert len(scheduler.of("/schedule")) == 5


def _answers_within(it: Cluster, limit_s: float) -> None:
    """How long the gateway waits for the scheduler from now on."""
    _client(it)._timeout_s = limit_s


def _client(it: Cluster) -> SchedulerClient:
    client = it.gateway._schedulers
    assert client is not None
    return client


@pytest.mark.asyncio
async def test_hung_scheduler_costs_no_request_its_time() -> None:
    """Those that wait go to the next scheduler as soon as a probe finds out; those that come meanwhile do at once."""
    async with scheduled_by(2) as (it, (first, second)):
        await it.post(COMPLETIONS, BODY)
        first.hangs = True
        waiting = [asyncio.create_task(it.post(COMPLETIONS, BODY)) for _ in range(3)]
        assert {reply.status for reply in await asyncio.gather(*waiting)} == {200}  # long before the time is over
        asked = len(first.of("/schedule"))
        for _ in range(3):
            assert (await it.post(COMPLETIONS, BODY)).status == 200
        assert len(first.of("/schedule")) == asked
        assert len(second.of("/schedule")) == 6
        first.hangs = False
        await until(lambda: all(one.answers for one in _client(it)._in_turn))


@pytest.mark.asyncio
async def test_scheduler_that_leaves_a_question_unanswered_is_not_asked_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scheduler_client, "_ASK_AGAIN_S", 3600.0)
    async with scheduled() as (it, scheduler):
        await it.post(COMPLETIONS, BODY)
        scheduler.may_place = asyncio.Event()
        _answers_within(it, 0.3)
        for _ in range(3):
            assert (await it.post(COMPLETIONS, BODY)).status == 200
        await until(lambda: len(scheduler.of("/healthz")) > 8)
        assert (await it.post(COMPLETIONS, BODY)).status == 200
        assert len(scheduler.of("/schedule")) == 2
        _answers_within(it, DEADLINE_S)
        scheduler.may_place.set()
        await until(lambda: all(one.answers for one in _client(it)._in_turn))
        assert (await it.post(COMPLETIONS, BODY)).status == 200
        assert len(scheduler.of("/schedule")) == 3


@pytest.mark.asyncio
async def test_dead_connection_delays_the_scheduler_only_for_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scheduler_client, "_ASK_AGAIN_S", 0.0)
    async with scheduled() as (it, scheduler):
        await it.post(COMPLETIONS, BODY)
        scheduler.may_place = open_question = asyncio.Event()
        _answers_within(it, 0.3)
        assert (await it.post(COMPLETIONS, BODY)).status == 200
        (known,) = _client(it)._in_turn
        await until(lambda: known._takes_trial)
        monkeypatch.setattr(scheduler_client, "_ASK_AGAIN_S", 3600.0)
        asked = asyncio.gather(*(it.post(COMPLETIONS, BODY) for _ in range(4)))
        assert {reply.status for reply in await asked} == {200}
        assert len(scheduler.of("/schedule")) == 3, "one request finds out"
        assert not known.answers

        scheduler.may_place = asyncio.Event()
        scheduler.may_place.set()
        _answers_within(it, DEADLINE_S)
        known._ask_again_s = 0.0
        await until(lambda: known._takes_trial)
        for _ in range(3):
            assert (await it.post(COMPLETIONS, BODY)).status == 200
        assert len(scheduler.of("/schedule")) == 6, "while the first question is still open"
        open_question.set()


@pytest.mark.asyncio
async def test_more_instances_than_a_cluster_has_are_not_named_as_avoided() -> None:
    async with _real(Mock(seen=[])) as (it, scheduler):
        await it.post(COMPLETIONS, BODY)
        for number in range(3000):
            it.gateway.backends.at(Address("127.0.1.1", 1 + number)).is_down = True
        one, *_ = scheduler.view
        it.gateway.backends.at(Address.parse(one)).is_stalled = True
        assert (await it.post(COMPLETIONS, BODY)).status == 200
        assert b"request_fallback_total{" not in (await it.get("/metrics")).content


@pytest.mark.asyncio
async def test_all_who_find_the_first_scheduler_away_ask_the_next() -> None:
    async with scheduled_by(2) as (it, (first, second)):
        first.status = 500
        for _ in range(2):
            assert {
                reply.status for reply in await asyncio.gather(*(it.post(COMPLETIONS, BODY) for _ in range(10)))
            } == {200}
        assert len(second.of("/schedule")) == 20
        assert len(first.of("/schedule")) <= 10
        assert b"request_fallback_total{" not in (await it.get("/metrics")).content


@pytest.mark.asyncio
async def test_a_place_is_reported_and_released_where_it_was_given() -> None:
    settings = {"full_mode": False, "requests_report_duration_s": 0.05, "mock": Mock(interval_s=0.05)}
    async with scheduled_by(2, **settings) as (it, (first, second)):
        body = BODY | {"stream": True, "max_tokens": 4000}
        before = asyncio.create_task(it.post(COMPLETIONS, body, {"X-Request-Id": "before"}))
        await until(lambda: it.engines.answering)
        first.status = 500
        after = asyncio.create_task(it.post(COMPLETIONS, body, {"X-Request-Id": "after"}))
        for scheduler, stream, own in ((first, before, "before"), (second, after, "after")):
            await until(lambda scheduler=scheduler: len({report["kind"] for report in scheduler.reports}) == 2)
            stream.cancel()
            await until(lambda scheduler=scheduler: scheduler.of("/release"))
            assert [released["id"] for released in scheduler.of("/release")] == [own]
            assert {report["id"] for report in scheduler.reports} == {own}


@pytest.mark.asyncio
async def test_a_release_that_fails_is_told_again() -> None:
    async with scheduled(full_mode=False) as (it, scheduler):
        scheduler.release_status = 500
        await it.post(COMPLETIONS, BODY, {"X-Request-Id": "r"})
        await until(lambda: scheduler.of("/release"))
        scheduler.release_status = 200
        await until(lambda: len(scheduler.of("/release")) == 2)
        await it.post(COMPLETIONS, BODY, {"X-Request-Id": "s"})
        await until(lambda: len(scheduler.of("/release")) == 3)
        assert [released["id"] for released in scheduler.of("/release")] == ["r", "r", "s"]


@pytest.mark.asyncio
async def test_a_client_that_leaves_is_released() -> None:
    async with scheduled(mock=Mock(interval_s=0.05)) as (it, scheduler):
        asked = asyncio.create_task(it.post(COMPLETIONS, BODY | {"max_tokens": 1000}))
        await until(lambda: it.engines.answering)
        asked.cancel()
        await until(lambda: scheduler.of("/release"))
        await it.until_idle()


@pytest.mark.asyncio
@pytest.mark.parametrize(("last", "status", "num_tokens"), [(b"[DONE]", 200, 4), (b"data:", 499, 1)])
async def test_a_client_that_leaves_after_the_last_event_had_everything(
    monkeypatch: pytest.MonkeyPatch, last: bytes, status: int, num_tokens: int
) -> None:
    """The engine ends the connection's answer a while after it; some clients do not wait for that."""
    ended: list[Record] = []
    monkeypatch.setattr(AccessLogger, "ended", lambda _, record: ended.append(record))
    body = BODY | {"stream": True, "return_token_ids": True}
    async with scheduled(mock=Mock(interval_s=0.3)) as (it, scheduler):
        async with asyncio.timeout(DEADLINE_S), it.client.post(it.url + COMPLETIONS, json=body) as answer:
            async for line in answer.content:
                if last in line:
                    break
            answer.close()
        await it.until_idle()
        assert [(record.status, record.num_output_tokens) for record in ended] == [(status, num_tokens)]
        await turns()
        await until(lambda: len(scheduler.of("/release")) == (status == 499))


@pytest.mark.asyncio
async def test_a_place_that_comes_when_its_client_has_left_is_released() -> None:
    async with scheduled() as (it, scheduler):
        scheduler.may_place = asyncio.Event()
        asked = asyncio.create_task(it.post(COMPLETIONS, BODY, {"X-Request-Id": "left"}))
        await until(lambda: scheduler.of("/schedule"))
        asked.cancel()
        await it.until_idle()
        scheduler.may_place.set()
        await until(lambda: scheduler.of("/release"))
        (released,) = scheduler.of("/release")
        assert (released["id"], len(released["scheduling_result"])) == ("left", 1)


@pytest.mark.asyncio
async def test_a_place_that_comes_too_late_is_released() -> None:
    async with scheduled() as (it, scheduler):
        await it.post(COMPLETIONS, BODY)
        scheduler.may_place = asyncio.Event()
        _answers_within(it, 0.6)
        assert (await it.post(COMPLETIONS, BODY, {"X-Request-Id": "late"})).status == 200
        assert not scheduler.of("/release")
        scheduler.may_place.set()
        await until(lambda: [released["id"] for released in scheduler.of("/release")] == ["late"])


@asynccontextmanager
async def _real(
    it_engines: Mock, policy_name: str = "load-balance", **settings: Any
) -> AsyncIterator[tuple[Cluster, RunningScheduler]]:
    async with engine(it_engines) as (one, _, _), engine(it_engines) as (other, _, _):
        endpoints = {Address("127.0.0.1", port): InferType.NEUTRAL for port in (one, other)}
        policy = load_policy(policy_name, Mode.LITE)
        config = SchedulerConfig(policy, host="127.0.0.1", port=0, backend_endpoints=endpoints)
        scheduler = await serve(config)
        try:
            await until(lambda: len(scheduler.view) == 2)
            address = (Address("127.0.0.1", scheduler.port),)
            defaults: dict[str, Any] = {"scheduling_policy": "load-balance", "backend_endpoints": ()}
            defaults |= {"full_mode": False, "schedule_timeout_s": DEADLINE_S}
            async with cluster(
                num_engines=0, mock=it_engines, scheduler_endpoints=address, **defaults | settings
            ) as it:
                yield it, scheduler
        finally:
            await scheduler.close()


@pytest.mark.asyncio
async def test_the_real_scheduler_balances_streams_and_forgets_them() -> None:
    async with _real(Mock(seen=[], interval_s=0.02), requests_report_duration_s=0.05) as (it, scheduler):
        reply = await it.get("/v1/models")
        assert [card["id"] for card in reply.json["data"]] == ["mock"]
        body = BODY | {"stream": True, "max_tokens": 20}
        replies = await asyncio.gather(*(it.post(COMPLETIONS, body) for _ in range(8)))
        assert {reply.status for reply in replies} == {200}
        loads = [scheduler.dispatcher.ledger.in_flight.of(instance) for instance in scheduler.view]
        assert len(loads) == 2
        await it.until_idle()
        await until(lambda: not it.gateway.services.running)


@pytest.mark.asyncio
async def test_the_real_scheduler_sends_a_prefix_where_it_has_sent_it_before(tmp_path: Path) -> None:
    mock, path = Mock(seen=[]), _tokenizer(tmp_path)
    prompts = [" ".join([word] * 200) for word in ("one", "two")]
    async with _real(mock, "prefix-cache", tokenizers={"mock": path}) as (it, scheduler):
        await it.post(COMPLETIONS, BODY)  # with its answer, the gateway knows that names are wanted
        for number in range(9):
            words = " ".join(["one"] * number)  # the prompts differ, but for their beginning
            for prompt in prompts:
                assert (await it.post(COMPLETIONS, BODY | {"prompt": f"{prompt} {words}"})).status == 200
                await it.until_idle()
        told = [one["content"] for one in mock.seen or []][1:]
        assert len(told) == 18
        hits = scheduler.dispatcher.hits
        assert hits is not None
        places = {kind: _places(scheduler, f"{prompts[kind]} two two") for kind in (0, 1)}
        assert sorted(map(sorted, places.values())) == [[0, 192], [0, 192]], places


@pytest.mark.asyncio
async def test_the_real_scheduler_places_a_continuation_elsewhere() -> None:
    mock = Mock(seen=[])
    async with _real(mock) as (it, _):
        whole = (await it.post(COMPLETIONS, BODY | {"stream": True})).text
        mock.cut_at = 500
        reply = await it.post(COMPLETIONS, BODY | {"stream": True})
        assert reply.text == whole
        first, second = (seen["headers"]["Host"] for seen in (mock.seen or [])[-2:])
        assert first != second
