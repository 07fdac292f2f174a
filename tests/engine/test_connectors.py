# SPDX-License-Identifier: Apache-2.0
"""Moves between two of vLLM's real schedulers that have KV connectors of vLLM's. Their workers are played here: an
offloading one is as late as it may be, and of each block it is known what lies there."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiKVConnectorMetadata,
    MultiKVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import RequestStatus

from llumlet.protocol.errors import Reason, Refused
from tests.engine.loop import Loop
from tests.engine.rig import BLOCK_SIZE, FakeRunner, Rig, full, window
from tests.engine.test_block_rows import Move
from vllm_llumnix.engine.blocks.connectors import KNOWN, has_unknown_connector

PROMPT = 6 * BLOCK_SIZE + 5


def example(tmp_path: Path) -> dict[str, Any]:
    return {"kv_connector": "ExampleConnector", "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)}}


def offloading(**more: Any) -> dict[str, Any]:
    return {
        "kv_connector": "OffloadingConnector",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 28, "offload_prompt_only": False, **more},
    }


def several(*connectors: dict[str, Any]) -> dict[str, Any]:
    configs = [{**one, "kv_role": "kv_both"} for one in connectors]
    return {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": configs}}


class Offloader(FakeRunner):
    """A runner whose worker offloads: it copies when it must, or at the end of a step while it is `prompt`."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt = True
        self.memory: dict[int, str] = {}
        """What lies in each block."""
        self.offloaded: dict[int, str] = {}
        """What lies in each place of the connector's."""
        self._open: dict[int, Any] = {}
        self._ended: dict[int, int] = {}

    def run(self, output: SchedulerOutput, chunks: frozenset[str]) -> ModelRunnerOutput:
        made = super().run(output, chunks)
        made.kv_connector_output = self._work(output.kv_connector_metadata)
        return made

    def _work(self, meta: Any) -> KVConnectorOutput | None:
        if isinstance(meta, MultiKVConnectorMetadata):
            done = self._work(meta.metadata[0])
            assert done is not None
            done.kv_connector_worker_meta = MultiKVConnectorWorkerMetadata((done.kv_connector_worker_meta, None))
            return done
        if not isinstance(meta, OffloadingConnectorMetadata):
            return None
        self._open.update(meta.store_jobs)
        for job in [job for job in self._open if self.prompt or job in (meta.jobs_to_flush or ())]:
            self._end(job, self._open.pop(job), self.memory, self.offloaded)
        loaded = set()
        for job, load in meta.load_jobs.items():
            self._end(job, load, self.offloaded, self.memory)
            loaded.add(load.req_id)
        ended, self._ended = self._ended, {}
        told = OffloadingWorkerMetadata(completed_jobs=ended)
        return KVConnectorOutput(finished_recving=loaded, kv_connector_worker_meta=told)

    def _end(self, number: int, job: Any, there: dict[int, str], here: dict[int, str]) -> None:
        pairs = zip(job.src_spec.block_ids, job.dst_spec.block_ids, strict=True)
        here.update({int(to): there.get(int(of), "nothing") for of, to in pairs})
        self._ended[number] = 1

    def write(self, rig: Rig, request: Any) -> None:
        """As if the blocks of this request had been computed, or copied here."""
        for group in range(len(rig.port.kv_cache_manager.get_blocks(request.request_id).blocks)):
            table = enumerate(rig.block_ids(request, group))
            self.memory.update({block: f"{request.request_id}.{group}.{at}" for at, block in table})


def new_rig(model: Path, connector: dict[str, Any], **more: Any) -> Rig:
    rig = Rig(model, kv_transfer_config=KVTransferConfig(kv_role="kv_both", **connector), **more)
    rig.runner = Offloader()
    return rig


