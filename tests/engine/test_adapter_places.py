# SPDX-License-Identifier: Apache-2.0
"""A batch holds `max_loras` LoRA adapters: whom there is room for, on vLLM's real schedulers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.v1.request import Request, RequestStatus

from llumlet.protocol.errors import Reason, Refused
from tests.engine.loop import new_engine_loop
from tests.engine.rig import Rig
from tests.engine.test_scheduler_port import KINDS, freeze
from vllm_llumnix.engine.engine_port import Reserved
from vllm_llumnix.engine.loop import EngineLoop


def adapter(number: int) -> LoRARequest:
    return LoRARequest(f"adapter {number}", number, f"/adapters/{number}")


@pytest.fixture(params=KINDS.values(), ids=KINDS.keys())
def lora_rig(request: pytest.FixtureRequest, model_dir: Path) -> Rig:
    return Rig(model_dir, enable_lora=True, max_loras=2, max_lora_rank=8, **request.param)


def arriving(rig: Rig, name: str, number: int, length: int = 500) -> Request:
    request = rig.request(name, max_tokens=length)
    request.lora_request = adapter(number)
    request.append_output_token_ids([7, 8])
    return request


def test_batch_that_has_its_adapters(lora_rig: Rig) -> None:
    rig = lora_rig
    rig.add("a", adapter=adapter(1))
    rig.add("b", adapter=adapter(2))
    rig.turns(4)
    with pytest.raises(Refused) as refused:
        rig.port.reservations.make(arriving(rig, "c", 3), use_prefix_cache=False)
    assert refused.value.reason == Reason.DESTINATION_FULL
    assert "--max-loras" in refused.value.detail
    second = arriving(rig, "d", 2)
    rig.port.reservations.make(second, use_prefix_cache=False)
    rig.port.reservations.admit(second, second.num_tokens - 1)
    rig.turn()
    assert second.status == RequestStatus.RUNNING


def test_waiting_request_without_cache_needs_no_place(lora_rig: Rig) -> None:
    rig = lora_rig
    rig.add("a", adapter=adapter(1))
    rig.add("b", adapter=adapter(2))
    rig.turns(4)
    request = arriving(rig, "c", 3)
    assert rig.port.reservations.make(request, use_prefix_cache=False, queued=True) == Reserved()
    with pytest.raises(Refused, match="max-loras"):
        rig.port.reservations.grow(request, request.num_tokens)
    rig.port.reservations.admit(request, 0)
    rig.turns(4)
    assert request.status == RequestStatus.WAITING


def test_reservation_holds_the_place_of_its_adapter(lora_rig: Rig) -> None:
    rig = lora_rig
    rig.add("a", adapter=adapter(1))
    rig.turns(4)
    request = arriving(rig, "c", 2, length=12)
    rig.port.reservations.make(request, use_prefix_cache=False)
    with pytest.raises(Refused, match="max-loras"):
        rig.port.reservations.make(arriving(rig, "d", 3), use_prefix_cache=False)
    other = rig.add("b", adapter=adapter(3))
    rig.turns(3)
    assert other.status == RequestStatus.WAITING
    rig.port.reservations.admit(request, request.num_tokens - 1)
    rig.turn()
    assert request.status == RequestStatus.RUNNING
    rig.turns(3)
    assert other.status == RequestStatus.WAITING
    rig.turns(12)
    assert request.is_finished()
    assert other.status == RequestStatus.RUNNING


def test_reservation_that_is_given_back_gives_the_place_back(lora_rig: Rig) -> None:
    rig = lora_rig
    rig.add("a", adapter=adapter(1))
    request = arriving(rig, "c", 2)
    rig.port.reservations.make(request, use_prefix_cache=False)
    other = rig.add("b", adapter=adapter(3))
    rig.turns(3)
    assert other.status == RequestStatus.WAITING
    rig.port.reservations.cancel(request)
    rig.turns(3)
    assert other.status == RequestStatus.RUNNING


def test_frozen_request_keeps_the_place_of_its_adapter(lora_rig: Rig) -> None:
    """Without, the scheduler finds three adapters in its batch once the request goes on, and the engine ends."""
    rig = lora_rig
    request = rig.add("a", adapter=adapter(1))
    rig.add("b", adapter=adapter(2))
    rig.turns(4)
    frozen = freeze(rig)
    third = rig.add("c", adapter=adapter(3))
    same = rig.add("d", adapter=adapter(2))
    rig.turns(3)
    assert third.status == RequestStatus.WAITING
    assert same.status == RequestStatus.RUNNING
    rig.port.unpin(frozen.pin)
    rig.port.unfreeze(request)
    count = request.num_output_tokens
    rig.turns(4)
    assert request.num_output_tokens > count


def test_engines_limit_is_left_alone(lora_rig: Rig) -> None:
    rig = lora_rig
    rig.port.reservations.make(arriving(rig, "c", 2), use_prefix_cache=False)
    rig.add("a")
    rig.turns(2)
    assert rig.scheduler.lora_config.max_loras == 1
    assert rig.scheduler.vllm_config.lora_config.max_loras == 2


def connection(rig: Rig, add_lora: Any) -> EngineLoop:
    engine = SimpleNamespace(model_executor=SimpleNamespace(add_lora=add_lora))
    return new_engine_loop(engine, rig)


def test_adapter_of_the_batch_is_not_loaded_again(lora_rig: Rig) -> None:
    rig = lora_rig
    loaded: list[LoRARequest] = []
    kvconn = connection(rig, loaded.append)
    rig.add("a", adapter=adapter(1))
    rig.turns(3)
    kvconn.load_adapter(arriving(rig, "b", 1))
    kvconn.load_adapter(rig.request("c"))
    assert not loaded
    kvconn.load_adapter(arriving(rig, "d", 2))
    assert loaded == [adapter(2)]


def test_adapter_that_does_not_load(lora_rig: Rig) -> None:
    def fail(_: LoRARequest) -> None:
        raise ValueError("/adapters/2 doesn't contain tensors")

    with pytest.raises(Refused) as refused:
        connection(lora_rig, fail).load_adapter(arriving(lora_rig, "a", 2))
    assert refused.value.reason == Reason.LORA_NOT_AVAILABLE
    assert "/adapters" not in refused.value.detail
