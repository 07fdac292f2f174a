# SPDX-License-Identifier: Apache-2.0
"""Counting tokens and reading large requests: by whom, within which limits, and never on the event loop for long."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop
from tokenizers import Tokenizer, models, pre_tokenizers

from llumlet.contract.block_hashes import chain, root_of
from llumlet.process.addresses import Address
from llumsched.gateway import prompts, reading, tokens
from llumsched.gateway.body import Body, Head
from llumsched.gateway.continuable import CannotContinue, Outline, outline
from llumsched.gateway.errors import InvalidRequest
from llumsched.gateway.model_tokenizer import ModelTokenizer
from llumsched.gateway.tokens import TokenCounter
from llumsched.request import MOST_PROMPT_BLOCKS
from tests.llumsched.gateway.support import DEADLINE_S, cluster, until

CHAT = "/v1/chat/completions"
LARGE_BYTES = 8 << 20
LONGEST_TURN_S = 0.02
TWO_MESSAGES = [{"role": "user", "content": "two"}, {"role": "user", "content": "three"}]
TEMPLATE = """{% for m in messages %}one {{ m['content'] }} {{ extra }}{{ ' ' }}
{%- if m['content'] == 'slow' %}{% for a in range(99999) %}{% for b in range(999) %}{% endfor %}{% endfor %}{% endif %}
{%- if m['content'] == 'large' %}{{ m['content'] * 600000000 }}{% endif %}{% endfor %}"""


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    words = {word: number for number, word in enumerate(["[UNK]", "one", "two", "three"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]", "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def tokenizer(tokenizer_path: Path) -> ModelTokenizer:
    return ModelTokenizer(str(tokenizer_path))


def _body(document: dict[str, Any]) -> Body:
    return Body.read(json.dumps(document | {"model": "mock"}).encode())


@pytest.mark.parametrize(
    ("document", "count"),
    [
        ({"prompt": "one two three"}, 3),
        ({"prompt": [5, 6]}, 2),
        ({"prompt": ["one", "two three"]}, 3),
        ({"prompt": [[1, 2], [3]]}, 3),
        ({"prompt": "one " * 5000}, 5000),
        ({"prompt": "one " * 100_000}, 100_000),
        ({"messages": TWO_MESSAGES}, 4),
        ({"messages": 3}, 0),
        ({}, 0),
    ],
)
def test_prompts_are_counted_by_the_models_tokenizer(
    tokenizer: ModelTokenizer, document: dict[str, Any], count: int
) -> None:
    assert prompts.count(tokenizer, document).num_tokens == count


@pytest.mark.parametrize(
    ("document", "ids"),
    [
        ({"prompt": "one two three one two"}, [1, 2, 3, 1, 2]),
        ({"prompt": [7, 8, 9, 7, 8]}, [7, 8, 9, 7, 8]),
        ({"prompt": "one two three one two", "cache_salt": "s"}, [1, 2, 3, 1, 2]),
        ({"messages": [*TWO_MESSAGES, *TWO_MESSAGES]}, [1, 2, 1, 3, 1, 2, 1, 3]),
        ({"prompt": ["one two", "two three"]}, []),
        ({"prompt": [[1, 2], [3]]}, []),
        ({"prompt": "one two three", "truncate_prompt_tokens": 2}, []),
        ({"prompt": [1, -5]}, []),
        ({"prompt": [1, 1 << 40]}, []),
        ({"messages": 3}, []),
        ({}, []),
    ],
    ids=str,
)
def test_blocks_are_named_as_the_engine_names_them(
    tokenizer: ModelTokenizer, document: dict[str, Any], ids: list[int]
) -> None:
    named = prompts.blocks(document, prompts.count(tokenizer, document).token_ids, 2)
    assert named == b"".join(chain(ids, 2, root_of(2, document.get("cache_salt", ""))))
    assert len(named) == 8 * (len(ids) // 2)
    assert not prompts.blocks(document, ids, 0), "nobody asks"


def test_of_a_long_prompt_the_first_blocks_are_named(tokenizer: ModelTokenizer) -> None:
    counted = prompts.count(tokenizer, {"prompt": [5] * 100_000})
    assert len(prompts.blocks({}, counted.token_ids, 2)) == 8 * MOST_PROMPT_BLOCKS


BY_TEXTS = 2 * 4 + 2
"""Of two messages of a word each."""


@pytest.mark.parametrize(
    ("told", "count"),
    [
        ({"chat_template_kwargs": {"extra": "three"}}, 6),
        ({"chat_template_kwargs": {"extra": True, "unknown": None}}, 6),
        ({"chat_template_kwargs": {}}, 4),
        ({"chat_template": None}, 4),
        ({"add_generation_prompt": False}, 4),
        ({"chat_template": "one " * 100}, BY_TEXTS),
        ({"chat_template": ""}, BY_TEXTS),
        ({"chat_template_kwargs": {"chat_template": "one " * 100}}, BY_TEXTS),
        ({"chat_template_kwargs": {"extra": ["one"] * 100}}, BY_TEXTS),
        ({"chat_template_kwargs": "one"}, BY_TEXTS),
        *(
            ({"chat_template_kwargs": {name: "1"}}, BY_TEXTS)
            for name in ("tokenize", "tools", "documents", "conversation", "messages", "add_generation_prompt",
                         "continue_final_message", "return_dict", "return_tensors", "max_length", "tokenizer_kwargs")
        ),
    ],
    ids=str,
)  # fmt: skip
def test_a_client_tells_a_template_scalars_and_nothing_else(
    tokenizer: ModelTokenizer, told: dict[str, Any], count: int
) -> None:
    """vLLM refuses `chat_template` and `tokenize`; here nothing of what `apply_chat_template` takes itself is taken."""
    assert prompts.count(tokenizer, {"messages": TWO_MESSAGES} | told).num_tokens == count


def test_a_chat_template_that_cannot_be_read_ends_it_with_a_reason(tokenizer_path: Path, tmp_path: Path) -> None:
    (tmp_path / "template.jinja").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"chat template at .*template\.jinja.*: .*codec"):
        ModelTokenizer(str(tokenizer_path), str(tmp_path / "template.jinja"))


def test_without_a_tokenizer_the_count_is_an_estimate() -> None:
    assert prompts.estimate({"prompt": "x" * 400}) == 100
    parts = [{"type": "text", "text": "x" * 40}, {"type": "image_url"}]
    assert prompts.estimate({"messages": [{"content": parts}]}) == 14
    assert prompts.estimate({"prompt": {"a": 1}, "messages": 3}) == 0


@asynccontextmanager
async def _counter(*arguments: Any, **settings: Any) -> AsyncIterator[TokenCounter]:
    counter = TokenCounter(*arguments, **settings)
    try:
        await counter.start()
        await counter._readers.start()
        yield counter
    finally:
        await counter.close()


@pytest.mark.asyncio
async def test_a_count_that_takes_too_much_or_finds_no_process_free_is_an_estimate(tokenizer_path: Path) -> None:
    async with _counter({"mock": str(tokenizer_path)}, cpu_s=0.2, num_processes=1) as counter:

        async def count(*words: str) -> int:
            messages = [{"role": "user", "content": word} for word in words]
            return (await counter.count(_body({"messages": messages}))).num_tokens

        assert await count("two", "three") == 4
        host = counter._readers._process
        for _ in range(2):
            began_s = time.monotonic()
            assert await count("slow") == 4 + 1
            assert time.monotonic() - began_s < 0.2 * 4 + 2
            assert await count("large") == 4 + 1
        while await count("two", "three") != 4:
            pass
        assert counter._readers._process is host, "which had loaded the tokenizer"
        busy = await counter._readers._take()
        assert await count("x" * 40) == 4 + 10, "as no process is free"
        counter._readers.freed(busy)
        assert await count("two", "three") == 4


@pytest.mark.asyncio
async def test_a_tokenizer_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no tokenizer at"):
        async with _counter({"": str(tmp_path)}):
            pass


@pytest.mark.asyncio
async def test_processes_that_do_not_start_end_the_gateway_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading.sys, "executable", "/bin/false")
    with pytest.raises(ValueError, match="end at their start"):
        async with _counter({"": "anything"}):
            pass


_READS_AND_WAITS = """
import asyncio
from llumsched.gateway.tokens import TokenCounter

