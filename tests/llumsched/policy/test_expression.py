# SPDX-License-Identifier: Apache-2.0
"""Formulas over columns: what they compute, beside Python itself, and what they refuse."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llumsched.policy.expression import MOST_CHARACTERS, Expression, ExpressionError

COLUMNS = {"a": np.array([1.0, 2.0, 0.0]), "b": np.array([4.0, 0.0, 0.0])}


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("a + 2 * b - 1", [8, 1, -1]),
        ("-a / (b + 1)", [-0.2, -2, 0]),
        ("a / b", [0.25, math.inf, math.nan]),
        ("1 / 0 * a", [math.inf, math.inf, math.nan]),
        ("a < b", [True, False, False]),
        ("0 < a <= 1 and not b == 0", [True, False, False]),
        ("a == 2 or b > 3", [True, True, False]),
        ("a if b > 0 else 9", [1, 9, 9]),
        ("-(a > b) + 1", [1, 0, 1]),
        ("(a > 0) + (b > 0) + (not a)", [2, 1, 1]),
        ("(a > 0) - (b > 0) > 0", [False, True, False]),
        ("max(a > 1, b > 9) * 3", [0, 3, 0]),
        ("-(a > b if b > 0 else a == 0)", [0, 0, -1]),
        ("max(a, b, 1.5) + min(a, 1) + abs(0 - b)", [9, 3, 1.5]),
    ],
)
def test_all_rows_at_a_time(text: str, values: list[float]) -> None:
    found = Expression(text).of(COLUMNS.__getitem__)
    np.testing.assert_array_equal(np.broadcast_to(found, 3), values)
    for row, value in enumerate(values):
        alone = float(Expression(text).of(lambda name, row=row: float(COLUMNS[name][row])))
        assert alone == value or math.isnan(alone)


@pytest.mark.parametrize("number", ["1" + 400 * "0", "1e999", "a + 1e400", "-9e999"])
def test_number_that_is_too_large_is_refused(number: str) -> None:
    with pytest.raises(ExpressionError, match="too large"):
        Expression(number)


def test_names_are_those_of_the_columns_it_reads_and_equality_that_of_the_text() -> None:
    assert Expression("max(a, 2) + a / b").names == {"a", "b"}
    assert Expression("a  +\n b") == Expression("a + b") != Expression("b + a")
    assert len({Expression("a"), Expression(" a "), Expression("b")}) == 2


def test_formulas_in_the_place_of_their_names_keep_their_brackets() -> None:
    formula = Expression("2 * x - c").with_names({"x": Expression("a + b"), "d": Expression("1")})
    assert formula.names == {"a", "b", "c"}
    assert formula.of({"a": 1.0, "b": 2.0, "c": 5.0}.__getitem__) == 1.0


@pytest.mark.parametrize(
    "text",
    ["", "a b", "a ** 2", "a % 2", "a // 2", "a.real", "a[0]", "[a]", "(a, b)", "lambda: a", "f(a)", "max", "abs(a, b)",
     "min(a, b=1)", "'a'", "True", "None", "1j", "a is b", "a in b", "~a", "a & b", "a := 1", "(yield)", "f'{a}'",
     "eval('1')", "().__class__", "x" * (MOST_CHARACTERS + 1), "(" * 500 + "a" + ")" * 500, "-" * 1500 + "a"],
)  # fmt: skip
def test_whatever_is_not_in_the_grammar_is_refused(text: str) -> None:
    with pytest.raises(ExpressionError):
        Expression(text)


def formulas(depth: int = 3) -> st.SearchStrategy[str]:
    leaves = st.sampled_from(["a", "b", "1", "0.5", "7"])
    return st.recursive(leaves, lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+-*"), inner).map(lambda parts: f"({' '.join(parts)})"),
        st.tuples(inner, st.sampled_from(["<", ">="]), inner, inner, inner).map(
            lambda p: f"({p[3]} if {p[0]} {p[1]} {p[2]} else {p[4]})"),
        st.tuples(inner, inner).map(lambda parts: f"max({', '.join(parts)})"),
        inner.map(lambda part: f"(-{part})"),
    ), max_leaves=8)  # fmt: skip


@given(formulas(), st.lists(st.tuples(st.integers(-9, 9), st.integers(-9, 9)), min_size=1, max_size=5))
def test_as_python_computes(text: str, rows: list[tuple[int, int]]) -> None:
    columns: dict[str, Any] = {name: np.array([float(row[at]) for row in rows]) for at, name in enumerate("ab")}
    found = np.broadcast_to(Expression(text).of(columns.__getitem__), len(rows))
    expected = [eval(text, {"max": max}, {"a": float(a), "b": float(b)}) for a, b in rows]
    np.testing.assert_allclose(found, expected)
