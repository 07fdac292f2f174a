# SPDX-License-Identifier: Apache-2.0
"""What a view takes, what it refuses, and whom it tells."""

from __future__ import annotations

from graphlib import CycleError

import pytest

from llumlet.contract.types import InstanceMetadata, InstanceStatus
from llumsched.cluster.instance import Instance
from llumsched.cluster.view import View, in_order


class Heard:
    def __init__(self) -> None:
        self.events: list[tuple[str, str, int | None]] = []

    def _note(self, event: str, instance: Instance) -> None:
        self.events.append((event, instance.metadata.incarnation, instance.status and instance.status.update_id))

    def appeared(self, instance: Instance) -> None:
        self._note("appeared", instance)

    def changed(self, instance: Instance) -> None:
        self._note("changed", instance)

    def left(self, instance: Instance) -> None:
        self._note("left", instance)


class Deaf(Heard):
    def _note(self, event: str, instance: Instance) -> None:
        raise RuntimeError(f"of the test: {event}")


def metadata(incarnation: str = "first", **fields: object) -> InstanceMetadata:
    return InstanceMetadata(instance_id="a", incarnation=incarnation, ip="127.0.0.1", llumlet_port=7001, **fields)


def status(update_id: int, incarnation: str = "first", timestamp_ms: int = 0) -> InstanceStatus:
    return InstanceStatus(
        instance_id="a", incarnation=incarnation, update_id=update_id, timestamp_ms=timestamp_ms, schedulable=True
    )


def test_a_life() -> None:
    now = 100.0
    view, heard = View(lambda: now), Heard()
    view.observe(heard)
    view.put_metadata(metadata())
    assert view["a"].status is None
    assert view.put_status(status(3), age_s=2)
    assert view["a"].age_s(now) == 2
    assert view.put_status(status(3, timestamp_ms=5))
    assert not view.put_status(status(2, timestamp_ms=9))
    assert str(view["a"].llumlet) == "127.0.0.1:7001"
    view.remove("a")
    assert not view
    assert [event for event, *_ in heard.events] == ["appeared", "changed", "changed", "left"]


def test_a_restarted_instance_is_a_new_one() -> None:
    view, heard = View(), Heard()
    view.put_metadata(metadata())
    view.put_status(status(7))
    view.observe(heard)
    view.put_metadata(metadata("second"))
    assert view["a"].status is None
    assert not view.put_status(status(8))
    assert view.put_status(status(1, "second"))
    assert heard.events == [
        ("appeared", "first", 7),
        ("left", "first", 7),
        ("appeared", "second", None),
        ("changed", "second", 1),
    ]


def test_metadata_that_is_repeated_tells_nobody() -> None:
    view, heard = View(), Heard()
    stop = view.observe(heard)
    view.put_metadata(metadata(utc_update=1.0))
    view.put_metadata(metadata(utc_update=2.0))
    assert len(heard.events) == 1
    view.put_metadata(metadata(utc_update=3.0, model="other"))
    assert [event for event, *_ in heard.events] == ["appeared", "changed"]
    stop()
    view.remove("a")
    assert len(heard.events) == 2


def test_a_status_without_an_instance_is_not_taken() -> None:
    view = View()
    assert not view.put_status(status(1))
    assert not view


@pytest.mark.parametrize(
    ("sent_s", "age_s", "as_of_s"),
    [
        (999.0, 0.0, 99.0),
        (999.0, 0.4, 99.0),
        # Milliseconds, which clocks differ by.
        (999.98, 0.0, 100.0),
        (1000.5, 0.0, 100.0),
        # A clock that was never set.
        (0.0, 0.0, 100.0),
    ],
)
def test_a_status_is_of_when_it_was_sent_as_far_as_clocks_tell(sent_s: float, age_s: float, as_of_s: float) -> None:
    view = View(lambda: 100.0, lambda: 1000.0)
    view.put_metadata(metadata())
    view.put_status(status(1, timestamp_ms=round(sent_s * 1000)), age_s)
    assert view["a"].as_of_s == pytest.approx(as_of_s)
    assert view["a"].received_s == 100.0 - age_s


def test_an_observer_that_raises_is_said_once_and_keeps_nobody_from_hearing(caplog: pytest.LogCaptureFixture) -> None:
    view, heard = View(), Heard()
    view.observe(Deaf())
    view.observe(heard)
    view.put_metadata(metadata())
    for update_id in range(3):
        assert view.put_status(status(update_id))
    view.remove("a")
    assert [event for event, *_ in heard.events] == ["appeared", "changed", "changed", "changed", "left"]
    assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == [
        f"of the test: {event}" for event in ("appeared", "changed", "left")
    ]


def test_observers_hear_of_a_change_after_what_they_depend_on() -> None:
    view, heard, kept = View(lambda: 0.0), list[str](), object()

    class Named(Heard):
        def __init__(self, name: str, after: tuple[object, ...] = (), keeps: tuple[object, ...] = ()) -> None:
            super().__init__()
            self.name, self.after, self.keeps = name, after, keeps

        def _note(self, event: str, instance: Instance) -> None:
            heard.append(self.name)

    keeper, reader = Named("keeper", keeps=(kept,)), Named("reader", after=(kept,))
    last = Named("last", after=(reader,))
    stop = view.observe(last, reader)
    view.observe(keeper)
    view.put_metadata(metadata())
    assert heard == ["keeper", "reader", "last"]
    stop()
    view.put_status(status(1))
    assert heard[3:] == ["keeper"]
    keeper.after = (last,)
    with pytest.raises(CycleError):
        in_order([last, reader, keeper])


def test_observer_may_leave_out_what_only_changes_the_status() -> None:
    view, heard = View(lambda: 0.0), Heard()
    heard.hears_statuses = False  # type: ignore[attr-defined]
    view.observe(heard)
    view.put_metadata(metadata())
    view.put_status(status(1))
    view.put_metadata(metadata(model="another"))
    assert [event for event, *_ in heard.events] == ["appeared", "changed"]
