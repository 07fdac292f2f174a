# SPDX-License-Identifier: Apache-2.0
"""Command lines that are wrong: everything is said at once, and nothing is asked of anybody."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata

import pytest

from llumlet.contract.types import MigrationReqPolicy, MigrationType
from llumlet.protocol.move.selection import Order
from llumsched.cli import main, prepare
from llumsched.commands import COMMANDS, load
from llumsched.commands.arguments import Output

ENDS = ["--from", "127.0.0.1:1", "--to", "127.0.0.1:2"]


def faults(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    *lines, last = captured.err.splitlines()
    assert last == f"See `llumnix {arguments[0]} --help`."
    return [line.removeprefix(f"llumnix {arguments[0]}: ") for line in lines]


def test_everything_wrong_is_said_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    found = faults(
        capsys,
        *("migrate", "--from", "no:where", "--rule", "MOST", "--order", "BIGGEST", "--value", "x"),
        *("--method", "teleport", "--stall-budget-ms", "-3", "--timeout", "soon", "--bogus"),
    )
    assert found == [
        "unknown argument '--bogus'",
        "--method 'teleport' is not one of auto, live, blocking, recompute",
        "--stall-budget-ms must not be negative",
        "--timeout 'soon' is not a duration like 5, 500ms or 3m",
        "--rule 'MOST' is not one of NUM_REQ, TOKEN, RATIO",
        "--order 'BIGGEST' is not one of LCR, FCR, LR, SR, FCW, FCWSR, LP",
        "--value 'x' is not a number",
        "--to INSTANCE is missing: its id, or its llumlet's HOST:PORT",
        "--from 'no:where': the port must be a number from 1 to 65535",
    ]


WITH_JSON = [name for name in COMMANDS if Output in load(name).SETTINGS]


@pytest.mark.parametrize("command", WITH_JSON)
def test_a_variable_that_cannot_be_read_hides_no_other_fault(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    variable = f"LLUMNIX_{command.upper()}_JSON"
    monkeypatch.setenv(variable, "maybe")
    assert faults(capsys, command, "--bogus")[:2] == [
        "unknown argument '--bogus'",
        f"{variable} 'maybe' is neither true nor false",
    ]


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        ([], "say which requests: --request ID, --all, or --rule with --order and --value"),
        (["--all", "--request", "a"], "--request and --all exclude each other"),
        (["--all", "--rule", "TOKEN"], "--all and a rule exclude each other"),
        (["--request", "a", "--value", "1"], "--request and a rule exclude each other"),
        (["--request", ""], "--request: the id is empty"),
        (["--rule", "NUM_REQ", "--order", "SR"], "--value is missing"),
        (["--rule", "NUM_REQ", "--value", "1"], "--order is missing"),
        (["--order", "SR", "--value", "1"], "--rule is missing"),
        (
            ["--rule", "NUM_REQ", "--order", "SR", "--value", "0"],
            "--value 0 is neither positive nor -1 (all)",
        ),
        (
            ["--rule", "NUM_REQ", "--order", "SR", "--value", "1.5"],
            "--value 1.5 is not a whole number",
        ),
        (
            ["--rule", "TOKEN", "--order", "SR", "--value", "-1"],
            "--value -1 is not positive",
        ),
        (
            ["--rule", "TOKEN", "--order", "SR", "--value", "1e40"],
            "--value 1e+40 is too large",
        ),
        (
            ["--rule", "RATIO", "--order", "SR", "--value", "1.1"],
            "--value 1.1 is not in (0, 1]",
        ),
        (["--rule", "RATIO", "--order", "SR", "--value", "nan"], "--value 'nan' is not a number"),
        (["--all", "--order", "QQ"], "--order 'QQ' is not one of LCR, FCR, LR, SR, FCW, FCWSR, LP"),
        (["--all", "--timeout", "0"], "--timeout must be positive"),
    ],
)
def test_which_requests(capsys: pytest.CaptureFixture[str], flags: list[str], fault: str) -> None:
    assert faults(capsys, "migrate", *ENDS, *flags) == [fault]


@pytest.mark.parametrize(
    ("flags", "rule", "order", "value"),
    [
        (["--rule", "NUM_REQ", "--order", "SR", "--value", "2"], "NUM_REQ", "SR", ("num_reqs", 2)),
        (
            ["--rule", "num_req", "--order", "lcr", "--value", "-1"],
            "NUM_REQ",
            "LCR",
            ("num_reqs", -1),
        ),
        (
            ["--rule", "TOKEN", "--order", "LR", "--value", "8e3"],
            "TOKEN",
            "LR",
            ("num_tokens", 8000),
        ),
        (
            ["--rule", "RATIO", "--order", "FCWSR", "--value", "0.25"],
            *("RATIO", "FCWSR", ("kv_cache_usage_ratio", 0.25)),
        ),
        (["--all"], "NUM_REQ", "FCR", ("num_reqs", -1)),
        (["--all", "--order", "FCW"], "NUM_REQ", "FCW", ("num_reqs", -1)),
    ],
)
def test_rules_become_messages(flags: list[str], rule: str, order: str, value: tuple[str, float]) -> None:
    migration, _, found = prepare("migrate", ["migrate", *ENDS, *flags], {})
    assert found == []
    request = migration.request
    assert MigrationType.Name(request.migration_type) == rule
    assert MigrationReqPolicy.Name(request.migration_req_policy) == order
    assert (request.WhichOneof("value"), getattr(request, value[0])) == value


def test_help_names_every_order() -> None:
    orders = load("migrate").DESCRIPTION.partition("Orders: ")[2]
    assert [order for order in Order if order not in re.findall(r"\b[A-Z]+\b", orders)] == []


def test_source_and_destination_must_differ(capsys: pytest.CaptureFixture[str]) -> None:
    same = ["--from", "127.0.0.1:1", "--to", "127.0.0.1:1", "--all"]
    assert faults(capsys, "migrate", *same) == ["--from and --to are the same llumlet, 127.0.0.1:1"]


@pytest.mark.parametrize("command", ["ps", "status"])
def test_llumlets_are_named(capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert faults(capsys, command, "--llumlet", "a:1,b:99999,,c") == [
        "--llumlet 'b:99999': the port must be a number from 1 to 65535",
        "--llumlet '' is not HOST:PORT",
        "--llumlet 'c' is not HOST:PORT",
    ]


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "migrate" in capsys.readouterr().err


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)])
def test_help(capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*command, "--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert " ".join(["usage: llumnix", *command]) in shown
    for text in [load(*command).DESCRIPTION] if command else [*COMMANDS, *COMMANDS.values()]:
        assert " ".join(text.split()) in " ".join(shown.split())


def test_help_all_shows_the_settings_that_help_leaves_out(capsys: pytest.CaptureFixture[str]) -> None:
    for flag, shows_all in (("--help", False), ("--help-all", True)):
        with pytest.raises(SystemExit):
            main(["gateway", flag])
        shown = capsys.readouterr().out
        assert "--scheduler-endpoints" in shown
        assert ("--engine-stall-time" in shown) is shows_all
        assert ("more settings: llumnix gateway --help-all" in shown) is not shows_all


def test_a_command_does_not_wait_for_what_others_import() -> None:
    code = """
