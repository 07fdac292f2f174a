# SPDX-License-Identifier: Apache-2.0
"""The flags: examples of the documentation and of `--help`, and everything wrong at once."""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llumlet.process import setting_sources, settings
from llumlet.process.setting_sources import Reading
from llumlet.protocol.move.selection import Order, Unit
from llumsched.cli import prepare
from llumsched.cluster.domains import FailoverDomain
from llumsched.commands import rescheduler_command as rescheduler
from llumsched.rescheduling import switches as arguments
from llumsched.rescheduling.planning.moves import Selection
from llumsched.rescheduling.planning.policies import load_rescheduling_policy
from llumsched.rescheduling.rescheduling_config import LoadTarget, ReschedulingConfig, rescheduling
from llumsched.rescheduling.switches import Switches

ROOT = Path(__file__).resolve().parents[3]


def read(*given: str) -> Reading:
    parser = argparse.ArgumentParser()
    classes = (Switches, ReschedulingConfig)
    settings.add_arguments(parser, classes)
    return setting_sources.read("rescheduler", classes, parser.parse_args(given), {})


def prepared(*given: str) -> tuple[Switches, ReschedulingConfig]:
    reading = read(*given)
    found = arguments.prepare(reading)
    assert reading.faults == []
    return found


def config(*given: str) -> ReschedulingConfig:
    return prepared(*given)[1]


def faults(*given: str) -> list[str]:
    reading = read(*given)
    arguments.prepare(reading)
    return reading.faults


def test_defaults_are_written_once() -> None:
    assert config() == ReschedulingConfig()


def test_load_balance_example_of_the_documentation() -> None:
    got = config(
        "--rescheduling-policies=decode_load,neutral_load",
        "--rescheduling-decode-load-metric=kv_cache_usage_ratio_projected",
        "--rescheduling-decode-load-threshold=0.7",
        "--rescheduling-load-balance-scope=cluster",
        "--rescheduling-req-select-rule=TOKEN",
        "--rescheduling-req-select-order=SR",
        "--rescheduling-req-select-value=1024",
    )
    assert got.policies == ("decode_load", "neutral_load")
    assert got.decode == LoadTarget(threshold=0.7)
    assert got.selection == Selection(Unit.TOKEN, Order.SR, 1024)


def test_failover_example_of_the_documentation() -> None:
    got = config(
        "--rescheduling-policies=prefill_failover,decode_failover,neutral_failover",
        "--failover-domain=node",
        "--instance-staleness-seconds=100",
    )
    assert (got.failover_domain, got.staleness_s) == (FailoverDomain.NODE, 100)


FLAGS = [
    ("--ttft-slo=700", "ttft_slo", 700.0),
    ("--tpot-slo=40", "tpot_slo", 40.0),
    ("--tpot-migrate-out-ceil-threshold=0.9", "tpot_migrate_out_ceil_threshold", 0.9),
    ("--rescheduling-load-balance-threshold=0.2", "balance_threshold", 0.2),
    ("--llumlet-grpc-connection-pool-size=3", "connection_pool_size", 3),
]
"""Flags, the fields that they set, and to what."""


@pytest.mark.parametrize(("flag", "name", "value"), FLAGS)
def test_a_flag_sets_one_field(flag: str, name: str, value: Any) -> None:
    policies = "--rescheduling-policies=neutral_ttft,neutral_tpot"
    assert config(policies, flag) == replace(config(policies), **{name: value})
    assert config(policies, flag) != config(policies)


@pytest.mark.parametrize(
    ("policy", "flag"),
    [
        ("neutral_ttft", "--ttft-slo=700"),
        ("neutral_tpot", "--tpot-slo=40"),
        ("neutral_tpot", "--tpot-migrate-out-ceil-threshold=0.9"),
    ],
)
def test_objectives_are_those_of_the_policies(policy: str, flag: str) -> None:
    names = f"--rescheduling-policies={policy}"
    usual, given = (load_rescheduling_policy(policy, config(names, *more)) for more in ((), (flag,)))
    assert (usual.sources, usual.selector) != (given.sources, given.selector)


def test_examples_of_help_are_right() -> None:
    text = rescheduling.description
    for example in text.split("Example: ")[1:]:
        flags = [word for word in example.split() if word.startswith("--")]
        assert flags
        config(*flags)
    lines = [line.split() for line in rescheduler.DESCRIPTION.splitlines() if line.startswith("  llumnix")]
    assert lines
    for line in lines:
        assert prepare("rescheduler", line[1:], {}).faults == []


@pytest.mark.parametrize(
    ("given", "enabled", "in_scheduler"),
    [
        ([], False, False),
        (["--enable-rescheduling"], True, True),
        (["--colocated-rescheduling-mode=true"], True, True),
        (["--standalone-rescheduling-mode"], True, False),
        (["--enable-rescheduling", "--standalone-rescheduling-mode"], True, False),
        (["--enable-rescheduling=false", "--colocated-rescheduling-mode"], False, False),
    ],
)
def test_switches(given: list[str], enabled: bool, in_scheduler: bool) -> None:
    switches, _ = prepared(*given)
    assert (switches.enabled, switches.in_scheduler) == (enabled, in_scheduler)