@pytest.fixture(params=["saves prompts", "offloads", "several"])
def connector(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    return {
        "saves prompts": example(tmp_path),
        "offloads": offloading(),
        "several": several(offloading(), example(tmp_path)),
    }[request.param]


@pytest.fixture
def rigs(model_dir: Path, connector: dict[str, Any]) -> tuple[Rig, Rig]:
    source, destination = (new_rig(model_dir, connector, num_blocks=128) for _ in range(2))
    return source, destination


def idle(rig: Rig) -> bool:
    """Whether nothing is left of any request, after a few steps."""
    rig.turns(4)
    return not rig.scheduler.has_requests() and rig.port.audit_idle() == []


@pytest.mark.parametrize("rounds", [0, 2])
def test_there_and_back(rigs: tuple[Rig, Rig], rounds: int) -> None:
    source, destination = rigs
    free = source.free_blocks, destination.free_blocks
    source.add("a", num_prompt=PROMPT)
    source.turns(12)
    for there, here in ((source, destination), (destination, source)):
        move = Move(there, here)
        for _ in range(rounds):
            move.round()
        move.finish()
        assert move.new.num_computed_tokens == move.new.num_tokens - 1
        there.turns(4)
        count = move.new.num_output_tokens
        here.turns(2 * BLOCK_SIZE)
        assert move.new.num_output_tokens == count + 2 * BLOCK_SIZE
    source.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert idle(source)
    assert idle(destination)
    assert (source.free_blocks, destination.free_blocks) == free


def test_preempted_after_a_move(rigs: tuple[Rig, Rig]) -> None:
    source, destination = rigs
    source.add("a", num_prompt=PROMPT)
    source.turns(12)
    move = Move(source, destination)
    move.finish()
    destination.turns(3)
    count = move.new.num_output_tokens
    destination.port.start_over(move.new)
    destination.turns(6)
    assert move.new.num_output_tokens > count


def test_request_preempted_elsewhere_is_loaded_as_new(model_dir: Path) -> None:
    """vLLM's V1 workers know nothing of a request that is called resumed here."""
    rig = new_rig(model_dir, offloading())
    former = rig.add("a", num_prompt=PROMPT)
    rig.turns(2)
    rig.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert idle(rig)
    assert rig.scheduler.reset_prefix_cache()
    request = rig.request("b", num_prompt=former.num_prompt_tokens)
    request.num_preemptions = 2
    rig.port.reservations.make(request, use_prefix_cache=False, queued=True)
    rig.port.reservations.admit(request, 0)
    rig.turn()
    assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    problem = rig.port.why_not_now(request)
    assert problem is not None
    assert problem[0] is Reason.NOT_STARTED
    output = rig.begin()
    assert [new.req_id for new in output.scheduled_new_reqs] == ["b"]
    assert output.num_scheduled_tokens == {"b": 5}
    rig.drain_one()
    assert rig.port.why_not_now(request) is None


def test_it_does_not_come_back_too_early(model_dir: Path) -> None:
    loop = Loop(new_rig(model_dir, offloading(), num_blocks=128), 1)
    rig = loop.rig
    rig.runner.prompt = False
    request = rig.add("a", num_prompt=PROMPT)
    loop.turns(6)
    assert loop.kvconn is not None
    rig.port.release(request)
    for _ in range(3):
        with pytest.raises(Refused, match="former life") as refusal:
            loop.kvconn.require_out_of_flight("a")
        assert refusal.value.reason is Reason.HANDOVER_OPEN
        loop.turn()
    rig.runner.prompt = True
    loop.turns(2)
    loop.kvconn.require_out_of_flight("a")
    rig.add("a", num_prompt=PROMPT)
    loop.turns(4)


@pytest.mark.asyncio
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("groups", [[full()], [full(), window(2 * BLOCK_SIZE)]], ids=["full", "a window beside"])
async def test_blocks_being_offloaded_are_not_written(model_dir: Path, depth: int, groups: Any) -> None:
    """Blocks of a request that has ended are given to one that comes, while the connector is to read them yet."""
    loop = Loop(
        new_rig(model_dir, offloading(), num_blocks=7 * len(groups) + 10, groups=groups, asynchronous=depth > 1), depth
    )
    rig, kvconn = loop.rig, loop.kvconn
    assert kvconn is not None
    former = rig.add("former", num_prompt=PROMPT, max_tokens=3)
    worker = rig.runner
    worker.prompt = False
    loop.turn()
    worker.write(rig, former)
    were = dict(worker.memory)
    while rig.scheduler.requests:
        loop.turn()
    assert not worker.offloaded
    newcomer = rig.request("newcomer", num_prompt=12 * BLOCK_SIZE, first=50)
    asked = kvconn.call_for_blocks(kvconn.reserve, newcomer, False, False, 12 * BLOCK_SIZE - 1)
    for _ in range(9):
        kvconn.step()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        if asked.done():
            break
        loop.step_fn()
    reserved = asked.result()
    stored = {block for block, content in were.items() if not content.endswith(".6")}
    assert stored & set(reserved.block_ids), "nothing that is offloaded is given out: the test shows nothing"
    worker.memory.update(dict.fromkeys(reserved.block_ids, "copied here"))
    worker.prompt = True
    loop.turns(4)
    assert worker.offloaded
    assert "copied here" not in worker.offloaded.values()
    assert set(worker.offloaded.values()) <= set(were.values())


@pytest.mark.asyncio
async def test_idle_connectors_cost_no_step(model_dir: Path) -> None:
    loop = Loop(new_rig(model_dir, offloading()), 1)
    assert loop.kvconn is not None
    asked = loop.kvconn.call_for_blocks(loop.kvconn.reserve, loop.rig.request("a"), False, False, 69)
    loop.kvconn.step()
    await asyncio.wait_for(asked, 1)


def test_blocks_that_a_connector_keeps(model_dir: Path, tmp_path: Path) -> None:
    """As it does until another engine has fetched them: the release leaves them alone until it says that it has."""
    loop = Loop(new_rig(model_dir, example(tmp_path)), 1)
    rig, kvconn = loop.rig, loop.kvconn
    assert kvconn is not None
    free = rig.free_blocks
    request = rig.add("a", num_prompt=PROMPT)
    loop.turns(3)
    rig.scheduler.connector.request_finished = lambda request, block_ids: (True, None)
    rig.port.freeze(request)
    frozen = rig.port.drained(request, 0)
    assert frozen is not None
    rig.port.release(request)
    rig.port.unpin(frozen.pin)
    loop.turns(2)
    held = len(rig.block_ids(request))
    assert rig.free_blocks == free - held
    assert rig.port.why_not_now(request) == (Reason.REQUEST_FINISHED, "the request has finished")
    with pytest.raises(Refused, match="former life") as refusal:
        kvconn.reserve(rig.request("a"), False, False, 60)
    assert refusal.value.reason is Reason.HANDOVER_OPEN
    sent = KVConnectorOutput(finished_sending={"a"})
    rig.runner._work = lambda meta: sent  # type: ignore[method-assign]
    loop.turn()
    assert rig.free_blocks == free
    assert rig.port.audit_idle() == []


def test_frozen_requests_alone_do_not_stop_a_connector(model_dir: Path) -> None:
    rig = new_rig(model_dir, offloading())
    rig.runner.prompt = False
    request = rig.add("a", num_prompt=PROMPT)
    rig.turns(3)
    rig.port.freeze(request)
    assert not rig.port.only_frozen()
    rig.runner.prompt = True
    rig.turns(3)
    assert rig.port.only_frozen()


def test_a_prompt_that_is_saved_whole(model_dir: Path, tmp_path: Path) -> None:
    rig = new_rig(model_dir, example(tmp_path), num_blocks=128)
    request = rig.add("a", num_prompt=600)
    assert rig.port.why_not_now(request) is None
    rig.turn()
    assert request.is_prefill_chunk
    problem = rig.port.why_not_now(request)
    assert problem is not None
    assert problem[0] is Reason.PREFILL_RUNNING
    rig.turns(3)
    assert rig.port.why_not_now(request) is None


def test_a_prompt_that_another_engine_has_computed(model_dir: Path, tmp_path: Path) -> None:
    rig = new_rig(model_dir, example(tmp_path))
    request = rig.request("a")
    request.kv_transfer_params = {"do_remote_prefill": True}
    rig.scheduler.add_request(request)
    problem = rig.port.why_not_now(request)
    assert problem is not None
    assert problem[0] is Reason.NOT_STARTED
    rig.turns(2)
    assert rig.port.why_not_now(request) is None


def names(connector: dict[str, Any]) -> Iterator[str]:
    yield connector["kv_connector"]
    for inner in connector.get("kv_connector_extra_config", {}).get("connectors", ()):
        yield from names(inner)


def test_known(rigs: tuple[Rig, Rig]) -> None:
    assert not has_unknown_connector(rigs[0].scheduler)


def test_unknown(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class of one's own may do anything, one that is derived from a known one too, and among several as well."""

    class Derived(ExampleConnector):
        pass

    monkeypatch.setitem(globals(), "Derived", Derived)
    own = {**example(tmp_path), "kv_connector": "Derived", "kv_connector_module_path": __name__}
    for connector in (own, several(offloading(), own)):
        assert has_unknown_connector(new_rig(model_dir, connector).scheduler)


def test_known_classes_exist() -> None:
    """But for one whose module needs what may not be installed."""
    for name in KNOWN:
        module, _, attribute = name.rpartition(".")
        path = module.replace(".", "/") + ".py"
        import vllm

        source = (Path(vllm.__path__[0]).parent / path).read_text()
        assert f"class {attribute}(" in source
