# SPDX-License-Identifier: Apache-2.0
"""The providers, each of which owns some columns.

A `Provider` knows numbers of an instance: its status (`status`), its metadata, the requests sent there (`in_flight`,
kept by `account` or `lrs`). A `RequestProvider` knows numbers *for a request*, asked once per decision for all
instances. Installed packages add some through the entry point group `llumnix.providers`: a callable without arguments
that returns a provider.
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
"""Tokens of a request's prompt in an instance's prefix cache (`llumsched.prefix`). Every decision has this column,
which is zero if unknown."""


@runtime_checkable
class Provider(Protocol):
    @property
    def columns(self) -> Sequence[str]:
        """Names of its columns, which do not change."""
        ...

    def row(self, instance: Instance, before: Instance | None) -> Sequence[float] | None:
        """The numbers of an instance in the order of `columns`; None if they equal those of `before`, the same life of
        the instance."""
        ...

    def on_change(self, listener: Callable[[str], None]) -> None:
        """Calls `listener` with the id of an instance whose numbers change without a report."""
        ...


@runtime_checkable
class RequestProvider(Protocol):
    """Numbers for a request. If it also observes the view, it hears of instances before it is asked about them."""

    @property
    def columns(self) -> Sequence[str]: ...

    def of_request(self, request: Request, cluster: Cluster) -> Sequence[Values]:
        """Columns for this request with the length of `cluster`. Works without a Python call per instance, as a
        decision has a millisecond for a thousand of them."""
        ...


_BUILT_IN: Mapping[str, Callable[[], object]] = {}


def all_request_providers() -> list[RequestProvider]:
    """Providers of installed packages, new ones with each call. Raises ValueError for an invalid one."""
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
