# SPDX-License-Identifier: Apache-2.0
"""Which instance takes a request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from llumsched.gateway.backends import Backend, Backends
from llumsched.gateway.errors import InvalidRequest, NoInstance, UnknownModel
from llumsched.gateway.objectives import NOTHING_PREDICTED, Predicted, Tally
from llumsched.gateway.outliers import Ejection
from llumsched.gateway.scheduler_client import SchedulerAnswer
from llumsched.model_memory import AWAY_RETRY_S
from llumsched.request import Request


@dataclass(frozen=True, slots=True)
class Placed:
    asked: Request
    backend: Backend
    answer: SchedulerAnswer | None = None
    """The scheduler's answer, for /release and /report; None if another has placed it."""
    is_fallback: bool = False
    """Whether the scheduler was away."""
    waited_s: float = 0.0
    """Time of waiting for the scheduler, or for an instance."""
    predicted: Predicted = NOTHING_PREDICTED
    dp_rank: int | None = None
    """Rank of the engine among several data-parallel ones behind that API server, by its own count."""


class Placement(ABC):
    """What a placement is told need not be of use to it."""

    @property
    def num_waiting(self) -> int:
        """Requests for which no instance was free when they asked first."""
        return 0

    def block_size(self, model: str) -> int:
        """Tokens of the blocks of a prompt by whose names places are chosen; 0: nobody asks for names."""
        return 0

    @abstractmethod
    async def place(
        self, asked: Request, excluded: Collection[Backend] = (), shunned: Collection[Backend] = (), key: str = ""
    ) -> Placed:
        """A place at none of `excluded`, and at one of `shunned` only if there is no other; `key` is the name of the
        client's key. Raises InvalidRequest, UnknownModel, NoInstance after a bounded wait, or Overloaded if too many
        wait already."""

    @abstractmethod
    async def refusal(self) -> str:
        """The reason why no request would be placed now; empty if one would, of whatever model."""

    def begun(self, placed: Placed) -> None:
        """Notes that the first token has come. Does not wait."""
        return

    def release(self, placed: Placed, *, completed: bool) -> None:
        """Notes that the request has ended there. `completed`: the engine came to an end with it. Does not wait."""
        return

    def report_running(self, running: Iterable[tuple[Placed, int]]) -> None:
        """Notes which requests run, and how many tokens each has, prompt and output. Does not wait."""
        return

    def attained(self, by_model: Mapping[str, Tally]) -> None:
        """Notes how many requests of each model have met their objectives so far, for people to see. Does not wait."""
        return

    def complain(self, avoided: Mapping[Backend, Ejection]) -> None:
        """Notes all instances to which nothing is sent now, and why, for others to know. Does not wait."""
        return

    async def learn(self) -> None:
        """Makes all instances known that can be known, for `/v1/models` and for when nobody can be asked."""
        return

    async def close(self) -> None:
        return


class RoundRobin(Placement):
    """Placement over the instances known here, in turn. Asks nobody."""

    def __init__(self, backends: Backends) -> None:
        self._backends = backends

    async def place(
        self, asked: Request, excluded: Collection[Backend] = (), shunned: Collection[Backend] = (), key: str = ""
    ) -> Placed:
        if not asked.model and self._backends.has_several_models:
            raise InvalidRequest("`model` is needed: several models are served here.")
        backend = self._backends.next_for(asked.model, excluded, shunned)
        if backend is None and not excluded:
            await self._backends.refresh()
            backend = self._backends.next_for(asked.model)
            if backend is None:
                if self._backends.knows(asked.model):
                    raise NoInstance(f"No instance serves `{asked.model}` now.", retry_after_s=AWAY_RETRY_S)
                if len(self._backends):
                    raise UnknownModel(f"The model `{asked.model}` does not exist.")
                raise NoInstance("No instance is known.", retry_after_s=1)
        if backend is None:
            raise NoInstance("No other instance is left to try.", retry_after_s=1)
        return Placed(asked, backend)

    async def refusal(self) -> str:
        if not len(self._backends):
            return "no instance is known"
        avoided = self._backends.avoided()
        if len(avoided) < len(self._backends):
            return ""
        backend, ejection = next(iter(avoided.items()))
        return f"no instance of {len(avoided)} is well; {backend}: {ejection.why}"
