# SPDX-License-Identifier: Apache-2.0
"""The installed vLLM as this environment imports it: patched, and as it was while the llumlet is off."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from vllm_llumnix import hooks
from vllm_llumnix.errors import PatchError
from vllm_llumnix.patching import state

pytest.importorskip("vllm")
torch = pytest.importorskip("torch")


@pytest.fixture
def llumlet_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(hooks.CONFIG_VARIABLE, raising=False)


@pytest.fixture
def llumlet_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(hooks.CONFIG_VARIABLE, "{}")


def ready_response(**changes: Any) -> Any:
    from vllm.v1.engine import EngineCoreReadyResponse

    required = [
        field.name
        for field in dataclasses.fields(EngineCoreReadyResponse)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    values: dict[str, Any] = dict.fromkeys(required, 1)
    values |= {"dp_stats_address": None, "dtype": "", "vllm_version": "", "instance_id": "", "supports_lora": False}
    return EngineCoreReadyResponse(**values | changes)


def test_this_environment_is_patched() -> None:
    import vllm.v1.engine.core
    import vllm.v1.engine.core_client

    patched = state.current()
    assert patched.problem is None
    assert {"vllm.v1.engine", "vllm.v1.engine.core", "vllm.v1.engine.core_client"} <= patched.applied
    assert vllm.v1.engine.core.__llumnix_digest__ == patched.digest


def test_children_are_patched() -> None:
    """The way in which vLLM starts its engine process: a fresh interpreter."""
    code = "import vllm.v1.engine as e; print(e.__llumnix_digest__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == state.current().digest


def test_flags() -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    assert any(group.title == "llumlet" for group in parser._action_groups)
    args = parser.parse_args(["--enable-llumlet", "--llumlet-port", "7000"])
    assert (args.enable_llumlet, args.llumlet_port) == (True, "7000")


def test_flags_are_resolved(llumlet_off: None, capsys: pytest.CaptureFixture[str]) -> None:
    from vllm.engine.arg_utils import EngineArgs

    args = argparse.Namespace(enable_llumlet=True, llumlet_port=-1)
    with pytest.raises(SystemExit) as ended:
        EngineArgs.from_cli_args(args)
    assert ended.value.code == 2
    assert "vllm: error:" in capsys.readouterr().err


def test_version_command() -> None:
    import vllm

    done = subprocess.run([Path(sys.executable).with_name("vllm"), "--version"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == vllm.__version__


def test_new_fields_are_last_and_optional() -> None:
    """So that a message written without them can be read."""
    from vllm.v1.engine import EngineCoreReadyResponse, EngineCoreRequest

    assert EngineCoreRequest.__struct_fields__[-1] == "queue_server_address"
    assert EngineCoreRequest.__struct_defaults__[-1] is None
    field = dataclasses.fields(EngineCoreReadyResponse)[-1]
    assert (field.name, field.default) == ("patch_digest", None)
    request = EngineCoreRequest("id", [1], None, None, None, 0.0, None, None, None)
    stock = msgspec.msgpack.decode(msgspec.msgpack.encode(request))[:-1]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(stock), type=EngineCoreRequest) == request
    request.queue_server_address = "tcp://127.0.0.1:1"
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=EngineCoreRequest)
    assert again.queue_server_address == "tcp://127.0.0.1:1"


def test_digest_of_another_series_is_refused(llumlet_on: None) -> None:
    own = hooks.ready_digest()
    assert own == state.current().digest
    hooks.check_ready(ready_response(patch_digest=own))
    for other in ("0123456789abcdef", None):
        with pytest.raises(PatchError, match=f"the engine process runs patch series {other}, this process {own}"):
            hooks.check_ready(ready_response(patch_digest=other))


def test_client_checks_the_digest(llumlet_on: None) -> None:
    from vllm.v1.engine.core_client import MPClient

    cache_config = SimpleNamespace(num_gpu_blocks=0, effective_attention_block_size=None)
    client = SimpleNamespace(
        vllm_config=SimpleNamespace(cache_config=cache_config), _effective_attention_block_sizes=set()
    )
    payload = msgspec.msgpack.encode(ready_response(patch_digest="0123456789abcdef"))
    with pytest.raises(PatchError):
        MPClient._apply_ready_response(client, payload)


def test_off_is_stock(llumlet_off: None) -> None:
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.engine.core_client import AsyncMPClient

    assert EngineCoreProc.kvconn is None
    assert hooks.attach_engine(object()) is None
    assert hooks.client_class(AsyncMPClient) is AsyncMPClient
    assert hooks.ready_digest() is None
    hooks.check_ready(ready_response())


def bare_engine(kvconn: Any) -> tuple[Any, list[Any]]:
    """An EngineCoreProc with what one iteration of its loop needs, and the record of what it did."""
    from vllm.v1.engine.core import EngineCoreProc

    done: list[Any] = []
    engine = EngineCoreProc.__new__(EngineCoreProc)
    engine.kvconn = kvconn
    engine.engines_running = False
    engine.batch_queue = None
    engine.scheduler = SimpleNamespace(has_requests=lambda: False)
    engine.output_queue = SimpleNamespace(put_nowait=done.append)
    engine.step_fn = lambda: (done.append("step"), ({1: "stock"}, True))[1]
    engine.post_step = lambda executed: None
    return engine, done


@pytest.mark.parametrize("attached", [False, True])
def test_the_connector_steps_before_the_engine(attached: bool) -> None:
    kvconn = SimpleNamespace(step=lambda: [(0, "first")], has_work=lambda stock: True) if attached else None
    engine, done = bare_engine(kvconn)
    assert engine.has_work() is attached
    assert engine._process_engine_step() is True
    assert done == ([(0, "first")] if attached else []) + ["step", (1, "stock")]


def test_data_parallel_engines_inherit_the_seams() -> None:
    from vllm.v1.engine.core import DPEngineCoreProc, EngineCoreProc

    for name in ("has_work", "_process_engine_step", "process_input_sockets", "process_output_sockets"):
        assert getattr(DPEngineCoreProc, name) is getattr(EngineCoreProc, name), name
    assert "_process_engine_step()" in inspect.getsource(DPEngineCoreProc)
    assert "kvconn_outputs = kvconn.step()" in inspect.getsource(EngineCoreProc._process_engine_step)


def draws(generator: Any, count: int) -> list[int]:
    """As the CPU sampler draws: one 31-bit integer for each token."""
    return [int(torch.randint(0, 2**31, (1,), generator=generator)) for _ in range(count)]


def test_a_history_advances_the_generator() -> None:
    kept = torch.Generator().manual_seed(7)
    expected = draws(kept, 12)
    arrived = torch.Generator().manual_seed(7)
    request = SimpleNamespace(prefill_token_ids=list(range(5 + 9)), prompt_len=5)
    assert hooks.output_history(request) == [5, 6, 7, 8, 9, 10, 11, 12, 13]
    hooks.restore_generator(arrived, request)
    assert draws(arrived, 3) == expected[9:]


def test_no_history_leaves_the_generator() -> None:
    generator = torch.Generator().manual_seed(7)
    state = generator.get_state()
    request = SimpleNamespace(prefill_token_ids=None, prompt_len=5)
    hooks.restore_generator(generator, request)
    assert hooks.output_history(request) == []
    assert torch.equal(generator.get_state(), state)


@pytest.mark.parametrize("num_kept", [0, 1, 17])
def test_a_discarded_draw_is_taken_back(num_kept: int) -> None:
    generator = torch.Generator().manual_seed(7)
    expected = draws(torch.Generator().manual_seed(7), num_kept + 1)
    draws(generator, num_kept + 1)
    request = SimpleNamespace(sampling_params=SimpleNamespace(seed=7), output_token_ids=[0] * num_kept)
    runner = SimpleNamespace(requests={"r": request}, input_batch=SimpleNamespace(req_ids=["r"]))
    hooks.undo_draw(runner, 0, generator)
    assert draws(generator, 1) == expected[num_kept:]


def test_remarks_are_warnings_at_the_start(
    llumlet_off: None, monkeypatch: pytest.MonkeyPatch, llumlet_log: pytest.LogCaptureFixture
) -> None:
    remark = "Scheduler.schedule differs"
    now = dataclasses.replace(state.current(), remarks=(remark,))
    monkeypatch.setattr(state, "current", lambda: now)
    args = argparse.Namespace(enable_llumlet=True, llumlet_instance_id="a", middleware=[])
    monkeypatch.setenv(hooks.CONFIG_VARIABLE, "")  # `resolve_args` sets it for the children: taken back at the end
    hooks.resolve_args(args)
    assert [(record.levelname, record.message) for record in llumlet_log.records] == [("WARNING", f"llumlet: {remark}")]