async def main():
    counter = TokenCounter({})
    await counter.read(b" " * (2 << 20) + b"{}")
    print(counter._readers._process.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.asyncio
async def test_processes_end_with_their_gateway_however_that_ends() -> None:
    gateway = await asyncio.create_subprocess_exec(sys.executable, "-c", _READS_AND_WAITS, stdout=subprocess.PIPE)
    assert gateway.stdout is not None
    host = int(await gateway.stdout.readline())

    def num_running() -> int:
        """Of the host's group; one that nobody has waited for yet does not run any more."""
        found = 0
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                state, _, group = stat.read_text().rpartition(")")[2].split()[:3]
                found += int(group) == host and state != "Z"
        return found

    assert num_running() == 3
    gateway.kill()
    await gateway.wait()
    await until(lambda: not num_running())


@pytest.mark.asyncio
async def test_a_large_body_is_read_as_a_small_one_is() -> None:
    filler = "x" * (1 << 20)
    async with _counter({}) as counter:
        document = {"model": "mock", "stream": True, "prompt": filler, "tools": [{}] * 9, "echo": {}, "n": 2**70}
        document["priority"] = -(2**63)
        body = await counter.read(bytearray(json.dumps(document).encode()))
        assert (body.model, body.is_streamed, body.head.echo) == ("mock", True, {})
        assert body.head.tools
        assert body.head.priority == -(2**63)
        assert body.head.n not in (None, 1)
        assert (await counter.count(body)).num_tokens == len(filler) // 4
        for wrong, why in (
            (b'{"a": "%b}', "JSON object"),
            (b'{"a": "\xff%b"}', "not UTF-8"),
            (b'{"model": "%b"}', "256"),
            (b'{"a": "%b", "priority": 9223372036854775808}', "<= 9223372036854775807 - at `\\$.priority`"),
        ):
            with pytest.raises(InvalidRequest, match=why):
                await counter.read(wrong % filler.encode())


@pytest.mark.asyncio
async def test_processes_that_are_gone_are_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_LEAST_LIFE_S", 0.0)
    body = _body({"prompt": "x" * 80_000})
    by_length = -(-len(body.content) // 4)
    async with _counter({}) as counter:
        assert (await counter.count(body)).num_tokens == 20_000
        first = counter._readers._process
        assert first is not None
        os.killpg(first.pid, signal.SIGKILL)
        await until(lambda: not counter._readers._workers)
        monkeypatch.setattr(reading, "_LEAST_LIFE_S", 60.0)
        assert (await counter.count(body)).num_tokens == by_length, "not without end"
        monkeypatch.setattr(reading, "_LEAST_LIFE_S", 0.0)
        assert (await counter.count(body)).num_tokens == 20_000
        second = counter._readers._process
        assert second is not None
    assert second.pid != first.pid
    with pytest.raises(ProcessLookupError):
        os.killpg(second.pid, 0)


class _Turns:
    """How long the longest turn of the event loop was, in time of its own thread: who else runs does not count."""

    longest_s = 0.0

    async def measure(self) -> None:
        before_s = time.thread_time()
        while True:
            await asyncio.sleep(0)
            now_s = time.thread_time()
            self.longest_s = max(self.longest_s, now_s - before_s)
            before_s = now_s


def _ask(port: int, body: bytes) -> bytes:
    """In a thread: none of this is the loop's work."""
    with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as client:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode())
        client.sendall(body)
        return client.recv(1 << 16)


class _Sink(asyncio.Protocol):
    """An engine that looks at nothing."""

    def __init__(self, sizes: list[int]) -> None:
        self._sizes = sizes
        self._left = 0

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if not self._left:
            head, _, data = data.partition(b"\r\n\r\n")
            self._left = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0] or 0)
            self._sizes.append(self._left)
        self._left -= len(data)
        if self._left <= 0:
            self._transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")


