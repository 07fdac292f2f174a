# SPDX-License-Identifier: Apache-2.0
"""The console command `llumnix`. Each sub-command is a module of `llumsched.commands`.

All mistakes in a command line are reported at once, so the parser checks almost nothing: the settings' readers and the
command's `prepare` do.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from typing import Any, Final, NamedTuple

from llumlet.process import setting_sources, settings
from llumlet.process.credentials import NONE, CredentialFiles, Credentials, CredentialsError
from llumlet.process.standard_streams import guarded
from llumlet.process.tokens import Role
from llumsched.commands import COMMANDS, WITH_FURTHER, Command, load
from llumsched.console.exit_codes import ExitCode
from llumsched.console.llumnix_flags import instead_of

_EPILOG = """exit codes:
  0  done; migrate: every selected request moved; drain: every stream came to its end
  1  migrate: some selected request did not move; drain: some stream was cut
  2  the command line is wrong
  3  migrate: nothing to move was found
  4  a llumlet could not be reached
  5  a llumlet refused
  6  up: the scheduler, the gateway or the last engine ended by itself
  7  the output could not be written
"""


_CONFIG = "YAML file with settings, such as `port: 8001`; flags and variables override them: docs/reference/settings.md"
_HELP: Final = "show the most used settings (--help) or all (--help-all), and exit"
MOST_IN_HELP: Final = 20
"""Number of settings above which `--help` of a command shows only the common ones."""
_SERVERS: Final = ("gateway", "scheduler", "rescheduler")
"""Commands that Llumnix has too: its command lines may bring any of its flags."""


def main(argv: Sequence[str] | None = None) -> int:
    with guarded("llumnix"):
        return _main(sys.argv[1:] if argv is None else argv)


def _main(words: Sequence[str]) -> int:
    if list(words[:1]) in (["--version"], ["version"]):
        print(f"llumnix {metadata.version('vllm-llumnix')}")
        return ExitCode.OK
    name = next((word for word in _split(words)[0] if word in COMMANDS), "")
    if not name:
        wrong = next((word for word in _split(words)[0] if not word.startswith("-")), "")
        if near := _meant(wrong, COMMANDS):
            print(f"llumnix: unknown command {wrong!r}: {near}", file=sys.stderr)
            return ExitCode.USAGE
        parser = _parser("", None)
        parser.parse_known_args(words)
        parser.print_help(sys.stderr)
        return ExitCode.USAGE
    config, credentials, faults = prepare(name, words)
    if faults:
        return _report_faults(name, faults)
    try:
        return load(name).run(config, credentials)
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED


class Prepared(NamedTuple):
    """Arguments of a command's `run`, and the faults that keep it from being called."""

    config: Any
    credentials: Credentials
    faults: list[str]
    """The faults of command line, variables and file, a sentence each."""


def prepare(name: str, words: Sequence[str], environ: Mapping[str, str] = os.environ) -> Prepared:
    given, further = _split(words)
    command = load(name)
    args, unknown = _parser(name, command, shows_all="--help-all" in given).parse_known_args(given)
    if name not in WITH_FURTHER:
        unknown += further
    reading = setting_sources.read(
        name, (*command.SETTINGS, CredentialFiles), args, environ, args.config, tuple(further)
    )
    reading.faults[:0] = _unknown(name, unknown)
    config = command.prepare(reading)
    credentials = NONE
    try:
        credentials = Credentials.load(reading.make(CredentialFiles), Role.OPERATOR)
    except CredentialsError as error:
        reading.faults += error.faults
    return Prepared(config, credentials, reading.faults)


def _unknown(name: str, words: Sequence[str]) -> Iterator[str]:
    """Faults of words that the command does not know. The word after an unknown flag counts as its value."""
    is_value = False
    for word in words:
        if is_value and not word.startswith("-"):
            is_value = False
            continue
        flag = word.partition("=")[0]
        is_value = word.startswith("-") and flag == word
        answer = _answer(name, flag) if word.startswith("-") else ""
        yield f"unknown argument {flag!r}: {answer}" if answer else f"unknown argument {word!r}"


def _answer(name: str, flag: str) -> str:
    """A hint for a flag that the command `name` lacks: the commands that have it, or a similar flag."""
    if name in _SERVERS:
        if instead := instead_of(flag):
            return instead
        if having := [f"`llumnix {each}`" for each in _SERVERS if each != name and flag in _flags_of(each)]:
            return f"it is for {' and '.join(having)}"
    return _meant(flag, {"--config", *_flags_of(name)})


def _flags_of(command: str) -> set[str]:
    classes = (*load(command).SETTINGS, CredentialFiles)
    return {f"--{name}" for entry in settings.all_entries(classes) for name in entry.setting.names}


def _meant(word: str, known: Iterable[str]) -> str:
    """A question that names the nearest known word; "" if none is near."""
    by_word = {each.lstrip("-"): each for each in known}  # dashes are alike in all
    near = difflib.get_close_matches(word.lstrip("-"), by_word, 1, 0.75)
    return f"did you mean {by_word[near[0]]}?" if near else ""


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our arguments, and those after the first `--`."""
    words = list(argv)
    end = words.index("--") if "--" in words else len(words)
    return words[:end], words[end + 1 :]


def _parser(name: str, command: Command | None, *, shows_all: bool = False) -> argparse.ArgumentParser:
    """A parser with the arguments of one command, and the names of all. `shows_all`: help lists every setting."""
    parser = argparse.ArgumentParser(
        prog="llumnix",
        description="Serve language models on several engines, look at these, and move their running requests.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="store_true", help="show the version, as `llumnix version` does, and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for each, text in COMMANDS.items():
        sub = commands.add_parser(
            each, help=text, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, add_help=False
        )
        sub.add_argument("-h", "--help", "--help-all", action="help", help=_HELP)
        if command is not None and each == name:
            sub.description = command.DESCRIPTION
            sub.add_argument("--config", default="", metavar="FILE", help=_CONFIG)
            classes = (*command.SETTINGS, CredentialFiles)
            only_common = not shows_all and len(settings.all_entries(classes)) > MOST_IN_HELP
            if num_hidden := settings.add_arguments(sub, classes, only_common=only_common):
                sub.epilog = f"{num_hidden} more settings: llumnix {name} --help-all"
    return parser


def _report_faults(name: str, faults: list[str]) -> int:
    for fault in faults:
        print(f"llumnix {name}: {fault}", file=sys.stderr)
    print(f"See `llumnix {name} --help`.", file=sys.stderr)
    return ExitCode.USAGE


if __name__ == "__main__":
    sys.exit(main())
