# SPDX-License-Identifier: Apache-2.0
"""`llumnix doctor`: checks if this machine's engines can move requests, and how a model's requests would move."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from llumlet.process import kinds
from llumlet.process.credentials import Credentials
from llumlet.process.kinds import MARK
from llumlet.process.setting_sources import Reading
from llumsched.commands.arguments import OPTIONS, Output
from llumsched.console.exit_codes import ExitCode

DESCRIPTION = """Check everything that --enable-llumlet needs, where engines run.

--model also shows how requests of this model will move: vLLM builds it without weights and plans its KV cache. Flags of
`vllm serve` follow after `--`: llumnix doctor --model DIR -- --kv-cache-dtype fp8. The exit code is 1 if something is
missing that --enable-llumlet needs; a part that it can do without, such as a transport, is marked "optional".
`vllm-llumnix doctor` does the same."""


@dataclass(frozen=True, slots=True)
class DoctorOptions:
    model: str = OPTIONS.setting(
        "", kinds.text("DIR"), "directory or name of a model whose moves are checked; empty checks only this machine"
    )
    adapt: bool = OPTIONS.setting(False, MARK, "check as for instances started with --llumlet-adapt")


SETTINGS: Final = (DoctorOptions, Output)


def prepare(reading: Reading) -> list[str]:
    """The arguments of `vllm-llumnix doctor`."""
    options = reading.make(DoctorOptions)
    if reading.further and not options.model:
        reading.faults.append("flags after -- need --model")
    words = ["--json"] * reading.make(Output).json + ["--adapt"] * options.adapt
    return [*words, *(["--model", options.model, "--", *reading.further] if options.model else [])]


def run(arguments: list[str], _: Credentials) -> int:
    command = Path(sys.executable).with_name("vllm-llumnix")
    if not command.exists():
        print(f"llumnix doctor: {command} was not found: run it with the engines' Python", file=sys.stderr)
        return ExitCode.USAGE
    return subprocess.run([command, "doctor", *arguments]).returncode
