# SPDX-License-Identifier: Apache-2.0
"""Formulas over columns, as text: `num_used_gpu_tokens / num_total_gpu_tokens`, or `num_waiting_requests > 4`.

The grammar is a part of Python's: names, numbers, `+ - * /`, comparisons, `and or not`, `a if condition else b`, and
the functions `min`, `max` and `abs`. A formula is compiled once and evaluated for all rows together. Division by zero
gives infinity, or NaN for 0 / 0. Comparisons are 1 or 0.
"""

from __future__ import annotations

import ast
import functools
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

MOST_CHARACTERS: Final = 2000

Values = Mapping[str, Any]
"""Arrays of one length, or single numbers, by name."""
_Evaluate = Callable[[Values], Any]


class ExpressionError(ValueError):
    """Raised for a text that is not a formula, with the reason."""


class Expression:
    """A formula. Two with the same text are equal."""

    def __init__(self, text: str) -> None:
        """Raises ExpressionError."""
        self.text = " ".join(text.split())
        if len(self.text) > MOST_CHARACTERS:
            raise ExpressionError(f"has {len(self.text)} characters, {MOST_CHARACTERS} at most")
        try:
            compiler = _Compiler()
            self._evaluate: _Evaluate = compiler.visit(ast.parse(self.text, mode="eval").body)
        except ExpressionError as error:
            raise ExpressionError(f"{self.text!r} {error}") from None
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise ExpressionError(f"{self.text!r} is no formula: {getattr(error, 'msg', error)}") from None
        self.names = frozenset(compiler.names)
        """Columns that it reads."""

    def of(self, value_of: Callable[[str], Any]) -> Any:
        """Evaluates to an array or a number. `value_of` gives an array or a number by name."""
        values = {name: value_of(name) for name in self.names}
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            return self._evaluate(values)

    def with_names(self, formulas: Mapping[str, Expression]) -> Expression:
        """The expression with formulas in place of names. Raises ExpressionError if it becomes too long."""
        if not self.names & formulas.keys():
            return self
        tree = _Replacing(formulas).visit(ast.parse(self.text, mode="eval"))
        return Expression(ast.unparse(tree))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Expression) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __repr__(self) -> str:
        return f"Expression({self.text!r})"


def numbers(values: Mapping[str, float]) -> dict[str, Expression]:
    """Constants as formulas, by name."""
    return {name: Expression(str(value)) for name, value in values.items()}


_OPERATORS: Final[Mapping[type[ast.AST], Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: np.true_divide,  # Python's own raises if two single numbers have no quotient
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.And: np.logical_and,
    ast.Or: np.logical_or,
}
_FUNCTIONS: Final[Mapping[str, tuple[Callable[..., Any], int, int]]] = {
    "min": (np.minimum, 2, 32),
    "max": (np.maximum, 2, 32),
    "abs": (np.abs, 1, 1),
}
"""The functions of the grammar, with their numbers of arguments."""


class _Compiler(ast.NodeVisitor):
    """Compiles Python's syntax tree to numpy calls; anything outside the grammar is refused. No code is generated."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self._truths: set[_Evaluate] = set()
        """Boolean parts, which numpy does not add like numbers."""

    def _truth(self, evaluate: _Evaluate) -> _Evaluate:
        self._truths.add(evaluate)
        return evaluate

    def _number(self, node: ast.AST) -> _Evaluate:
        """A numeric part: true is 1, false is 0."""
        evaluate: _Evaluate = self.visit(node)
        if evaluate in self._truths:
            return lambda values: np.multiply(evaluate(values), 1.0)
        return evaluate

    def generic_visit(self, node: ast.AST) -> _Evaluate:
        raise ExpressionError(f"uses {type(node).__name__}, which formulas do not have")

    def visit_Name(self, node: ast.Name) -> _Evaluate:
        if node.id in _FUNCTIONS:
            raise ExpressionError(f"uses the function {node.id} without arguments")
        self.names.add(node.id)
        return operator.itemgetter(node.id)

    def visit_Constant(self, node: ast.Constant) -> _Evaluate:
        if isinstance(node.value, bool) or not isinstance(node.value, int | float):
            raise ExpressionError(f"uses {node.value!r}, which is no number")
        try:
            number = float(node.value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise ExpressionError("uses a number that is too large")
        return lambda _: number

    def visit_UnaryOp(self, node: ast.UnaryOp) -> _Evaluate:
        match node.op:
            case ast.Not():
                denied: _Evaluate = self.visit(node.operand)
                return self._truth(lambda values: np.logical_not(denied(values)))
            case ast.USub():
                operand = self._number(node.operand)
                return lambda values: -operand(values)
            case ast.UAdd():
                return self._number(node.operand)
        return self.generic_visit(node.op)

    def visit_BinOp(self, node: ast.BinOp) -> _Evaluate:
        return self._applied(node.op, self._number(node.left), self._number(node.right))

    def visit_Compare(self, node: ast.Compare) -> _Evaluate:
        """A chain is the conjunction of its comparisons."""
        sides = [self._number(side) for side in (node.left, *node.comparators)]
        parts = [self._applied(*each) for each in zip(node.ops, sides, sides[1:], strict=False)]
        return self._truth(functools.reduce(lambda one, other: self._applied(ast.And(), one, other), parts))

    def visit_BoolOp(self, node: ast.BoolOp) -> _Evaluate:
        parts: list[_Evaluate] = [self.visit(value) for value in node.values]
        return self._truth(functools.reduce(lambda one, other: self._applied(node.op, one, other), parts))

    def visit_IfExp(self, node: ast.IfExp) -> _Evaluate:
        test, body, other = self.visit(node.test), self._number(node.body), self._number(node.orelse)
        return lambda values: np.where(test(values), body(values), other(values))

    def visit_Call(self, node: ast.Call) -> _Evaluate:
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name not in _FUNCTIONS or node.keywords:
            raise ExpressionError(f"calls what is none of {', '.join(sorted(_FUNCTIONS))}")
        function, least, most = _FUNCTIONS[name]
        if not least <= len(node.args) <= most:
            raise ExpressionError(f"calls {name} with {len(node.args)} arguments")
        arguments = [self._number(argument) for argument in node.args]
        if len(arguments) == 1:
            return lambda values: function(arguments[0](values))
        return lambda values: functools.reduce(function, [argument(values) for argument in arguments])

    def _applied(self, op: ast.AST, left: _Evaluate, right: _Evaluate) -> _Evaluate:
        function = _OPERATORS.get(type(op))
        if function is None:
            return self.generic_visit(op)
        return lambda values: function(left(values), right(values))


class _Replacing(ast.NodeTransformer):
    def __init__(self, formulas: Mapping[str, Expression]) -> None:
        self._formulas = formulas

    def visit_Name(self, node: ast.Name) -> ast.expr:
        formula = self._formulas.get(node.id)
        return node if formula is None else ast.parse(formula.text, mode="eval").body
