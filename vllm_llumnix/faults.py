# SPDX-License-Identifier: Apache-2.0
"""Fault points: named places in the production code where a test can make something go wrong.

A point costs one truth test unless `LLUMNIX_FAULTS` was set when the process started. The variable holds a JSON list of
objects `{"point": name, "action": action, ...}`; every other key must equal the context the point passes (so that
`{"point": "mover.pulled", "round": 2, …}` hits only the second round), except `times` (how often; default 1), `file`
(not before this file exists) and the action's own arguments:

    delay     seconds          sleep in the calling thread
    hold      seconds          the same in C, without giving up the interpreter lock: every other thread stands still
    kill                       SIGKILL to the own process
    stop                       SIGSTOP to the own process
    raise                      raise FaultInjected
    corrupt   which, layer     flip a byte of the first, middle or last block just written (the mover does)

Unknown points and actions are refused when the variable is read.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import time
from collections.abc import Iterable
from typing import Any

from vllm_llumnix.errors import ConfigError, LlumnixError

POINTS = frozenset(
    {
        "loop.step",
        "loop.model",
        "loop.request",
        "engine.grammar",
        "worker.model",
        "worker.request",
        "worker.compile",
        "source.round",
        "source.frozen",
        "source.committed",
        "destination.reserved",
        "destination.commit_received",
        "destination.admitted",
        "mover.pulled",
        "mover.turn",
        "relay.sent",
    }
)
ACTIONS = frozenset({"delay", "hold", "kill", "stop", "raise", "corrupt"})
_ARGUMENTS = {"delay": {"seconds"}, "hold": {"seconds"}, "corrupt": {"which", "layer", "offset", "bytes"}}


class FaultInjected(LlumnixError):
    """Raised by a fault point whose action is `raise`."""


def parse(text: str) -> list[dict[str, Any]]:
    """The fault specifications in `text`; raises ConfigError naming every mistake."""
    try:
        specs = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError([f"LLUMNIX_FAULTS is not JSON: {error}"]) from error
    faults = []
    for spec in specs:
        if spec.get("point") not in POINTS:
            faults.append(f"LLUMNIX_FAULTS: no fault point {spec.get('point')!r}; known: {', '.join(sorted(POINTS))}")
        if spec.get("action") not in ACTIONS:
            faults.append(f"LLUMNIX_FAULTS: no action {spec.get('action')!r}; known: {', '.join(sorted(ACTIONS))}")
    if faults:
        raise ConfigError(faults)
    return [{"times": 1, **spec} for spec in specs]


_specs: list[dict[str, Any]] = parse(os.environ["LLUMNIX_FAULTS"]) if os.environ.get("LLUMNIX_FAULTS") else []


def armed(point: str) -> bool:
    """Whether anything may happen at `point`; for places that are in nobody's way otherwise."""
    return any(spec["point"] == point for spec in _specs)


def hit_tokens(point: str, prompts: Iterable[list[int] | None]) -> None:
    """`point` once for every token of these prompts, with the context `token`: for a fault of marked requests."""
    for prompt in prompts:
        for token in dict.fromkeys(prompt or ()):
            hit(point, token=token)


def hit(point: str, **context: Any) -> dict[str, Any] | None:
    """Run the fault armed at `point`, if any; returns the specification of a `corrupt` fault for the caller."""
    if not _specs:
        return None
    for spec in _specs:
        if spec["point"] != point or spec["times"] <= 0:
            continue
        if "file" in spec and not os.path.exists(spec["file"]):
            continue
        conditions = spec.keys() - {"point", "action", "times", "file"} - _ARGUMENTS.get(spec["action"], set())
        if any(context.get(key) != spec[key] for key in conditions):
            continue
        spec["times"] -= 1
        match spec["action"]:
            case "delay":
                time.sleep(spec["seconds"])
            case "hold":
                ctypes.PyDLL(None).usleep(int(spec["seconds"] * 1e6))
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "raise":
                raise FaultInjected(point)
            case "corrupt":
                return spec
    return None
