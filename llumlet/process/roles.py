# SPDX-License-Identifier: Apache-2.0
"""Who may call what of a llumlet, or of a scheduler's CMS."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final


class Role(StrEnum):
    PEER = "peer"
    """An instance: it moves requests to others and takes theirs, starts lost ones again, and reports."""
    OPERATOR = "operator"
    """A person, a scheduler, a rescheduler: has requests moved, instances drained, and looks at everything."""
    READER = "reader"
    """Looks at everything, and changes nothing."""


ALL: Final = frozenset(Role)

_PEERS: Final = frozenset({Role.PEER})
_OPERATORS: Final = frozenset({Role.OPERATOR})
_PEERS_AND_OPERATORS: Final = _PEERS | _OPERATORS
_LOOKERS: Final = frozenset({Role.OPERATOR, Role.READER})

MAY_CALL: Final[Mapping[str, frozenset[Role]]] = {
    # MigrateIn has the destination ask the source.
    "/llumlet.Llumlet/Migrate": _PEERS_AND_OPERATORS,
    "/llumlet.Llumlet/MigrateIn": _OPERATORS,
    # An origin calls off a request that it has started anew elsewhere.
    "/llumlet.Llumlet/Abort": _PEERS_AND_OPERATORS,
    "/llumlet.Llumlet/AbortMigrateIn": _OPERATORS,
    "/llumlet.Llumlet/Drain": _OPERATORS,
    "/llumlet.Llumlet/GetInstanceStatus": ALL,
    "/llumlet.Llumlet/GetInstanceMetadata": ALL,
    "/llumlet.Llumlet/ListRequests": _LOOKERS,
    "/llumlet.Llumlet/WatchCache": _LOOKERS,
    "/llumlet.Cms/Report": _PEERS,
    "/llumlet.Cms/Watch": _LOOKERS,
    "/llumlet.Cms/Peers": ALL,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": ALL,
}
"""Roles by gRPC's name of the method. What is not named, the service `Peer` apart, is for nobody of one role only."""

_PEER_SERVICE: Final = "/llumlet.Peer/"


def may_call(method: str, roles: frozenset[Role]) -> bool:
    """Whether a token of these roles, one at least, opens `method`. One that has all roles opens everything."""
    if method.startswith(_PEER_SERVICE):
        return Role.PEER in roles
    return roles == ALL or bool(roles & MAY_CALL.get(method, frozenset()))
