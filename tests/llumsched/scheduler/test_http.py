# SPDX-License-Identifier: Apache-2.0
"""The scheduler process over real sockets: full mode, with instances put into its view."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from llumlet.contract.types import StepSample
from llumsched.contract import MAX_BODY_BYTES
from llumsched.latency.profile import Profile
from llumsched.policy.document import Mode, load_policy
from llumsched.policy.filters import StalenessFilter
from llumsched.scheduler.process import RunningScheduler, SchedulerConfig, serve
from tests.llumsched import cases
from tests.llumsched.latency.llumnix import for_llumnix
from tests.llumsched.latency.test_fitting import TRUE, steps

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(120)]


class Client:
    def __init__(self, running: RunningScheduler, session: aiohttp.ClientSession) -> None:
        self.running, self._session = running, session
        self._base = f"http://127.0.0.1:{running.port}"

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        data = io.BytesIO(body if isinstance(body, bytes) else json.dumps(body).encode())
        async with self._session.post(self._base + path, data=data) as answer:
            text = await answer.text()
            return answer.status, json.loads(text) if answer.content_type == "application/json" else text

    async def get(self, path: str) -> tuple[int, str]:
        async with self._session.get(self._base + path) as answer:
            return answer.status, await answer.text()

    async def first_event(self) -> Any:
        """What the web page is told first."""
        async with self._session.get(self._base + "/events") as answer:
            return json.loads((await answer.content.readline()).removeprefix(b"data: "))

    async def schedule(self, id: str, **fields: Any) -> str:
        """The chosen instance's id."""
        status, answer = await self.post("/schedule", {"id": id, "model": "m", "gateway_id": "g", **fields})
        assert status == 200, answer
        result: list[dict[str, Any]] = answer["scheduling_result"]
        return str(result[0]["id"])


@pytest_asyncio.fixture
async def client() -> AsyncIterator[Client]:
    policy = load_policy("load-balance", Mode.FULL)
    running = await serve(SchedulerConfig(policy, "127.0.0.1", 0, "listen://127.0.0.1:0", warms_up_s=0.0))
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60)) as session:
        for name in "abc":
            cases.put(running.view, name, api_server_port=8000 + ord(name), node_id=name)
        yield Client(running, session)
    await running.close()


async def test_a_request_is_placed_and_echoed(client: Client) -> None:
    body = {"id": "r", "model": "m", "gateway_id": "g", "prompt_token_ids": [1, 2, 3], "unknown": {}}
    status, answer = await client.post("/schedule", body)
    assert status == 200
    assert answer["prompt_token_ids"] == [1, 2, 3]
    assert answer["scheduling_result"] == [
        {"id": "a", "model": "m", "infer_type": "neutral", "endpoint": {"host": "127.0.0.1", "port": 8097},
         "version": 0, "aux_ip": "", "aux_port": 0, "dp_rank": 0, "dp_size": 1}
    ]  # fmt: skip
    assert client.running.dispatcher.ledger.in_flight.of("a").num_tokens == 3


async def test_of_ranks_behind_one_api_server_the_gateway_is_told_which(client: Client) -> None:
    """By that server's own count: with `--data-parallel-hybrid-lb` it has only some of them."""
    for name in "abc":
        client.running.view.remove(name)
    for rank in (4, 5, 6):
        ranks = {"data_parallel_size": 8, "dp_rank": rank, "dp_local_rank": rank - 4, "api_server_port": 8100}
        cases.put(client.running.view, f"dp{rank}", **ranks)
    cases.put(client.running.view, "alone", data_parallel_size=8, dp_rank=7, dp_local_rank=3, api_server_port=8101)
    found = {}
    for number in range(4):
        body = {"id": f"r{number}", "model": "m", "gateway_id": "g", "prompt_num_tokens": 10}
        _, answer = await client.post("/schedule", body)
        (chosen,) = answer["scheduling_result"]
        found[chosen["id"]] = chosen["dp_rank"], chosen.get("dp_rank_local")
    assert found == {"dp4": (4, 0), "dp5": (5, 1), "dp6": (6, 2), "alone": (7, None)}


