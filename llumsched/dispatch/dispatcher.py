# SPDX-License-Identifier: Apache-2.0
"""The dispatcher: places requests by the policy over the table, and keeps account of them."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from msgspec.structs import replace

from llumlet.protocol.infer_type import InferType
from llumlet.protocol.urgency import is_urgent
from llumsched.cluster.instance import Instance
from llumsched.cluster.lost import FAILS_S
from llumsched.cluster.providers import HIT_COLUMN, RequestProvider
from llumsched.cluster.providers.ledger import Ledger
from llumsched.cluster.providers.step_models import StepModels
from llumsched.cluster.snapshot import Snapshot
from llumsched.cluster.table import standard_table
from llumsched.cluster.view import Observer, View
from llumsched.dispatch.complaints import Complaints
from llumsched.dispatch.warmth import Warmth
from llumsched.foresight.moved_on import Forecast
from llumsched.latency.profile import Profile
from llumsched.model_memory import ModelMemory
from llumsched.policy import filters as f
from llumsched.policy import pipeline
from llumsched.policy.candidates import Candidates, Context
from llumsched.policy.document import Policy
from llumsched.policy.pipeline import Decision
from llumsched.policy.selectors import Draw
from llumsched.prefix.hits import PrefixHits
from llumsched.request import Request

_REMEMBER_S = 10.0
_MOST_REMEMBERED = 100_000


class NotPlacedKind(StrEnum):
    """Reasons why a request was not placed, as labels of `scheduler_scheduling_failed_total`."""

    ENDPOINT_NOT_FOUND = "endpoint_not_found"
    """No instance serves the model, now or recently."""
    MODEL_AWAY = "model_away"
    """No instance serves the model now, but one did recently, or it is configured."""
    MODEL_NEEDED = "model_needed"
    """The request names no model, and instances serve several."""
    NO_AVAILABLE_ENDPOINT = "no_available_endpoint"
    NO_ENDPOINT_IN_TIME = "no_endpoint_in_time"
    """An instance would take the request if it might not wait."""
    NO_MATCH_INFER_TYPE = "no_match_infer_type"
    CMS_NOT_AVAILABLE = "cms_not_available"
    """No instance is known, and the store cannot be reached."""
    PROMPT_TOO_LONG = "prompt_too_long"
    """No instance of the model can hold the prompt."""
    WARMING = "warming"
    """The scheduler does not know enough instances yet."""


class NotPlaced(Exception):
    def __init__(self, kind: NotPlacedKind, said: str) -> None:
        super().__init__(said)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Assignment:
    infer_type: InferType
    instance: Instance
    fallback: bool
    num_hit_tokens: int = 0
    """Tokens of the prompt known to be in the instance's prefix cache."""
    predicted: dict[str, float] = field(default_factory=dict)
    """The predictions there, as in `Candidates.predicted`."""


@dataclass(frozen=True, slots=True)
class Knowledge:
    """The dispatcher's knowledge beside the reports of instances and the sent requests."""

    profiles: Sequence[Profile] = ()
    """Step models for engines without measured steps."""
    hits: PrefixHits | None = None
    """Contents of the instances' prefix caches."""
    providers: Sequence[RequestProvider] = ()
    """Further columns, asked for with each request."""
    models: Collection[str] = ()
    """Models that are known before an instance serves them."""
    warms_up_s: float = 0.0
    """Time without a new instance before the first choice."""
    forecast: Forecast | None = None
    """Adds columns to the table by which it can be moved on to now."""
    forward: bool = False
    """True if decisions see the table moved on, which needs a forecast."""


_NOTHING_ELSE: Final = Knowledge()