@pytest.fixture
def frozen() -> None:
    """As in a gateway's process: what was there before is no work of the collector's."""
    gc.collect()
    gc.freeze()


@pytest.mark.usefixtures("frozen")
@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m","prompt":[1' + b",1" * (LARGE_BYTES // 2) + b"]}",
        b'{"model":"m","stream":true,"messages":[{}' + b",{}" * (LARGE_BYTES // 3) + b"]}",
        b'{"model":"m","prompt":"' + "é".encode() * (LARGE_BYTES // 2) + b'"}',
    ],
    ids=["ids", "messages", "text"],
)
def test_no_body_keeps_the_loop(body: bytes) -> None:
    longest_s = uvloop.run(_longest_turn_with(body))
    assert longest_s < LONGEST_TURN_S


async def _longest_turn_with(body: bytes) -> float:
    """Of a gateway that gets it. On the loop that gateways have: asyncio's own copies what it cannot send at once."""
    sizes: list[int] = []
    server = await asyncio.get_running_loop().create_server(lambda: _Sink(sizes), "127.0.0.1", 0)
    engine = Address("127.0.0.1", server.sockets[0].getsockname()[1])
    nobody = (Address("127.0.0.1", 1),)
    settings = {"scheduling_policy": "load-balance", "scheduler_endpoints": nobody, "backend_endpoints": (engine,)}
    async with server, cluster(num_engines=0, **settings) as it:
        await it.gateway.services.tokens.read(b" " * (2 << 20) + b"{}")  # the processes are there
        turns = _Turns()
        measuring = asyncio.create_task(turns.measure())
        answer = await asyncio.to_thread(_ask, it.gateway.port, body)
        measuring.cancel()
        assert answer.startswith(b"HTTP/1.1 200")
        assert max(sizes) >= len(body)
    return turns.longest_s