async def test_a_young_scheduler_does_not_choose_yet() -> None:
    policy = load_policy("load-balance", Mode.FULL)
    async with AsyncExitStack() as stack:
        running = await serve(SchedulerConfig(policy, "127.0.0.1", 0, "listen://127.0.0.1:0", warms_up_s=60.0))
        stack.push_async_callback(running.close)
        client = Client(running, await stack.enter_async_context(aiohttp.ClientSession()))
        body = {"id": "r", "model": "m"}
        assert await client.post("/schedule", body) == (503, "warming: 0 instances are known so far")
        cases.put(running.view, "a", api_server_port=8000)
        assert await client.post("/schedule", body) == (503, "warming: 1 instances are known so far")
        assert json.loads((await client.get("/healthz"))[1])["status"] == "warming"
        running.dispatcher.warmth._grew_s -= 60.0
        assert await client.schedule("r") == "a"
        assert json.loads((await client.get("/healthz"))[1])["status"] == "ok"
        assert 'scheduler_scheduling_failed_total{error_type="warming"} 2.0' in (await client.get("/metrics"))[1]


async def test_dispatched_requests_count(client: Client) -> None:
    assert [await client.schedule(f"r{n}", prompt_num_tokens=10) for n in range(4)] == ["a", "b", "c", "a"]
    cases.put(client.running.view, "b", 2, recent_waiting_requests=["r1"])
    assert await client.schedule("r4", prompt_num_tokens=10) == "b"


async def test_several_are_released_at_once(client: Client) -> None:
    for name in ("r", "s"):
        await client.schedule(name, prompt_num_tokens=10)
    place = {"id": "a", "endpoint": {"host": "x", "port": 1}}
    ended = (("r", "a"), ("s", "b"))
    bodies = [{"id": name, "gateway_id": "g", "scheduling_result": [place | {"id": at}]} for name, at in ended]
    status, text = await client.post("/release", [*bodies, {"id": "t"}])
    assert (status, "scheduling_result is missing or empty" in text) == (400, True)
    in_flight = client.running.dispatcher.ledger.in_flight
    assert in_flight.of("a").num_tokens == 10, "nothing of a wrong call is done"
    assert await client.post("/release", bodies) == (200, "")
    assert (in_flight.of("a").num_tokens, in_flight.of("b").num_tokens) == (0, 0)
    assert await client.post("/release", []) == (200, "")


async def test_the_second_try_of_a_gateway_that_excludes_nobody_goes_elsewhere(client: Client) -> None:
    """It is known by its id, as Llumnix's gateway has it."""
    assert await client.schedule("r", prompt_num_tokens=10) == "a"
    body = {"id": "r", "gateway_id": "g", "scheduling_result": [{"id": "a", "endpoint": {"host": "x", "port": 1}}]}
    assert await client.post("/release", body) == (200, "")
    assert await client.post("/release", body) == (200, "")
    assert await client.schedule("r", prompt_num_tokens=10) == "b"
    excluded = [f"127.0.0.1:{8000 + ord(name)}" for name in "ab"]
    assert await client.schedule("s", prompt_num_tokens=10, excluded_endpoints=excluded) == "c"
    counters = client.running.dispatcher.ledger.in_flight.counters
    assert {key: value.num_requests for key, value in counters.items()} == {"b": 1, "c": 1}


async def test_the_id_of_a_gateway_that_says_what_it_tried_may_come_again(client: Client) -> None:
    """Clients have a session's id in all of its requests; two gateways may have one each."""
    placed = [await client.schedule("session", prompt_num_tokens=10, excluded_endpoints=[])]
    body = {
        "id": "session",
        "gateway_id": "g",
        "scheduling_result": [{"id": "a", "endpoint": {"host": "x", "port": 1}}],
    }
    await client.post("/release", body)
    placed += [await client.schedule("session", prompt_num_tokens=10, excluded_endpoints=[])]
    placed += [await client.schedule("session", prompt_num_tokens=10, excluded_endpoints=[], gateway_id="h")]
    assert placed == ["a", "a", "b"]
    counters = client.running.dispatcher.ledger.in_flight.counters
    assert {key: value.num_requests for key, value in counters.items()} == {"a": 1, "b": 1}
    cases.put(client.running.view, "a", 2, recent_waiting_requests=["session"], api_server_port=8097, node_id="a")
    assert set(client.running.dispatcher.ledger.in_flight.counters) == {"b"}


