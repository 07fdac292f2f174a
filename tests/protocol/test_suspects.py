# SPDX-License-Identifier: Apache-2.0
"""Who is a suspect after a death, whose turn it is, and who is to end."""

from __future__ import annotations

import pytest

from llumlet.protocol.origin.owners import Owner
from llumlet.protocol.recovery.steps import UNKNOWN, LastSteps, name_of
from llumlet.protocol.recovery.suspects import LONGER, TRIAL_TOKENS, Judgement, Suspects

INNOCENT, SUSPECT, GUILTY = Judgement.INNOCENT, Judgement.SUSPECT, Judgement.GUILTY


def engine(name: str) -> Owner:
    return Owner(name, "1", b"")


def steps(*request_ids: str, on_trial: str = "", **more: bool) -> LastSteps:
    tried = {"on_trial": name_of(on_trial)} if on_trial else {}
    return LastSteps(frozenset(map(name_of, request_ids)), **tried, **more)


class Bench:
    """Suspects, and who has had a turn."""

    def __init__(self, most: int = 1) -> None:
        self.most = most
        self.suspects = Suspects[Owner](lambda: self.most)
        self.judge = self.suspects.judge
        self.come: set[str] = set()

    def tried(self, *request_ids: str) -> set[str]:
        """Have these wait for their turns; returns all of whom it has come."""
        self.come.difference_update(request_ids)
        for request_id in request_ids:
            self.suspects.ask_turn(request_id)
        self.come.update(self.suspects.come())
        return set(self.come)

    def deaths(self, request_id: str) -> list[str]:
        return [owner.instance for owner in self.suspects.deaths(request_id)]

    def send(self, request_id: str, owner: Owner, delivered: int = 0) -> None:
        self.suspects.sent(request_id, owner, delivered)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_only_who_was_in_the_step_is_a_suspect(bench: Bench) -> None:
    first = engine("first")
    assert bench.judge("beside", first, steps("r"), 5) is INNOCENT
    assert bench.judge("r", first, steps("r"), 5) is SUSPECT
    assert bench.judge("r", first, steps("r"), 5) is SUSPECT, "asked twice, counted once"
    assert bench.deaths("r") == ["first"]
    assert bench.suspects.trial_tokens("beside") == 0
    assert bench.suspects.trial_tokens("r") == TRIAL_TOKENS
    assert bench.tried("beside") == {"beside"}, "everyone else at once"


def test_the_second_death_on_trial_is_the_end(bench: Bench) -> None:
    first, second = engine("first"), engine("second")
    bench.judge("r", first, steps("r", "beside"), 5)
    assert bench.tried("r") == {"r"}
    bench.send("r", second)
    assert bench.judge("r", second, steps("r", "other", on_trial="r"), 5) is GUILTY
    assert bench.deaths("r") == ["first", "second"]
    assert bench.judge("other", second, steps("r", "other", on_trial="r"), 9) is INNOCENT, "it was not its doing"


def test_whoever_was_beside_it_both_times_goes_on(bench: Bench) -> None:
    """Cleared in a trial of its own, it was in the step in which the culprit's trial ended its engine."""
    first, second = engine("first"), engine("second")
    for request_id in ("poison", "beside"):
        assert bench.judge(request_id, first, steps("poison", "beside"), 7) is SUSPECT
    assert bench.tried("beside", "poison") == {"beside"}
    bench.send("beside", second, delivered=7)
    bench.suspects.heard("beside", 7 + TRIAL_TOKENS - 1)
    assert bench.tried() == {"beside"}
    bench.suspects.heard("beside", 7 + TRIAL_TOKENS)
    assert bench.tried() == {"beside", "poison"}, "the next one, when the former has survived"
    bench.send("poison", second, delivered=7)
    last = steps("poison", "beside", on_trial="poison")
    assert bench.judge("beside", second, last, 30) is INNOCENT
    assert bench.judge("poison", second, last, 7) is GUILTY
    assert bench.deaths("beside") == ["first"]


