# SPDX-License-Identifier: Apache-2.0
"""The choice of an instance for a request."""

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
    """The scheduler's answer, for /release and /report; None if it was placed without one."""
    is_fallback: bool = False
    """True if no scheduler answered."""
    waited_s: float = 0.0
    """Time spent waiting for the scheduler or for an instance."""
    predicted: Predicted = NOTHING_PREDICTED
    dp_rank: int | None = None
    """The data-parallel rank to use behind that API server, by its own count."""


class Placement(ABC):
    """The interface of a placement. An implementation may ignore what it is told."""

    @property
    def num_waiting(self) -> int:
        """Requests that had to wait for an instance."""
        return 0

    def block_size(self, model: str) -> int:
        """Tokens per block for the names of a prompt's blocks; 0 if they are not needed."""
        return 0

    @abstractmethod
    async def place(
        self, asked: Request, excluded: Collection[Backend] = (), shunned: Collection[Backend] = (), key: str = ""
    ) -> Placed:
        """Chooses an instance outside of `excluded`, and one of `shunned` only if there is no other; `key` is the name
        of the client's key. Raises InvalidRequest, UnknownModel, NoInstance after a bounded wait, or Overloaded if too
        many are waiting."""

    @abstractmethod
    async def refusal(self) -> str:
        """The reason why no request could be placed now; empty if one could."""

    def begun(self, placed: Placed) -> None:
        """Notes the first token. Does not block."""
        return

    def release(self, placed: Placed, *, completed: bool) -> None:
        """Notes that the request has ended there. `completed`: the engine finished it. Does not block."""
        return

    def report_running(self, running: Iterable[tuple[Placed, int]]) -> None:
        """Notes the running requests, with their tokens of prompt and output. Does not block."""
        return

    def attained(self, by_model: Mapping[str, Tally]) -> None:
        """Notes how many requests of each model met their objectives so far, for display. Does not block."""
        return

    def complain(self, avoided: Mapping[Backend, Ejection]) -> None:
        """Notes the instances that get nothing now, and why, for other gateways. Does not block."""
        return

    async def learn(self) -> None:
        """Learns all instances, for `/v1/models` and for times without a scheduler."""
        return

    async def close(self) -> None:
        return


class RoundRobin(Placement):
    """Placement over the known instances in turn, without a scheduler."""

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
