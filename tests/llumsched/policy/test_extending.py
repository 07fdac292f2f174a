# SPDX-License-Identifier: Apache-2.0
"""The packages of docs/extend/extending.md, installed and used as it says."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from llumlet.protocol.infer_type import InferType
from llumsched.cluster.providers import all_request_providers
from llumsched.policy.candidates import Candidates
from llumsched.policy.document import Mode, Overrides, parse_policy
from llumsched.policy.pipeline import run
from llumsched.policy.selectors import Draw
from llumsched.rescheduling.planning.policies import load_policies
from llumsched.rescheduling.rescheduling_config import ReschedulingConfig
from tests.llumsched import cases
from tests.llumsched.rescheduling.cluster import instance, pairs, planned

DOCUMENT = Path(__file__).parents[3] / "docs" / "extend" / "extending.md"
POLICY = """
full:
  neutral:
    metrics: [distance_of_it, free_blocks]
    filters: [{tenantFilter: {prefix: mine}}]
    selector: worstSelector
define:
  metrics: {distance_of_it: {value: distance * 2}}
"""


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    source = "\n".join(blocks("python"))
    lines = "\n".join(blocks("toml")).replace('[project.entry-points."', "[").replace('"]', "]").replace('"', "")
    cases.distribution(tmp_path, lines, source, "my_package")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("installed")
def test_a_policy_of_dispatch_uses_all_of_it() -> None:
    stage = parse_policy(POLICY, "test", Mode.FULL, Overrides()).stages[InferType.NEUTRAL]
    nodes = {"mine-a": "A", "mine-b": "B", "other": "C"}
    instances = [cases.instance(name, node_id=node) for name, node in nodes.items()]
    plain = cases.candidates(*instances, id="r")
    seen = Candidates(plain.cluster, plain.context, all_request_providers())
    decision = run(stage, seen, Draw(random.Random(0)))
    distances = seen.values(stage.metrics[0]).tolist()
    assert distances == [2 * abs(node - len("r")) for node in plain["node"]]
    refused = {one.name: mask.tolist() for one, mask in decision.screening.refused}
    assert refused["tenantFilter"] == [False, False, True]
    assert decision.row == max((0, 1), key=lambda row: (distances[row], row))


def test_a_policy_of_rescheduling_pairs_as_it_says(installed: Path) -> None:
    path = installed / "mine.yaml"
    path.write_text("rescheduling: {selector: fullestToEmptiest}")
    config = ReschedulingConfig((str(path),))
    cluster = [instance("a", 0.5), instance("b", 0.1), instance("c", 0.9)]
    assert pairs(planned(cluster, config, policies=load_policies(config))) == [("c", "b")]
