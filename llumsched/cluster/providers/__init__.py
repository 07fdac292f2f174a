# SPDX-License-Identifier: Apache-2.0
"""Who writes which columns.

A `Provider` knows numbers of an instance: what its status says (`status`), what it is (`metadata`), what was sent there
(`in_flight`, kept by `account` or `lrs`). A `RequestProvider` knows numbers of an instance *for a request*: asked once
in a decision, for all instances at a time. Those of other packages come through the entry point group
`llumnix.providers`: the entry point loads a callable without arguments that returns one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol, runtime_checkable

from llumsched.cluster.columns import Cluster, Values
from llumsched.cluster.instance import Instance
from llumsched.extensions import load_values
from llumsched.request import Request

ENTRY_POINTS = "llumnix.providers"
HIT_COLUMN: Final = "kv_cache_hit_len"
"""Tokens of a request's prompt that an instance has in its prefix cache (`llumsched.prefix`). Every decision has this
column: all zeros where nobody knows."""


@runtime_checkable
class Provider(Protocol):
    @property
    def columns(self) -> Sequence[str]:
        """Names of the columns that it owns. Fixed."""
        ...

    def row(self, instance: Instance, before: Instance | None) -> Sequence[float] | None:
        """The numbers of an instance, in the order of `columns`; None if they are as they were `before` (which is the
        same life of the same instance)."""
        ...

    def on_change(self, listener: Callable[[str], None]) -> None:
        """Has `listener` called with the id of an instance whose numbers change without its reporting."""
        ...


@runtime_checkable
class RequestProvider(Protocol):
    """Numbers for a request. One that observes the view, too, hears of instances before it is asked about them."""

    @property
    def columns(self) -> Sequence[str]: ...

    def of_request(self, request: Request, cluster: Cluster) -> Sequence[Values]:
        """Columns for this request, each of the length of `cluster`. Without a Python call for each instance: there may
        be a thousand, and a millisecond for all of the decision."""
        ...


_BUILT_IN: Mapping[str, Callable[[], object]] = {}


def all_request_providers() -> list[RequestProvider]:
    """Providers of installed packages, new ones with each call. Raises ValueError for what is none."""
    return [_made(name, make) for name, make in load_values(ENTRY_POINTS, _BUILT_IN, _fault).items()]


def _fault(name: str, value: object) -> str | None:
    return None if callable(value) else f"is {type(value).__name__}, and cannot be called"


def _made(name: str, make: Callable[[], object]) -> RequestProvider:
    try:
        made = make()
    except Exception as error:
        raise ValueError(f"provider {name}: {type(error).__name__}: {error}") from error
    if not isinstance(made, RequestProvider):
        raise ValueError(f"provider {name} is {type(made).__name__}, without columns or of_request")
    return made