async def test_unserved_model_gets_404(client: Client) -> None:
    assert await client.post("/schedule", {"id": "r", "model": "x"}) == (
        404,
        "endpoint not found: no instance serves model 'x'",
    )


async def test_refused_request_gets_429(client: Client) -> None:
    for name in "abc":
        cases.put(client.running.view, name, 2, schedulable=False, api_server_port=8000 + ord(name), node_id=name)
    assert await client.post("/schedule", {"id": "r", "model": "m"}) == (429, "no available endpoint")
    status, answer = await client.post("/schedule", {"id": "r", "model": "m", "scheduling_mode": "pd_batch"})
    assert (status, answer) == (429, "no available endpoint: no prefill instance is there")


async def test_a_prompt_that_fits_nowhere(client: Client) -> None:
    status, answer = await client.post("/schedule", {"id": "r", "model": "m", "prompt_num_tokens": 9000})
    assert (status, answer) == (400, "no instance can hold a prompt of 9000 tokens")


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/schedule", b"{", "bad JSON: Input data was truncated"),
        ("/schedule", b"[1]", "bad JSON: Expected `object`, got `array`"),
        ("/schedule", b"{}", "bad JSON: Object missing required field `id`"),
        ("/schedule", {"id": 7}, "bad JSON: Expected `str`, got `int` - at `$.id`"),
        ("/schedule", {"id": ""}, "bad JSON: Expected `str` of length >= 1 - at `$.id`"),
        ("/report", [{"id": "", "instance_id": "a"}], "bad JSON: Expected `str` of length >= 1 - at `$[0].id`"),
        ("/schedule", {"id": "r", "prompt_num_tokens": -1}, "bad JSON: Expected `int` >= 0"),
        ("/schedule", {"id": "r", "priority": 2**63}, "bad JSON: Expected `int` <= 9223372036854775807"),
        ("/schedule", {"id": "r", "scheduling_mode": "x"}, "bad JSON: Invalid enum value 'x'"),
        ("/schedule", {"id": "r", "scheduling_mode": "pd_staged"}, "needs a scheduling_stage"),
        ("/schedule", {"id": "r", "prompt_token_ids": ["x"]}, "prompt_token_ids: Expected `int`, got `str`"),
        ("/schedule", {"id": "r" * 2000}, "length <= 1024"),
        ("/schedule", b'{"id": "r", "x": ' + b"[" * 100_000, "bad JSON"),
        ("/schedule", b'{"id": "\xff"}', "bad JSON"),
        ("/release", {"id": "r"}, "scheduling_result is missing or empty"),
        ("/report", {"id": "r"}, "bad JSON: Expected `array`, got `object`"),
        ("/report", [{"id": "r", "instance_id": "a", "kind": "x"}], "bad JSON: Invalid enum value 'x'"),
    ],
)
async def test_wrong_json_is_said(client: Client, path: str, body: Any, said: str) -> None:
    status, answer = await client.post(path, body)
    assert status == 400
    assert said in answer
    assert not client.running.dispatcher.ledger.in_flight.counters


async def test_too_much_of_it(client: Client) -> None:
    status, _ = await client.post("/schedule", b" " * (MAX_BODY_BYTES + 1))
    assert status == 413


