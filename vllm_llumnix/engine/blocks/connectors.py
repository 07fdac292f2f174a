# SPDX-License-Identifier: Apache-2.0
"""vLLM's KV connectors beside moves: which are known, and what they are told of what moves do. Loop thread only.

The scheduler tells its connector of a request that is added, of blocks that it gives out, and of a request that ends. A
move does some of that past the scheduler, and then it is said here:

    a request comes        as by vLLM's `add_request`: a connector fails on a scheduled request that it has not met
    blocks are reserved    as if a step had given them out: a connector may still read them for who had them last, and
                           is to be done with that before anybody writes them (`quiet_from`)
    it comes back          not before the connector is done with its former life, which has the same id
    a request leaves       nothing: the release is `finish_requests`, which tells the connector; where that wants the
                           blocks for longer, they stay the request's until it says that it is done

What a connector saves of a request it only reads, as a mover does: the two do not mind each other. Nor do they where it
loads: such a request waits, and nothing of it moves until the load has ended.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from llumlet.protocol.errors import Reason
from vllm_llumnix.engine.vllm_types import Connector, Request, Scheduler

_PACKAGE = "vllm.distributed.kv_transfer.kv_connector.v1"


class Beside:
    """A connector that keeps nothing of a request but in the scheduler's sight: its status, and that its blocks are not
    freed yet."""

    def __init__(self, connector: Any) -> None:
        self._connector = connector

    def why_not_now(self, request: Request) -> tuple[Reason, str] | None:
        """Reason why a move would break something that it has open for this request."""
        return None

    def works_for(self, request_id: str) -> bool:
        """True if it remembers something of a request that is not the scheduler's any more."""
        return False

    def give_out(self, block_ids: Collection[int]) -> None:
        """These blocks get another owner: the coming step waits for what still reads them."""


class SavesPrompts(Beside):
    """Saves the blocks of a whole prompt in the first step of a request that it meets, whatever is computed by then: of
    one in the middle of its prefill, it would keep what nobody has written."""

    def why_not_now(self, request: Request) -> tuple[Reason, str] | None:
        if request.num_computed_tokens and not request.num_output_tokens:
            return Reason.PREFILL_RUNNING, "its KV connector saves a prompt in one step"
        return None


class Offloads(Beside):
    """Copies blocks between steps. What it still reads of a request that has ended is protected by a look at the blocks
    that each step gives out: it finishes reading those first."""

    def works_for(self, request_id: str) -> bool:
        return request_id in self._connector.connector_scheduler._req_status

    def give_out(self, block_ids: Collection[int]) -> None:
        self._connector.connector_scheduler._current_batch_allocated_block_ids.update(block_ids)


KNOWN: dict[str, type[Beside]] = {
    f"{_PACKAGE}.example_connector.ExampleConnector": SavesPrompts,
    f"{_PACKAGE}.nixl.connector.NixlPullConnector": Beside,
    f"{_PACKAGE}.offloading_connector.OffloadingConnector": Offloads,
}
"""By class: one that is derived from these may do anything."""

_SEVERAL = f"{_PACKAGE}.multi_connector.MultiConnector"


def parts_of(connector: Connector | None) -> list[Any]:
    """A connector, or those that it is made of."""
    if connector is None:
        return []
    if _name_of(connector) == _SEVERAL:
        return [part for sub_connector in connector.sub_connectors for part in parts_of(sub_connector)]
    return [connector]


def has_unknown_connector(scheduler: Scheduler) -> bool:
    return any(_name_of(part) not in KNOWN for part in parts_of(scheduler.connector))


def _name_of(connector: object) -> str:
    return f"{type(connector).__module__}.{type(connector).__qualname__}"


class Connectors:
    """KV connectors of one scheduler, if it has any."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._connector = scheduler.connector
        # With an unknown one, requests come and go with their tokens alone.
        self._known = [KNOWN.get(_name_of(part), Beside)(part) for part in parts_of(scheduler.connector)]
        self.quiet_from = 0
        """The scheduler's step after which nothing reads any more what has been given out so far."""

    def why_not_now(self, request: Request) -> tuple[Reason, str] | None:
        if self._connector is None:
            return None
        params = request.kv_transfer_params
        if isinstance(params, dict) and params.get("do_remote_prefill") and not request.num_computed_tokens:
            return Reason.NOT_STARTED, "its prompt, which another engine has computed, is to be fetched first"
        return next(filter(None, (known.why_not_now(request) for known in self._known)), None)

    def why_not_back(self, request_id: str) -> str | None:
        """Why a request of this id cannot come here now."""
        former = self._scheduler.requests.get(request_id)
        kept = former is not None and former.is_finished()
        if kept or any(known.works_for(request_id) for known in self._known):
            return "a KV connector is not done with a former life of the request"
        return None

    def have_work(self) -> bool:
        """True if they need steps although nothing is to be computed."""
        connector = self._connector
        if connector is None:
            return False
        kept = any(request.is_finished() for request in self._scheduler.requests.values())
        return kept or bool(self._scheduler.finished_req_ids) or connector.has_pending_push_work()

    def give_out(self, block_ids: Collection[int]) -> None:
        """Blocks have been taken from the pool outside of a step. Whoever writes them waits for `quiet_from`."""
        if self._connector is None or not self.have_work():
            return  # nothing reads any block that is free, and the engine may not step for long
        for known in self._known:
            known.give_out(block_ids)
        self.quiet_from = self._scheduler.current_step + 1

    def as_new(self, request: Request) -> None:
        """A request that comes here has not been in a batch of this engine, whatever it has been through elsewhere:
        vLLM takes one that was preempted, and has then been loaded, for one that the workers know."""
        if self._connector is not None:
            request.num_preemptions = 0

    def meet(self, request: Request) -> None:
        """A request becomes the scheduler's past `add_request`."""
        if self._connector is not None:
            self.as_new(request)
            self._connector.on_new_request(request)
