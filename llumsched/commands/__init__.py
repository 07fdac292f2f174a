# SPDX-License-Identifier: Apache-2.0
"""The sub-commands of `llumnix`, one module each."""

from __future__ import annotations

import argparse
from typing import Protocol

from llumsched.commands import drain, explain, gateway, migrate, ps, rescheduler, scheduler, status, top, up


class Command(Protocol):
    """What a module of this package has."""

    NAME: str
    HELP: str
    """One line for the list of commands."""
    DESCRIPTION: str
    """For the command's own `--help`."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def faults(self, args: argparse.Namespace) -> list[str]:
        """Everything wrong with the arguments, a sentence each. May keep parsed values in
        `args`."""
        ...

    def run(self, args: argparse.Namespace) -> int:
        """Returns the exit code. `args.credentials` are for the clients."""
        ...


COMMANDS: tuple[Command, ...] = (up, top, ps, status, migrate, drain, explain, gateway, scheduler, rescheduler)
