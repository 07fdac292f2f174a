# SPDX-License-Identifier: Apache-2.0
"""Which requests a typed id means."""

from __future__ import annotations

import pytest

from llumsched.console.request_ids import find
from tests.llumlet.fake_agent import request_info

REQUESTS = [
    request_info("cmpl-abc123-0a1b2c3d"),
    request_info("cmpl-abd456-ffffffff"),
    request_info("cmpl-abc-11111111"),
    request_info("0_twin-22222222", external_request_id="twin"),
    request_info("1_twin-22222222", external_request_id="twin"),
]


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("cmpl-abc123-0a1b2c3d", ["cmpl-abc123-0a1b2c3d"]),
        ("cmpl-abc123", ["cmpl-abc123-0a1b2c3d"]),
        ("cmpl-abd", ["cmpl-abd456-ffffffff"]),
        # An id that is the beginning of another one still means itself.
        ("cmpl-abc", ["cmpl-abc-11111111"]),
        ("twin", ["0_twin-22222222", "1_twin-22222222"]),
        ("0_", ["0_twin-22222222"]),
    ],
)
def test_texts_resolve_to_requests(text: str, meant: list[str]) -> None:
    assert find([text], REQUESTS) == (meant, [])


def test_the_same_request_twice_is_meant_once() -> None:
    ids, faults = find(["cmpl-abc123", "cmpl-abc123-0a1b2c3d", "cmpl-abc12"], REQUESTS)
    assert ids == ["cmpl-abc123-0a1b2c3d"]
    assert faults == []


def test_a_beginning_of_several() -> None:
    ids, (fault,) = find(["cmpl-ab"], REQUESTS)
    assert ids == []
    assert fault.startswith("'cmpl-ab' is the beginning of 3 requests: cmpl-abc123-0a1b2c3d, ")


def test_near_ids_are_named() -> None:
    _, (fault,) = find(["cmpl-abx456"], REQUESTS)
    assert "no request 'cmpl-abx456'; near: " in fault
    assert "cmpl-abd456" in fault


def test_without_near_ids_some_are_named() -> None:
    many = [request_info(f"cmpl-{number:03}-00000000") for number in range(9)]
    _, (fault,) = find(["@@@@"], many)
    assert fault.startswith("no request '@@@@'; the instance has cmpl-000-00000000, ")
    assert fault.endswith(" and 4 more")


def test_an_idle_instance() -> None:
    assert find(["a"], []) == ([], ["no request 'a': the instance has none at all"])


def test_every_fault_is_said() -> None:
    ids, faults = find(["nope", "twin", "cmpl-ab"], REQUESTS)
    assert len(ids) == 2
    assert len(faults) == 2
