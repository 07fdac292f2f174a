# SPDX-License-Identifier: Apache-2.0
"""Who is refused for what gateways say."""

from __future__ import annotations

import pytest

from llumlet.contract.types import InstanceMetadata
from llumlet.process.addresses import Address
from llumsched.causes import Cause
from llumsched.cluster.instance import Instance
from llumsched.cluster.view import View
from llumsched.dispatch.complaints import Complaint, Complaints

TTL_S = 15.0


class Cluster:
    """`size` instances at ports from 1 on, and complaints about them."""

    def __init__(self, size: int) -> None:
        self.now_s = 100.0
        self.view = View(lambda: self.now_s)
        self.complaints = Complaints(lambda: self.now_s)
        self.view.observe(self.complaints)
        for port in range(1, size + 1):
            self.put(f"i{port}", port)

    def put(self, instance_id: str, port: int) -> Instance:
        metadata = InstanceMetadata(instance_id=instance_id, incarnation="1", ip="10.0.0.1", api_server_port=port)
        self.view.put_metadata(metadata)
        return self.view[instance_id]

    def complain(self, gateway: str, cause: Cause, *ports: int, host: str = "") -> None:
        told = {Address("10.0.0.1", port): Complaint(cause, "said", self.now_s) for port in ports}
        self.complaints.complain(gateway, told, TTL_S, host)

    def refused(self, gateway: str) -> set[str]:
        return set(self.complaints.of(gateway))


def test_complaint_about_behaviour_counts_for_all_gateways() -> None:
    cluster = Cluster(10)
    cluster.complain("a", Cause.ERRORS, 3)
    assert cluster.complaints.of("a") == cluster.complaints.of("unknown") == {"i3": "errors: said"}
    cluster.complain("a", Cause.ERRORS)
    assert not cluster.refused("a")


@pytest.mark.parametrize("cause", [Cause.UNREACHABLE, Cause.SILENCE])
def test_unreachability_counts_for_all_from_more_than_half(cause: Cause) -> None:
    cluster = Cluster(10)
    cluster.complain("a", cause, 3)
    for gateway in "bc":
        cluster.complain(gateway, cause)
    assert (cluster.refused("a"), cluster.refused("b"), cluster.refused("unknown")) == ({"i3"}, set(), set())
    cluster.complain("b", cause, 3)
    assert cluster.refused("c") == cluster.refused("unknown") == {"i3"}


def test_workers_of_one_machine_share_its_vote() -> None:
    """Its network may be what is broken, however many workers it has."""
    cluster = Cluster(10)
    workers = [f"worker-{number}" for number in range(8)]
    for worker in workers:
        cluster.complain(worker, Cause.UNREACHABLE, 3, host="big")
    for gateway in "ab":
        cluster.complain(gateway, Cause.UNREACHABLE, host=gateway)
    assert cluster.refused("a") == set()
    assert cluster.refused("worker-0") == {"i3"}
    cluster.complain("a", Cause.UNREACHABLE, 3, host="a")
    assert cluster.refused("b") == {"i3"}
    for worker in workers[:4]:
        cluster.complain(worker, Cause.UNREACHABLE, host="big")
    assert cluster.refused("b") == set(), "one and a half of three"


def test_complaints_end_if_they_are_not_said_again() -> None:
    cluster = Cluster(10)
    cluster.complain("a", Cause.ERRORS, 3)
    cluster.now_s += TTL_S - 0.1
    assert cluster.refused("b") == {"i3"}
    cluster.now_s += 0.2
    assert not cluster.refused("b")


def test_at_most_half_is_refused_of_whom_most_complain_first() -> None:
    cluster = Cluster(4)
    cluster.complain("a", Cause.ERRORS, 1, 2, 3, 4)
    cluster.complain("b", Cause.ERRORS, 3, 4)
    assert cluster.refused("c") == {"i3", "i4"}
    cluster.complain("a", Cause.UNREACHABLE, 1, 2, 3, 4)
    assert cluster.refused("a") == {"i1", "i2", "i3", "i4"}, "trying these would gain nothing"


def test_all_ranks_behind_an_api_server_are_meant() -> None:
    cluster = Cluster(10)
    cluster.put("rank", 3)
    cluster.complain("a", Cause.ERRORS, 3)
    assert cluster.refused("a") == {"i3", "rank"}
    assert cluster.complaints.ids_at(Address("10.0.0.1", 3)) == {"i3", "rank"}


def test_an_instance_that_leaves_or_listens_elsewhere_is_not_meant() -> None:
    cluster = Cluster(10)
    cluster.complain("a", Cause.ERRORS, 3, 4)
    cluster.view.remove("i3")
    cluster.put("i4", 40)
    assert not cluster.refused("a")
    cluster.put("new", 3)
    assert cluster.refused("a") == {"new"}
