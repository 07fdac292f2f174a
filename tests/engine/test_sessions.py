# SPDX-License-Identifier: Apache-2.0
"""Requests whose input comes in parts, in vLLM's real schedulers: they go elsewhere between two parts, and find there
what they would have found here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request, RequestStatus

from llumlet.protocol.errors import Reason, Refused
from llumlet.protocol.ids import HOME, Epoch
from tests.engine.rig import Rig, full, states
from tests.engine.test_scheduler_port import KINDS
from vllm_llumnix.engine.requests.request_state import BETWEEN_PARTS, Residence, residence_of, settle_in

PARTS = [[10 + n % 80 for n in range(size)] for size in (70, 9, 40)]
TOKENS = (12, 1, 33)
OWNED = Epoch(0, 1)


@pytest.fixture(params=KINDS.values(), ids=KINDS.keys())
def rigs(request: pytest.FixtureRequest, model_dir: Path) -> tuple[Rig, Rig]:
    return Rig(model_dir, **request.param), Rig(model_dir, **request.param)


def part_of(rig: Rig, number: int, *, resumable: bool = True, tokens: int | None = None) -> Request:
    """As vLLM hands a part to its scheduler."""
    part = Request(
        request_id="s",
        prompt_token_ids=[*PARTS[number]],
        sampling_params=SamplingParams(temperature=0, max_tokens=tokens or TOKENS[number], ignore_eos=True),
        pooling_params=None,
        block_hasher=rig.block_hasher,
        resumable=resumable,
    )
    settle_in(part, Residence("tcp://127.0.0.1:1", "s", None, num_parts=int(resumable)))
    return part


def say(rig: Rig, number: int, **more: Any) -> Any:
    rig.scheduler.add_request(part_of(rig, number, **more))
    return rig.scheduler.requests["s"]


def answered(rig: Rig) -> list[int]:
    """The tokens of the answer, when it is complete and nothing works on it any more."""
    tokens = []
    for output in rig.turns(80):
        tokens += output.new_token_ids
    assert rig.scheduler.requests["s"].status == BETWEEN_PARTS
    return tokens


def arrive(source: Rig, destination: Rig) -> Any:
    """A move of a request that stands still."""
    old = source.scheduler.requests["s"]
    there = residence_of(old)
    assert there is not None
    assert source.port.why_not_now(old) is None
    source.port.sessions.hold(old)
    source.port.freeze(old)
    frozen = source.port.drained(old, old.num_output_tokens)
    assert frozen is not None
    assert frozen.computed_tokens == old.num_tokens - 1
    new = Request(
        request_id="s",
        prompt_token_ids=[*old.prompt_token_ids],
        sampling_params=old.sampling_params,
        pooling_params=None,
        block_hasher=destination.block_hasher,
        resumable=True,
    )
    new.append_output_token_ids(list(old.output_token_ids))
    earlier = there.num_earlier
    settle_in(new, Residence(there.origin, "s", None, OWNED, num_parts=there.num_parts, num_earlier=earlier))
    destination.port.reservations.make(new, use_prefix_cache=False, computed_tokens=frozen.computed_tokens)
    destination.port.reservations.admit(new, frozen.computed_tokens)
    source.port.sessions.left(old)
    source.port.release(old)
    source.port.unpin(frozen.pin)
    return new


def test_the_next_part_finds_what_the_last_one_left(rigs: tuple[Rig, Rig]) -> None:
    source, destination = rigs
    say(source, 0)
    first = answered(source)
    new = arrive(source, destination)
    assert (new.status, new.num_tokens) == (BETWEEN_PARTS, 70 + TOKENS[0])
    assert destination.scheduler.num_waiting_for_streaming_input == 1
    assert source.scheduler.num_waiting_for_streaming_input == 0
    assert not source.scheduler.requests
    assert source.turns(3) == []
    residence = residence_of(new)
    assert residence is not None
    for number in (1, 2):
        before = residence.num_earlier + new.num_output_tokens
        destination.port.sessions.take_part("s", OWNED, number, part_of(destination, number))
        assert new.prompt_token_ids[-len(PARTS[number]) :] == PARTS[number]
        assert (residence.num_parts, residence.num_earlier) == (number + 1, before)
        assert len(answered(destination)) == TOKENS[number]
    # Of each answer but the last its last token is dropped, here as there.
    assert new.prompt_token_ids[:81] == PARTS[0] + first[:-1]
    assert residence.num_earlier == TOKENS[0] + TOKENS[1]
    destination.port.sessions.take_part("s", OWNED, 3, None)
    for rig in rigs:
        rig.turns(3)
        assert not rig.scheduler.has_requests()
        assert rig.port.audit_idle() == []


@pytest.mark.parametrize("since", ["it is to leave", "it is frozen"])
def test_parts_wait_while_it_may_leave(rigs: tuple[Rig, Rig], since: str) -> None:
    rig, _ = rigs
    session = say(rig, 0)
    answered(rig)
    if since == "it is to leave":
        rig.port.sessions.hold(session)
    else:
        rig.port.freeze(session)
    say(rig, 1)
    say(rig, 2)
    assert rig.turns(5) == []
    rig.port.unfreeze(session)
    rig.port.sessions.go_on(session)
    assert len(answered(rig)) == TOKENS[1] + TOKENS[2]
    residence = residence_of(session)
    assert residence is not None
    assert residence.num_parts == 3


def test_it_ends_while_it_may_leave(rigs: tuple[Rig, Rig]) -> None:
    rig, _ = rigs
    session = say(rig, 0)
    answered(rig)
    rig.port.sessions.hold(session)
    say(rig, 1)
    rig.scheduler.finish_requests("s", RequestStatus.FINISHED_ABORTED)
    rig.port.forget(session)
    assert not rig.port.sessions._held
    rig.turns(3)
    assert rig.port.audit_idle() == []


def test_parts_of_one_that_has_left_are_dropped(rigs: tuple[Rig, Rig]) -> None:
    """vLLM would take one for a new request. Its origin sends it again; when the session is back, by relay alone."""
    source, destination = rigs
    say(source, 0)
    answered(source)
    arrive(source, destination)
    source.scheduler.add_request(part_of(source, 1))
    source.scheduler.add_request(part_of(source, 1, resumable=False))
    assert not source.scheduler.requests
    assert source.turns(3) == []
    back = arrive(destination, source)
    source.scheduler.add_request(part_of(source, 1))
    assert back.status == BETWEEN_PARTS
    source.port.sessions.take_part("s", OWNED, 1, part_of(source, 1))
    assert len(answered(source)) == TOKENS[1]


def test_only_the_next_part_counts(rigs: tuple[Rig, Rig]) -> None:
    source, destination = rigs
    say(source, 0)
    answered(source)
    new = arrive(source, destination)
    take_part = destination.port.sessions.take_part
    for epoch, number in ((HOME, 1), (Epoch(0, 2), 1), (OWNED, 0), (OWNED, 2)):
        take_part("s", epoch, number, part_of(destination, 1))
        take_part("s", epoch, number, None)
        assert new.status == BETWEEN_PARTS
    take_part("other", OWNED, 1, part_of(destination, 1))
    take_part("s", OWNED, 1, part_of(destination, 1))
    take_part("s", OWNED, 1, part_of(destination, 1))
    take_part("s", OWNED, 2, part_of(destination, 2))
    assert len(answered(destination)) == TOKENS[1] + TOKENS[2]


def test_its_input_ends_while_a_part_is_answered(rigs: tuple[Rig, Rig]) -> None:
    source, destination = rigs
    say(source, 0)
    answered(source)
    arrive(source, destination)
    destination.port.sessions.take_part("s", OWNED, 1, part_of(destination, 1, tokens=20))
    destination.turns(4)
    for _ in range(3):  # as often as heartbeats say that nothing has come
        destination.port.sessions.take_part("s", OWNED, 2, None)
    tokens = [token for output in destination.turns(40) for token in output.new_token_ids]
    assert len(tokens) > 10
    assert not destination.scheduler.requests
    assert destination.port.audit_idle() == []


def test_it_moves_between_two_parts_only(rigs: tuple[Rig, Rig]) -> None:
    rig, _ = rigs
    session = say(rig, 0, tokens=200)
    for _ in range(12):
        problem = rig.port.why_not_now(session)
        assert problem is not None
        assert problem[0] is Reason.PREFILL_RUNNING
        rig.turn()
    assert session.num_output_tokens > 5


def test_session_without_its_kv_cache_is_refused(rigs: tuple[Rig, Rig]) -> None:
    _, destination = rigs
    new = part_of(destination, 0)
    new.append_output_token_ids([5, 6])
    destination.port.reservations.make(new, use_prefix_cache=False, computed_tokens=71)
    with pytest.raises(Refused) as refused:
        destination.port.reservations.admit(new, 0)
    assert refused.value.reason is Reason.INVALID_REQUEST
    destination.port.reservations.cancel(new)
    assert destination.port.audit_idle() == []


def test_they_take_places_in_the_batch(model_dir: Path) -> None:
    """vLLM admits nobody to a batch whose places are taken by those that wait for more input."""
    source, destination = Rig(model_dir), Rig(model_dir, max_num_seqs=1)
    say(source, 0)
    answered(source)
    arrive(source, destination)
    with pytest.raises(Refused) as refused:
        destination.port.reservations.make(destination.request("r"), use_prefix_cache=False)
    assert refused.value.reason is Reason.DESTINATION_FULL


def test_not_with_states(model_dir: Path) -> None:
    rig = Rig(model_dir, num_blocks=512, groups=[full(), states("align", 32)])
    session = say(rig, 0)
    answered(rig)
    problem = rig.port.why_not_now(session)
    assert problem is not None
    assert problem[0] is Reason.NOT_PORTABLE