async def test_why(client: Client) -> None:
    cases.put(client.running.view, "a", 2, health=2, loop_age_ms=3000.0, api_server_port=8097, node_id="a")
    status, answer = await client.post("/debug/schedule", {"id": "", "model": "m", "prompt_num_tokens": 5})
    assert status == 200
    (stage,) = answer["stages"]
    assert stage["chosen"] == "b"
    verdicts = {one["instance_id"]: (one["verdict"], one["refused_by"]) for one in stage["instances"]}
    assert verdicts["a"] == (
        "refused",
        [
            {"filter": "schedulabilityFilter", "reason": "suspect: its loop has not moved for 3.0 s", "skipped": False},
            {"filter": "failoverFilter", "reason": "failed itself", "skipped": False},
        ],
    )
    assert verdicts["c"] == ("not chosen", [])
    assert not client.running.dispatcher.ledger.in_flight.counters
    status, text = await client.get("/debug/schedule?model=m&prompt_num_tokens=5")
    assert json.loads(text)["stages"][0]["chosen"] == "b"


async def test_further_metrics_are_told_to_who_asks(client: Client) -> None:
    cases.put(client.running.view, "a", 2, num_waiting_requests=3, api_server_port=8097, node_id="a")
    asked = {"model": "m", "metrics": ["num_waiting_requests", "freeness"]}
    answers = [(await client.post("/debug/schedule", asked))[1]]
    answers += [json.loads((await client.get("/debug/schedule?model=m&metrics=num_waiting_requests,+freeness"))[1])]
    for answer in answers:
        (stage,) = answer["stages"]
        assert [one["name"] for one in stage["metrics"] if not one["compared"]] == ["num_waiting_requests", "freeness"]
        assert [one["metrics"]["num_waiting_requests"] for one in stage["instances"]] == [3.0, 0.0, 0.0]
    status, said = await client.post("/debug/schedule", {"metrics": ["freenes"]})
    assert (status, said[:42]) == (400, "metric 'freenes' is unknown; known: all_de")
    assert (await client.post("/debug/schedule", {"metrics": ["freeness"] * 65}))[0] == 400


async def test_policy_file_decides_about_priorities(tmp_path: Path) -> None:
    file = tmp_path / "urgent.yaml"
    file.write_text("""
define: {filters: {reserveFilter: {refuse: priority >= 0 and num_used_gpu_tokens > 5000, said: kept for the urgent}}}
full: {neutral: {metrics: [num_requests], filters: [reserveFilter], selector: {metricBasedSelector: {}}}}
""")
    async with AsyncExitStack() as stack:
        policy = load_policy(str(file), Mode.FULL)
        running = await serve(SchedulerConfig(policy, "127.0.0.1", 0, "listen://127.0.0.1:0", warms_up_s=0.0))
        stack.push_async_callback(running.close)
        client = Client(running, await stack.enter_async_context(aiohttp.ClientSession()))
        cases.put(running.view, "a", num_used_gpu_tokens=9_000)
        assert await client.schedule("r", priority=-1) == "a"
        assert await client.post("/schedule", {"id": "s", "model": "m"}) == (429, "no available endpoint")
        (stage,) = json.loads((await client.get("/debug/schedule?model=m&priority=3"))[1])["stages"]
        (refusal,) = stage["instances"][0]["refused_by"]
        assert refusal["reason"].startswith("kept for the urgent (")
        wrong = await client.get("/debug/schedule?priority=soon")
        assert wrong == (400, "Expected `int`, got `str` - at `$.priority`")