@pytest.mark.usefixtures("frozen")
def test_no_lost_stream_keeps_the_loop() -> None:
    """Of a large request all fields are looked at before its stream goes on at another engine: not here."""
    document = {"model": "m", "prompt": [1] * (LARGE_BYTES // 3), "max_tokens": 7, "top_k": 5, "logit_bias": {"3": -1}}
    body = Body(json.dumps(document).encode(), Head())
    found, longest_s = uvloop.run(_longest_turn_of_outline(body))
    assert longest_s < LONGEST_TURN_S
    assert found == outline(document)
    assert json.loads(found.fields) == {"model": "m", "top_k": 5, "logit_bias": {"3": -1}}
    assert json.loads(found.limits) == {"max_tokens": 7}


async def _longest_turn_of_outline(body: Body) -> tuple[Outline, float]:
    async with _counter({}) as counter:
        await counter.read(b" " * (2 << 20) + b"{}")  # the processes are there
        turns = _Turns()
        measuring = asyncio.create_task(turns.measure())
        await asyncio.sleep(0)  # it has begun
        found = await counter.outline(body)
        await asyncio.sleep(0)  # and seen all of it
        measuring.cancel()
        return found, turns.longest_s


@pytest.mark.asyncio
async def test_unreadable_body_is_not_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "_READ_BYTES_PER_S", 1 << 40)
    large = Body(b'{"a":[' + b"[]," * (8 << 20) + b"[]]}", Head())
    async with _counter({}) as counter:
        for filler in ("", "x" * 80_000):
            with pytest.raises(CannotContinue, match="out of range"):
                await counter.outline(Body(b'{"a":1e999,"b":"%b"}' % filler.encode(), Head()))
        monkeypatch.setattr(counter, "_cpu_s", 0.01)
        with pytest.raises(CannotContinue, match="takes too long"):
            await counter.outline(large)
    async with _counter({}) as counter:
        monkeypatch.setattr(counter._readers, "start", _no_process)
        with pytest.raises(CannotContinue, match="too many"):
            await counter.outline(large)


async def _no_process() -> None:
    raise OSError
