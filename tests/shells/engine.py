# SPDX-License-Identifier: Apache-2.0
"""vLLM's EngineCoreProc in threads of this process: its loop, its sockets, its scheduler; only the worker is fake.

`hooks.attach_engine` attaches the production shells as in any engine process: loop, thread, llumlet, relay,
mover. Nothing of ours is replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine import core as vllm_core
from vllm.v1.engine.core import EngineCoreProc, EngineShutdownState
from vllm.v1.engine.utils import EngineZmqAddresses
from vllm.v1.kv_cache_interface import FullAttentionSpec, HiddenStateCacheSpec, KVCacheConfig, KVCacheGroupSpec

from tests.shells.model import BLOCK_SIZE, NUM_BLOCKS, FakeExecutor
from vllm_llumnix.engine.loop import EngineLoop
from vllm_llumnix.engine.service.agent import LlumletAgent

NO_MESSAGE = b"\xff"
"""A request type that vLLM does not know: its input thread ends on it."""
JOIN_SECONDS = 10.0


class Engine(EngineCoreProc):
    """One engine, as its client in `tests.frontend.fakes` expects it: its sockets are in `directory`.

    `start` runs the loop; `stop_loop` and then `stop_sockets` end every thread. With `cache_stays` it has a second
    group of layers, of a kind that is not carried; the model reads the first group only.
    """

    model_executor: FakeExecutor
    kvconn: EngineLoop

    def __init__(self, config: VllmConfig, directory: Path, *, cache_stays: bool = False) -> None:
        self._directory = directory
        self._cache_stays = cache_stays
        with (
            # Of the process, which is not this engine's alone.
            mock.patch.object(vllm_core, "freeze_gc_heap"),
            mock.patch.object(vllm_core, "enable_envs_cache"),
        ):
            super().__init__(config, True, "", FakeExecutor, log_stats=True)
        self.published: list[tuple[float, str, int]] = []
        """When, of which request, how many tokens."""
        self._tap_outputs()
        self._loop_thread = threading.Thread(target=self._run_loop, name="fake-engine-loop", daemon=True)
        self.failure: BaseException | None = None

    def _tap_outputs(self) -> None:
        stock = self.output_queue.put_nowait

        def put_nowait(item: Any) -> None:
            if isinstance(item, tuple):
                now = time.monotonic()
                outputs = item[1].outputs
                self.published += [(now, output.request_id, len(output.new_token_ids)) for output in outputs]
            stock(item)

        self.output_queue.put_nowait = put_nowait

    @contextlib.contextmanager
    def _perform_handshakes(self, *args: Any) -> Iterator[EngineZmqAddresses]:
        yield EngineZmqAddresses(inputs=[f"ipc://{self._directory}/in"], outputs=[f"ipc://{self._directory}/out"])

    def _initialize_kv_caches(self, vllm_config: VllmConfig) -> KVCacheConfig:
        vllm_config.cache_config.num_gpu_blocks = NUM_BLOCKS
        page: dict[str, Any] = {"block_size": BLOCK_SIZE, "num_kv_heads": 1, "head_size": 4, "dtype": torch.float32}
        groups = [KVCacheGroupSpec(["layer.0"], FullAttentionSpec(**page))]
        if self._cache_stays:
            groups.append(KVCacheGroupSpec(["layer.1"], HiddenStateCacheSpec(**page)))
        return KVCacheConfig(
            num_blocks=NUM_BLOCKS,
            kv_cache_tensors=[],
            kv_cache_groups=groups,
            hash_block_size=BLOCK_SIZE,
        )

    def process_input_sockets(self, *args: Any) -> None:
        self._input_thread = threading.current_thread()
        with contextlib.suppress(ValueError):
            super().process_input_sockets(*args)

    @property
    def agent(self) -> LlumletAgent:
        agent = self.kvconn.llumlet
        assert isinstance(agent, LlumletAgent)
        return agent

    def start(self) -> None:
        self._loop_thread.start()

    def stop_loop(self) -> None:
        """As SIGTERM does."""
        self.shutdown_state = EngineShutdownState.REQUESTED
        self.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))
        self._loop_thread.join(JOIN_SECONDS)
        assert not self._loop_thread.is_alive()

    def stop_sockets(self) -> None:
        """The last; `NO_MESSAGE` must be on its way."""
        self.output_queue.put_nowait(EngineCoreProc.ENGINE_CORE_DEAD)
        for thread in (self.output_thread, self._input_thread):
            thread.join(JOIN_SECONDS)
            assert not thread.is_alive()

    def shutdown(self) -> None:
        """Without what belongs to a whole process."""
        self.structured_output_manager.clear_backend()
        self.model_executor.shutdown()
        self.scheduler.shutdown()

    def _run_loop(self) -> None:
        try:
            self.run_busy_loop()
        except SystemExit:
            pass
        except BaseException as error:  # noqa: BLE001 - the outermost; looked at by the test
            self.failure = error
        finally:
            # The wrapped one, which ends the llumlet's thread.
            self.__dict__["shutdown"]()
            _close(self.kvconn.thread.event_loop)


def engine_config(model: Path, *, asynchronous: bool) -> VllmConfig:
    config = EngineArgs(
        model=str(model),
        block_size=BLOCK_SIZE,
        enforce_eager=True,
        max_model_len=1536,
        max_num_seqs=8,
        max_num_batched_tokens=64,
    ).create_engine_config()
    # vLLM switches it off for its own CPU executor.
    config.scheduler_config.async_scheduling = asynchronous
    return config


def _close(loop: asyncio.AbstractEventLoop) -> None:
    """A process would end here, and its helper threads with it."""
    _cancel_all(loop)
    loop.run_until_complete(loop.shutdown_default_executor())
    # Timers that were due meanwhile have begun something.
    _cancel_all(loop)
    loop.close()


def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    while tasks := asyncio.all_tasks(loop):
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.wait(tasks))
