# SPDX-License-Identifier: Apache-2.0
"""The table of adapters: who is found under a name, and who only has the same name."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.lora.request import LoRARequest

from llumlet.protocol.errors import Reason, Refused
from tests.support.adapters import write_adapter
from tests.support.model import PRESETS
from vllm_llumnix import adapters
from vllm_llumnix.adapters import Adapters

pytestmark = pytest.mark.asyncio

SPEC = PRESETS["tiny"]
CONFIG = SimpleNamespace(max_lora_rank=8, lora_dtype="torch.bfloat16", max_loras=1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "one", SPEC, seed=0)


def named(path: Path, number: int = 1, name: str = "story", **fields: Any) -> LoRARequest:
    return LoRARequest(name, number, str(path), **fields)


def knowing(*requests: LoRARequest, config: Any = CONFIG) -> Adapters:
    table = Adapters(config)
    for request in requests:
        table.learn(request)
    return table


async def digest(path: Path, **config: Any) -> str:
    request = named(path)
    return await knowing(request, config=SimpleNamespace(**{**vars(CONFIG), **config})).digest_of(request)


async def refusal(answer: Any) -> str:
    with pytest.raises(Refused) as refused:
        await answer
    assert refused.value.reason == Reason.LORA_NOT_AVAILABLE
    return refused.value.detail


async def test_adapters_are_reported_once(path: Path) -> None:
    table, told = knowing(), list[list[str]]()
    table.on_change = lambda: told.append(table.names)
    for request in (named(path), named(path), named(path, 2, "other")):
        table.learn(request)
    table.learn(named(path), reloaded=True)
    table.forget(1)
    table.forget(1)
    assert told == [["story"], ["story", "other"], ["other"]]


async def test_a_copy_elsewhere_is_the_same(path: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(path, tmp_path / "elsewhere"))
    there = knowing(named(copy, 7))
    found = await there.resolve("story", await digest(path))
    assert (found.lora_name, found.lora_int_id, found.lora_path) == ("story", 7, str(copy))


def flip_last_byte(path: Path) -> None:
    weights = path / "adapter_model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)


def change_scale(path: Path) -> None:
    config = path / "adapter_config.json"
    config.write_text(config.read_text().replace('"lora_alpha": 8', '"lora_alpha": 9'))


def rename_weights(path: Path) -> None:
    (path / "adapter_model.safetensors").rename(path / "adapter_model.bin")


@pytest.mark.parametrize("change", [flip_last_byte, change_scale, rename_weights])
async def test_other_contents(path: Path, tmp_path: Path, change: Callable[[Path], None]) -> None:
    other = Path(shutil.copytree(path, tmp_path / "other"))
    change(other)
    assert "has other contents here" in await refusal(knowing(named(other)).resolve("story", await digest(path)))


@pytest.mark.parametrize("setting", [{"max_lora_rank": 16}, {"lora_dtype": "torch.float16"}, {"target_modules": ["a"]}])
async def test_other_settings(path: Path, setting: dict[str, Any]) -> None:
    detail = await refusal(knowing(named(path)).resolve("story", await digest(path, **setting)))
    assert "or other LoRA settings" in detail


async def test_room_for_more_adapters_is_no_difference(path: Path) -> None:
    assert await digest(path, max_loras=4) == await digest(path)


@pytest.mark.parametrize("name", ["other", "../one", "", "x" * 10**6])
async def test_unknown_name(path: Path, name: str) -> None:
    detail = await refusal(knowing(named(path)).resolve(name, await digest(path)))
    assert detail.endswith("is not known here")
    assert len(detail) < 200


async def test_a_peer_without_digest(path: Path) -> None:
    await refusal(knowing(named(path)).resolve("story", None))


async def test_an_arriving_request_does_not_load_anew(path: Path) -> None:
    there = knowing(named(path, load_inplace=True))
    assert not (await there.resolve("story", await digest(path))).load_inplace


async def test_removed(path: Path) -> None:
    request = named(path)
    table = knowing(request, named(path, 2, "other"))
    table.forget(1)
    assert "is not known here" in await refusal(table.resolve("story", await digest(path)))
    assert "was replaced or removed" in await refusal(table.digest_of(request))
    assert await table.resolve("other", await digest(path))


async def test_loaded_anew_from_other_files(path: Path, tmp_path: Path) -> None:
    former, present = named(path), named(write_adapter(tmp_path / "two", SPEC, seed=1), load_inplace=True)
    table = knowing(former)
    before = await table.digest_of(former)
    table.learn(present, reloaded=True)
    assert await table.digest_of(present) != before
    assert "was replaced or removed" in await refusal(table.digest_of(former))


async def test_loaded_anew_from_the_same_files(path: Path) -> None:
    request = named(path)
    table = knowing(request)
    before = await table.digest_of(request)
    write_adapter(path, SPEC, seed=1)
    assert "have changed" in await refusal(table.digest_of(request))
    assert "have changed" in await refusal(table.resolve("story", before))
    table.learn(request)
    assert "have changed" in await refusal(table.digest_of(request))
    table.learn(request, reloaded=True)
    assert await table.digest_of(request) != before


async def test_files_that_are_gone(path: Path) -> None:
    table = knowing(named(path))
    known = await digest(path)
    await table.resolve("story", known)
    shutil.rmtree(path)
    assert "have changed" in await refusal(table.resolve("story", known))


async def test_files_that_cannot_be_read_are_read_again(path: Path, tmp_path: Path) -> None:
    late = named(tmp_path / "late")
    table = knowing(late)
    assert (await refusal(table.digest_of(late))).endswith("cannot be read: FileNotFoundError")
    shutil.copytree(path, late.lora_path)
    table.learn(late)
    assert await table.digest_of(late) == await digest(path)


async def test_two_adapters_of_one_id(path: Path) -> None:
    table = knowing(named(path), named(path, name="other"))
    assert "shares its id 1" in await refusal(table.resolve("story", await digest(path)))


async def test_reading_takes_long(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()
    stock = adapters.read_contents

    def slowly(*args: Any) -> Any:
        goes_on.wait()
        return stock(*args)

    monkeypatch.setattr(adapters, "READ_SECONDS", 0.05)
    monkeypatch.setattr(adapters, "read_contents", slowly)
    request = named(path)
    table = knowing(request)
    assert "is still being read" in await refusal(table.digest_of(request))
    goes_on.set()
    monkeypatch.setattr(adapters, "READ_SECONDS", 5.0)
    assert await table.digest_of(request)


async def test_files_that_change_while_they_are_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = adapters.hashlib.file_digest

    def touch(file: Any, name: str) -> Any:
        os.utime(path / "adapter_config.json", ns=(0, 0))
        return stock(file, name)

    monkeypatch.setattr(adapters.hashlib, "file_digest", touch)
    request = named(path)
    assert "cannot be read: OSError" in await refusal(knowing(request).digest_of(request))
