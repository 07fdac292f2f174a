# SPDX-License-Identifier: Apache-2.0
"""A simulated instance moves the requests that an engine would move: benchmarks of the rescheduler count on it."""

from __future__ import annotations

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from llumlet.protocol import selection
from llumlet.protocol.ids import RequestId
from llumlet.protocol.selection import ALL, Order, Rule, Unit
from llumlet.types import MigrateRequest, MigrationReqPolicy, MigrationType
from llumsched.testing.engine import EngineModel, SimulatedRequest
from llumsched.testing.selection import select

BLOCKS = EngineModel(num_blocks=100, block_size=4)
LENGTHS = st.lists(st.integers(1, 200), max_size=5)
RULES = st.one_of(
    st.builds(Rule, st.just(Unit.NUM_REQ), st.sampled_from(Order), st.one_of(st.just(ALL), st.integers(1, 8))),
    st.builds(Rule, st.just(Unit.TOKEN), st.sampled_from(Order), st.integers(1, 600)),
    st.builds(Rule, st.just(Unit.RATIO), st.sampled_from(Order), st.sampled_from([0.01, 0.1, 0.5, 1.0])),
)


def simulated(name: str, length: int, order: int) -> SimulatedRequest:
    return SimulatedRequest(name, [1] * length, 10, num_computed=length, arrival_order=float(order))


def asked(rule: Rule) -> MigrateRequest:
    amount = {Unit.NUM_REQ: "num_reqs", Unit.TOKEN: "num_tokens", Unit.RATIO: "kv_cache_usage_ratio"}[rule.unit]
    value = rule.value if rule.unit is Unit.RATIO else int(rule.value)
    request = MigrateRequest(
        migration_type=MigrationType.Value(rule.unit), migration_req_policy=MigrationReqPolicy.Value(rule.order)
    )
    setattr(request, amount, value)
    return request


@given(waiting=LENGTHS, running=LENGTHS, rule=RULES)
def test_it_selects_as_engines_do(waiting: list[int], running: list[int], rule: Rule) -> None:
    queued = [simulated(f"w{at}", length, at) for at, length in enumerate(waiting)]
    decoding = [simulated(f"r{at}", length, at) for at, length in enumerate(running)]
    engine = SimpleNamespace(waiting=queued, running=decoding, requests=queued + decoding, model=BLOCKS)
    candidates = [
        selection.Candidate(RequestId(each.request_id), each in decoding, int(each.arrival_order), each.num_tokens)
        for each in queued + decoding
    ]
    expected = selection.select(candidates, rule, BLOCKS.num_blocks * BLOCKS.block_size)
    assert [each.request_id for each in select(engine, asked(rule))] == expected