def test_a_trial_that_is_over_there_and_not_yet_known_here(bench: Bench) -> None:
    """The engine has the next one on trial already, which ends it: not the one whose last tokens are on their way."""
    bench.most = 2
    first, second = engine("first"), engine("second")
    for request_id in ("poison", "beside"):
        assert bench.judge(request_id, first, steps("poison", "beside"), 7) is SUSPECT
    assert bench.tried("beside", "poison") == {"beside", "poison"}
    for request_id in ("beside", "poison"):
        bench.send(request_id, second, delivered=7)
    last = steps("beside", "poison", on_trial="poison")
    assert bench.judge("beside", second, last, 7 + TRIAL_TOKENS - 1) is SUSPECT
    assert bench.judge("poison", second, last, 7) is GUILTY
    assert bench.deaths("beside") == ["first"]
    assert bench.tried("beside") == {"beside", "poison"}


def test_of_two_on_trial_at_an_engine_of_another_host_neither_is_guilty(bench: Bench) -> None:
    bench.most = 2
    first, second = engine("first"), engine("second")
    for request_id in ("poison", "beside"):
        assert bench.judge(request_id, first, UNKNOWN, 7) is SUSPECT
    assert bench.tried("beside", "poison") == {"beside", "poison"}
    for request_id in ("beside", "poison"):
        bench.send(request_id, second, delivered=7)
    for _ in range(2):
        assert bench.judge("beside", second, UNKNOWN, 9) is SUSPECT
    assert bench.judge("poison", second, UNKNOWN, 7) is SUSPECT
    assert bench.deaths("beside") == bench.deaths("poison") == ["first", "second"]


def test_trials_are_spread_over_engines(bench: Bench) -> None:
    bench.most = 2
    bench.judge("r", engine("dead"), steps("r"), 0)
    assert bench.tried("r") == {"r"}
    assert not bench.suspects.engines
    there = engine("there")
    bench.send("r", there)
    assert bench.suspects.engines == {there}


def test_an_engine_on_another_host(bench: Bench) -> None:
    """Nothing is known of its steps, but who was on trial there from here."""
    first, second = engine("first"), engine("second")
    for request_id in ("poison", "beside"):
        assert bench.judge(request_id, first, UNKNOWN, 7) is SUSPECT
    assert bench.tried("poison", "beside") == {"poison"}
    bench.send("poison", second)
    assert bench.judge("fresh", second, UNKNOWN, 3) is INNOCENT
    assert bench.judge("poison", second, UNKNOWN, 7) is GUILTY


def test_engines_that_are_killed_one_after_the_other(bench: Bench) -> None:
    """From outside: whoever is in the step each time is tried each time, for longer, and never ended."""
    for number in range(4):
        owner, there = engine(f"e{number}"), engine(f"f{number}")
        assert bench.judge("r", owner, steps("r", "other"), 10) is SUSPECT
        assert bench.suspects.trial_tokens("r") == min(TRIAL_TOKENS * LONGER**number, 1024)
        assert "r" in bench.tried("r")
        bench.send("r", there, delivered=10)
        bench.suspects.heard("r", 10 + 1024)
        assert bench.suspects.trial_tokens("r") == 0


def test_an_engine_that_dies_before_the_trial_has_begun(bench: Bench) -> None:
    """It waited there to be scheduled: nothing was learnt, and its turn comes again."""
    bench.judge("r", engine("first"), steps("r"), 5)
    bench.tried("r")
    second = engine("second")
    bench.send("r", second)
    assert bench.judge("r", second, steps("other"), 5) is SUSPECT
    assert bench.deaths("r") == ["first"]
    assert bench.tried("r") == {"r"}
    third = engine("third")
    bench.send("r", third)
    assert bench.judge("r", third, steps("r"), 5) is GUILTY


def test_no_more_at_a_time_than_engines_and_the_youngest_first(bench: Bench) -> None:
    bench.most = 2
    names = ["old", "young", "newborn"]
    for name, delivered in zip(names, (900, 3, 0), strict=True):
        bench.judge(name, engine("first"), steps(*names), delivered)
    bench.most = 0
    assert bench.tried("old") == {"old"}, "with no engine in sight one looks for one"
    bench.most = 2
    assert bench.tried("young", "newborn") == {"old", "young"}
    bench.send("old", engine("a"), 900)
    bench.suspects.heard("old", 900 + TRIAL_TOKENS)
    assert bench.tried() == set(names)


def test_suspects_with_most_evidence_come_last(bench: Bench) -> None:
    names = ["first", "old", "young"]
    for name, delivered in zip(names, (1, 900, 3), strict=True):
        bench.judge(name, engine("dead"), steps(*names), delivered)
    assert bench.tried(*names) == {"first"}
    bench.suspects.step_back("first")
    assert bench.tried() == {"first", "young"}


