# SPDX-License-Identifier: Apache-2.0
"""Where simulated instances find each other. What moves, moves among those of one world, in one process."""

from __future__ import annotations

from llumsim.clock import RealClock
from llumsim.engine.instance import ModelledInstance
from llumsim.engine.requests import EngineRequest
from llumsim.live.streams import SimulatedRequest
from llumsim.moves.links import Network
from llumsim.moves.llumlets import Llumlet


class World:
    def __init__(self) -> None:
        self.network = Network(RealClock())
        self.llumlets: dict[str, Llumlet] = {}
        """Llumlets by instance id; that of an instance that has ended is there until its next life."""
        self.requests: dict[str, SimulatedRequest] = {}
        """Requests that have not ended, by their ids in engines."""

    def at(self, address: str) -> Llumlet | None:
        for llumlet in self.llumlets.values():
            if f"{llumlet.member.metadata.ip}:{llumlet.member.metadata.llumlet_port}" == address:
                return llumlet
        return None

    def owner(self, request_id: str) -> ModelledInstance | None:
        request = self.requests.get(request_id)
        return self.llumlets[request.owner].member if request is not None else None

    def owned(self, arrived: EngineRequest, member: ModelledInstance) -> None:
        """A request that has moved."""
        request = self.requests.get(arrived.id)
        if request is None:  # its client has left meanwhile
            member.engine.remove(arrived)
        else:
            request.moved(arrived, member.id)

    def finished(self, request: EngineRequest) -> None:
        client = self.requests.pop(request.id, None)
        if client is not None:
            client.told(request.num_output)
            client.end("length")

    def abort(self, request: SimulatedRequest) -> None:
        """Its client does not want it any more: it ends, wherever it runs."""
        if self.requests.pop(request.request_id, None) is not None:
            llumlet = self.llumlets[request.owner]
            if llumlet.member.is_alive:
                llumlet.abort(request.in_engine, llumlet.member.clock.now_ps)
            request.end("abort")

    def lost(self, member: ModelledInstance, reason: str) -> None:
        """An instance has ended, and with it its requests."""
        for llumlet in self.llumlets.values():
            llumlet.departures.lost(member)
            llumlet.arrivals.lost(member)
        for request in [one for one in self.requests.values() if one.owner == member.id]:
            del self.requests[request.request_id]
            request.end(reason)
