# SPDX-License-Identifier: Apache-2.0
"""Commands whose output cannot be written, or not with every character."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Final

import pytest

from llumsched.commands import COMMANDS

LLUMNIX: Final = ("llumsched.cli",)
VLLM_LLUMNIX: Final = ("vllm_llumnix.cli",)
WORDS: Final = (
    (*LLUMNIX, "--help"),
    (*LLUMNIX, "scheduler", "--help"),
    (*LLUMNIX, "status", "--json", "--llumlet", "127.0.0.1:1,127.0.0.1:2"),
    (*VLLM_LLUMNIX, "--help"),
    (*VLLM_LLUMNIX, "patch", "show"),
    (*VLLM_LLUMNIX, "patch", "show", "--json"),
)


def started(words: tuple[str, ...], stdout: int, **environ: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", *words], stdout=stdout, stderr=subprocess.PIPE, env=os.environ | environ, timeout=120
    )


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_reader_that_left_ends_a_command_in_silence(words: tuple[str, ...]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = started(words, writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (7, b"")


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_full_disk_is_told_in_one_line(words: tuple[str, ...]) -> None:
    with open("/dev/full", "wb") as full:
        done = started(words, full.fileno())
    program = "vllm-llumnix" if words[0] == VLLM_LLUMNIX[0] else "llumnix"
    told = f"{program}: the output cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr.decode()) == (7, told)


@pytest.mark.parametrize("words", [(*LLUMNIX, name, "--help") for name in COMMANDS] + [WORDS[0], WORDS[3], WORDS[4]])
def test_characters_that_the_encoding_lacks_are_written_as_escapes(words: tuple[str, ...]) -> None:
    done = started(words, subprocess.PIPE, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, b"")
    done.stdout.decode("ascii")


@pytest.mark.parametrize("redirection", [">&-", "2>&-", ">&- 2>&-"])
def test_closed_output_is_nowhere(redirection: str) -> None:
    command = f"{sys.executable} -m llumsched.cli status --json --llumlet 127.0.0.1:1 {redirection}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, timeout=120)
    assert done.returncode == 4
    assert b"Traceback" not in done.stderr + done.stdout


def test_lost_errors_change_no_exit_code() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "llumsched.cli", "status", "--llumlet", "127.0.0.1:1"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=writer, timeout=120)
    os.close(writer)
    assert done.returncode == 4
