# SPDX-License-Identifier: Apache-2.0
"""Lists of peers for API servers, to which their requests could go.

A thousand API servers ask every few seconds, so the instances are ranked at most once a second. An answer holds some of
the freest and some random ones; with equal answers one engine's end would send all its requests to the same peers.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Final

from llumlet.contract.cms.peers import MAX_PEERS, peer_of, takes_requests, usage
from llumlet.contract.types import PeerInfo, PeersRequest, PeersResponse
from llumsched.cluster.view import View

PREPARED_S: Final = 1.0
MAX_OWN_IDS: Final = 1024
"""Largest number of ids in a question: ranks of one API server."""
_ANY: Final = ""


class PeerLists:
    """Makes lists of peers from a view, on its event loop."""

    def __init__(
        self, view: View, clock: Callable[[], float] = time.monotonic, draw: random.Random | None = None
    ) -> None:
        self._view = view
        self._clock = clock
        self._random = draw or random.Random()
        self._ranked: dict[str, list[PeerInfo]] = {}
        """Peers by compatibility digest, the freest first."""
        self._prepared_s = float("-inf")

    def answer(self, request: PeersRequest) -> PeersResponse:
        own = set(request.instance_ids[:MAX_OWN_IDS])
        known = (self._view[one].metadata.compatibility_digest for one in own if one in self._view)
        digest = next(known, request.compatibility_digest)
        now_s = self._clock()
        if now_s - self._prepared_s > PREPARED_S:
            self._prepared_s, self._ranked = now_s, self._rank()
        number = min(request.number or MAX_PEERS, MAX_PEERS)
        return PeersResponse(peers=self._some(digest, own, number), compatibility_digest=digest)

    def _some(self, digest: str, own: set[str], number: int) -> list[PeerInfo]:
        ranked = self._ranked.get(digest, [])
        if len(ranked) <= number + len(own):
            return [peer for peer in ranked if peer.instance_id not in own][:number]
        # A few more, in the place of the caller's own.
        num_freest = number // 2 + len(own)
        drawn = sorted(self._random.sample(range(num_freest, len(ranked)), number - number // 2))
        freest = [peer for peer in ranked[:num_freest] if peer.instance_id not in own]
        return [*freest, *(peer for row in drawn if (peer := ranked[row]).instance_id not in own)][:number]

    def _rank(self) -> dict[str, list[PeerInfo]]:
        found = [
            (usage(instance.status), instance)
            for instance in self._view.values()
            if instance.status is not None and takes_requests(instance.status)
        ]
        found.sort(key=lambda one: one[0])
        ranked = defaultdict(list)
        for _, instance in found:
            assert instance.status is not None
            peer = peer_of(instance.metadata, instance.status)
            ranked[_ANY].append(peer)
            if instance.metadata.compatibility_digest:
                ranked[instance.metadata.compatibility_digest].append(peer)
        return dict(ranked)
