# SPDX-License-Identifier: Apache-2.0
"""The sub-commands of `llumnix`, one module each. Only the requested one is imported, for a quick start."""

from __future__ import annotations

import importlib
from typing import Any, Final, Protocol

from llumlet.process.credentials import Credentials
from llumlet.process.setting_sources import Reading


class Command(Protocol):
    """The interface of a command's module, or of what it calls COMMAND."""

    DESCRIPTION: str
    """The text of the command's own `--help`."""
    SETTINGS: tuple[type, ...]
    """Classes of settings: see `llumlet.process.settings`. Credentials and --config come with every command."""

    def prepare(self, reading: Reading) -> Any:
        """The argument of `run`. Adds faults to `reading.faults`; `run` is then not called."""
        ...

    def run(self, config: Any, credentials: Credentials) -> int:
        """Returns the exit code."""
        ...


COMMANDS: Final = {
    "up": "start engines, scheduler, rescheduler and gateway on this machine",
    "top": "watch instances, their load, and the moves between them",
    "ps": "list the requests of instances",
    "status": "show the load and the settings of instances",
    "migrate": "move running requests from one instance to another",
    "drain": "move everything away from an instance and end it",
    "explain": "show where the scheduler would send a request, and why",
    "profile": "measure how long the steps of an engine take",
    "doctor": "check what engines need here, and how a model's requests would move",
    "gateway": "serve the OpenAI API in front of all engines",
    "scheduler": "choose an instance for each request",
    "rescheduler": "move running requests from hot instances to cold ones and away from failed ones",
}
"""Help texts of the commands, by name; the module of `ps` is `ps_command`."""
WITH_FURTHER: Final = frozenset({"up", "doctor"})
"""Commands that take arguments after `--`."""


def load(name: str) -> Command:
    """The module of one of COMMANDS."""
    module: Any = importlib.import_module(f"{__name__}.{name}_command")
    command: Command = getattr(module, "COMMAND", module)
    return command
