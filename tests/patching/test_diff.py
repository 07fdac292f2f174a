# SPDX-License-Identifier: Apache-2.0
"""Unified diffs: exact or not at all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_llumnix.errors import PatchError
from vllm_llumnix.patching.diff import parse
from vllm_llumnix.patching.series import unified_diff

BEFORE = "one\ntwo\nthree\nfour\n"
AFTER = "one\ntwo\nmore\nthree\nFOUR\n"
DIFF = """Why: a header is passed over
---
--- a/vllm/x.py
+++ b/vllm/x.py
@@ -1,4 +1,5 @@ class Context
 one
 two
+more
 three
-four
+FOUR
"""


def test_apply_and_reverse() -> None:
    (change,) = parse(DIFF, "x.patch")
    assert change.path == "vllm/x.py"
    assert change.apply(BEFORE) == AFTER
    assert change.reversed().apply(AFTER) == BEFORE
    assert (change.hunks[0].num_added, change.hunks[0].num_removed) == (2, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("zero\n" + BEFORE, r"vllm/x.py:1: expected 'one', found 'zero'"),
        (BEFORE.replace("three", "3"), r"vllm/x.py:3: expected 'three', found '3'"),
        (BEFORE.replace("two", "two "), r"vllm/x.py:2: expected 'two', found 'two '"),
        ("one\ntwo", r"vllm/x.py:3: expected 'three', found the end of the file"),
    ],
)
def test_neither_offset_nor_fuzz(text: str, message: str) -> None:
    (change,) = parse(DIFF, "x.patch")
    with pytest.raises(PatchError, match=message):
        change.apply(text)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("zero\n" + BEFORE, 1),
        (BEFORE + "five\n", 1),
        ("two\nthree\n" + BEFORE, 1),
        (BEFORE.replace("three", "3"), 0),
        (BEFORE.replace("two", "two "), 0),
        (BEFORE + BEFORE, 2),
        (BEFORE + "one\n" + BEFORE, 2),
        ("", 0),
    ],
)
def test_by_text(text: str, count: int) -> None:
    """Wherever it is, but word for word, and once."""
    (change,) = parse(DIFF, "x.patch")
    result, misfits = change.apply_by_text(text)
    if count == 1:
        assert (result, misfits) == (text.replace(BEFORE, AFTER), [])
    else:
        assert (result, misfits) == (text, [(change.hunks[0], count)])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no change in it"),
        (DIFF.replace("+++ b/vllm/x.py", "+++ b/vllm/y.py"), "with one path"),
        (DIFF.replace("--- a/vllm/x.py", "--- /dev/null"), "no change in it"),
        (DIFF.replace("-1,4", "-1,5"), "begins with"),
        (DIFF.replace("-1,4", "-1,3"), "more lines than its head says"),
        (DIFF.replace("@@ -1,4", "@@ 1,4"), "not the head of a hunk"),
        (DIFF + "trailing\n", "expected '--- a/PATH'"),
        (DIFF[: DIFF.index("@@")], "no hunk for vllm/x.py"),
    ],
)
def test_special_changes_are_refused(text: str, message: str) -> None:
    with pytest.raises(PatchError, match=message):
        parse(text, "x.patch")


def test_a_head_that_counts_wrongly() -> None:
    (change,) = parse(DIFF.replace("+1,5", "+2,5"), "x.patch")
    with pytest.raises(PatchError, match="counts its lines wrongly"):
        change.apply(BEFORE)


LINES = st.lists(st.sampled_from(["a", "b", "c", "", "  d", "\x0c", "+", "-", "--- a/x"]), min_size=1, max_size=30)


@given(LINES, LINES)
def test_round_trip(before_lines: list[str], after_lines: list[str]) -> None:
    before, after = ("".join(f"{line}\n" for line in lines) for lines in (before_lines, after_lines))
    text = "".join(unified_diff("vllm/x.py", before, after))
    if before == after:
        assert text == ""
        return
    (change,) = parse(text, "x.patch")
    assert change.apply(before) == after
    assert change.reversed().apply(after) == before
