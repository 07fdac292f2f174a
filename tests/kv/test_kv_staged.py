# SPDX-License-Identifier: Apache-2.0
"""Over a network that reads staging areas: the right bytes or an error, whatever becomes of the buffers that everybody
can write to."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from tests.kv.fakes import FakeWorker, Memory, packed, pull_of, source_process, until
from tests.kv.staged import BIG, CAPABILITY, CHUNK, Over, OverMooncake, OverNixl, Reader, Source
from tests.support.authority import Authority, credential_files, token_file
from vllm_llumnix.errors import TransferFailed, TransportUnavailable
from vllm_llumnix.kv.memory.layout import Cut, Cuts
from vllm_llumnix.kv.mover.messages import DEPTH, MoverInfo, SealKind, StageRequest, decode_stage_answer
from vllm_llumnix.kv.mover.mover_client import MoverClient
from vllm_llumnix.kv.networks.seal import Gmac, Multilinear, Sealer, new_key, sealer
from vllm_llumnix.kv.serving import block_server, block_stage
from vllm_llumnix.kv.serving.grants import CAPABILITY_BYTES
from vllm_llumnix.kv.settings import MooncakeSettings, NixlSettings, WorkerSettings
from vllm_llumnix.kv.transport import staged
from vllm_llumnix.kv.transport.blocks_tcp import receive_frame, send_frame
from vllm_llumnix.kv.worker import start_mover, stop_mover


@pytest.fixture(scope="module", params=[OverMooncake, OverNixl], ids=["mooncake", "nixl"])
def over(request: pytest.FixtureRequest) -> Iterator[Over]:
    over: Over = request.param()
    yield over
    over.close()


def wanted(over: Over, *, required: bool = True) -> MooncakeSettings | NixlSettings:
    """What a worker is told."""
    if over.name == "nixl":
        return NixlSettings(devices="lo", required=required, max_in=1, max_out=1)
    return MooncakeSettings(host="127.0.0.1", protocol="tcp", required=required, max_in=1, max_out=1)


@pytest.fixture
def identities(tmp_path: Path) -> list[WorkerSettings]:
    """Two workers with certificates of one authority."""
    authority, token = Authority(tmp_path), token_file(tmp_path)
    files = [credential_files(authority, name, token) for name in ("a", "b")]
    return [WorkerSettings(instance="x", tls=(f.tls_cert, f.tls_key, f.tls_ca)) for f in files]


@pytest.mark.parametrize("secured", [False, True], ids=["clear", "tls"])
@pytest.mark.parametrize("slot_blocks", [1, 3, 100])
@pytest.mark.parametrize(("theirs", "ours"), [("LBHNC", "LBHNC"), ("BLHNC", "BLHNC"), ("LBHNC", "BLHNC")])
def test_blocks_arrive_and_nothing_else_changes(
    theirs: str,
    ours: str,
    slot_blocks: int,
    secured: bool,
    over: Over,
    identities: list[WorkerSettings],
    closing: list[Any],
) -> None:
    shapes = [(3, 4096), (1, 512)]
    there, here, before = Memory(theirs, shapes, seed=1), Memory(ours, shapes, seed=2), Memory(ours, shapes, seed=2)
    a, b = identities if secured else (None, None)
    area = {"slot_bytes": slot_blocks * there.blocks.bytes_per_block, "area_bytes": 1}
    source, reader = Source(over, there, a, **area), Reader(over, here, b, **area)
    closing += [source, reader.transport]
    from_blocks, to_blocks = [5, 6, 30, 0, 7, 8, 9, 10, 11, 12], [9, 10, 1, 31, 20, 21, 22, 23, 24, 25]
    reader.transport.probe(source.peer)
    source.grants.allow(CAPABILITY, from_blocks)
    for _ in range(2):
        sizes = list(reader.pull(source.peer, from_blocks, to_blocks))
        assert sum(sizes) == 10 * here.blocks.bytes_per_block
        assert max(sizes) <= reader.area.slot_bytes
        assert reader.all_free
        assert len(reader.transport.connections.idle) == 1
    moved = dict(zip(to_blocks, from_blocks, strict=True))
    for block in range(here.num_blocks):
        assert here.block(block) == (there.block(moved[block]) if block in moved else before.block(block))


@pytest.mark.usefixtures("gpu_in_main_memory")
@pytest.mark.parametrize("gpu", [False, True], ids=["main memory", "gpu"])
def test_the_second_of_two_heads(gpu: bool, over: Over, closing: list[Any]) -> None:
    """Every token has a row of both at the source, which is one worker; here are two."""
    there = Memory("LBNHC", [(3, 4096)], seed=1, heads=2, tokens=16)
    here = Memory("LBNHC", [(3, 2048)], seed=2, heads=1, tokens=16)
    source, reader = Source(over, there, gpu=gpu), Reader(over, here, gpu=gpu)
    closing += [source, reader.transport]
    source.grants.allow(CAPABILITY, [5, 6])
    reader.transport.probe(source.peer, Cuts(Cut(1, 2), Cut(0, 1)))
    with pytest.raises(TransportUnavailable, match="pages differ"):
        reader.transport.probe(source.peer)
    pull = pull_of(source.peer, [5, 6], [9, 1], CAPABILITY, cuts=Cuts(Cut(1, 2), Cut(0, 1)))
    assert sum(reader.transport.pull(pull, CHUNK)) == 2 * here.blocks.bytes_per_block
    for from_block, to_block in ((5, 9), (6, 1)):
        for theirs, ours in zip(there.block(from_block), here.block(to_block), strict=True):
            rows = np.frombuffer(theirs, np.uint8).reshape(16, 2, 128)
            assert np.array_equal(rows[:, 1], np.frombuffer(ours, np.uint8).reshape(16, 128))
    odd = pull_of(source.peer, [5], [9], CAPABILITY, cuts=Cuts(Cut(1, 3), Cut(0, 1)))
    with pytest.raises(ValueError, match="part 1 of 3"):
        list(reader.transport.pull(odd, CHUNK))


def test_a_turn_is_a_chunk(pair: tuple[Source, Reader]) -> None:
    """So that a low limit does not let whole buffers pass; a block at least, and a buffer at most."""
    source, reader = pair
    source.grants.allow(CAPABILITY, range(64))
    block = source.memory.blocks.bytes_per_block
    for chunk_bytes, largest in ((1, block), (3 * block + 1, 3 * block), (1 << 30, reader.area.slot_bytes)):
        sizes = list(reader.pull(source.peer, list(range(64)), list(range(64)), CAPABILITY, chunk_bytes))
        assert max(sizes) == largest
        assert sum(sizes) == 64 * block
    assert np.array_equal(source.memory.bytes, reader.memory.bytes)


def test_from_another_process_again_and_again(over: Over, closing: list[Any]) -> None:
    shape: dict[str, Any] = {"shapes": BIG, "num_blocks": 200}
    reader = Reader(over, Memory(seed=2, **shape))
    closing.append(reader.transport)
    random = np.random.default_rng(3)
    with source_process(CAPABILITY, over.name, seed=1, **shape) as source:
        for _ in range(5):
            ids = random.permutation(200)
            source_ids, destination_ids = ids[:150].tolist(), ids[::-1][:150].tolist()
            assert sum(reader.pull(source.peer, source_ids, destination_ids)) == 150 * BIG[0][0] * BIG[0][1]
            for source_id, destination_id in zip(source_ids, destination_ids, strict=True):
                assert reader.memory.block(destination_id) == source.memory.block(source_id)


def test_staged_blocks_are_wiped(pair: tuple[Source, Reader]) -> None:
    source, reader = pair
    source.grants.allow(CAPABILITY, range(20))
    assert sum(reader.pull(source.peer, list(range(20)), list(range(20))))
    until(lambda: source.all_free)
    assert not any(ctypes.string_at(source.area.address, source.area.num_bytes))


@pytest.mark.usefixtures("gpu_in_main_memory")
@pytest.mark.parametrize("gpu", [False, True], ids=["main memory", "gpu"])
@pytest.mark.parametrize("where", ["source", "destination"])
def test_a_changed_byte(where: str, gpu: bool, over: Over, closing: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody writes to a buffer while it is on its way."""
    source = Source(over, Memory(shapes=BIG, seed=1, num_blocks=64), gpu=gpu)
    reader = Reader(over, Memory(shapes=BIG, seed=2, num_blocks=64), gpu=gpu)
    closing += [source, reader.transport]
    source.grants.allow(CAPABILITY, range(64))
    before = Memory(shapes=BIG, seed=2, num_blocks=64)
    kind = type(sealer(source.area.seal, new_key()))
    stock = kind.seal if where == "source" else kind.is_intact

    area = source.area if where == "source" else reader.area

    def meddle(it: Sealer, number: int, data: Any, *rest: Any) -> Any:
        if number == 2:
            for slot in range(area.num_bytes // area.slot_bytes):
                ctypes.c_ubyte.from_address(area.address + slot * area.slot_bytes + 100).value ^= 1
        return stock(it, number, data, *rest)

    monkeypatch.setattr(kind, stock.__name__, meddle)
    with pytest.raises(TransferFailed, match="not what was to be read"):
        list(reader.pull(source.peer, list(range(64)), list(range(64))))
    for block in range(64):
        assert reader.memory.block(block) in (source.memory.block(block), before.block(block))
    assert not np.array_equal(source.memory.bytes, reader.memory.bytes)
    until(lambda: source.all_free and reader.all_free)
    # Buffers that nobody had filled: nobody wipes them.
    ctypes.memset(area.address, 0, area.num_bytes)


@pytest.mark.parametrize("exposed", [True, False])
def test_a_write_between_the_check_and_the_use(
    exposed: bool, over: Over, closing: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where others can write to a buffer at any time, what is used is what was checked."""
    source = Source(over, Memory(shapes=BIG, seed=1, num_blocks=64))
    reader = Reader(over, Memory(shapes=BIG, seed=2, num_blocks=64), exposed=exposed)
    closing += [source, reader.transport]
    source.grants.allow(CAPABILITY, range(64))
    stock, last = Gmac.is_intact, source.memory.bytes.nbytes // reader.area.slot_bytes - 1

    def meddle(it: Sealer, number: int, data: Any, seal: bytes) -> bool:
        intact = stock(it, number, data, seal)
        # Then no other is on its way.
        for slot in range(reader.area.num_bytes // reader.area.slot_bytes if number == last else 0):
            ctypes.c_ubyte.from_address(reader.area.address + slot * reader.area.slot_bytes + 100).value ^= 1
        return intact

    monkeypatch.setattr(Gmac, "is_intact", meddle)
    assert sum(reader.pull(source.peer, list(range(64)), list(range(64)))) == source.memory.bytes.nbytes
    assert np.array_equal(source.memory.bytes, reader.memory.bytes) is exposed


def test_nothing_is_staged_after_a_grant_was_revoked(pair: tuple[Source, Reader], over: Over) -> None:
    """What lay there for a peer that reads no more, or not yet, is gone when `revoke` returns."""
    source, _ = pair
    source.grants.allow(CAPABILITY, range(64))
    assert source.peer.tcp is not None
    host, _, port = source.peer.tcp.rpartition(":")
    with socket.create_connection((host, int(port))) as connection:
        for number in range(DEPTH):
            request = StageRequest(source.peer.nonce, CAPABILITY, [1, 2], number, new_key(), number, network=over.name)
            send_frame(connection, request)
            assert receive_frame(connection, decode_stage_answer, 5.0).error is None
        # One more, which waits for blocks that nobody grants.
        send_frame(connection, msgspec.structs.replace(request, blocks=[10**6]))
        staged = ctypes.string_at(source.area.address, source.area.num_bytes)
        began = time.monotonic()
        source.grants.revoke(CAPABILITY)
        assert time.monotonic() - began < 0.5
        assert any(staged)
        assert not any(ctypes.string_at(source.area.address, source.area.num_bytes))
        until(lambda: source.all_free, 1)


def test_buffers_are_not_kept_for_who_is_refused(
    pair: tuple[Source, Reader], over: Over, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_server, "GRANT_SECONDS", 0.01)
    source, _ = pair
    request = StageRequest(source.peer.nonce, b"x" * CAPABILITY_BYTES, [1], 0, new_key(), 0, network=over.name)
    assert source.peer.tcp is not None
    host, _, port = source.peer.tcp.rpartition(":")
    with contextlib.ExitStack() as stack:
        for _ in range(8):
            connection = stack.enter_context(socket.create_connection((host, int(port))))
            send_frame(connection, request)
            assert "not granted" in str(receive_frame(connection, decode_stage_answer, 5.0).error)
        assert source.all_free


def test_only_what_is_granted(pair: tuple[Source, Reader], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_server, "GRANT_SECONDS", 0.05)
    source, reader = pair
    before = reader.memory.bytes.copy()
    source.grants.allow(CAPABILITY, [1, 2])
    for blocks, capability in (([1, 3], CAPABILITY), ([1], b"x" * CAPABILITY_BYTES), ([1], b"")):
        with pytest.raises(TransferFailed, match="not granted"):
            list(reader.pull(source.peer, blocks, list(range(len(blocks))), capability))
    source.grants.revoke(CAPABILITY)
    with pytest.raises(TransferFailed, match="not granted"):
        list(reader.pull(source.peer, [1], [1]))
    assert np.array_equal(before, reader.memory.bytes)
    assert reader.all_free


def test_a_pull_that_is_given_up(pair: tuple[Source, Reader]) -> None:
    source, reader = pair
    source.grants.allow(CAPABILITY, range(64))
    pull = reader.pull(source.peer, list(range(64)), list(range(64)))
    while not next(pull):
        pass
    pull.close()
    copy = reader.memory.bytes.copy()
    assert not reader.transport.connections.idle
    until(lambda: reader.all_free)
    assert np.array_equal(copy, reader.memory.bytes)
    assert sum(reader.pull(source.peer, list(range(64)), list(range(64)))) == len(copy)
    assert np.array_equal(source.memory.bytes, reader.memory.bytes)


def test_a_source_that_is_stopped(over: Over, closing: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers that may still be written to are not used again until that is over."""
    shape: dict[str, Any] = {"shapes": BIG, "num_blocks": 200}
    reader = Reader(over, Memory(seed=2, **shape), area_bytes=1)
    closing.append(reader.transport)
    every = list(range(200))
    with source_process(CAPABILITY, over.name, seed=1, **shape) as source:
        assert sum(reader.pull(source.peer, [0], [0]))
        pull = reader.pull(source.peer, every, every)
        while not next(pull):
            pass
        source.stop()
        with monkeypatch.context() as hurried:
            hurried.setattr(staged, "STALL_SECONDS", 0.3)
            with pytest.raises(TransferFailed, match="nothing has come"):
                list(pull)
        held = reader.area.num_bytes // reader.area.slot_bytes - reader.area.num_free
        source.go_on()
        until(lambda: reader.all_free, 20)
        assert held <= DEPTH
        assert sum(reader.pull(source.peer, every, every)) == len(reader.memory.bytes)
        assert np.array_equal(reader.memory.bytes, source.memory.bytes)


def test_a_source_killed_in_the_middle(over: Over, closing: list[Any]) -> None:
    shape: dict[str, Any] = {"shapes": BIG, "num_blocks": 200}
    reader = Reader(over, Memory(seed=2, **shape))
    closing.append(reader.transport)
    every = list(range(200))
    with source_process(CAPABILITY, over.name, seed=1, **shape) as source:
        pull = reader.pull(source.peer, every, every)
        while not next(pull):
            pass
        source.kill()
        with pytest.raises(TransferFailed):
            list(pull)
        with pytest.raises(TransferFailed, match="refused"):
            reader.transport.probe(source.peer)
    until(lambda: reader.all_free, 20)


def test_more_pulls_than_there_are_buffers(over: Over, closing: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_stage, "PATIENCE_SECONDS", 0.1)
    source = Source(over, Memory(shapes=BIG, seed=1, num_blocks=64), area_bytes=1)
    readers = [Reader(over, Memory(shapes=BIG, seed=2, num_blocks=64)) for _ in range(3)]
    closing += [source, *(reader.transport for reader in readers)]
    source.grants.allow(CAPABILITY, range(64))
    pulls = [reader.pull(source.peer, list(range(64)), list(range(64))) for reader in readers]
    for pull in pulls[:2]:
        while not next(pull):
            pass
    with pytest.raises(TransferFailed, match="staging buffers are needed"):
        list(pulls[2])
    for pull in pulls[:2]:
        list(pull)
    for reader in readers[:2]:
        assert np.array_equal(reader.memory.bytes, source.memory.bytes)


def test_pulls_wait_for_each_others_buffers(over: Over, closing: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """As the mover has them: in turn, on one thread."""
    num_pulls = 8
    source = Source(over, Memory(shapes=BIG, seed=1, num_blocks=64), num_pulls=num_pulls)
    reader = Reader(over, Memory(shapes=BIG, seed=2, num_blocks=64), area_bytes=1)
    closing += [source, reader.transport]
    source.grants.allow(CAPABILITY, range(64))
    parts = [list(range(first, first + 8)) for first in range(0, 64, 8)]
    pulls = [reader.pull(source.peer, part, part, chunk_bytes=1) for part in parts]
    deadline = time.monotonic() + 20
    while pulls:
        assert time.monotonic() < deadline
        pulls = [pull for pull in pulls if next(pull, None) is not None]
    assert np.array_equal(reader.memory.bytes, source.memory.bytes)
    assert reader.all_free


def test_probe_says_why_not(pair: tuple[Source, Reader], over: Over) -> None:
    source, reader = pair
    for change, complaint in [
        ({"unavailable": "on a GPU"}, "on a GPU"),
        ({"tcp": None}, "does not serve"),
        ({over.name: None}, f"does not run {over.title}"),
        ({"layout": Memory(layout="LBNHC").blocks}, "layouts differ"),
    ]:
        with pytest.raises(TransportUnavailable, match=complaint):
            reader.transport.probe(msgspec.structs.replace(source.peer, **change))
    with pytest.raises(TransferFailed, match="another process"):
        reader.transport.probe(msgspec.structs.replace(source.peer, nonce=bytes(32)))
    with pytest.raises(ValueError, match="destination blocks"):
        list(reader.pull(source.peer, [0, 1], [1]))


@pytest.mark.asyncio
async def test_a_worker_starts_stops_and_starts_again(over: Over) -> None:
    """As for sleep; and nothing that it starts stays on the core that vLLM has bound its main thread to."""
    shape: dict[str, Any] = {"shapes": BIG, "num_blocks": 64}
    memory, cpus = Memory(seed=2, **shape), os.sched_getaffinity(0)
    worker = FakeWorker(memory)
    settings = packed(transports=(over.name, "tcp"), **{over.name: wanted(over)})
    before = set(os.listdir("/proc/self/task"))
    with source_process(CAPABILITY, over.name, seed=1, **shape) as source:
        for times in (1, 2):
            os.sched_setaffinity(0, {min(cpus)})
            try:
                info = msgspec.msgpack.decode(start_mover(worker, settings), type=MoverInfo)
            finally:
                os.sched_setaffinity(0, cpus)
            if times == 1:
                started = set(os.listdir("/proc/self/task")) - before
                assert len(started) > 3
                assert {frozenset(os.sched_getaffinity(int(thread))) for thread in started} == {frozenset(cpus)}
            assert getattr(info.memory, over.name) is not None
            client = MoverClient(info)
            assert await client.probe(source.peer, over.name) is None
            report = await client.pull(
                pull_of(source.peer, [3], [4 * times], transport=over.name, capability=CAPABILITY)
            )
            assert report.error is None
            assert memory.block(4 * times) == source.memory.block(3)
            client.close()
            stop_mover(worker)


@pytest.mark.asyncio
async def test_without_the_network(over: Over, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"vllm_llumnix.kv.networks.{over.name}.why_not_installed", lambda: "it is not here")
    worker = FakeWorker(Memory())
    for required in (True, False):
        settings = packed(transports=(over.name, "tcp"), **{over.name: wanted(over, required=required)})
        if required:
            with pytest.raises(TransportUnavailable, match="it is not here"):
                start_mover(worker, settings)
            continue
        info = msgspec.msgpack.decode(start_mover(worker, settings), type=MoverInfo)
        assert (getattr(info.memory, over.name), bool(info.memory.tcp)) == (None, True)
        client = MoverClient(info)
        assert await client.probe(info.memory, over.name) == f"no transport '{over.name}': it is not here"
        client.close()
        stop_mover(worker)


@pytest.mark.parametrize("num_bytes", [100, 65536, 200_001])
@pytest.mark.parametrize("kind", get_args(SealKind))
def test_seals(kind: SealKind, num_bytes: int) -> None:
    data = torch.arange(num_bytes).to(torch.uint8)
    key = new_key()
    one, twin = sealer(kind, key), sealer(kind, key)
    seal = one.seal(7, data)
    assert twin.is_intact(7, data, seal)
    assert not twin.is_intact(8, data, seal)
    assert not sealer(kind, new_key()).is_intact(7, data, seal)
    assert not twin.is_intact(7, data, b"")
    for place in (0, 50, num_bytes - 1):
        data[place] ^= 1
        assert not twin.is_intact(7, data, seal)
        data[place] ^= 1
    assert twin.is_intact(7, data, seal)


def test_the_seal_of_a_gpu_is_the_formula() -> None:
    """Of Lemire and Kaser, in whole numbers."""
    random = np.random.default_rng(5)
    data = random.integers(0, 256, 150_000, dtype=np.uint8)
    key, number = bytes(range(16)), 3

    def keys(purpose: int, count: int) -> list[int]:
        start = (purpose << 64).to_bytes(16, "big")
        stream = Cipher(algorithms.AES(key), modes.CTR(start)).encryptor().update(bytes(16 * count))
        return [int.from_bytes(stream[8 * i : 8 * i + 8], "little") for i in range(2 * count)]

    def hashed(words: list[int], keys: list[int]) -> int:
        total = keys[0] + sum(word * key for word, key in zip(words, keys[1:], strict=True))
        return signed(total % 2**64 >> 32)

    def signed(word: int) -> int:
        return word - 2**32 if word >= 2**31 else word

    padded = data.tobytes().ljust(3 * 65536, b"\0")
    words = [int.from_bytes(padded[i : i + 4], "little", signed=True) for i in range(0, len(padded), 4)]
    pieces = [words[i : i + 16384] for i in range(0, len(words), 16384)]
    of_pieces, of_words, fresh = keys(0, 16385), keys(1, 6), keys(2 + number, 1)
    hashes = [hashed(piece, of_pieces[tag * 16385 :][:16385]) for tag in (0, 1) for piece in pieces]
    tags = [hashed(hashes, [fresh[tag], *of_words[tag * 6 :][:6]]) for tag in (0, 1)]
    expected = b"".join(tag.to_bytes(4, "little", signed=True) for tag in tags)
    assert Multilinear(key).seal(number, torch.from_numpy(data)) == expected
