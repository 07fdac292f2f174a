# SPDX-License-Identifier: Apache-2.0
"""The events and effects of a replay: the alphabet of `replay`."""

from __future__ import annotations

import enum

import msgspec

from llumlet.protocol.effects import ClearTimer, SetTimer
from llumlet.protocol.errors import Reason
from llumlet.protocol.events import TimerFired
from llumlet.protocol.ids import Epoch
from llumlet.protocol.origin.owners import Owner
from llumlet.protocol.origin.streams import Stream

# Events


class ReplayBegun(msgspec.Struct, frozen=True):
    """The owner is lost, and all former owners are barred."""


class TurnCame(msgspec.Struct, frozen=True):
    """The request may be sent somewhere."""


class CachedKnown(msgspec.Struct, frozen=True):
    """Tokens of the stream in engines' prefix caches, by address, without engines that have not answered."""

    num_tokens: dict[str, int]


class PlaceCame(msgspec.Struct, frozen=True):
    """The request may go to the engine that was chosen."""


class Identified(msgspec.Struct, frozen=True):
    """The id of the engine that listens there."""

    instance: str
    incarnation: str


class Adopted(msgspec.Struct, frozen=True):
    """The engine has the request."""

    instance: str
    incarnation: str


class AdoptRefused(msgspec.Struct, frozen=True):
    """The engine has not taken it, and will not under this attempt."""

    reason: Reason
    detail: str = ""


class NotSent(msgspec.Struct, frozen=True):
    """The request could not be sent from here."""

    detail: str = ""


class AnswerLost(msgspec.Struct, frozen=True):
    """No answer: whether the engine has the request is not known. `broken`: nor whether it is still there."""

    broken: bool
    detail: str = ""


class GivenUpThere(msgspec.Struct, frozen=True):
    """The engine that was asked has ended the request, unasked; that has come before its answer."""


class GoneKnown(msgspec.Struct, frozen=True):
    """Tells if the process of an engine that did not answer is gone."""

    gone: bool


class StreamEnded(msgspec.Struct, frozen=True):
    """The request has no client any more."""


# Effects. An answer names the request and the attempt; one to a former attempt is none.


class AskCached(msgspec.Struct, frozen=True):
    """Ask the llumlets at these addresses, all at once, how much of the stream their engines have cached. Answered by
    CachedKnown, in so many seconds at the latest."""

    stream: Stream
    attempt: int
    addresses: list[str]
    delivered: list[int]
    seconds: float

    @property
    def request_id(self) -> str:
        return self.stream.request_id


class Identify(msgspec.Struct, frozen=True):
    """Answered by Identified, AdoptRefused or AnswerLost, in so many seconds at the latest."""

    request_id: str
    attempt: int
    address: str
    seconds: float


class Adopt(msgspec.Struct, frozen=True, kw_only=True):
    """Ask the llumlet at `address` to go on with the request after its delivered tokens.

    Answered by Adopted, AdoptRefused, NotSent or AnswerLost, in so many seconds at the latest.
    """

    stream: Stream
    attempt: int
    address: str
    epoch: Epoch
    delivered: list[int]
    digest: str
    weight_version: str
    trial_tokens: int
    holder: Owner | None
    seconds: float

    @property
    def request_id(self) -> str:
        return self.stream.request_id


class CallOff(msgspec.Struct, frozen=True):
    """Ends an attempt whose answer is not awaited any more."""

    request_id: str
    attempt: int


class AskWhetherGone(msgspec.Struct, frozen=True):
    """Answered by GoneKnown."""

    request_id: str
    attempt: int
    address: str


class AbortAt(msgspec.Struct, frozen=True):
    """Aborts a request that an engine took although it is not wanted any more."""

    request_id: str
    address: str


class Dismiss(msgspec.Struct, frozen=True):
    """Tell an engine that may have the request that its epoch counts no more."""

    owner: Owner


class GiveUp(msgspec.Struct, frozen=True):
    """The client gets an error."""


class Level(enum.IntEnum):
    """The level of a log line, as in `logging`."""

    INFO = 20
    WARNING = 30
    ERROR = 40


class Log(msgspec.Struct, frozen=True):
    text: str
    level: Level = Level.INFO


ReplayEvent = (
    ReplayBegun
    | TurnCame
    | CachedKnown
    | PlaceCame
    | Identified
    | Adopted
    | AdoptRefused
    | NotSent
    | AnswerLost
    | GivenUpThere
    | GoneKnown
    | StreamEnded
    | TimerFired
)
ReplayEffect = (
    SetTimer | ClearTimer | AskCached | Identify | Adopt | CallOff | AskWhetherGone | AbortAt | Dismiss | GiveUp | Log
)