class Dispatcher:
    """Places requests one after the other on one event loop: each decision sees the earlier placements."""

    def __init__(
        self,
        view: View,
        policy: Policy,
        ledger: Ledger[Any],
        clock: Callable[[], float],
        draw: random.Random | None = None,
        knowledge: Knowledge = _NOTHING_ELSE,
    ) -> None:
        self.view, self.policy, self.ledger, self.hits = view, policy, ledger, knowledge.hits
        self._lost_s = FAILS_S if policy.staleness_s else 0.0
        self._forecast, self._forward = knowledge.forecast, knowledge.forward
        self.step_models = StepModels(clock, knowledge.profiles)
        outlooks = [self._forecast.outlook] if self._forecast else []
        self.table = standard_table(ledger.in_flight, self.step_models, *outlooks)
        self.models = ModelMemory(clock, knowledge.models)
        self.table.on_unserved = self.models.served
        self._providers: Sequence[RequestProvider] = (*((self.hits,) if self.hits else ()), *knowledge.providers)
        self._lost: tuple[tuple[Instance, ...], Snapshot | None] = (), None
        """Lost instances, and their columns."""
        self._clock = clock
        self._random = draw or random.Random()
        self._last: OrderedDict[tuple[InferType, str], str] = OrderedDict()
        self._placed: OrderedDict[tuple[str, str], tuple[float, frozenset[str]]] = OrderedDict()
        """Instances that a gateway's request went to lately: a second try goes elsewhere, if there is an elsewhere."""
        self.complaints = Complaints(clock)
        self.warmth = Warmth(clock, knowledge.warms_up_s)
        observing = [one for one in self._providers if isinstance(one, Observer)]
        senders = [self._forecast.senders] if self._forecast else []
        self.close = view.observe(
            ledger, self.step_models, *outlooks, *senders, *observing, self.table, self.complaints, self.warmth
        )

    def schedule(
        self,
        request: Request,
        stages: tuple[InferType, ...] = (InferType.NEUTRAL,),
        gateway_id: str = "",
        tried: frozenset[str] | None = None,
    ) -> list[Assignment]:
        """Places a request at an instance for each stage, or at none if a stage finds none. Raises NotPlaced.

        `tried`: ids of the instances that failed the request. None: its gateway does not tell, and a repeated id counts
        as a retry.
        """
        if warming := self._warming:
            raise NotPlaced(NotPlacedKind.WARMING, warming)
        if not request.model and len(self.table.base_models) > 1:
            raise NotPlaced(NotPlacedKind.MODEL_NEEDED, "instances serve several models")
        placements: list[Assignment] = []
        for stage in stages:
            (decision,) = self.decide(request, (stage,), gateway_id, tried).values()
            if decision.row is None:
                self.release(request.id, {one.instance.id for one in placements}, gateway_id)
                raise self._not_placed(decision, self._unhurried(request, stage, gateway_id, tried))
            num_hit_tokens = int(decision.candidates[HIT_COLUMN][decision.row]) if self.hits else 0
            instance = self.table.instances[decision.row]
            predicted = decision.candidates.predicted(decision.row)
            placed = Assignment(stage, instance, decision.fallback, num_hit_tokens, predicted)
            placements.append(placed)
            self.ledger.dispatched(
                request.id,
                placed.instance.id,
                placed.infer_type,
                request.prompt_num_tokens,
                gateway_id,
                placed.num_hit_tokens,
                urgent=is_urgent(request.priority),
            )
        for placed in placements:
            if self._forecast is not None:
                self._forecast.senders.sent()
            if self.hits is not None:
                self.hits.sent(request, placed.instance.id)
            self._last[placed.infer_type, request.model] = placed.instance.id
            if request.id and tried is None:
                self._remember(request, placed, gateway_id)
        self._forget()
        return placements

    def decide(
        self,
        request: Request,
        stages: tuple[InferType, ...] = (InferType.NEUTRAL,),
        gateway_id: str = "",
        tried: frozenset[str] | None = None,
    ) -> Mapping[InferType, Decision]:
        """The decisions that `schedule` would make now. Changes nothing. Raises NotPlaced if no policy can run."""
        if not self.view and not self.view.connected:
            raise NotPlaced(NotPlacedKind.CMS_NOT_AVAILABLE, "cms not available")
        context = Context(
            self._clock() - self.view.age_s,
            request,
            self._earlier_tries(request, gateway_id) if tried is None else tried,
            self.complaints.of(gateway_id),
            self._lost_columns(),
        )
        forecast = self._forecast if self._forward else None
        cluster = self.table if forecast is None else forecast.of(self.table, context.now_s)
        candidates = Candidates(cluster, context, self._providers, reported=None if forecast is None else self.table)
        decisions = {}
        for infer_type in stages:
            stage = self.policy.stages.get(infer_type)
            if stage is None:
                raise NotPlaced(
                    NotPlacedKind.NO_MATCH_INFER_TYPE, f"policy {self.policy.name} places no {infer_type} requests"
                )
            last = self._last.get((infer_type, request.model))
            decisions[infer_type] = pipeline.run(stage, candidates, Draw(self._random, last))
        return decisions

    def refusal(self) -> str:
        """The reason why no request would be placed now; "" if one would."""
        if warming := self._warming:
            return warming
        try:
            (decision,) = self.decide(Request()).values()
        except NotPlaced as error:
            return str(error)
        return str(self._not_placed(decision)) if decision.row is None else ""

    @property
    def _warming(self) -> str:
        if not self.warmth.is_warming or not self.view.connected:
            return ""
        return f"warming: {len(self.view)} instances are known so far"

    def release(self, request_id: str, instance_ids: Collection[str], gateway_id: str = "") -> None:
        """Takes back a request that did not arrive or has ended. Idempotent."""
        self.ledger.released(request_id, instance_ids, gateway_id)

    def _earlier_tries(self, request: Request, gateway_id: str) -> frozenset[str]:
        until_s, tried = self._placed.get((gateway_id, request.id), (0.0, frozenset()))
        return tried if until_s > self._clock() else frozenset()

    def _lost_columns(self) -> Snapshot | None:
        lost = self.view.lost.within(self._lost_s)
        if lost != self._lost[0]:
            self._lost = lost, self.table.measured(lost) if lost else None
        return self._lost[1]

    def _remember(self, request: Request, placed: Assignment, gateway_id: str) -> None:
        tried = self._earlier_tries(request, gateway_id) | {placed.instance.id}
        self._placed[gateway_id, request.id] = (self._clock() + _REMEMBER_S, tried)
        self._placed.move_to_end((gateway_id, request.id))

    def _forget(self) -> None:
        while len(self._last) > _MOST_REMEMBERED:
            self._last.popitem(last=False)
        now_s = self._clock()
        while self._placed and (len(self._placed) > _MOST_REMEMBERED or next(iter(self._placed.values()))[0] <= now_s):
            self._placed.popitem(last=False)

    def _unhurried(
        self, request: Request, stage: InferType, gateway_id: str, tried: frozenset[str] | None
    ) -> Decision | None:
        """The decision for a refused request if it might not wait; None if that fails too."""
        if not request.may_wait:
            return None
        (decision,) = self.decide(replace(request, may_wait=False), (stage,), gateway_id, tried).values()
        return decision if decision.row is not None else None

    def _not_placed(self, decision: Decision, unhurried: Decision | None = None) -> NotPlaced:
        """The reason for a refusal: that of the first filter that leaves no instance."""
        if unhurried is not None:
            both = zip(decision.screening.refused, unhurried.screening.refused, strict=True)
            refusing = [one.name for (one, mask), (_, other) in both if (mask & ~other).any()]
            said = f"no instance would meet its objectives ({', '.join(refusing)})"
            return NotPlaced(NotPlacedKind.NO_ENDPOINT_IN_TIME, said)
        request, infer_type = decision.candidates.context.request, decision.stage.infer_type
        masks = {one.name: mask for one, mask in decision.screening.refused}
        wrong_model, wrong_type = masks[f.ModelFilter.name], masks[f.InferTypeFilter.name]
        if len(wrong_model) and wrong_model.all():
            if request.model in self.models:
                return NotPlaced(NotPlacedKind.MODEL_AWAY, f"no instance serves {request.model!r}")
            return NotPlaced(
                NotPlacedKind.ENDPOINT_NOT_FOUND, f"endpoint not found: no instance serves model {request.model!r}"
            )
        if (wrong_model | wrong_type).all():
            return NotPlaced(
                NotPlacedKind.NO_MATCH_INFER_TYPE, f"no available endpoint: no {infer_type} instance is there"
            )
        if (wrong_model | wrong_type | masks[f.CapacityFilter.name]).all():
            tokens = request.prompt_num_tokens
            return NotPlaced(NotPlacedKind.PROMPT_TOO_LONG, f"no instance can hold a prompt of {tokens} tokens")
        return NotPlaced(NotPlacedKind.NO_AVAILABLE_ENDPOINT, "no available endpoint")