def test_all_faults_at_once() -> None:
    found = faults(
        "--enable-rescheduling=perhaps",
        "--colocated-rescheduling-mode",
        "--standalone-rescheduling-mode",
        "--rescheduling-policies=decode_load,binpacking,slow",
        "--rescheduling-neutral-load-metric=warmth",
        "--rescheduling-decode-load-metric=num_tokens",
        "--rescheduling-interval-ms=soon",
        "--rescheduling-max-moves-per-pass=1.5",
        "--rescheduling-link-bytes-per-second=0",
        "--rescheduling-neutral-load-threshold=inf",
        "--rescheduling-req-select-rule=BYTES",
        "--rescheduling-load-balance-scope=galaxy",
        "--failover-domain=rack",
        "--instance-staleness-seconds=-1",
        "--llumlet-grpc-timeout-seconds=0",
    )
    for part in (
        "--enable-rescheduling 'perhaps' is neither true nor false",
        "exclude each other",
        "--rescheduling-policies 'binpacking' is not one of decode_load, neutral_waiting, neutral_load, ",
        "--rescheduling-policies 'slow' is not one of decode_load, ",
        "'warmth' is none of all_decodes_tokens_num",
        "'num_tokens' is no load",
        "'soon' is not a number",
        "--rescheduling-max-moves-per-pass must be a whole number",
        "--rescheduling-link-bytes-per-second must be positive",
        "'inf' is not a number",
        "'BYTES' is not one of NUM_REQ, TOKEN, RATIO",
        "'galaxy' is not one of cluster, unit",
        "'rack' is not one of instance, node, instance-unit, node-unit",
        "--instance-staleness-seconds must be positive",
        "--llumlet-grpc-timeout-seconds must be positive",
    ):
        assert part in "\n".join(found)
    assert len(found) == 15


@pytest.mark.parametrize(
    ("rule", "order", "value", "fault"),
    [
        ("NUM_REQ", "LR", "-1", ""),
        ("NUM_REQ", "LR", "-2", "is neither positive nor"),
        ("TOKEN", "SR", "-1", "is not positive"),
        ("TOKEN", "SR", "1.5", "is not a whole number"),
        ("RATIO", "SR", "1.5", "is not in (0, 1]"),
        ("RATIO", "SR", "0.25", ""),
        ("token", "fcwsr", "0", ""),
        ("TOKEN", "FCW", "0", "give a number"),
    ],
)
def test_selections(rule: str, order: str, value: str, fault: str) -> None:
    found = faults(
        f"--rescheduling-req-select-rule={rule}",
        f"--rescheduling-req-select-order={order}",
        f"--rescheduling-req-select-value={value}",
    )
    assert (found == []) == (fault == "")
    assert fault in "".join(found)


@pytest.mark.parametrize(
    ("given", "faults"),
    [
        ([], ["--cms HOST:PORT or redis://"]),
        (["--cms", "listen://127.0.0.1:1"], ["does not listen"]),
        (["--cms", "127.0.0.1:1", "--colocated-rescheduling-mode"], ["is for `llumnix scheduler`"]),
        (["--cms", "127.0.0.1:1", "--enable-rescheduling=false"], ["leaves this process nothing to do; omit it"]),
        (["--cms", "127.0.0.1:1", "--port", "70000"], ["is not a port"]),
        (["--cms", "127.0.0.1:1", "--cache-index-blocks", "9"], ["has no effect without --enable-cache-aware"]),
        (["--cms", "127.0.0.1:1", "--enable-cache-aware-scheduling", "--cache-index-blocks", "0"], ["at least 1"]),
        (
            ["--cms", "127.0.0.1:1", "--rescheduling-policies=neutral_failover", "--priority-headroom=0.3"],
            ["--priority-headroom: none of --rescheduling-policies has a use for it"],
        ),
        (["--cms", "127.0.0.1:1", "--tpot-slo=40"], ["--tpot-slo: none of --rescheduling-policies has a use for it"]),
        (["--cms", "127.0.0.1:1", "--tpot-slo=40", "--rescheduling-policies=neutral_tpot"], []),
        (
            ["--colocated-rescheduling-mode", "--enable-rescheduling=false", "--rescheduling-interval-ms", "soon"],
            [
                "'soon' is not a number",
                "--cms",
                "is for `llumnix scheduler`",
                "leaves this process nothing to do; omit it",
            ],
        ),
    ],
)
def test_faults_of_the_command(given: list[str], faults: list[str]) -> None:
    found = prepare("rescheduler", ["rescheduler", *given], {}).faults
    for fault, said in zip(faults, found, strict=True):
        assert fault in said


def test_documentation_has_every_flag_with_its_default() -> None:
    text = (ROOT / "docs/operate/rescheduling.md").read_text() + (ROOT / "docs/reference/defaults.md").read_text()
    plain = {entry.setting.flag: entry.default for entry in settings.entries(ReschedulingConfig) if not entry.part}
    numbers = {flag: default for flag, default in plain.items() if isinstance(default, float | int)}
    assert [flag for flag in numbers if flag not in text] == []
    for flag, default in re.findall(r"`(--rescheduling-[a-z-]+)` (?:\()?([0-9][0-9e.]*)", text):
        if flag in numbers:
            assert float(default.rstrip(".")) == numbers[flag], flag
