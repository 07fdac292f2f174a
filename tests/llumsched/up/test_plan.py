# SPDX-License-Identifier: Apache-2.0
"""What `llumnix up` makes of its command line: the commands, and every fault at once."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from llumsched import cli
from llumsched.scaling.scaling_config import Bounds, ScalingConfig
from llumsched.up import device
from llumsched.up.autoscaler import LEAVE_S
from llumsched.up.plan import CHECKS, UpConfig, plan_of

ANY_PORTS = {"port": 0, "scheduler_port": 0, "cms_port": 0}


@pytest.fixture(autouse=True)
def engines_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "vllm_command", lambda: "/opt/vllm")
    monkeypatch.setattr(device, "vllm_is_for_cpu", lambda: True)


def on_gpus(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    monkeypatch.setattr(device, "vllm_is_for_cpu", lambda: False)
    monkeypatch.setattr(device, "gpus", lambda environment: list(names))


def faults_of(config: UpConfig) -> list[str]:
    return [fault for check in CHECKS for fault in check(config)]


def values(command: tuple[str, ...], flag: str) -> list[str]:
    return [command[i + 1] for i, word in enumerate(command) if word == flag]


def test_every_component_knows_the_others(tmp_path: Path) -> None:
    made = plan_of(UpConfig(str(tmp_path), 3, engine_args=("--max-model-len", "99"), **ANY_PORTS))
    cms = values(made.scheduler.command, "--cms")[0].removeprefix("listen://")
    scheduler_port = values(made.scheduler.command, "--port")[0]
    assert "--colocated-rescheduling-mode" in made.scheduler.command
    assert values(made.gateway.command, "--scheduler-endpoints") == [f"127.0.0.1:{scheduler_port}"]
    assert values(made.gateway.command, "--tokenizer-path") == [str(tmp_path)]
    ports = set()
    for index, engine in enumerate(made.engines):
        assert engine.command[:3] == ("/opt/vllm", "serve", str(tmp_path))
        assert values(engine.command, "--llumlet-cms") == [cms]
        assert values(engine.command, "--llumlet-instance-id") == [engine.name] == [f"engine-{index}"]
        assert engine.command[-2:] == ("--max-model-len", "99")
        assert engine.environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
        ports.update(values(engine.command, "--port"))
    assert len(ports) == 3


def test_the_gateway_counts_with_the_engines_tokenizer_and_template(tmp_path: Path) -> None:
    def told(*engine_args: str, model: str = "org/m", policy: str = "prefix-cache") -> dict[str, list[str]]:
        config = UpConfig(model, engine_args=engine_args, scheduling_policy=policy, **ANY_PORTS)
        command = plan_of(config).gateway.command
        return {flag: values(command, flag) for flag in ("--tokenizer-path", "--chat-template")}

    assert told()["--tokenizer-path"] == ["org/m"]
    assert told(policy="load-balance")["--tokenizer-path"] == []
    assert told("--tokenizer", "org/other")["--tokenizer-path"] == ["org/other"]
    template = tmp_path / "chat.jinja"
    template.write_text("")
    assert told("--chat-template", str(template))["--chat-template"] == [str(template)]
    assert told("--chat-template", "{{ messages }}")["--chat-template"] == []


def test_without_rescheduling() -> None:
    command = plan_of(UpConfig("m", enable_rescheduling=False, **ANY_PORTS)).scheduler.command
    assert not [word for word in command if "rescheduling" in word]


def test_the_served_name_is_the_one_that_is_waited_for_and_shown() -> None:
    made = plan_of(UpConfig("org/m", engine_args=("--served-model-name=a",), **ANY_PORTS))
    assert made.model == "a"
    assert '"model": "a"' in made.greeting


def test_each_engine_has_its_own_gpus_and_sees_the_others_behind_them(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpus(monkeypatch, "0", "1", "2", "3")
    made = plan_of(UpConfig("m", 2, engine_args=("-tp", "2"), **ANY_PORTS))
    assert [engine.environment["CUDA_VISIBLE_DEVICES"] for engine in made.engines] == ["0,1,2,3", "2,3,0,1"]
    assert not any(engine.cores for engine in made.engines)


def test_too_few_gpus_are_a_fault_unless_they_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpus(monkeypatch, "0")
    (fault,) = faults_of(UpConfig("m", 2, **ANY_PORTS))
    assert "want 2 GPUs, and 1 are here" in fault
    shared = UpConfig("m", 2, share_gpus=True, **ANY_PORTS)
    assert not faults_of(shared)
    assert "CUDA_VISIBLE_DEVICES" not in plan_of(shared).engines[0].environment


@pytest.mark.parametrize(
    ("engines", "cores", "expected"),
    [
        (2, [0, 1], [[0], [1]]),
        (3, [4, 7], [[4], [7], [4]]),
        (2, [0, 1, 2, 3, 4], [[0, 1], [2, 3]]),
    ],
)
def test_engines_share_out_the_cores(engines: int, cores: list[int], expected: list[list[int]]) -> None:
    assert [device.cores_of(index, engines, cores) for index in range(engines)] == expected


def test_environment_variables_are_kept() -> None:
    own = device.cpu_environment(2, 4, {"OMP_NUM_THREADS": "7"})
    assert "OMP_NUM_THREADS" not in own
    assert int(own["VLLM_CPU_KVCACHE_SPACE"]) >= 1


def test_all_faults_at_once(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "vllm_command", lambda: None)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        command = ["up", "/no/such", "--engines", "0", "--port", str(port), "--cms-port", "7", "--scheduler-port", "7"]
        command += ["--scheduling-policy", "nonsense"]
        code = cli.main([*command, "--drain-seconds", "x", "--llumlet-token-file", "t", "--", "--llumlet-cms=a:1"])
    assert code == 2
    said = capsys.readouterr().err
    for fault in (
        "--engines must be from 1 to 256",
        f"--port {port} of 127.0.0.1 is taken",
        "--cms-port and --scheduler-port are both 7",
        "unknown policy 'nonsense'; known: load-balance, ",
        "--drain-seconds 'x' is not a duration",
        "credentials have no effect here",
        "--llumlet-cms cannot be given for the engines",
        "/no/such is not a directory",
        "`vllm` was not found",
    ):
        assert fault in said


def test_more_than_one_machine_takes() -> None:
    found = cli.prepare("up", ["up", "m", "--engines", "100001", "--gateway-workers", "100001"], {}).faults
    assert {"--engines must be from 1 to 256", "--gateway-workers must be from 1 to 256"} <= set(found)


def test_further_arguments_are_for_up_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ps", "--llumlet", "127.0.0.1:1", "--", "--more"]) == 2
    assert "unknown argument '--more'" in capsys.readouterr().err


def test_the_gateway_listens_beyond_this_machine_only_if_that_is_said() -> None:
    (fault,) = faults_of(UpConfig("m", host="0.0.0.0", **ANY_PORTS))
    assert "0.0.0.0 is not a loopback address" in fault
    said = UpConfig("m", host="0.0.0.0", insecure=True, **ANY_PORTS)
    assert not faults_of(said)
    assert "--insecure" in plan_of(said).gateway.command
    assert "--insecure" not in plan_of(UpConfig("m", **ANY_PORTS)).gateway.command


def test_engines_that_come_and_go_have_places_names_and_ports_of_their_own() -> None:
    made = plan_of(UpConfig("m", autoscale=Bounds(2, 4), scaling=ScalingConfig(settle_s=7.0), **ANY_PORTS))
    assert [engine.name for engine in made.engines] == ["engine-0", "engine-1"]
    assert values(made.scheduler.command, "--scaling") == ["2:4"]
    assert values(made.scheduler.command, "--scaling-settle-seconds") == ["7.0"]
    assert "2 of up to 4 engines are ready" in made.greeting
    assert made.autoscale is not None
    later = [made.autoscale.engine(3, life) for life in (0, 1)]
    assert [engine.name for engine in later] == ["engine-3", "engine-3.1"]
    assert values(later[0].command, "--llumlet-instance-id") == ["engine-3"]
    assert values(later[0].command, "--llumlet-cms") == values(made.engines[0].command, "--llumlet-cms")
    assert values(later[0].command, "--llumlet-drain-seconds") == [f"{LEAVE_S:.0f}"]
    assert later[0].cores == tuple(device.cores_of(3, 4))
    assert plan_of(UpConfig("m", **ANY_PORTS)).autoscale is None
    said = UpConfig("m", autoscale=Bounds(1, 2), engine_args=("--llumlet-drain-seconds", "9"), **ANY_PORTS)
    assert values(plan_of(said).engines[0].command, "--llumlet-drain-seconds") == ["9"]


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["--autoscale", "3:2"], "--autoscale '3:2': MIN is above MAX"),
        (["--autoscale", "0:2"], "--autoscale '0:2': MIN must be at least 1"),
        (["--autoscale", "many"], "--autoscale 'many' is not MIN:MAX"),
        (["--autoscale", "1:900"], "--autoscale 1:900: more than 256 engines"),
        (["--autoscale", "1:2", "--engines", "2"], "--engines and --autoscale exclude each other"),
        (["--autoscale-ttft-seconds", "2"], "--autoscale-ttft-seconds has no effect without --autoscale"),
        (
            ["--autoscale", "1:2", "--autoscale-tpot-seconds", "often"],
            "--autoscale-tpot-seconds 'often' is not a duration",
        ),
        (
            ["--autoscale", "1:2", "--autoscale-low-freeness", "400"],
            "--autoscale-high-freeness 320 is below --autoscale-low-freeness 400: there would be",
        ),
    ],
)
def test_numbers_of_engines_that_are_none(words: list[str], fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["up", "org/m", "--port", "0", "--scheduler-port", "0", "--cms-port", "0", *words]) == 2
    assert fault in capsys.readouterr().err


def test_the_scheduler_is_told_what_is_said_of_the_number_of_engines() -> None:
    """Every setting that it has of that; of those that are as they are anyway, nothing."""
    told = {
        "low-freeness": "200.0", "high-freeness": "350.0", "cold-start-seconds": "100.0", "ttft-seconds": "2.5",
        "tpot-seconds": "0.08", "settle-seconds": "7.0", "interval-seconds": "0.5",
    }  # fmt: skip
    ports = ["--port", "0", "--scheduler-port", "0", "--cms-port", "0"]
    flags = [word for name, value in told.items() for word in (f"--autoscale-{name}", value)]
    config, _, faults = cli.prepare("up", ["up", "org/m", "--autoscale", "1:4", *ports, *flags], {})
    assert not faults
    command = plan_of(config).scheduler.command
    assert {name: values(command, f"--scaling-{name}") for name in told} == {name: [told[name]] for name in told}
    made, _, faults = cli.prepare("scheduler", ["scheduler", *command[command.index("--scaling") :]], {})
    assert not faults
    assert made.scaling == replace(config.scaling, bounds=Bounds(1, 4))
    plain, _, _ = cli.prepare("up", ["up", "org/m", "--autoscale", "1:4", *ports], {})
    assert not [word for word in plan_of(plain).scheduler.command if word.startswith("--scaling-")]


def test_virtual_usage_takes_moves_and_engines_along() -> None:
    made = plan_of(UpConfig("m", scheduling_policy="virtual-usage", **ANY_PORTS))
    assert values(made.scheduler.command, "--scheduling-policy") == ["virtual-usage"]
    assert values(made.scheduler.command, "--rescheduling-neutral-load-metric") == ["virtual_usage"]
    assert all(values(engine.command, "--scheduling-policy") == ["priority"] for engine in made.engines)
    command = made.scheduler.command
    assert not cli.prepare("scheduler", ["scheduler", *command[command.index("--scheduling-policy") :]], {}).faults
    alone = plan_of(UpConfig("m", scheduling_policy="virtual-usage", enable_rescheduling=False, **ANY_PORTS))
    assert not [word for word in alone.scheduler.command if "rescheduling" in word]
    other = plan_of(UpConfig("m", **ANY_PORTS))
    assert "--rescheduling-neutral-load-metric" not in other.scheduler.command
    assert "--scheduling-policy" not in other.engines[0].command


@pytest.mark.parametrize(
    "said", [("--scheduling-policy", "fcfs"), ("--scheduling-policy=fcfs",), ("--scheduling_policy=fcfs",)]
)
def test_given_queue_policy_is_kept(said: tuple[str, ...]) -> None:
    made = plan_of(UpConfig("m", scheduling_policy="virtual-usage", engine_args=said, **ANY_PORTS))
    assert made.engines[0].command[-len(said) :] == said
    assert "priority" not in made.engines[0].command


def test_flags_of_ours_are_known_with_underscores_too() -> None:
    (fault,) = faults_of(UpConfig("m", engine_args=("--llumlet_cms=a:1",), **ANY_PORTS))
    assert "--llumlet-cms cannot be given for the engines" in fault
