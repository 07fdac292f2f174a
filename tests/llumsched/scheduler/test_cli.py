# SPDX-License-Identifier: Apache-2.0
"""`llumnix scheduler` and `llumnix explain`: flags, and one whole life of the process."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from llumlet.process.addresses import Address
from llumlet.process.redis_url import Login, RedisUrl
from llumlet.process.tasks import end
from llumlet.protocol.infer_type import InferType
from llumsched.cli import prepare
from llumsched.commands import scheduler_command as scheduler
from llumsched.endpoints import Endpoint
from llumsched.latency.profile import Profile
from llumsched.policy.document import Mode, Overrides, load_policy
from llumsched.policy.filters import MetricBasedFilter
from llumsched.rescheduling.planning.policies import load_rescheduling_policy
from llumsched.scheduler.process import SchedulerConfig
from tests.llumlet.fake_agent import until
from tests.llumsched import cases
from tests.llumsched.conftest import start
from tests.llumsched.latency.llumnix import for_llumnix
from tests.llumsched.latency.test_fitting import TRUE
from tests.llumsched.rescheduling.test_arguments import FLAGS


def parsed(*arguments: str) -> tuple[list[str], SchedulerConfig | None]:
    found, _, faults = prepare("scheduler", ["scheduler", *arguments], {})
    return faults, found


def config(*arguments: str) -> SchedulerConfig:
    faults, found = parsed(*arguments)
    assert not faults
    assert found is not None
    return found


def test_defaults() -> None:
    found = config()
    assert (found.host, found.port, found.cms) == ("127.0.0.1", 8002, "listen://127.0.0.1:8003")
    assert (found.policy.name, found.policy.mode) == ("load-balance", Mode.FULL)
    assert (found.account_staleness_s, found.gateway_ttl_s, found.state_ttl_s) == (10.0, 30.0, 600.0)
    assert found.rescheduling is None


def test_flags() -> None:
    found = config(
        "--dispatch-neutral-load-metric=num_requests", "--dispatch-neutral-load-threshold=7", "--dispatch-top-k=2",
        "--cms=redis://10.0.0.5:6380",
        "--colocated-rescheduling-mode", "--enable-rescheduling", "--failover-domain=node",
        "--enable-instance-status-local-account=false",
    )  # fmt: skip
    assert found.cms == "redis://10.0.0.5:6380"
    assert found.policy.stages[InferType.NEUTRAL].metrics[0].name == "num_requests"
    assert found.rescheduling is not None
    assert str(found.rescheduling.failover_domain) == "node"
    assert not found.account


TPOT = "--rescheduling-policies=neutral_load,neutral_tpot"
INSIDE = ("--enable-rescheduling", "--colocated-rescheduling-mode")


@pytest.mark.parametrize(
    ("arguments", "of_dispatch", "of_rescheduling"),
    [
        (["--scheduling-policy=slo", "--ttft-slo=700", "--tpot-slo-dispatch-threshold=0.7"],
         {"ttft_slo": 700.0, "tpot_slo_dispatch_threshold": 0.7}, {}),
        ([*INSIDE, TPOT, "--tpot-slo=40"], {}, {"tpot_slo": 40.0}),
        ([*INSIDE, TPOT, "--tpot-slo-dispatch-threshold=0.9", "--scheduling-policy=slo"],
         {"tpot_slo_dispatch_threshold": 0.9}, {"tpot_slo_dispatch_threshold": 0.9}),
        ([*INSIDE, TPOT, "--tpot-migrate-out-ceil-threshold=0.99"], {}, {"tpot_migrate_out_ceil_threshold": 0.99}),
    ],
)  # fmt: skip
def test_objectives_are_set_for_whoever_has_a_use_for_them(
    arguments: list[str], of_dispatch: dict[str, float], of_rescheduling: dict[str, float]
) -> None:
    found = config(*arguments)
    assert of_dispatch.items() <= found.policy.constants.items()
    if of_rescheduling:
        assert found.rescheduling is not None
        policy = load_rescheduling_policy("neutral_tpot", found.rescheduling)
        assert of_rescheduling.items() <= policy.constants.items()


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["--tpot-slo=40"], "policy load-balance: full: has no constant tpot_slo to set to 40"),
        ([*INSIDE, "--tpot-slo=40"], "policy load-balance: full: has no constant tpot_slo to set to 40"),
        ([*INSIDE, TPOT, "--ttft-slo=40"], "policy load-balance: full: has no constant ttft_slo to set to 40"),
        ([*INSIDE, "--tpot-migrate-out-ceil-threshold=0.9"],
         "--tpot-migrate-out-ceil-threshold: none of --rescheduling-policies has a use for it"),
        ([*INSIDE, TPOT, "--tpot-migrate-out-ceil-threshold=0.8"],
         "neutral_tpot: tpot_migrate_out_ceil_threshold 0.8 is below tpot_slo_dispatch_threshold 0.85: "
         "what may leave an instance might come there"),
    ],
)  # fmt: skip
def test_an_objective_that_nobody_has_a_use_for(arguments: list[str], fault: str) -> None:
    assert parsed(*arguments)[0] == [fault]


def test_a_password_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "a word"
    flag = f"--cms=redis://u@h?{urlencode({'password_file': file})}"
    assert parsed(flag)[0] == [f"--cms password_file {file}: No such file or directory"]
    file.touch(0o644)
    (fault,) = parsed(flag)[0]
    assert "everybody" in fault
    file.chmod(0o600)
    url = RedisUrl.parse(config(flag).cms)
    assert (url.name, url.login) == ("redis://h:6379", Login("u", "", str(file)))
    (fault,) = parsed(flag.replace("u@h", "u:p@h"))[0]
    assert "both password and password_file" in fault


OBJECTIVES = ("ttft_slo", "tpot_slo", "ttft_slo_dispatch_threshold", "tpot_slo_dispatch_threshold")


@pytest.mark.parametrize("constant", OBJECTIVES)
def test_a_flag_of_objectives_is_a_constant_of_the_policy(constant: str) -> None:
    found = config("--scheduling-policy=slo", f"--{constant.replace('_', '-')}=0.5").policy
    assert found.stages == load_policy("slo", Mode.FULL, Overrides(constants={constant: 0.5})).stages
    assert found.stages != load_policy("slo", Mode.FULL).stages


@pytest.mark.parametrize("infer_type", InferType)
def test_flags_of_load_are_those_of_one_infer_type(infer_type: InferType) -> None:
    flag = f"--dispatch-{infer_type}-load"
    stages = config(f"{flag}-metric=num_requests", f"{flag}-threshold=7").policy.stages
    usual = config().policy.stages
    (limit,) = [each for each in stages[infer_type].filters if isinstance(each, MetricBasedFilter)]
    assert (stages[infer_type].metrics[0].name, limit.metric.name, limit.threshold) == (
        "num_requests", "num_requests", 7.0,
    )  # fmt: skip
    assert all((stages[other] == usual[other]) == (other != infer_type) for other in InferType)


@pytest.mark.parametrize(("flag", "name", "value"), FLAGS)
def test_a_flag_reaches_the_rescheduler_inside(flag: str, name: str, value: Any) -> None:
    inside = ("--colocated-rescheduling-mode", "--scheduling-policy=slo",
              "--rescheduling-policies=neutral_ttft,neutral_tpot")  # fmt: skip
    found, usual = config(*inside, flag).rescheduling, config(*inside).rescheduling
    assert usual is not None
    assert found == replace(usual, **{name: value})
    assert found != usual


def test_rescheduler_s_setting_may_leave_the_policy_unchanged(tmp_path: Path) -> None:
    policy = tmp_path / "bare.yaml"
    policy.write_text("full: {neutral: {selector: roundRobinSelector}}")
    flags = [f"--scheduling-policy={policy}", "--failover-domain=node", "--instance-staleness-seconds=9"]
    assert len(parsed(*flags)[0]) == 2
    found = config(*flags, "--colocated-rescheduling-mode").rescheduling
    assert found is not None
    assert (str(found.failover_domain), found.staleness_s) == ("node", 9.0)


def test_the_headroom_of_urgent_requests_is_one_number_for_dispatch_and_rescheduling() -> None:
    flags = ["--scheduling-policy=virtual-usage", "--priority-headroom=0.3"]
    moves = ["--colocated-rescheduling-mode", "--rescheduling-neutral-load-metric=virtual_usage"]
    found = config(*flags, *moves)
    assert found.rescheduling is not None
    balance = load_rescheduling_policy("neutral_load", found.rescheduling).selector
    [dispatch] = [one for one in found.policy.stages[InferType.NEUTRAL].metrics if one.name == "virtual_usage"]
    table = cases.table(cases.instance("a", num_urgent_requests=1))
    assert [one.values(table).tolist() for one in (dispatch, balance.metric)] == [[0.3], [0.3]]  # type: ignore[attr-defined]
    assert config("--priority-headroom=0", *moves).rescheduling is not None, "what waits heeds it, whatever the policy"
    assert parsed("--priority-headroom=0.3")[0] == [
        "policy load-balance: full: has no constant priority_headroom to set to 0.3"
    ]
    assert parsed(*flags[:1], "--priority-headroom=1.1")[0] == ["--priority-headroom must be from 0 to 1"]
    by_name = "--policy-constant=priority_headroom=0.3"
    assert config(flags[0], by_name, *moves).policy == found.policy
    said = "--policy-constant priority_headroom: --priority-headroom says it as well"
    assert parsed(*flags, by_name, *moves)[0] == [said]


def test_lite_mode_needs_no_further_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    endpoints = "10.0.0.1:8000,http://b:8001,c:8002=prefill,[::1]:8003=decode,10.0.0.1:8000,https://d/v/llm=decode"
    found = config("--enable-full-mode-scheduling=false", "--llm-backend-endpoints", endpoints)
    assert found.backend_api_key == "secret"
    assert found.policy.mode is Mode.LITE
    assert found.backend_endpoints == {
        Address("10.0.0.1", 8000): "neutral",
        Address("b", 8001): "neutral",
        Address("c", 8002): "prefill",
        Address("::1", 8003): "decode",
        Endpoint(Address("d", 443), True, "/v/llm"): "decode",
    }


@pytest.mark.parametrize(
    ("arguments", "faults"),
    [
        (["--enable-full-mode-scheduling=maybe", "--port=70000", "--instance-staleness-seconds=-1",
          "--dispatch-top-k=x"],
         ["--enable-full-mode-scheduling 'maybe' is neither true nor false", "--port '70000' is not a port",
          "--instance-staleness-seconds must be positive", "--dispatch-top-k 'x' is not a number"]),
        (["--enable-full-mode-scheduling=false", "--cms=redis://h:1", "--enable-rescheduling"],
         ["--enable-full-mode-scheduling=false needs --llm-backend-endpoints",
          "--cms has no effect in lite mode", "rescheduling needs full mode"]),
        (["--llm-backend-endpoints=a:1"], ["--llm-backend-endpoints has no effect in full mode"]),
        (["--enable-full-mode-scheduling=false", "--llm-backend-endpoints=a:1=decoder,b:2=decode,b:2,c"],
         ["--llm-backend-endpoints 'decoder' is not one of neutral, prefill, decode",
          "--llm-backend-endpoints b:2: both decode and neutral", "--llm-backend-endpoints 'c' is not HOST:PORT"]),
        (["--cms=nowhere"], ["--cms 'nowhere' is not"]),
        (["--dispatch-decode-load-metric=lod", "--dispatch-decode-load-threshold=much"],
         ["metric 'lod' is unknown; known: ", "--dispatch-decode-load-threshold 'much' is not a number"]),
        (["--scheduling-policy=round-robin", "--dispatch-neutral-load-metric=num_requests"],
         ["uses no metric that 'num_requests' could take the place of"]),
        (["--enable-full-mode-scheduling=false", "--llm-backend-endpoints=a:1", "--enable-rescheduling",
          "--rescheduling-interval-ms=soon"],
         ["rescheduling needs full mode", "--rescheduling-interval-ms 'soon' is not a number"]),
        (["--scheduling-policy=round-robin", "--dispatch-neutral-load-threshold=5", "--dispatch-top-k=3"],
         ["full.neutral: has no load threshold to set to 5", "full: has no metricBasedSelector to set top_k to 3"]),
        (["--gateway-ttl-seconds=5", "--request-state-ttl-seconds=5"],
         ["--gateway-ttl-seconds has no effect in full mode",
          "--request-state-ttl-seconds has no effect in full mode"]),
        (["--enable-full-mode-scheduling=false", "--llm-backend-endpoints=a:1", "--failover-domain=node",
          "--instance-staleness-seconds=7", "--dispatch-decode-load-threshold=5",
          "--request-local-account-staleness-seconds=7", "--enable-instance-status-local-account"],
         ["lite: has no failoverFilter to set domain to node", "lite: has no stalenessFilter to set seconds to 7",
          "lite.decode: has no load threshold to set to 5",
          "--request-local-account-staleness-seconds has no effect in lite mode",
          "--enable-instance-status-local-account has no effect in lite mode"]),
        (["--cache-index-blocks=9"], ["--cache-index-blocks has no effect with the policy load-balance"]),
        (["--enable-full-mode-scheduling=false", "--llm-backend-endpoints=a:1", "--cache-sent-blocks=9"],
         ["--cache-sent-blocks has no effect with the policy load-balance"]),
        (["--standalone-rescheduling-mode"], ["--standalone-rescheduling-mode is for `llumnix rescheduler`"]),
    ],
)  # fmt: skip
def test_all_faults_at_once(arguments: list[str], faults: list[str]) -> None:
    said = parsed(*arguments)[0]
    assert len(said) == len(faults)
    for fault in faults:
        assert any(fault in one for one in said), said


@pytest.mark.parametrize("policy", ["--scheduling-policy=prefix-cache", "--enable-cache-aware-scheduling"])
def test_the_index_has_a_size_where_caches_are_known(policy: str) -> None:
    assert config(policy, "--cache-index-blocks=9").cache_index_blocks == 9


def test_profiles_are_read_before_anything_starts(tmp_path: Path) -> None:
    ttft, tpot = (json.loads(text) for text in for_llumnix(Profile("m", TRUE, 100, 0.01, "here")))
    files = {"few": {"results": ttft["results"][:3]}, "ttft": ttft, "other": tpot | {"metadata": {"model": "n"}}}
    paths = {name: str(tmp_path / name) for name in files}
    for name, content in files.items():
        Path(paths[name]).write_text(json.dumps(content))
    for arguments, fault in (
        ([f"--step-profiles={tmp_path}/none"], "cannot be read: No such file"),
        ([f"--step-profiles={paths['ttft']}"], "llumnix_profile is None, not 1"),
        ([f"--ttft-profiling-data-path={paths['few']}"], "3 results are too few, 8 at least"),
        (
            [f"--ttft-profiling-data-path={paths['ttft']}", f"--tpot-profiling-data-path={paths['other']}"],
            "of different models, m and n",
        ),
    ):
        (said,) = parsed(*arguments)[0]
        assert fault in said
    assert config(f"--ttft-profiling-data-path={paths['ttft']}").ttft_profile == paths["ttft"]
    Path(paths["few"]).write_text(Profile("m", TRUE, 100, 0.01, "").written())
    assert config(f"--step-profiles={paths['few']}").step_profiles == (Profile("m", TRUE, 100, 0.01, paths["few"]),)


@pytest.mark.asyncio
async def test_a_password_stays_out_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    found = config("--host=127.0.0.1", "--port=0", "--cms=redis://somebody:secret@127.0.0.1:1")
    with caplog.at_level(logging.DEBUG):
        serving = asyncio.create_task(scheduler._serve(found))
        try:
            await until(lambda: "llumnix.scheduler" in {record.name for record in caplog.records})
            await until(lambda: "is lost" in caplog.text)
        finally:
            await end(serving)
    assert "redis://127.0.0.1:1" in caplog.text
    assert "secret" not in caplog.text
    assert "somebody" not in caplog.text


@pytest.mark.parametrize(
    ("policy", "warns"), [("load-balance", True), ("round-robin", True), ("prefix-cache", False), ("slo", False)]
)
def test_prefixes_that_no_policy_heeds_are_warned_of(policy: str, warns: bool) -> None:
    found = config("--enable-cache-aware-scheduling", f"--scheduling-policy={policy}")
    assert [policy in warning for warning in scheduler._warnings(found)] == [True] * warns
    assert list(scheduler._warnings(config(f"--scheduling-policy={policy}"))) == []


@pytest.mark.asyncio
async def test_warnings_come_before_it_serves(caplog: pytest.LogCaptureFixture) -> None:
    found = config("--port=0", "--cms=listen://127.0.0.1:0", "--enable-cache-aware-scheduling")
    with caplog.at_level(logging.INFO, "llumnix.scheduler"):
        serving = asyncio.create_task(scheduler._serve(found))
        try:
            await until(lambda: len(caplog.records) > 1)
        finally:
            await end(serving)
    first, second = caplog.records[:2]
    assert first.levelno == logging.WARNING
    assert first.message == (
        "--enable-cache-aware-scheduling changes no placement: no formula of the policy load-balance reads prefix "
        "caches; the policy prefix-cache does"
    )
    assert second.message.startswith("at http://")


@pytest.mark.asyncio
@pytest.mark.timeout(180)
async def test_a_life() -> None:
    process = await start("scheduler", "--host", "127.0.0.1", "--port", "0", "--cms", "listen://127.0.0.1:0")
    assert process.stderr is not None
    try:
        while True:
            line = (await asyncio.wait_for(process.stderr.readline(), 90)).decode()
            assert line, "the scheduler has ended"
            if "llumnix.scheduler: at http://" in line:
                break
        address = line.split("http://")[1].split(": ")[0]
        for arguments in (["--json"], []):
            explain = await start("explain", "--scheduler", address, *arguments)
            out, err = await asyncio.wait_for(explain.communicate(), 90)
            assert explain.returncode == 0, err
            if arguments:
                assert json.loads(out)["stages"][0]["chosen"] is None
            else:
                assert out.decode().startswith("neutral: nobody (load-balance, full mode")
        explain = await start("explain", "--scheduler", address, "--metric", "freeness,none_such")
        _, err = await asyncio.wait_for(explain.communicate(), 90)
        assert explain.returncode == 2
        assert b"metric 'none_such' is unknown; known: all_decodes_tokens_num, " in err
    finally:
        process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0


@pytest.mark.asyncio
@pytest.mark.timeout(180)
async def test_explain_without_a_scheduler() -> None:
    explain = await start("explain", "--scheduler", "127.0.0.1:1")
    _, err = await asyncio.wait_for(explain.communicate(), 90)
    assert explain.returncode == 4
    assert b"scheduler 127.0.0.1:1" in err
