# SPDX-License-Identifier: Apache-2.0
"""How many schedulers there are, by what arrives."""

from __future__ import annotations

import random

import pytest

from llumsched.cluster.view import View
from llumsched.foresight.senders import Senders
from tests.llumsched import cases


class World:
    def __init__(self, *names: str) -> None:
        self.now_s = 0.0
        self.view = View(lambda: self.now_s)
        self.senders = Senders(lambda: self.now_s)
        self.view.observe(self.senders)
        self.recent: dict[str, list[tuple[float, str]]] = {name: [] for name in names}
        self.number = 0
        for name in names:
            self.tell(name)

    def tell(self, name: str) -> None:
        self.number += 1
        recent = self.recent[name] = [each for each in self.recent[name] if each[0] > self.now_s - 10]
        cases.put(self.view, name, self.number, recent_waiting_requests=[each for _, each in recent])

    def play(self, num_schedulers: int, seconds: float) -> None:
        """Requests of so many schedulers, ten a second in all; this one's are every so-manieth."""
        chance = random.Random(1)
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s += 0.1
            self.number += 1
            if chance.randrange(num_schedulers) == 0:
                self.senders.sent()
            name = chance.choice(list(self.recent))
            self.recent[name].append((self.now_s, f"r{self.number}"))
            if chance.random() < 0.5:
                self.tell(name)


@pytest.mark.parametrize("number", [1, 2, 4])
def test_requests_that_come_for_each_that_was_sent(number: int) -> None:
    world = World("a", "b", "c")
    world.play(number, 120)
    assert world.senders.number == pytest.approx(number, rel=0.25)
    if number == 1:
        assert world.senders.number == 1.0, "not a little more or less"


def test_appearing_and_leaving_schedulers_are_noticed() -> None:
    world = World("a", "b")
    world.play(4, 60)
    world.play(1, 60)
    assert world.senders.number == 1.0


def test_earlier_requests_count_as_others() -> None:
    """A scheduler that starts finds ten seconds of requests named that it has not sent, and that say nothing."""
    world = World("a")
    world.recent["a"] = [(0.0, f"old{number}") for number in range(100)]
    world.view.remove("a")
    world.tell("a")
    for number in range(20):
        world.senders.sent()
        world.recent["a"].append((0.0, f"new{number}"))
    world.tell("a")
    assert world.senders.number == 1.0


def test_a_handful_of_requests_says_nothing() -> None:
    world = World("a")
    for _ in range(5):
        world.senders.sent()
    world.recent["a"] = [(0.0, f"r{number}") for number in range(50)]
    world.tell("a")
    assert world.senders.number == 1.0
