# SPDX-License-Identifier: Apache-2.0
"""Tokens of a prompt that instances have: what a provider says for a request, and what it hears."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress

import numpy as np
import pytest

from llumlet.contract.block_hashes import adapter_mask, chain, root_of
from llumlet.contract.cache_feed import packed
from llumlet.contract.errors import LlumletUnreachable
from llumlet.contract.types import CacheChanges, WatchCacheRequest
from llumlet.process.credentials import NONE
from llumsched.cluster.instance import Instance
from llumsched.prefix import watches as watching
from llumsched.prefix.hits import PrefixHits, names_in
from llumsched.prefix.index import PrefixIndex
from llumsched.prefix.watches import CacheWatches
from llumsched.request import Request
from tests.llumsched.cases import instance, table
from tests.llumsched.gateway.support import until

SIZE = 16


def blocks_of(num_tokens: int, *, first: int = 0, size: int = SIZE, salt: str = "") -> bytes:
    return b"".join(chain(range(first, first + num_tokens), size, root_of(size, salt)))


def asked(num_tokens: int, model: str = "m", *, size: int = SIZE) -> Request:
    return Request("r", model, num_tokens, prompt_blocks=blocks_of(num_tokens, size=size), prompt_block_size=size)


class Cluster:
    def __init__(self, *instances: Instance) -> None:
        self.hits = PrefixHits(PrefixIndex(10_000))
        self.table = table(*instances)
        for one in instances:
            self.hits.appeared(one)

    def of(self, request: Request) -> dict[str, float]:
        (values,) = self.hits.of_request(request, self.table)
        return {one.id: float(value) for one, value in zip(self.table.instances, values, strict=True)}


def test_hits_are_tokens_of_whole_blocks_from_the_first_on() -> None:
    cluster = Cluster(instance("a"), instance("b"), instance("c"))
    cluster.hits.holds("a", names_in(blocks_of(100)), SIZE)
    cluster.hits.holds("b", names_in(blocks_of(100)[8:]), SIZE)
    assert cluster.of(asked(70)) == {"a": 64, "b": 0, "c": 0}
    assert cluster.of(asked(200)) == {"a": 96, "b": 0, "c": 0}
    assert cluster.of(asked(64)) == {"a": 48, "b": 0, "c": 0}, "one token is computed in any case"
    assert cluster.of(Request("r", "m", 100)) == {"a": 0, "b": 0, "c": 0}, "nothing is known of the prompt"


def test_other_sizes_of_blocks_never_meet() -> None:
    cluster = Cluster(instance("a"), instance("b"))
    cluster.hits.holds("a", names_in(blocks_of(128)), SIZE)
    cluster.hits.holds("b", names_in(blocks_of(128, size=32)), 32)
    assert cluster.of(asked(200)) == {"a": 128, "b": 0}
    assert cluster.of(asked(200, size=32)) == {"a": 0, "b": 128}


def test_an_adapters_blocks_are_its_own() -> None:
    with_adapter = instance("a", served_models=["m", "lora"], adapters=["lora"])
    cluster = Cluster(with_adapter, instance("b"))
    names = names_in(blocks_of(64))
    cluster.hits.holds("a", names ^ np.uint64(adapter_mask("lora")), SIZE)
    cluster.hits.holds("b", names, SIZE)
    assert cluster.of(asked(100, "lora")) == {"a": 64, "b": 0}
    assert cluster.of(asked(100, "m")) == {"a": 0, "b": 64}
    assert cluster.of(asked(100, "an alias of the base")) == {"a": 0, "b": 64}
    cluster.hits.changed(instance("a", served_models=["m"]))
    assert cluster.of(asked(100, "lora")) == {"a": 0, "b": 64}


def test_left_or_restarted_instance_holds_nothing() -> None:
    one, other = instance("a"), instance("b")
    cluster = Cluster(one, other)
    for each in "ab":
        cluster.hits.holds(each, names_in(blocks_of(64)), SIZE)
    assert cluster.of(asked(100)) == {"a": 64, "b": 64}
    cluster.hits.left(one)
    cluster.table.left(one)
    assert cluster.of(asked(100)) == {"b": 64}
    cluster.hits.appeared(one)
    cluster.table.appeared(one)
    assert cluster.of(asked(100)) == {"a": 0, "b": 64}
    cluster.hits.lacks("b", names_in(blocks_of(64))[2:3])
    assert cluster.of(asked(100)) == {"a": 0, "b": 32}


class Streams:
    """The llumlet of one instance: a test says what each stream tells."""

    def __init__(self) -> None:
        self.requests: list[WatchCacheRequest] = []
        self.told: asyncio.Queue[CacheChanges | Exception | None] = asyncio.Queue()
        self.closed = False

    async def watch_cache(
        self, request: WatchCacheRequest, *, deadline_s: float | None = None
    ) -> AsyncGenerator[CacheChanges, None]:
        assert deadline_s is not None
        self.requests.append(request)
        while (changes := await self.told.get()) is not None:
            if isinstance(changes, Exception):
                raise changes
            yield changes

    async def close(self) -> None:
        self.closed = True

    def tell(self, number: int, *, reset: bool = False, stored: bytes = b"", removed: bytes = b"") -> None:
        self.told.put_nowait(CacheChanges(number=number, reset=reset, stored=stored, removed=removed))


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "_FIRST_RETRY_S", 0.01)


@pytest.mark.asyncio
@pytest.mark.parametrize("fault", ["gap", "no reset", "ended", "broken", "nonsense", "silent"])
async def test_a_stream_that_lacks_something_is_void_until_everything_was_told_again(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "SILENCE_S", 0.05 if fault == "silent" else 1000.0)
    one = instance("a", cache_block_size=SIZE)
    cluster, streams = Cluster(one), Streams()
    watches = CacheWatches(cluster.hits, NONE, lambda _: streams)
    watches.appeared(one)
    if fault == "no reset":
        streams.tell(1, stored=blocks_of(64))
    else:
        streams.tell(1, reset=True, stored=blocks_of(64))
        streams.tell(2, removed=blocks_of(64)[-8:])
        await until(lambda: cluster.of(asked(100)) == {"a": 48})
        assert watches.in_sync == {"a"}
        match fault:
            case "gap":
                streams.tell(4, stored=blocks_of(96))
            case "ended":
                streams.told.put_nowait(None)
            case "broken":
                streams.told.put_nowait(LlumletUnreachable("a:1", "gone"))
            case "nonsense":
                streams.tell(3, stored=b"seven")
    await until(lambda: len(streams.requests) == 2)
    monkeypatch.setattr(watching, "SILENCE_S", 1000.0)
    assert cluster.of(asked(100)) == {"a": 0}
    assert not watches.in_sync
    streams.tell(1, reset=True, stored=blocks_of(32))
    await until(lambda: cluster.of(asked(100)) == {"a": 32})
    assert cluster.hits.num_resyncs == 1
    streams.tell(2, reset=True, stored=blocks_of(80))  # it was too slow
    await until(lambda: cluster.of(asked(100)) == {"a": 80})
    cluster.hits.left(one)
    watches.left(one)
    await until(lambda: streams.closed)
    assert cluster.of(asked(100)) == {"a": 0}
    await watches.close()


@pytest.mark.asyncio
async def test_every_life_is_asked_for_by_name_and_who_tells_nothing_is_not_asked() -> None:
    streams = Streams()
    cluster = Cluster()
    watches = CacheWatches(cluster.hits, NONE, lambda _: streams)
    watches.appeared(instance("silent"))
    for life in ("first", "second"):
        one = instance("a", cache_block_size=SIZE, incarnation=life)
        watches.appeared(one)
        await until(lambda: len(streams.requests) == (1 if life == "first" else 2))  # noqa: B023
        watches.left(one)
    assert [(one.engine_id, one.incarnation) for one in streams.requests] == [("a", "first"), ("a", "second")]
    with suppress(asyncio.CancelledError):
        await watches.close()


def test_packed_names_are_read_back() -> None:
    assert names_in(packed([1, 1 << 63, 5])).tolist() == [1, 1 << 63, 5]
    with pytest.raises(ValueError, match="multiple"):
        names_in(b"seven")


def test_sent_blocks_expire_by_later_ones() -> None:
    cluster = Cluster(instance("a"), instance("b"))
    cluster.hits = PrefixHits(PrefixIndex(10_000), sent_blocks=20)
    of_prompt = [
        Request(prompt_num_tokens=161, prompt_blocks=blocks_of(160, first=1000 * number), prompt_block_size=SIZE)
        for number in range(5)
    ]
    for request in of_prompt[:2]:
        cluster.hits.sent(request, "a")
    assert [cluster.of(request) for request in of_prompt[:3]] == [{"a": 160, "b": 0}] * 2 + [{"a": 0, "b": 0}]
    cluster.hits.sent(of_prompt[0], "a")  # used again: it counts as new
    cluster.hits.sent(of_prompt[2], "a")
    assert [cluster.of(request)["a"] for request in of_prompt[:3]] == [160, 0, 160]
    cluster.hits.sent(of_prompt[3], "b")
    assert cluster.of(of_prompt[3]) == {"a": 0, "b": 160}
    longer = Request(prompt_num_tokens=321, prompt_blocks=blocks_of(320), prompt_block_size=SIZE)
    assert cluster.of(longer)["a"] == 160
    cluster.hits.sent(Request(prompt_num_tokens=100), "a")
    cluster.hits.sent(of_prompt[4], "gone")


def test_where_engines_tell_nothing_is_guessed() -> None:
    cluster = Cluster(instance("a", cache_block_size=32))
    cluster.hits.sent(asked(100), "a")
    assert cluster.of(asked(100)) == {"a": 0}
    assert cluster.hits.block_size_of(cluster.table.instances[0]) == 32
