# SPDX-License-Identifier: Apache-2.0
"""The adopting half of a rescue: one machine per attempt to bring a lost request's KV cache from an engine that hangs.

The request's ownership is not at stake here: its origin has barred the former owner before it asked anybody to go on.
All that can be lost is the KV cache, and then the request is computed again from its tokens (`WITHOUT`). Two things are
never done: bytes are not published unless the holder says afterwards that the blocks were the request's until then,
and blocks are not given back while a mover may write them. A copy that does not end leaves them draining, and the
request has to come again, perhaps elsewhere: `DRAINING` is an answer, long before `ABANDONED` gives the blocks back.

    CLAIMING → RESERVING → COPYING → ENDING → FETCHED
    (anything fails) → WITHOUT        (the copy fails) → DRAINING → ABANDONED
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec

from llumlet.protocol.machine import Machine, install, rows

CLAIM_SECONDS = 1.0
"""Time for an answer of the holder's llumlet. A process whose interpreter is stuck does not answer at all."""
PULL_SECONDS = 2.5


class State(enum.StrEnum):
    NEW = "new"
    CLAIMING = "claiming"
    RESERVING = "reserving"
    COPYING = "copying"
    ENDING = "ending"
    DRAINING = "draining"
    FETCHED = "fetched"
    WITHOUT = "without"
    ABANDONED = "abandoned"


# Events


class RescueStarted(msgspec.Struct, frozen=True):
    """Begin."""


class ClaimGranted(msgspec.Struct, frozen=True):
    """`num_blocks` of the holder have final KV of the first `computed_tokens` tokens, after this output."""

    computed_tokens: int
    num_blocks: int
    output_token_ids: Sequence[int]


class ClaimFailed(msgspec.Struct, frozen=True):
    """The claim was refused, or there was no answer in time."""

    detail: str = ""


class RoomTaken(msgspec.Struct, frozen=True):
    """Blocks are held, the first `hit_blocks` of them with the request's KV from the prefix cache."""

    hit_blocks: int


class RoomRefused(msgspec.Struct, frozen=True):
    """The holder's memory cannot be read from here, or there is no room. Nothing is held."""

    detail: str = ""


class CopyDone(msgspec.Struct, frozen=True):
    """Every mover has read its last byte."""

    num_bytes: int


class CopyFailed(msgspec.Struct, frozen=True):
    """The copy failed, or took too long. Movers may go on writing."""

    detail: str = ""


class CopyQuiet(msgspec.Struct, frozen=True):
    """No mover writes any more."""


class ClaimSettled(msgspec.Struct, frozen=True):
    """Tells if the holder's blocks were the request's until it was asked; a late answer counts as no."""

    intact: bool


# Effects


class AskClaim(msgspec.Struct, frozen=True):
    """Answered by ClaimGranted or ClaimFailed, in so many seconds at the latest."""

    seconds: float


class TakeRoom(msgspec.Struct, frozen=True):
    """Answered by RoomTaken or RoomRefused."""


class CopyBlocks(msgspec.Struct, frozen=True):
    """Blocks `[from_block, to_block)` of the holder's, to the same places here.

    Answered by CopyDone or CopyFailed, in so many seconds at the latest.
    """

    from_block: int
    to_block: int
    seconds: float


class StopCopy(msgspec.Struct, frozen=True):
    """Answered by CopyQuiet, however long that takes."""


class EndClaim(msgspec.Struct, frozen=True):
    """Answered by ClaimSettled, in so many seconds at the latest."""

    seconds: float


class FreeRoom(msgspec.Struct, frozen=True):
    """Give the blocks back. No mover can write them."""


RescueEvent = (
    RescueStarted
    | ClaimGranted
    | ClaimFailed
    | RoomTaken
    | RoomRefused
    | CopyDone
    | CopyFailed
    | CopyQuiet
    | ClaimSettled
)
RescueEffect = AskClaim | TakeRoom | CopyBlocks | StopCopy | EndClaim | FreeRoom


