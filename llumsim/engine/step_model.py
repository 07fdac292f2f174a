# SPDX-License-Identifier: Apache-2.0
"""The duration of a step, and the other properties of an engine: one JSON file, fitted or from published figures.

    seconds = a + b · prefill tokens + c · Σ pairs + d · decodes + e · Σ decode KV

A chunk of p prompt tokens that begins at position s has p · s + p · (p + 1) / 2 pairs of a query and a key. A request
of which one token is computed is a decode; its decode KV is all its tokens, that one included.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, Self

from llumsim import PS

_COEFFICIENTS: Final = ("a", "b", "c", "d", "e")


@dataclass(frozen=True, slots=True)
class StepModel:
    """Coefficients in whole picoseconds."""

    a: int
    b: int
    c: int
    d: int
    e: int

    @classmethod
    def of_seconds(cls, a: float, b: float, c: float, d: float, e: float) -> Self:
        """Raises ValueError for a negative one, and for steps that take no time."""
        whole = [round(value * PS) for value in (a, b, c, d, e)]
        if min(whole) < 0 or whole[0] <= 0:
            raise ValueError("a step model needs a > 0, and no coefficient below 0")
        return cls(*whole)

    def duration(self, prefill_tokens: int, pairs: int, num_decodes: int, decode_kv: int) -> int:
        return self.a + self.b * prefill_tokens + self.c * pairs + self.d * num_decodes + self.e * decode_kv


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The settings that determine vLLM's batches."""

    num_blocks: int
    """Blocks of the KV cache, without vLLM's null block."""
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int = 8192
    prefix_caching: bool = True
    by_priority: bool = False
    """`--scheduling-policy priority`; else first come, first served."""
    ageing_s: float = 60.0
    """The engine's `--llumlet-priority-ageing-seconds`, used with priorities; 0 disables ageing."""

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError("max_num_batched_tokens must be at least max_num_seqs, as vLLM demands")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """A kind of instance."""

    name: str
    step: StepModel
    engine: EngineConfig
    bytes_per_token: int
    """Bytes of KV cache, over all layers and ranks."""
    link_bytes_per_s: float
    """Speed of one node's link, in each direction; the moves of its instances share it."""
    instances_per_node: int = 1
    cold_start_s: float = 60.0
    request_s: float = 0.0
    """Time from a request's placement to its engine's queue, beyond the messages: what its API server needs for it."""
    answer_s: float = 0.0
    """Time from the end of a step to the client, beyond the message."""
    sources: tuple[str, ...] = ()


def engine_model(
    *,
    step_s: float = 0.010,
    decode_s: float = 0.0001,
    prefill_s: float = 0.00002,
    speed: float = 1.0,
    num_blocks: int = 1024,
    block_size: int = 16,
    **config: Any,
) -> Hardware:
    """An engine whose steps take `step_s`, and `decode_s` for each decoded and `prefill_s` for each computed prompt
    token: all of that `speed` times as fast. `config` as for `EngineConfig`. Raises ValueError."""
    step, prefill, decode = (seconds / speed for seconds in (step_s, prefill_s, decode_s))
    return Hardware(
        name="simulated",
        step=StepModel.of_seconds(step, prefill, 0.0, decode, 0.0),
        engine=EngineConfig(
            num_blocks=num_blocks, block_size=block_size, max_model_len=num_blocks * block_size, **config
        ),
        bytes_per_token=1024,
        link_bytes_per_s=1e9,
    )


def built_in_hardware() -> list[str]:
    return sorted(path.name.removesuffix(".json") for path in _directory().iterdir() if path.name.endswith(".json"))


def load_hardware(name: str) -> Hardware:
    """A built-in one by name, or that of a file by its path, which ends in `.json`. Raises ValueError, OSError."""
    if name.endswith(".json"):
        text = Path(name).read_text()
    elif name in built_in_hardware():
        text = (_directory() / f"{name}.json").read_text()
    else:
        raise ValueError(f"unknown step model {name!r}; known: {', '.join(built_in_hardware())}, or a .json file")
    return parse_hardware(text, name)


def parse_hardware(text: str, source: str) -> Hardware:
    """Raises ValueError that says what is wrong."""
    try:
        document: dict[str, Any] = json.loads(text)
        step = document.pop("step_s")
        if set(step) != set(_COEFFICIENTS):
            raise ValueError(f"step_s has {', '.join(sorted(step))} instead of a, b, c, d, e")
        engine = EngineConfig(**document.pop("engine"))
        sources = tuple(document.pop("sources", ()))
        return Hardware(step=StepModel.of_seconds(**step), engine=engine, sources=sources, **document)
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise ValueError(f"step model {source}: {error!r}") from error


def describe_hardware(hardware: Hardware, step_s: Mapping[str, float]) -> str:
    """Write what `parse_hardware` reads, with the fitted coefficients in seconds."""
    document = {"name": hardware.name, "step_s": dict(step_s)}
    document |= {name: value for name, value in asdict(hardware).items() if name not in ("name", "step")}
    return json.dumps(document, indent=2) + "\n"


def _directory() -> Any:
    return files("llumsim.engine") / "models"