def test_requests_that_end_make_way(bench: Bench) -> None:
    """Whether they are being tried or wait for it."""
    names = ["a", "b", "c"]
    for name in names:
        bench.judge(name, engine("dead"), steps(*names), 0)
    assert bench.tried(*names) == {"a"}
    bench.suspects.keep({"a", "c"})
    assert bench.tried() == {"a"}
    bench.suspects.keep({"c"})
    assert bench.tried() == {"a", "c"}
    bench.suspects.keep(set())
    assert len(bench.suspects) == 0
    assert not bench.suspects.any_tried


def test_cleared_request_stays_cleared(bench: Bench) -> None:
    """It finds no engine for a while, and is asked about again each time. By then nothing is known of the culprit."""
    home, other = engine("home"), engine("other")
    bench.suspects.came_after("r", 1, home)
    assert bench.judge("beside", home, steps("r", "beside"), 5) is INNOCENT
    assert bench.judge("r", home, steps("r", "beside"), 0) is GUILTY
    bench.suspects.keep({"beside"})
    assert bench.judge("beside", home, steps("r", "beside"), 5) is INNOCENT
    assert bench.judge("beside", other, steps("r", "beside"), 5) is SUSPECT, "another death"
    bench.suspects.keep(set())
    assert not bench.suspects._cleared


def test_own_trial_overrides_an_earlier_clearing(bench: Bench) -> None:
    """It only hung, and has woken up."""
    there = engine("there")
    bench.suspects.came_after("r", 1, there)
    assert bench.judge("beside", there, steps("r", "beside"), 5) is INNOCENT
    bench.suspects.keep({"beside"})
    assert bench.judge("beside", engine("another"), steps("beside"), 5) is SUSPECT
    assert bench.tried("beside") == {"beside"}
    bench.send("beside", there)
    assert bench.judge("beside", there, steps("beside"), 5) is GUILTY


def test_a_call_that_came_to_nothing_leaves_the_turn(bench: Bench) -> None:
    bench.judge("r", engine("dead"), steps("r"), 0)
    bench.tried("r")
    there = engine("there")
    bench.send("r", there)
    assert bench.suspects.tried_at("r") is there
    bench.suspects.sent("r", None, 0)
    assert bench.suspects.tried_at("r") is None
    bench.suspects.heard("r", 1000)
    assert bench.suspects.any_tried
    assert bench.tried("r") == {"r"}


def test_request_with_earlier_deaths_is_on_trial_at_once(bench: Bench) -> None:
    """Its gateway has seen the first death."""
    home = engine("home")
    bench.suspects.came_after("r", 1, home)
    assert bench.suspects.trial_tokens("r") == TRIAL_TOKENS
    assert bench.judge("beside", home, steps("r", "beside"), 5) is INNOCENT
    assert bench.judge("r", home, steps("r", "beside"), 0) is GUILTY
    assert (bench.deaths("r"), bench.suspects.num_before("r")) == (["home"], 1)


def test_request_with_earlier_deaths_is_cleared_by_living(bench: Bench) -> None:
    home = engine("home")
    bench.suspects.came_after("r", 1, home)
    bench.suspects.heard("r", TRIAL_TOKENS)
    assert not bench.suspects.any_tried
    assert bench.judge("r", home, steps("r"), 9) is SUSPECT
    assert bench.suspects.trial_tokens("r") == TRIAL_TOKENS * LONGER, "it has to survive more the next time"


def test_of_two_that_came_after_deaths_neither_is_guilty_at_once(bench: Bench) -> None:
    home = engine("home")
    for name in "ab":
        bench.suspects.came_after(name, 1, home)
    assert {bench.judge(name, home, steps("a", "b"), 0) for name in "ab"} == {SUSPECT}


def test_request_with_earlier_deaths_on_an_unknown_engine_becomes_a_suspect(bench: Bench) -> None:
    bench.suspects.came_after("r", 1, None)
    home, other = engine("home"), engine("other")
    assert bench.judge("r", home, steps("r"), 0) is SUSPECT
    assert bench.tried("r") == {"r"}
    bench.send("r", other)
    assert bench.judge("r", other, steps("r"), 0) is GUILTY
