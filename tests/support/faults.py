# SPDX-License-Identifier: Apache-2.0
"""Faults in the engines that a test starts, at the points that production code names (`vllm_llumnix.faults`).

    ServerSpec(…, env=with_faults([{"point": "mover.pulled", "action": "kill", "final": True}]))

A fault is a dictionary with a `point` and an `action`. It happens `times` times (default 1), and not before `file`
exists. With `token`, a request at the point must have this token in its prompt. Every other key is an argument of the
action or must equal the point's context:

    delay     seconds                         sleep in the calling thread
    hold      seconds                         sleep in C and keep the interpreter lock: every other thread stands still
    kill                                      SIGKILL to the own process
    stop                                      SIGSTOP to the own process
    raise                                     raise FaultInjected
    corrupt   which, layer, offset, bytes     invert bytes of a block that the mover has just written (`mover.pulled`)
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from vllm_llumnix.errors import LlumnixError
from vllm_llumnix.kv.memory.layout import BlockLayout
from vllm_llumnix.steps.compiles import compiling

POINTS = frozenset({
    "destination.admitted", "destination.commit_received", "destination.reserved", "engine.grammar", "loop.model",
    "loop.step", "mover.pulled", "mover.turn", "source.committed", "source.frozen", "source.round", "worker.compile",
    "worker.model", "worker.started",
})  # fmt: skip
ACTIONS = {
    "delay": {"seconds"}, "hold": {"seconds"}, "kill": set(), "stop": set(), "raise": set(),
    "corrupt": {"which", "layer", "offset", "bytes"},
}  # fmt: skip
"""Arguments by action."""


class FaultInjected(LlumnixError):
    """Raised by a point whose fault has the action `raise`."""


def with_faults(faults: Sequence[dict[str, Any]]) -> dict[str, str]:
    """The variable of an engine in which these faults happen."""
    return {"LLUMNIX_FAULTS": f"{__name__}:{json.dumps(faults)}"}


def arm(text: str) -> Callable[..., None]:
    """The function that points call, for a JSON list of faults. Raises ValueError that names every mistake."""
    faults: list[dict[str, Any]] = [{"times": 1, **fault} for fault in json.loads(text)]
    wrong = [f"no point {fault.get('point')!r}" for fault in faults if fault.get("point") not in POINTS]
    wrong += [f"no action {fault.get('action')!r}" for fault in faults if fault.get("action") not in ACTIONS]
    if wrong:
        raise ValueError(f"{'; '.join(wrong)}: points are {sorted(POINTS)}, actions {sorted(ACTIONS)}")

    def inject(point: str, *, requests: Iterable[Any] = (), **context: Any) -> None:
        if point == "worker.started":
            if any(fault["point"] in ("worker.model", "worker.compile") for fault in faults):
                _wrap_model(context["worker"], inject)
            return
        prompts: list[Sequence[int]] | None = None
        for fault in faults:
            if fault["point"] != point or fault["times"] <= 0 or not os.path.exists(fault.get("file", "/")):
                continue
            if "token" in fault:
                if prompts is None:
                    prompts = [request.prompt_token_ids or () for request in requests if request is not None]
                if not any(fault["token"] in prompt for prompt in prompts):
                    continue
            action = fault["action"]
            conditions = fault.keys() - {"point", "action", "times", "file", "token"} - ACTIONS[action]
            if any(context.get(key) != fault[key] for key in conditions):
                continue
            fault["times"] -= 1
            _happen(point, fault, context)

    return inject


def _happen(point: str, fault: dict[str, Any], context: dict[str, Any]) -> None:
    match fault["action"]:
        case "delay":
            time.sleep(fault["seconds"])
        case "hold":
            ctypes.PyDLL(None).usleep(int(fault["seconds"] * 1e6))
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "raise":
            raise FaultInjected(point)
        case "corrupt" if context["blocks"]:
            corrupt(context["layout"], context["blocks"], fault)


def _wrap_model(worker: Any, inject: Callable[..., None]) -> None:
    """Let the worker's model hang or compile a kernel, or die of a marked request in its first step."""
    execute = worker.execute_model

    def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> object:
        inject("worker.model", requests=scheduler_output.scheduled_new_reqs)
        with compiling():
            inject("worker.compile")
        return execute(scheduler_output, *args, **kwargs)

    worker.execute_model = execute_model


def corrupt(layout: BlockLayout, blocks: Sequence[int], fault: dict[str, Any]) -> None:
    """Invert one byte of this process's KV memory, or `bytes` in a row.

    The byte lies in the page of layer `layer` of the `which` (first, middle, last, or a number) of `blocks`.
    `offset` within the page is by default the most significant byte of the page's first element,
    which holds the first token's key in every layout: in use however short the block is. All bits
    are inverted, so that the element changes its sign and its order of magnitude.
    """
    which = {"first": 0, "middle": len(blocks) // 2, "last": -1}.get(fault["which"], fault["which"])
    address, region = layout.page(blocks[which], fault["layer"])
    offset = fault.get("offset", region.element_bytes - 1)
    end = offset + fault.get("bytes", 1)
    if not 0 <= offset < end <= region.page_bytes:
        raise ValueError(f"a page has {region.page_bytes} bytes, not {end}")
    for place in range(address + offset, address + end):
        ctypes.c_ubyte.from_address(place).value ^= 0xFF
