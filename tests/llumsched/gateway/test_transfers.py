# SPDX-License-Identifier: Apache-2.0
"""Clients do not tell engines from where to read caches, unless the operator trusts them."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from llumsched.gateway.body import _TRANSFERS, Body
from tests.llumsched.gateway.support import cluster
from tests.llumsched.gateway.test_paths import GENERATE, MESSAGES, RESPONSES, TRANSCRIPTIONS, engines

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "mock", "prompt": "one two three", "max_tokens": 3}
PULL = {"do_remote_prefill": True, "remote_host": "10.0.0.1", "remote_block_ids": [1, 2]}
FIELDS: dict[str, dict[str, Any]] = {
    "kv_transfer_params": {"kv_transfer_params": PULL},
    "ec_transfer_params": {"ec_transfer_params": {"x": 1}},
    "vllm_xargs.kv_transfer_params": {"vllm_xargs": {"n": 1, "kv_transfer_params": "x"}},
    "sampling_params.extra_args.kv_transfer_params": {"sampling_params": {"extra_args": {"kv_transfer_params": PULL}}},
}


@pytest.mark.asyncio
@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("trusts", [False, True])
async def test_request_that_moves_caches_reaches_an_engine_only_if_the_operator_trusts_clients(
    field: str, trusts: bool
) -> None:
    async with engines(1, trust_transfer_params=trusts) as (it, mock):
        for path in (COMPLETIONS, MESSAGES, RESPONSES, GENERATE):
            reply = await it.post(path, BODY | FIELDS[field])
            assert reply.status == (200 if trusts else 403), path
            if not trusts:
                assert f"`{field}`" in reply.json["error"]["message"]
        assert bool(mock.seen) == trusts


@pytest.mark.asyncio
async def test_neither_size_nor_spelling_hides_a_field() -> None:
    async with cluster(num_engines=1) as it:
        text = json.dumps(BODY | {"kv_transfer_params": PULL})
        for sent in (text, text.replace("kv_tr", "\\u006bv_tr"), '{"vllm_xargs": 1, ' + text[1:]):
            assert (await it.post(COMPLETIONS, sent.encode())).status == 403
        large = json.dumps(BODY | {"filler": "x" * (2 << 20), "kv_transfer_params": PULL}).encode()
        assert (await it.gateway.services.tokens.read(large)).head.transfers == "kv_transfer_params"


@pytest.mark.asyncio
@pytest.mark.parametrize("given", [{}, None])
async def test_empty_fields_and_other_arguments_of_extensions_pass(given: Any) -> None:
    async with cluster(num_engines=1) as it:
        body = BODY | {"kv_transfer_params": given, "vllm_xargs": {"ngram_size": 3, "ec_transfer_params": given}}
        assert (await it.post(COMPLETIONS, body)).status == 200


def _form(boundary: str, *parts: tuple[str, str]) -> bytes:
    head = f"--{boundary}\r\nContent-Disposition: form-data; "
    return "".join([*(f"{head}{name}\r\n\r\n{value}\r\n" for name, value in parts), f"--{boundary}--\r\n"]).encode()


@pytest.mark.asyncio
@pytest.mark.parametrize("name", ['name="vllm_xargs"', "name*=utf-8''vllm%5Fxargs"])
async def test_forms_are_searched_as_well(name: str) -> None:
    async with engines(1) as (it, mock):
        headers = {"Content-Type": "multipart/form-data; boundary=b"}
        for value, status in (('{"kv_transfer_params": "x"}', 403), ('{"n": 1}', 200), ("no JSON", 400)):
            form = _form("b", ('name="model"', "mock"), (name, value))
            assert (await it.post(TRANSCRIPTIONS, form, headers)).status == status
        many = [(f'name="f{number}"', "") for number in range(300)]
        assert (await it.post(TRANSCRIPTIONS, _form("b", *many, (name, "{}")), headers)).status == 400
        assert len(mock.seen or ()) == 1


def test_every_such_field_of_the_installed_vllm_is_known() -> None:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    fields: set[str] = set()
    for file in Path(spec.origin).with_name("entrypoints").rglob("*protocol*.py"):
        fields |= set(re.findall(r"^    (\w*(?:transfer|extra_args|xargs)\w*)\s*:", file.read_text(), re.MULTILINE))
    assert fields == {*_TRANSFERS, "vllm_xargs"}


def test_clients_do_not_write_what_is_found_out_of_their_bodies() -> None:
    content = json.dumps(BODY | {"transfers": "x", "num_sequences": 7, "most_output": 9})
    head = Body.read(content.encode()).head
    assert (head.transfers, head.num_sequences, head.most_output) == ("", 1, 3)


@pytest.mark.asyncio
async def test_form_that_aiohttp_writes_is_read() -> None:
    form = aiohttp.FormData({"model": "mock", "language": "de"})
    form.add_field("file", b"\x00", filename="a.wav")
    payload = form()
    async with engines(1) as (it, _):
        headers = {"Content-Type": payload.headers["Content-Type"]}
        assert (await it.post(TRANSCRIPTIONS, bytes(await payload.as_bytes()), headers)).status == 200