import sys
from llumsched import cli
try:
    cli.main(["ps", "--help"])
except SystemExit:
    assert not {"aiohttp", "numpy", "yaml"} & sys.modules.keys()
else:
    raise AssertionError("no help")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_an_unknown_command_is_an_error_of_usage() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "llumsched.cli", "teleport"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert "teleport" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("word", ["--version", "version"])
def test_version(capsys: pytest.CaptureFixture[str], word: str) -> None:
    assert main([word]) == 0
    assert capsys.readouterr().out == f"llumnix {metadata.version('vllm-llumnix')}\n"


def test_misspelt_words_are_told_what_they_may_mean(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["statsu"]) == 2
    assert capsys.readouterr().err == "llumnix: unknown command 'statsu': did you mean status?\n"
    assert faults(capsys, "ps", "--clustr", "a") == ["unknown argument '--clustr': did you mean --cluster?"]
    assert faults(capsys, "drain", "a:1", "--llumlet-tls-cret=x") == [
        "unknown argument '--llumlet-tls-cret': did you mean --llumlet-tls-cert?"
    ]
    assert faults(capsys, "scheduler", "--scheduling-polcy", "x", "--portt", "3") == [
        "unknown argument '--scheduling-polcy': did you mean --scheduling-policy?",
        "unknown argument '--portt': did you mean --port?",
    ]


def test_doctor_hands_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(subprocess, "run", lambda words: asked.append(words) or subprocess.CompletedProcess(words, 1))
    assert main(["doctor", "--model", "DIR", "--adapt", "--json", "--", "--dtype", "half"]) == 1
    [(program, *words)] = asked
    assert program.is_file()
    assert words == ["doctor", "--json", "--adapt", "--model", "DIR", "--", "--dtype", "half"]


def test_doctor_of_flags_without_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert faults(capsys, "doctor", "--", "--dtype", "half") == ["flags after -- need --model"]
