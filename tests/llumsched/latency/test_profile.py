# SPDX-License-Identifier: Apache-2.0
"""Profiles in our form and in Llumnix's: what is written is read, and what is wrong is said."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from llumsched.latency.profile import Profile, read_llumnix, read_profile
from tests.llumsched.latency.llumnix import BATCHES, LENGTHS, PROMPTS, for_llumnix
from tests.llumsched.latency.test_fitting import TRUE

PROFILE = Profile("m", TRUE, 812, 0.02, "here")
OURS: dict[str, Any] = json.loads(PROFILE.written())
TTFT: dict[str, Any] = json.loads(for_llumnix(PROFILE)[0])
TPOT: dict[str, Any] = json.loads(for_llumnix(PROFILE)[1])


def write(path: Path, content: Any) -> str:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_a_file_of_our_own_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = write(tmp_path / "p.json", PROFILE.written("of a test"))
    assert read_profile(path) == Profile("m", TRUE, 812, 0.02, path)


def test_llumnix_s_two_files_say_what_the_numbers_say(tmp_path: Path) -> None:
    files = [write(tmp_path / f"{name}.json", content) for name, content in (("ttft", TTFT), ("tpot", TPOT))]
    found = read_llumnix(files)
    assert (found.model, found.num_steps) == ("m", len(PROMPTS) + len(BATCHES) * len(LENGTHS))
    a, b, c, d, e = found.coefficients
    for result in TTFT["results"]:
        n = result["tokens_num"]
        assert 1e3 * (a + b * n + c * n * (n + 1) / 2) == pytest.approx(result["p50"], rel=0.02)
    for result in TPOT["results"]:
        batch, length = result["batch_size"], result["tokens_per_request"]
        assert 1e3 * (a + d * batch + e * batch * length) == pytest.approx(result["p50"], rel=0.02)


def test_single_llumnix_file_is_enough(tmp_path: Path) -> None:
    found = read_llumnix([write(tmp_path / "ttft.json", TTFT)])
    assert found.coefficients.b == pytest.approx(TRUE.b, rel=0.05)
    assert (found.coefficients.d, found.coefficients.e) == (0, 0)


def test_only_medians_count(tmp_path: Path) -> None:
    """As for Llumnix: the rest may be missing, or nonsense."""
    bare = [{"tokens_num": one["tokens_num"], "p50": one["p50"], "mean": "?"} for one in TTFT["results"]]
    found = read_llumnix([write(tmp_path / "ttft.json", {"results": bare})])
    assert found.model == ""
    assert found.fits("anything")
    assert found.coefficients.b == pytest.approx(TRUE.b, rel=0.05)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is no JSON"),
        ("[]", "is no JSON object"),
        ({}, "llumnix_profile is None, not 1"),
        (TTFT, "llumnix_profile is None, not 1"),
        (OURS | {"step_s": {"a": 1.0}}, "step_s has not the numbers a, b, c, d, e"),
        (OURS | {"step_s": TRUE._asdict() | {"a": 0.0}}, "step_s needs a > 0"),
        (OURS | {"step_s": TRUE._asdict() | {"b": -1e-9}}, "no number below 0"),
        (OURS | {"step_s": TRUE._asdict() | {"c": math.nan}}, "step_s.c nan is no number"),
        (OURS | {"step_s": TRUE._asdict() | {"c": math.inf}}, "step_s.c inf is no number"),
        (OURS | {"step_s": TRUE._asdict() | {"c": "1"}}, "step_s.c '1' is no number"),
        (OURS | {"model": 7}, "model '7' is no name"),
        (OURS | {"steps": -1}, "steps -1 is no number of steps"),
    ],
)
def test_a_file_of_our_own_that_is_wrong(content: Any, said: str, tmp_path: Path) -> None:
    path = write(tmp_path / "p.json", content)
    with pytest.raises(ValueError, match=said) as error:
        read_profile(path)
    assert str(error.value).startswith(f"profile {path}: ")


def results(**fields: Any) -> dict[str, Any]:
    return TTFT | {"results": [*TTFT["results"], {"tokens_num": 5, "p50": 1.0} | fields]}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (OURS, "results is no list, or empty"),
        (TTFT | {"results": []}, "results is no list, or empty"),
        (TTFT | {"results": [1]}, r"results\[0\] is no object"),
        (TTFT | {"results": TTFT["results"][:3]}, "3 results are too few"),
        (results(p50=math.nan), r"results\[12\].p50 nan is no number"),
        (results(p50=None), r"results\[12\].p50 None is no number"),
        (results(p50=0), r"results\[12\].p50 is not above 0"),
        (results(p50=True), r"results\[12\].p50 True is no number"),
        (results(tokens_num=0), r"results\[12\].tokens_num 0 is no whole number from 1 on"),
        (results(tokens_num=1.5), r"results\[12\].tokens_num 1.5 is no whole number"),
        (TTFT | {"results": [{"batch_size": 4, "p50": 1.0}]}, r"results\[0\].tokens_per_request None is no number"),
    ],
)
def test_a_file_of_llumnix_that_is_wrong(content: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        read_llumnix([write(tmp_path / "ttft.json", content)])


def test_files_of_different_models_are_not_put_together(tmp_path: Path) -> None:
    other = TPOT | {"metadata": {"model": "n"}}
    with pytest.raises(ValueError, match="of different models, m and n"):
        read_llumnix([write(tmp_path / "ttft.json", TTFT), write(tmp_path / "tpot.json", other)])


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        read_profile(str(tmp_path / "none.json"))
