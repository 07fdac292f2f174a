# SPDX-License-Identifier: Apache-2.0
"""The last known activity of an engine.

A request crashes its engine in a step, or while its grammar is compiled. The engine records the requests in its steps
where others can read them after its death; names are hashes of request ids.
"""

from __future__ import annotations

import dataclasses
import hashlib

NAME_BYTES = 8
NOBODY = bytes(NAME_BYTES)


def name_of(request_id: str) -> bytes:
    return hashlib.blake2b(request_id.encode(), digest_size=NAME_BYTES).digest()


@dataclasses.dataclass(frozen=True, slots=True)
class LastSteps:
    """An engine's last record of its activity."""

    under_way: frozenset[bytes] = frozenset()
    """Names of the requests that its model had been given and not returned."""
    compiling: frozenset[bytes] = frozenset()
    """Names of requests whose grammar is being compiled. That may take long and stops no step: it matters for a dead
    engine, not for a silent one."""
    anybody: bool = False
    """Any request of the engine may have been worked on: it was choosing whom to take, or more is not known."""
    began: float = 0.0
    """The time at which the model was given the oldest batch under way, in seconds of the machine's monotonic clock."""
    on_trial: bytes = NOBODY
    leaving: bool = False
    """True if it was ending: a drain, or a signal."""

    def had(self, request_id: str) -> bool:
        """True if the request may be why the engine stopped."""
        return self.anybody or name_of(request_id) in self.under_way | self.compiling

    def tried(self, request_id: str) -> bool:
        """True if the engine records that the request was on trial there."""
        return self.on_trial == name_of(request_id)

    def tried_another(self, request_id: str) -> bool:
        """True if another request was on trial in these steps, which then is to blame."""
        tried = self.on_trial
        return tried not in (NOBODY, name_of(request_id)) and (self.anybody or tried in self.under_way | self.compiling)


UNKNOWN = LastSteps(anybody=True)
"""Steps of an engine whose record cannot be read."""
