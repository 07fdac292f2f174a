# SPDX-License-Identifier: Apache-2.0
"""The console command `llumnix`. Each sub-command is a module of `llumsched.commands`.

Every mistake in a command line is reported at once, so the parser itself checks next to nothing:
what can be wrong with a sub-command's arguments is said by its `faults`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from llumlet.credential_files import CredentialFiles, CredentialsError, add_arguments
from llumlet.credentials import Credentials
from llumlet.roles import Role
from llumsched.commands import COMMANDS, Command, load
from llumsched.exit_codes import ExitCode

_EPILOG = """exit codes:
  0  done; migrate: every selected request moved; drain: every stream came to its end
  1  migrate: some selected request did not move; drain: some stream was cut
  2  the command line is wrong
  3  migrate: nothing to move was found
  4  a llumlet could not be reached
  5  a llumlet refused
  6  up: the scheduler, the gateway or the last engine ended by itself
"""


def main(argv: Sequence[str] | None = None) -> int:
    given, further = _split(sys.argv[1:] if argv is None else argv)
    name = next((word for word in given if word in COMMANDS), "")
    command = load(name) if name else None
    parser = _parser(name, command)
    args, unknown = parser.parse_known_args(given)
    if command is None:
        parser.print_help(sys.stderr)
        return ExitCode.USAGE
    args.further = further
    if not args.takes_further:
        unknown += further
    faults = [f"unknown argument {argument!r}" for argument in unknown] + command.faults(args)
    try:
        args.credentials = Credentials.load(CredentialFiles.given(args), Role.OPERATOR)
    except CredentialsError as error:
        faults += error.faults
    if faults:
        return _report_faults(name, faults)
    try:
        return command.run(args)
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our arguments, and those after the first `--`: a command that hands them on sets `takes_further`, and finds
    them in `args.further`."""
    words = list(argv)
    end = words.index("--") if "--" in words else len(words)
    return words[:end], words[end + 1 :]


def _parser(name: str, command: Command | None) -> argparse.ArgumentParser:
    """With the arguments of one command, and the names of all."""
    parser = argparse.ArgumentParser(
        prog="llumnix",
        description="Serve language models on several engines, look at these, and move their running requests.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(takes_further=False)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for each, text in COMMANDS.items():
        sub = commands.add_parser(
            each, help=text, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
        )
        if command is not None and each == name:
            sub.description = command.DESCRIPTION
            command.add_arguments(sub)
            add_arguments(
                sub.add_argument_group("credentials", "As the instances have them; the token may be an operator's.")
            )
    return parser


def _report_faults(name: str, faults: list[str]) -> int:
    for fault in faults:
        print(f"llumnix {name}: {fault}", file=sys.stderr)
    print(f"See `llumnix {name} --help`.", file=sys.stderr)
    return ExitCode.USAGE


if __name__ == "__main__":
    sys.exit(main())