class Rescue(Machine[State, RescueEvent, RescueEffect]):
    """The fetching of a KV cache: of a request with `num_tokens` tokens, of which its client has received the output
    tokens `delivered`."""

    def __init__(self, num_tokens: int, delivered: Sequence[int], block_size: int) -> None:
        super().__init__(State.NEW)
        self._num_tokens = num_tokens
        self._delivered = list(delivered)
        self._block_size = block_size
        self.computed_tokens = 0
        """Number of tokens of which the KV cache is here, once it is fetched."""
        self.copied_bytes = 0
        self.detail = ""
        """Why the request comes without it."""

    @property
    def answered(self) -> bool:
        """True if the adoption can continue or must be refused: the state tells."""
        return self.state in (State.FETCHED, State.WITHOUT, State.DRAINING, State.ABANDONED)

    def _computed(self, event: ClaimGranted) -> int:
        """The KV cache of its last token is computed here."""
        return min(event.computed_tokens, self._num_tokens - 1)

    def _why_useless(self, event: ClaimGranted) -> str:
        """Empty if what the holder has is of use."""
        if list(event.output_token_ids[: len(self._delivered)]) != self._delivered:
            return "the holder's tokens are not those that the client has received"
        computed = self._computed(event)
        if not 0 < computed <= event.num_blocks * self._block_size:
            return f"{computed} tokens in {event.num_blocks} blocks"
        return ""

    def _useless(self, event: ClaimGranted) -> bool:
        return bool(self._why_useless(event))

    def _decline(self, event: ClaimGranted) -> list[RescueEffect]:
        self.detail = self._why_useless(event)
        return [EndClaim(CLAIM_SECONDS)]

    def _take_room(self, event: ClaimGranted) -> list[RescueEffect]:
        self.computed_tokens = self._computed(event)
        return [TakeRoom()]

    def _do_without(self, event: ClaimFailed) -> list[RescueEffect]:
        self.detail = event.detail
        return []

    def _do_without_room(self, event: RoomRefused) -> list[RescueEffect]:
        self.detail = event.detail
        return [EndClaim(CLAIM_SECONDS)]

    @property
    def _last_block(self) -> int:
        return -(-self.computed_tokens // self._block_size)

    def _all_there(self, event: RoomTaken) -> bool:
        return event.hit_blocks >= self._last_block

    def _end(self, event: RoomTaken) -> list[RescueEffect]:
        self.computed_tokens = max(self.computed_tokens, event.hit_blocks * self._block_size)
        return [EndClaim(CLAIM_SECONDS)]

    def _copy(self, event: RoomTaken) -> list[RescueEffect]:
        return [CopyBlocks(event.hit_blocks, self._last_block, PULL_SECONDS)]

    def _ask_whether_intact(self, event: CopyDone) -> list[RescueEffect]:
        self.copied_bytes = event.num_bytes
        return [EndClaim(CLAIM_SECONDS)]

    def _give_up(self, event: CopyFailed) -> list[RescueEffect]:
        self.detail = event.detail
        return [StopCopy(), EndClaim(CLAIM_SECONDS)]

    def _intact(self, event: ClaimSettled) -> bool:
        return event.intact

    def _discard(self, event: ClaimSettled) -> list[RescueEffect]:
        self.detail = "the holder could not keep the KV cache"
        return [FreeRoom()]


_S = State

install(
    Rescue,
    [
        rows(_S.NEW, RescueStarted, _S.CLAIMING, [AskClaim(CLAIM_SECONDS)]),
        rows(_S.CLAIMING, ClaimGranted, _S.WITHOUT, Rescue._decline, when=Rescue._useless),
        rows(_S.CLAIMING, ClaimGranted, _S.RESERVING, Rescue._take_room),
        rows(_S.CLAIMING, ClaimFailed, _S.WITHOUT, Rescue._do_without),
        rows(_S.RESERVING, RoomTaken, _S.ENDING, Rescue._end, when=Rescue._all_there),
        rows(_S.RESERVING, RoomTaken, _S.COPYING, Rescue._copy),
        rows(_S.RESERVING, RoomRefused, _S.WITHOUT, Rescue._do_without_room),
        rows(_S.COPYING, CopyDone, _S.ENDING, Rescue._ask_whether_intact),
        rows(_S.COPYING, CopyFailed, _S.DRAINING, Rescue._give_up),
        rows(_S.ENDING, ClaimSettled, _S.FETCHED, when=Rescue._intact),
        rows(_S.ENDING, ClaimSettled, _S.WITHOUT, Rescue._discard),
        rows(_S.DRAINING, CopyQuiet, _S.ABANDONED, [FreeRoom()]),
        rows((_S.WITHOUT, _S.DRAINING, _S.ABANDONED), ClaimSettled, None, late=True),
    ],
)
