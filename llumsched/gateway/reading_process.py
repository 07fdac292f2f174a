# SPDX-License-Identifier: Apache-2.0
"""The processes that read and count clients' bodies.

    gateway ---socket pair for each---> worker, forked
       `-------starts-----------------> host: loads the tokenizers, forks the workers, forks another if one ends

The kernel limits each worker: CPU time per job (SIGPROF), four times as much clock time (SIGALRM), and memory
(RLIMIT_AS). A worker that exceeds a limit ends, and the host answers in its place. All end with the gateway, as their
sockets do.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
import socket
import sys
from typing import TYPE_CHECKING, Any, Final

import msgspec

from llumsched.gateway import frames, prompts
from llumsched.gateway.body import Body, Head
from llumsched.gateway.continuable import outline
from llumsched.gateway.errors import InvalidRequest
from llumsched.gateway.frames import CLOCK_PER_CPU, Answer, Job, Settings, Task

if TYPE_CHECKING:
    from llumsched.gateway.model_tokenizer import ModelTokenizer

_MOST_TOLD_CHARACTERS: Final = 256
"""Largest text of a field of the head that is sent back."""
_TOLD_NUMBERS: Final = range(-(1 << 63), 1 << 64)
_ENDED: Final = Answer(is_last=True)


def main() -> None:
    settings = msgspec.json.decode(sys.argv[1], type=Settings)
    sockets = [socket.socket(fileno=number) for number in settings.sockets]
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a service's stop goes to all its processes
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        tokenizers = _load(settings)
    except ValueError as error:
        for one in sockets:
            one.sendall(frames.answer_frame(Answer(is_last=True, fault=str(error))))
        return
    gc.freeze()
    for one in sockets:
        one.sendall(frames.answer_frame(_ENDED))
    workers = {_fork(one, tokenizers, settings): one for one in sockets}
    while workers:
        process, status = os.wait()
        one = workers.pop(process)
        if status:
            try:
                one.sendall(frames.answer_frame(_ENDED))
            except OSError:
                continue  # the gateway has ended
            workers[_fork(one, tokenizers, settings)] = one


def _load(settings: Settings) -> dict[str, ModelTokenizer]:
    if not settings.tokenizers:
        return {}
    from llumsched.gateway.model_tokenizer import ModelTokenizer

    return {model: ModelTokenizer(path, settings.chat_template) for model, path in settings.tokenizers.items()}


def _fork(connection: socket.socket, tokenizers: dict[str, ModelTokenizer], settings: Settings) -> int:
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # clients are not to fill logs
        with open("/proc/self/statm", encoding="ascii") as sizes:
            in_use = int(sizes.read().split()[0]) * resource.getpagesize()
        most = in_use + settings.memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        while True:
            _work(connection, tokenizers)
    except EOFError:
        code = 0
    finally:
        os._exit(code)


def _work(connection: socket.socket, tokenizers: dict[str, ModelTokenizer]) -> None:
    """Does one job. Raises EOFError if the gateway has ended."""
    num_header, num_body = frames.JOB_LENGTHS.unpack(_receive(connection, frames.JOB_LENGTHS.size))
    job = frames.read_job(bytes(_receive(connection, num_header)))
    content = _receive(connection, num_body)
    _limit(job.cpu_s)
    match job.task:
        case Task.READ:
            answer = _read(content)
        case Task.COUNT:
            answer = _count(connection, job, content, tokenizers)
        case Task.OUTLINE:
            answer = _outline(content)
    _limit(0.0)
    connection.sendall(frames.answer_frame(answer))


def _limit(cpu_s: float) -> None:
    """Limits the CPU time of a job; 0 is no limit."""
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    signal.setitimer(signal.ITIMER_REAL, cpu_s * CLOCK_PER_CPU)


def _receive(connection: socket.socket, num_bytes: int) -> bytearray:
    content = bytearray(num_bytes)
    left = memoryview(content)
    while left:
        taken = connection.recv_into(left)
        if not taken:
            raise EOFError
        left = left[taken:]
    return content


def _read(content: bytearray) -> Answer:
    try:
        head = Body.read(content).head
    except InvalidRequest as error:
        return Answer(is_last=True, fault=str(error))
    return Answer(is_last=True, head=_short(head))


def _short(head: Head) -> Head:
    """Shortens the head: fields that may be of any size, or too large for msgpack, are only marked as present."""

    def told(value: Any) -> Any:
        if isinstance(value, list | dict) or (isinstance(value, int) and value not in _TOLD_NUMBERS):
            return "…" if value else value
        return value[:_MOST_TOLD_CHARACTERS] if isinstance(value, str) else value

    return Head(**{name: told(getattr(head, name)) for name in Head.__struct_fields__})


def _count(connection: socket.socket, job: Job, content: bytearray, tokenizers: dict[str, ModelTokenizer]) -> Answer:
    try:
        document = Body(content, Head()).document()
    except InvalidRequest:
        return _ENDED  # the engine says what is wrong
    tokenizer = tokenizers.get(job.model) or tokenizers.get("")
    if tokenizer is not None:
        by_length = Answer(is_last=False, num_tokens=prompts.estimate(document, job.form))
        connection.sendall(frames.answer_frame(by_length))
    counted = prompts.count(tokenizer, document, job.form)
    names = prompts.blocks(document, counted.token_ids, job.block_size)
    return Answer(is_last=True, num_tokens=counted.num_tokens, blocks=names)


def _outline(content: bytearray) -> Answer:
    try:
        return Answer(is_last=True, outline=outline(Body(content, Head()).document()))
    except InvalidRequest as error:
        return Answer(is_last=True, fault=str(error))


if __name__ == "__main__":
    main()
    os._exit(0)  # libraries that were imported have nothing to say at their end
