# SPDX-License-Identifier: Apache-2.0
"""Values that installed packages add under entry point groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any, TypeVar

T = TypeVar("T")


def load_values(group: str, built_in: Mapping[str, T], fault: Callable[[str, object], str | None]) -> dict[str, T]:
    """Values by name: `built_in`, and those of the entry points of `group`.

    Raises ValueError that lists all faults: values that do not load, that `fault` objects to, or whose name is taken.
    """
    values = dict(built_in)
    faults = []
    for entry in entry_points(group=group):
        value: Any = None
        said: str | None
        try:
            value = entry.load()
            said = fault(entry.name, value)
        except Exception as error:  # noqa: BLE001 - whatever a foreign module raises when it is imported
            said = f"does not load: {type(error).__name__}: {error}"
        if said is None and entry.name in values and values[entry.name] is not value:
            said = "has a name that is in use already"
        if said is None:
            values[entry.name] = value
        else:
            faults.append(f"entry point {entry.name} = {entry.value} of {group} {said}")
    if faults:
        raise ValueError("; ".join(faults))
    return values