async def test_predictions_are_told_and_usable_in_policies(tmp_path: Path) -> None:
    """Of an instance whose steps are known; the file sends nothing where the first token would take 0.8 seconds."""
    file = tmp_path / "soon.yaml"
    file.write_text("""
define: {filters: {soonFilter: {refuse: predicted_ttft > 800, said: too late}}}
full: {neutral: {metrics: [predicted_tpot], filters: [soonFilter], selector: {metricBasedSelector: {}}}}
""")
    async with AsyncExitStack() as stack:
        policy = load_policy(str(file), Mode.FULL)
        running = await serve(SchedulerConfig(policy, "127.0.0.1", 0, "listen://127.0.0.1:0", warms_up_s=0.0))
        stack.push_async_callback(running.close)
        client = Client(running, await stack.enter_async_context(aiohttp.ClientSession()))
        cases.put(running.view, "a")
        url = "/debug/schedule?model=m&prompt_num_tokens="
        (stage,) = json.loads((await client.get(url + "10"))[1])["stages"]
        assert stage["instances"][0]["predicted"] is None
        told = [StepSample(number=number, **step._asdict()) for number, step in enumerate(steps(TRUE, 16), start=1)]
        cases.put(running.view, "a", 2, steps=told)
        (stage,) = json.loads((await client.get(url + "1000"))[1])["stages"]
        (one,) = stage["instances"]
        seconds = TRUE.a + 1000 * TRUE.b + 500_500 * TRUE.c
        assert one["predicted"]["ttft_ms"] == pytest.approx(1e3 * seconds, rel=0.02)
        assert one["predicted"]["tpot_ms"] == pytest.approx(1e3 * (TRUE.a + TRUE.d + 1000 * TRUE.e), rel=0.02)
        assert one["predicted"]["num_steps"] == 16
        assert max(one["predicted"][f"{name}_deviation"] for name in ("ttft", "tpot")) < 0.05
        assert stage["chosen"] == "a"
        (stage,) = json.loads((await client.get(url + "4000"))[1])["stages"]
        assert [one["reason"].split(" (")[0] for one in stage["instances"][0]["refused_by"]] == ["too late"]


@pytest.mark.parametrize(("policy", "is_told"), [("slo", True), ("load-balance", False)])
async def test_the_answer_has_the_predictions_that_the_request_was_placed_by(policy: str, is_told: bool) -> None:
    profile = Profile("m", TRUE, 100, 0.01, "here")
    config = SchedulerConfig(
        load_policy(policy, Mode.FULL), "127.0.0.1", 0, "listen://127.0.0.1:0", warms_up_s=0.0, step_profiles=(profile,)
    )
    async with AsyncExitStack() as stack:
        running = await serve(config)
        stack.push_async_callback(running.close)
        client = Client(running, await stack.enter_async_context(aiohttp.ClientSession()))
        cases.put(running.view, "a", model="m")
        _, answer = await client.post("/schedule", {"id": "r", "model": "m", "prompt_num_tokens": 1000})
        (one,) = answer["scheduling_result"]
        expected_ms = {
            "predicted_ttft": 1e3 * (TRUE.a + 1000 * TRUE.b + 500_500 * TRUE.c),
            "predicted_tpot": 1e3 * (TRUE.a + TRUE.d + 1000 * TRUE.e),
        }
        told = {name: value for name, value in one.items() if name.startswith("predicted")}
        assert told == (pytest.approx(expected_ms, rel=0.02) if is_told else {})
        assert one.get("refuses_late", False) is is_told


async def test_a_policy_by_predictions_places_before_anything_is_predicted(client: Client) -> None:
    """And says nothing: JSON knows no infinity."""
    policy = load_policy("slo", Mode.FULL)
    async with AsyncExitStack() as stack:
        running = await serve(SchedulerConfig(policy, "127.0.0.1", 0, "listen://127.0.0.1:0", warms_up_s=0.0))
        stack.push_async_callback(running.close)
        other = Client(running, await stack.enter_async_context(aiohttp.ClientSession()))
        cases.put(running.view, "a")
        _, answer = await other.post("/schedule", {"id": "r", "model": "m", "prompt_num_tokens": 1000})
        assert [name for name in answer["scheduling_result"][0] if name.startswith("predicted")] == []


async def test_met_objectives_are_shown(client: Client) -> None:
    for counts in ((0, 0), (7, 3)):
        body = {"gateway_id": "g", "models": [{"model": "m", "num_met": counts[0], "num_missed": counts[1]}]}
        assert await client.post("/attainment", body) == (200, "")
    status, _ = await client.post("/attainment", {"gateway_id": "g", "models": [{"model": "m", "num_met": -1}]})
    assert status == 400
    assert (await client.first_event())["overview"] == {
        "policy": "load-balance",
        "objectives_ms": [None, None],
        "attainment": {"m": [7, 10]},
        "cached": None,
        "scaling": None,
    }


