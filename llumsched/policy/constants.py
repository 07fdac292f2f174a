# SPDX-License-Identifier: Apache-2.0
"""Values for constants in policies' files, from the command line, variables or a settings file."""

from __future__ import annotations

from typing import Final

from llumlet.process import kinds
from llumlet.process.kinds import Faulty, Kind

Constants = tuple[tuple[str, float], ...]
"""Names and values, without repeated names."""


def _read(texts: list[str]) -> Constants:
    found: dict[str, float] = {}
    faults = []
    for part in filter(None, map(str.strip, ",".join(texts).split(","))):
        name, _, text = map(str.strip, part.partition("="))
        if not (name.isidentifier() and text):
            faults.append(f"{part!r} is not NAME=VALUE")
            continue
        try:
            value = kinds.number().read(text)
        except ValueError as error:
            faults.append(f"{name}: {error}")
            continue
        if found.setdefault(name, value) != value:
            faults.append(f"{name}: both {found[name]:g} and {value:g}")
    if faults:
        raise Faulty(faults)
    return tuple(found.items())


POLICY_CONSTANTS: Final[Kind[Constants]] = Kind(_read, "NAME=VALUE[,NAME=VALUE…]", repeated=True)
"""A list with commas, repeatable."""
FLAG: Final = "--policy-constant"
