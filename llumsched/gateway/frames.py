# SPDX-License-Identifier: Apache-2.0
"""Messages between the gateway and its reading processes, over socket pairs. Pure.

A job is `lengths of header and body, header, body`; each of its answers is `length, answer`. Headers and answers are
msgpack.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import StrEnum
from typing import Final

import msgspec

from llumsched.gateway.body import Head
from llumsched.gateway.chats.form import Form
from llumsched.gateway.continuable import Outline

JOB_LENGTHS: Final = struct.Struct("!II")
ANSWER_LENGTH: Final = struct.Struct("!I")
CLOCK_PER_CPU: Final = 4
"""Clock seconds that a job may take per CPU second, since the machine has other work."""


class Task(StrEnum):
    READ = "read"
    """Reads a body as `Body.read` does."""
    COUNT = "count"
    OUTLINE = "outline"


class Job(msgspec.Struct, array_like=True):
    task: Task
    cpu_s: float
    """CPU time after which the kernel ends the process."""
    model: str = ""
    block_size: int = 0
    """Tokens per block for the names of blocks; 0 asks for no names."""
    form: Form = Form.OPENAI
    """Place of the prompt in the body, for a count."""


class Answer(msgspec.Struct, array_like=True):
    """A result of a job. A count has two: an estimate by length at once, then one by tokens."""

    is_last: bool
    num_tokens: int | None = None
    """A count; None if the process ended on it, or the body is not a JSON object."""
    head: Head | None = None
    fault: str = ""
    outline: Outline | None = None
    blocks: bytes = b""
    """Names of the prompt's blocks."""


class Settings(msgspec.Struct):
    """The command line of the processes."""

    tokenizers: dict[str, str]
    """Path or hub name by model; the model "" is any other."""
    chat_template: str
    memory_bytes: int
    """Memory that each process may take beyond its size at the start."""
    sockets: list[int]
    """File descriptors, one per process."""


_JOB: Final = msgspec.msgpack.Decoder(Job)
_ANSWER: Final = msgspec.msgpack.Decoder(Answer)


def job_head(job: Job, num_bytes: int) -> bytes:
    """The bytes before a job's body."""
    header = msgspec.msgpack.encode(job)
    return JOB_LENGTHS.pack(len(header), num_bytes) + header


def read_job(header: bytes) -> Job:
    return _JOB.decode(header)


def answer_frame(answer: Answer) -> bytes:
    content = msgspec.msgpack.encode(answer)
    return ANSWER_LENGTH.pack(len(content)) + content


def take_answers(buffer: bytearray) -> Iterator[Answer]:
    """Takes whole answers out of `buffer`. Raises msgspec.DecodeError."""
    while len(buffer) >= ANSWER_LENGTH.size:
        end = ANSWER_LENGTH.size + ANSWER_LENGTH.unpack_from(buffer)[0]
        if len(buffer) < end:
            return
        content = bytes(buffer[ANSWER_LENGTH.size : end])
        del buffer[:end]
        yield _ANSWER.decode(content)
