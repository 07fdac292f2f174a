# SPDX-License-Identifier: Apache-2.0
"""A modelled instance moves the requests that an engine would move: benchmarks of the rescheduler count on it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from llumlet.contract.bridge import rule_of
from llumlet.contract.types import MigrateRequest, MigrationReqPolicy, MigrationType
from llumlet.protocol.ids import RequestId
from llumlet.protocol.move import selection
from llumlet.protocol.move.selection import ALL, Order, Rule, Unit
from llumsim.engine.requests import EngineRequest, Phase
from llumsim.engine.step_model import EngineConfig
from llumsim.moves.llumlets import Llumlet

CONFIG = EngineConfig(num_blocks=100, block_size=4)
LENGTHS = st.lists(st.integers(1, 200), max_size=5)
RULES = st.one_of(
    st.builds(Rule, st.just(Unit.NUM_REQ), st.sampled_from(Order), st.one_of(st.just(ALL), st.integers(1, 8))),
    st.builds(Rule, st.just(Unit.TOKEN), st.sampled_from(Order), st.integers(1, 600)),
    st.builds(Rule, st.just(Unit.RATIO), st.sampled_from(Order), st.sampled_from([0.01, 0.1, 0.5, 1.0])),
)


def arrived(phase: Phase, lengths: list[int]) -> list[EngineRequest]:
    """In the order of their arrival."""
    name = phase.name.lower()
    return [
        EngineRequest(f"{name}-{at}", length, 10, priority=length % 4 - 1, arrived_ps=at, phase=phase)
        for at, length in enumerate(lengths)
    ]


def asked(rule: Rule) -> MigrateRequest:
    amount = {Unit.NUM_REQ: "num_reqs", Unit.TOKEN: "num_tokens", Unit.RATIO: "kv_cache_usage_ratio"}[rule.unit]
    value = rule.value if rule.unit is Unit.RATIO else int(rule.value)
    request = MigrateRequest(
        migration_type=MigrationType.Value(rule.unit), migration_req_policy=MigrationReqPolicy.Value(rule.order)
    )
    setattr(request, amount, value)
    return request


@example(waiting=[], running=[1] * 4, rule=Rule(Unit.RATIO, Order.LCR, 0.01))
@given(waiting=LENGTHS, running=LENGTHS, rule=RULES)
def test_instance_selects_requests_like_an_engine(waiting: list[int], running: list[int], rule: Rule) -> None:
    queued, decoding = arrived(Phase.WAITING, waiting), arrived(Phase.DECODE, running)
    candidates = [
        selection.Candidate(
            RequestId(each.id), each in decoding, each.arrived_ps, each.num_tokens, priority=each.priority
        )
        for each in queued + decoding
    ]
    engine: Any = SimpleNamespace(
        waiting=queued,
        running=decoding[::-1],  # as if each had come by a move
        num_tokens=lambda each: each.num_tokens,
        config=CONFIG,
    )
    nobody: Any = None
    llumlet = Llumlet(SimpleNamespace(engine=engine), nobody, nobody, nobody)  # type: ignore[arg-type]
    heard = rule_of(asked(rule))  # a ratio is a float of 32 bits on its way
    expected = selection.select(candidates, heard, CONFIG.num_blocks * CONFIG.block_size)
    assert llumlet._selected(asked(rule)) == expected
