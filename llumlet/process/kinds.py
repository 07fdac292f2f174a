# SPDX-License-Identifier: Apache-2.0
"""Kinds of setting values: the conversion of text, and its faults.

Text comes from a command line, a variable or a file. A reader raises ValueError with a message that follows the
setting's name: `--port` + `'seventy' is not a port`. Standard library only, as parsers are built early.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Generic, TypeVar, cast

T = TypeVar("T")

_INFINITE: Final = math.inf
_DURATION: Final = re.compile(r"(.*?)(ms|s|m|h|)", re.DOTALL)
_UNITS: Final = {"ms": 1e-3, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0}


class Faulty(ValueError):
    """An error with several faults, a sentence each."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("; ".join(faults))
        self.faults = faults


@dataclass(frozen=True, slots=True)
class Kind(Generic[T]):
    """A reader of values: `read` takes the text, or all texts of a `repeated` setting."""

    read: Callable[[Any], T]
    metavar: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of `add_argument`."""
    repeated: bool = False


def text(metavar: str) -> Kind[str]:
    return Kind(str, metavar)


def _read_switch(value: str) -> bool:
    if value.lower() not in ("true", "false"):
        raise ValueError(f"{value!r} is neither true nor false")
    return value.lower() == "true"


SWITCH: Final = Kind(_read_switch, "BOOL", {"nargs": "?", "const": "true"})
"""A switch: `--name`, `--name=true` or `--name=false`. Takes the next word: nothing for commands with positionals."""
MARK: Final = Kind(_read_switch, options={"action": argparse.BooleanOptionalAction})
"""A switch: `--name` or `--no-name`; true or false in a variable or a file."""


def one_of(options: Iterable[T], *, or_file: str = "") -> Kind[T]:
    """A word of `options`, in upper or lower case; or a path that ends so, if options are texts."""
    by_name = {str(option).lower(): option for option in options}

    def read(value: str) -> T:
        if or_file and value.endswith(or_file):
            return cast(T, value)
        if value.lower() not in by_name:
            file = f", nor a path of a {or_file} file" if or_file else ""
            raise ValueError(f"{value!r} is not one of {', '.join(map(str, by_name.values()))}{file}")
        return by_name[value.lower()]

    return Kind(read, "|".join(map(str, by_name.values())))


def number(
    metavar: str = "N", *, at_least: float = -_INFINITE, above: float = -_INFINITE, at_most: float = _INFINITE
) -> Kind[float]:
    """A finite number."""

    def read(value: str) -> float:
        found = _finite(value, value)
        _require(at_least <= found <= at_most and found > above, at_least, above, at_most)
        return found

    return Kind(read, metavar)


def integer(metavar: str = "N", *, at_least: float = -_INFINITE, at_most: float = _INFINITE) -> Kind[int]:
    def read(value: str) -> int:
        try:
            found = int(value)
        except ValueError:
            found = int(_finite(value, value))
            if found != float(value):
                raise ValueError("must be a whole number") from None
        _require(at_least <= found <= at_most, at_least, -_INFINITE, at_most)
        return found

    return Kind(read, metavar)


def seconds(*, at_least: float = 0.0, above: float = -_INFINITE) -> Kind[float]:
    """A time written as `5`, `500ms`, `3m` or `1h`; its value is in seconds."""

    def read(value: str) -> float:
        digits, unit = _DURATION.fullmatch(value).groups()  # type: ignore[union-attr]  # matches everything
        found = _finite(digits, value, "a duration like 5, 500ms or 3m") * _UNITS[unit]
        _require(found >= at_least and found > above, at_least, above, _INFINITE)
        return found

    return Kind(read, "TIME")


def port(at_least: int = 0) -> Kind[int]:
    """A port; 0 is any free one."""

    def read(value: str) -> int:
        if not (value.isascii() and value.isdigit() and at_least <= int(value) < 65536):
            raise ValueError(f"{value!r} is not a port")
        return int(value)

    return Kind(read, "PORT")


def several(kind: Kind[T], metavar: str) -> Kind[tuple[T, ...]]:
    """Values separated by commas, without repetitions; the faults of all of them are reported."""

    def read(value: str) -> tuple[T, ...]:
        found: dict[T, None] = {}
        faults: list[str] = []
        for part in filter(None, map(str.strip, value.split(","))):
            try:
                found[kind.read(part)] = None
            except ValueError as error:
                faults += faults_of(error)
        if faults:
            raise Faulty(faults)
        return tuple(found)

    return Kind(read, metavar)


def repeatable(kind: Kind[T]) -> Kind[T]:
    """A list with commas that may be given several times, as one list."""
    return Kind(lambda texts: kind.read(",".join(texts)), kind.metavar, repeated=True)


def file(check: Callable[[str], object]) -> Kind[str]:
    """A path whose file `check` accepts; it raises ValueError otherwise."""

    def read(path: str) -> str:
        check(path)
        return path

    return Kind(read, "FILE")


def is_file(path: str) -> None:
    if not Path(path).is_file():
        raise ValueError(f"{path!r} is not a file")


def faults_of(error: ValueError) -> list[str]:
    return error.faults if isinstance(error, Faulty) else [str(error)]


def _finite(digits: str, value: str, what: str = "a number") -> float:
    try:
        found = float(digits)
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise ValueError(f"{value!r} is not {what}")
    return found


def _require(fits: bool, at_least: float, above: float, at_most: float) -> None:
    if fits:
        return
    if at_most < _INFINITE:
        low = f"above {above:g} and at most" if above > -_INFINITE else f"from {at_least:g} to"
        raise ValueError(f"must be {low} {at_most:g}")
    if above == 0:
        raise ValueError("must be positive")
    raise ValueError("must not be negative" if at_least == 0 else f"must be at least {at_least:g}")