async def test_with_a_profile_predictions_begin_with_the_first_request(tmp_path: Path) -> None:
    profile = Profile("m", TRUE, 100, 0.01, "here")
    first, later = (tmp_path / name for name in ("ttft.json", "tpot.json"))
    for file, text in zip((first, later), for_llumnix(profile), strict=True):
        file.write_text(text)
    policy = load_policy("load-balance", Mode.FULL)
    for files in ({"step_profiles": (profile,)}, {"ttft_profile": str(first), "tpot_profile": str(later)}):
        async with AsyncExitStack() as stack:
            running = await serve(
                SchedulerConfig(policy, "127.0.0.1", 0, "listen://127.0.0.1:0", warms_up_s=0.0, **files)
            )
            stack.push_async_callback(running.close)
            client = Client(running, await stack.enter_async_context(aiohttp.ClientSession()))
            cases.put(running.view, "a", model="m")
            (stage,) = json.loads((await client.get("/debug/schedule?model=m&prompt_num_tokens=1000"))[1])["stages"]
            seconds = TRUE.a + 1000 * TRUE.b + 500_500 * TRUE.c
            assert stage["instances"][0]["predicted"]["ttft_ms"] == pytest.approx(1e3 * seconds, rel=0.03)


async def test_pages_for_people_and_machines(client: Client) -> None:
    await client.schedule("r", prompt_num_tokens=10)
    await client.post("/schedule", {"id": "r", "model": "x"})
    assert json.loads((await client.get("/healthz"))[1])["instances"] == 3
    view = json.loads((await client.get("/debug/view"))[1])
    assert view["instances"]["a"]["in_flight"]["num_requests"] == 1
    _, text = await client.get("/metrics")
    for line in (
        "scheduler_scheduling_total 1.0",
        'scheduler_scheduling_failed_total{error_type="endpoint_not_found"} 1.0',
        'instance_cms_inflight_dispatch_requests{infer_type="neutral",instance_id="a"} 1.0',
        'instance_cms_all_prefills_tokens_num{infer_type="neutral",instance_id="a"} 10.0',
        "request_full_mode_schedule_duration_milliseconds_count 1.0",
        "scheduler_view_age_seconds 0.0",
        "scheduler_expired_requests_total 0.0",
    ):
        assert line in text.splitlines(), line
    assert (await client.get("/"))[0] == 200
    assert (await client.get("/nothing"))[0] == 404


async def test_unknown_paths_and_methods_are_refused_in_json_without_the_name_of_a_server(client: Client) -> None:
    for method, path, status in (("GET", "/nothing", 404), ("PUT", "/schedule", 405)):
        async with client._session.request(method, client._base + path) as answer:
            assert (answer.status, "Server" in answer.headers) == (status, False)
            assert (await answer.json())["error"]["code"] == status
            assert answer.headers.get("Allow") == ("POST" if status == 405 else None)
    assert (await client.get("/health"))[0] == (await client.get("/healthz"))[0] == 200


async def test_it_is_ready_while_an_instance_would_take_a_request(client: Client) -> None:
    assert await client.get("/ready") == (200, "OK")
    for name in "abc":
        cases.put(client.running.view, name, 2, schedulable=False)
    assert await client.get("/ready") == (503, "no available endpoint")
    assert (await client.get("/healthz"))[0] == 200


async def test_health_tells_of_a_policy_that_raises(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object, candidates: object) -> None:
        raise TypeError("no truth")

    monkeypatch.setattr(StalenessFilter, "refuse", refuse)
    assert await client.schedule("r") in "abc"
    said = json.loads((await client.get("/healthz"))[1])
    assert (said["status"], said["raised"]) == ("degraded", ["Filter stalenessFilter"])
    assert 'scheduler_policy_raised_total{part="Filter stalenessFilter"}' in (await client.get("/metrics"))[1]
    assert (await client.get("/ready"))[0] == 200
