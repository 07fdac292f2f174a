# SPDX-License-Identifier: Apache-2.0
"""Profiles of an engine's steps, known before it has made any: a file of our own, or Llumnix's two.

Ours has the five numbers, and their origin:

    {"llumnix_profile": 1, "model": "qwen", "step_s": {"a": 0.03, "b": 2e-4, "c": 8e-9, "d": 1e-4, "e": 2e-6},
     "steps": 812, "error": 0.02, "description": "…"}

Llumnix's have grids of measured milliseconds, of which it uses the medians: times to the first token by prompt length,
and times between tokens by batch and tokens of each request. The five numbers are fitted to them. Llumnix's predictor
is infinite beyond its grid, this one is not.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from llumsched.latency.fitting import Coefficients, MeasuredStep, pairs
from llumsched.latency.online import FEWEST_STEPS, LearntModel, learn

_VERSION: Final = 1
_MOST_BYTES: Final = 64 << 20
_MOST_RESULTS: Final = 100_000


@dataclass(frozen=True, slots=True)
class Profile:
    model: str
    """Name of the model, as engines report it; "" is any."""
    coefficients: Coefficients
    num_steps: int
    error: float
    """Median of the absolute relative error of those steps."""
    source: str
    """The file, or another name of the source."""

    def fits(self, model: str) -> bool:
        return not self.model or self.model == model

    def written(self, description: str = "") -> str:
        """The text of a profile file."""
        document = {
            "llumnix_profile": _VERSION,
            "model": self.model,
            "step_s": self.coefficients._asdict(),
            "steps": self.num_steps,
            "error": self.error,
            "description": description,
        }
        return json.dumps(document, indent=2) + "\n"


def profile_of(model: LearntModel, name: str, source: str) -> Profile:
    return Profile(name, model.coefficients, model.num_steps, model.error, source)


def read_profile(path: str) -> Profile:
    """Reads a profile file. Raises ValueError that names the fault."""
    document = _document(path)
    try:
        if document.get("llumnix_profile") != _VERSION:
            raise ValueError(f"llumnix_profile is {document.get('llumnix_profile')!r}, not {_VERSION}")
        numbers = document.get("step_s")
        if not isinstance(numbers, dict) or set(numbers) != set(Coefficients._fields):
            raise ValueError("step_s has not the numbers a, b, c, d, e")
        coefficients = Coefficients(**{name: _number(f"step_s.{name}", value) for name, value in numbers.items()})
        if min(coefficients) < 0 or not coefficients.a:
            raise ValueError("step_s needs a > 0, and no number below 0")
        steps, error = document.get("steps", 0), _number("error", document.get("error", 0.0))
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
            raise ValueError(f"steps {steps!r} is no number of steps")
        return Profile(_name(document.get("model", "")), coefficients, steps, error, path)
    except ValueError as problem:
        raise ValueError(f"profile {path}: {problem}") from None


def read_llumnix(paths: Sequence[str]) -> Profile:
    """The profile of Llumnix's files of one model: of first tokens, of decodes, or both. Raises ValueError."""
    models, steps = set(), list[MeasuredStep]()
    for path in paths:
        document = _document(path)
        try:
            metadata = document.get("metadata")
            models.add(_name(metadata.get("model", "")) if isinstance(metadata, dict) else "")
            steps += _steps(document.get("results"))
        except ValueError as problem:
            raise ValueError(f"profile {path}: {problem}") from None
    named = sorted(filter(None, models))
    if len(named) > 1:
        raise ValueError(f"profiles {', '.join(paths)}: of different models, {' and '.join(named)}")
    if len(steps) < FEWEST_STEPS:
        raise ValueError(f"profiles {', '.join(paths)}: {len(steps)} results are too few, {FEWEST_STEPS} at least")
    return profile_of(learn(steps), named[0] if named else "", ", ".join(paths))


def _document(path: str) -> Mapping[str, Any]:
    try:
        file = Path(path)
        if file.stat().st_size > _MOST_BYTES:
            raise ValueError(f"profile {path}: has more than {_MOST_BYTES} bytes")
        document = json.loads(file.read_text())
    except OSError as error:
        raise ValueError(f"profile {path}: cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"profile {path}: is no JSON: {error}") from None
    if not isinstance(document, dict):
        raise ValueError(f"profile {path}: is no JSON object")
    return document


def _steps(results: Any) -> Iterator[MeasuredStep]:
    """Steps that would give Llumnix's medians. Raises ValueError."""
    if not isinstance(results, list) or not results:
        raise ValueError("results is no list, or empty")
    if len(results) > _MOST_RESULTS:
        raise ValueError(f"has {len(results)} results, {_MOST_RESULTS} at most")
    for index, result in enumerate(results):
        where = f"results[{index}]"
        if not isinstance(result, dict):
            raise ValueError(f"{where} is no object")
        seconds = _number(f"{where}.p50", result.get("p50")) / 1e3
        if seconds <= 0:
            raise ValueError(f"{where}.p50 is not above 0")
        if "tokens_num" in result:
            (tokens,) = _counts(where, result, ("tokens_num",))
            yield MeasuredStep(tokens, pairs(0, tokens), 0, 0, seconds)
        else:
            batch, length = _counts(where, result, ("batch_size", "tokens_per_request"))
            yield MeasuredStep(0, 0, batch, batch * length, seconds)


def _counts(where: str, result: Mapping[str, Any], names: Iterable[str]) -> list[int]:
    found = []
    for name in names:
        value = _number(f"{where}.{name}", result.get(name))
        if value < 1 or value != int(value) or value > 1 << 30:
            raise ValueError(f"{where}.{name} {value:g} is no whole number from 1 on")
        found.append(int(value))
    return found


def _number(where: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{where} {value!r} is no number")
    return float(value)


def _name(value: Any) -> str:
    if not isinstance(value, str) or len(value) > 1024:
        raise ValueError(f"model {str(value)[:40]!r} is no name")
    return value
