# SPDX-License-Identifier: Apache-2.0
"""Nothing that is read from a socket is ever code, whatever vLLM is allowed to do."""

from __future__ import annotations

import ast
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from vllm.v1.serial_utils import CUSTOM_TYPE_CLOUDPICKLE, CUSTOM_TYPE_PICKLE, CUSTOM_TYPE_RAW_VIEW

import llumlet
import llumsched
import vllm_llumnix
from llumlet.protocol import wire
from llumlet.protocol.errors import Refused
from vllm_llumnix.engine.blocks import movers as memory
from vllm_llumnix.engine.requests import request_state
from vllm_llumnix.kv.mover import messages
from vllm_llumnix.wire import request_wire

PACKAGES = (llumlet, llumsched, vllm_llumnix)
FORBIDDEN_MODULES = {"pickle", "cloudpickle", "marshal", "shelve", "dill", "jsonpickle"}
HARMLESS_OF_YAML = {"safe_load", "compose", "SafeLoader", "MappingNode", "SequenceNode", "YAMLError"}
"""`compose` makes nodes of text. The rest of it can make objects of any class; and that of files from disk only."""
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
CODES = (CUSTOM_TYPE_PICKLE, CUSTOM_TYPE_CLOUDPICKLE, CUSTOM_TYPE_RAW_VIEW)

DECODERS: dict[str, Callable[[bytes], Any]] = {
    "to_origin": wire.decode_to_origin,
    "to_engine": wire.decode_to_engine,
    "command": messages.decode_command,
    "answer": messages.decode_answer,
    "state": request_wire.decode_state,
    "params": request_state._params_decoder.decode,
    "memory": memory.decode_memory,
}
REFUSALS = (msgspec.DecodeError, Refused)


class Exploit:
    """Its pickle makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.fixture(autouse=True)
def vllm_may_unpickle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")


def payloads(exploit: bytes) -> list[bytes]:
    """The pickle itself, and in the disguises that vLLM's own decoder would open."""
    encode = msgspec.msgpack.encode
    extensions = [msgspec.msgpack.Ext(code, exploit) for code in CODES]
    state = {
        "request_id": "r",
        "external_request_id": "r",
        "origin": "tcp://127.0.0.1:1",
        "prompt_token_ids": [1],
        "output_token_ids": [],
        "sampling_params": {"max_tokens": 5},
        "arrival_time": 0.0,
    }
    disguised: list[Any] = [exploit]
    for extension in extensions:
        disguised += [
            extension,
            [extension],
            {"type": "tokens", "outputs": extension},
            {"type": "pull", "peer": extension},
            {"extra_args": {"x": extension}, "max_tokens": 5},
            {"structured_outputs": extension},
            {"logits_processors": [extension]},
            {"bad_words": extension},
            state | {"trace_headers": extension},
            state | {"sampling_params": extension},
            {"digest": "d", "ranks": extension},
        ]
    return [exploit, *map(encode, disguised)]


@pytest.mark.parametrize("decoder", DECODERS, ids=str)
def test_a_pickle_stays_one(tmp_path: Path, decoder: str) -> None:
    canary = tmp_path / "canary"
    for payload in payloads(pickle.dumps(Exploit(canary))):
        try:
            DECODERS[decoder](payload)
        except REFUSALS:
            continue
    assert not canary.exists()
    pickle.loads(pickle.dumps(Exploit(canary)))
    assert canary.exists(), "the exploit works"


def test_vllm_s_own_decoder_would_have_opened_it(tmp_path: Path) -> None:
    """What our decoders are compared with: this is why none of them is vLLM's."""
    from vllm.v1.serial_utils import MsgpackDecoder

    canary = tmp_path / "canary"
    payload = msgspec.msgpack.encode(msgspec.msgpack.Ext(CUSTOM_TYPE_PICKLE, pickle.dumps(Exploit(canary))))
    MsgpackDecoder().decode(payload)
    assert canary.exists()


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_no_module_of_ours_can_unpickle_or_evaluate(package: Any) -> None:
    root = Path(package.__file__).parent
    paths = [path for path in root.rglob("*.py") if not path.name.endswith(("_pb2.py", "_pb2_grpc.py"))]
    found = [f"{path.relative_to(root)}:{line} {what}" for path in paths for line, what in _forbidden(path)]
    assert paths
    assert [place for place in found if not place.startswith("patching/loader.py")] == []


def _forbidden(path: Path) -> list[tuple[int, str]]:
    """`patching.loader` compiles vLLM's own sources, from disk."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import(names=names):
                modules = {alias.name.partition(".")[0] for alias in names}
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] == "yaml":
                found.append((node.lineno, f"from {module}"))
                continue
            case ast.Attribute(value=ast.Name(id="yaml"), attr=name) if name not in HARMLESS_OF_YAML:
                found.append((node.lineno, f"yaml.{name}"))
                continue
            case ast.ImportFrom(module=str(module)):
                modules = {module.partition(".")[0]}
            case ast.Call(func=ast.Name(id=name)) if name in FORBIDDEN_CALLS:
                found.append((node.lineno, name))
                continue
            case _:
                continue
        found += [(node.lineno, module) for module in modules & FORBIDDEN_MODULES]
    return found
