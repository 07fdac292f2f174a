# SPDX-License-Identifier: Apache-2.0
"""What an engine was doing when it was last heard of, as far as that can be known.

A request that makes its engine die does so in a step, or while its grammar is compiled. The engine writes down who is
in its steps where others can read it after its death; a name there is a hash of the request's id.
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
    """What an engine was doing when it wrote its record last."""

    under_way: frozenset[bytes] = frozenset()
    """Names of the requests that its model had been given and not returned."""
    compiling: frozenset[bytes] = frozenset()
    """Names of those whose grammar was not compiled yet. That takes long at times and stops no step: it says something
    of an engine that is dead, and nothing of one that is silent."""
    anybody: bool = False
    """Any request of the engine may have been worked on: it was choosing whom to take, or more is not known."""
    began: float = 0.0
    """The time at which the model was given the oldest batch under way, in seconds of the machine's monotonic clock."""
    on_trial: bytes = NOBODY
    leaving: bool = False
    """Whether it was on its way out: a drain, or a signal to end."""

    def had(self, request_id: str) -> bool:
        """Whether the request may be why the engine went no further."""
        return self.anybody or name_of(request_id) in self.under_way | self.compiling

    def tried(self, request_id: str) -> bool:
        """Whether the engine says that it was on trial there."""
        return self.on_trial == name_of(request_id)

    def tried_another(self, request_id: str) -> bool:
        """Whether somebody else was on trial in these steps: then that is why."""
        tried = self.on_trial
        return tried not in (NOBODY, name_of(request_id)) and (self.anybody or tried in self.under_way | self.compiling)


UNKNOWN = LastSteps(anybody=True)
"""Steps of an engine whose record cannot be read."""
