# SPDX-License-Identifier: Apache-2.0
"""`--policy-constant`: how it is read, and which policies it reaches."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from llumlet.process.kinds import Faulty
from llumsched.cli import prepare
from llumsched.policy.constants import POLICY_CONSTANTS
from llumsched.rescheduling.planning.policies import load_policies

FILE = """
define:
  constants: {reserve: 512, share: 0.5}
  filters: {roomFilter: {refuse: num_total_gpu_tokens - num_used_gpu_tokens < reserve * share}}
full: {neutral: {metrics: [num_requests], filters: [roomFilter], selector: {metricBasedSelector: {}}}}
rescheduling:
  sources: [roomFilter]
  selector: {metricBalanceSelector: {metric: num_requests}}
"""
IN_SCHEDULER = "--colocated-rescheduling-mode"


@pytest.fixture
def own(tmp_path: Path) -> str:
    path = tmp_path / "own.yaml"
    path.write_text(FILE)
    return str(path)


def read(program: str, *arguments: str, environ: Mapping[str, str] | None = None) -> Any:
    config, _, faults = prepare(program, [program, *arguments], environ or {})
    assert not faults
    return config


def test_names_and_numbers() -> None:
    assert POLICY_CONSTANTS.read([]) == ()
    assert POLICY_CONSTANTS.read(["a=1, b = -2.5", "c=1e3,a=1,"]) == (("a", 1.0), ("b", -2.5), ("c", 1000.0))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("reserve", "'reserve' is not NAME=VALUE"),
        ("reserve=", "'reserve=' is not NAME=VALUE"),
        ("=5", "'=5' is not NAME=VALUE"),
        ("1st=5", "'1st=5' is not NAME=VALUE"),
        ("reserve=much", "reserve: 'much' is not a number"),
        ("reserve=nan", "reserve: 'nan' is not a number"),
        ("reserve=-inf", "reserve: '-inf' is not a number"),
        ("reserve=1,reserve=2", "reserve: both 1 and 2"),
    ],
)
def test_faulty_constants_are_reported_together(text: str, fault: str) -> None:
    with pytest.raises(Faulty) as error:
        POLICY_CONSTANTS.read([text, "x=y"])
    assert error.value.faults == [fault, "x: 'y' is not a number"]


def test_a_file_of_one_s_own_takes_them_in_dispatch(own: str) -> None:
    config = read("scheduler", f"--scheduling-policy={own}", "--policy-constant=reserve=100")
    assert config.policy.constants == {"reserve": 100.0, "share": 0.5}
    environ = {"LLUMNIX_SCHEDULER_POLICY_CONSTANT": "reserve=100,share=2"}
    assert read("scheduler", f"--scheduling-policy={own}", environ=environ).policy.constants["share"] == 2.0


def test_they_may_stand_in_the_file_of_settings(own: str, tmp_path: Path) -> None:
    settings = tmp_path / "settings.yaml"
    settings.write_text(f"scheduling-policy: {own}\npolicy-constant: [reserve=7, share=1]\n")
    assert read("scheduler", f"--config={settings}").policy.constants == {"reserve": 7.0, "share": 1.0}


def test_so_do_built_in_policies() -> None:
    config = read("scheduler", "--scheduling-policy=slo", "--policy-constant", "kv_cache_threshold=0.8,tpot_slo=30")
    assert (config.policy.constants["kv_cache_threshold"], config.policy.constants["tpot_slo"]) == (0.8, 30.0)


@pytest.mark.parametrize("program", ["scheduler", "rescheduler"])
def test_rescheduling_takes_them_in_files_and_in_built_in_policies(own: str, program: str) -> None:
    where = [IN_SCHEDULER] if program == "scheduler" else ["--standalone-rescheduling-mode", "--cms=127.0.0.1:1"]
    policies = f"--rescheduling-policies={own},neutral_tpot"
    config = read(program, *where, policies, "--policy-constant=reserve=100", "--policy-constant=tpot_slo=30")
    of_file, of_tpot = load_policies(config.rescheduling if program == "scheduler" else config[2])
    assert of_file.constants == {"reserve": 100.0, "share": 0.5}
    assert of_tpot.constants["tpot_slo"] == 30.0
    assert "100" in str(of_file.sources.singles[-1]), "the filter goes by it"


def test_constant_applies_to_dispatch_and_rescheduling(own: str) -> None:
    config = read(
        "scheduler", IN_SCHEDULER, f"--scheduling-policy={own}", f"--rescheduling-policies={own}",
        "--policy-constant=reserve=9",
    )  # fmt: skip
    (policy,) = load_policies(config.rescheduling)
    assert config.policy.constants == policy.constants == {"reserve": 9.0, "share": 0.5}


def test_undefined_constant_is_a_fault(own: str) -> None:
    standalone = ["--standalone-rescheduling-mode", "--cms=127.0.0.1:1"]
    there = "; it defines reserve, share"
    for program, arguments, said in (
        ("scheduler", [f"--scheduling-policy={own}"], f"policy {own}: full: has no constant reserv to set to 9{there}"),
        ("scheduler", [], "policy load-balance: full: has no constant reserv to set to 9"),
        ("scheduler", [IN_SCHEDULER, f"--rescheduling-policies={own}"],
         "--policy-constant reserv: none of the policies defines it"),
        ("rescheduler", [*standalone, f"--rescheduling-policies={own}"],
         "--policy-constant reserv: none of the policies defines it"),
    ):  # fmt: skip
        assert prepare(program, [program, *arguments, "--policy-constant=reserv=9"], {}).faults == [said]


@pytest.mark.parametrize("at", ["--scheduling-policy", "--rescheduling-policies"])
def test_in_a_scheduler_one_of_the_two_that_defines_it_is_enough(own: str, at: str) -> None:
    config = read("scheduler", IN_SCHEDULER, f"{at}={own}", "--policy-constant=reserve=9")
    policies = [config.policy, *load_policies(config.rescheduling)]
    assert [policy.constants["reserve"] for policy in policies if "reserve" in policy.constants] == [9.0]


def test_constant_beside_its_flag_is_a_fault() -> None:
    arguments = ["scheduler", "--scheduling-policy=slo", "--tpot-slo=40", "--policy-constant=tpot_slo=30"]
    assert prepare("scheduler", arguments, {}).faults == ["--policy-constant tpot_slo: --tpot-slo says it as well"]


def test_flags_of_objectives_do_not_change_a_file_of_rescheduling(tmp_path: Path) -> None:
    """It says everything itself, and takes its constants by their names."""
    own = tmp_path / "own.yaml"
    own.write_text(FILE.replace("reserve", "tpot_slo"))
    arguments = ["rescheduler", "--standalone-rescheduling-mode", "--cms=127.0.0.1:1", f"--rescheduling-policies={own}"]
    assert prepare("rescheduler", [*arguments, "--tpot-slo=40"], {}).faults == [
        "--tpot-slo: none of --rescheduling-policies has a use for it; a file of one's own takes --policy-constant "
        "tpot_slo=VALUE"
    ]
    assert prepare("rescheduler", [*arguments, "--policy-constant=tpot_slo=40"], {}).faults == []


@pytest.mark.parametrize("given", ["--tpot-slo=soon", "--policy-constant=tpot_slo=soon"])
def test_a_value_that_cannot_be_read_is_the_only_fault(given: str) -> None:
    (fault,) = prepare(
        "scheduler", ["scheduler", IN_SCHEDULER, "--rescheduling-policies=neutral_tpot", given], {}
    ).faults
    assert fault.endswith("'soon' is not a number")
