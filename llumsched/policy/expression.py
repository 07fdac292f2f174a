# SPDX-License-Identifier: Apache-2.0
"""Formulas over columns, as text: `num_used_gpu_tokens / num_total_gpu_tokens`, or `num_waiting_requests > 4`.

The grammar is a part of Python's: names, numbers, `+ - * /`, comparisons, `and or not`, `a if condition else b`, and
the functions `min`, `max` and `abs`. A formula is checked and compiled once, and then evaluated for all rows at a time.
Division by zero gives an infinity, or not a number for 0 / 0.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

MOST_CHARACTERS: Final = 2000
_OPERATORS: Final = (ast.Add, ast.Sub, ast.Mult, ast.Div)
_COMPARISONS: Final = (ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq)


class ExpressionError(ValueError):
    """A text that is no formula, and why."""


class Expression:
    """A formula. It is a value: two of the same text are equal."""

    def __init__(self, text: str) -> None:
        """Raises ExpressionError."""
        self.text = " ".join(text.split())
        if len(self.text) > MOST_CHARACTERS:
            raise ExpressionError(f"has {len(self.text)} characters, {MOST_CHARACTERS} at most")
        try:
            tree = ast.parse(self.text, mode="eval")
            compiler = _Compiler()
            body = compiler.visit(tree.body)
        except ExpressionError as error:
            raise ExpressionError(f"{self.text!r} {error}") from None
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise ExpressionError(f"{self.text!r} is no formula: {getattr(error, 'msg', error)}") from None
        self.names = frozenset(compiler.names)
        """Names of the columns that it reads."""
        code = compile(ast.fix_missing_locations(ast.Expression(body)), "<expression>", "eval")
        self._evaluate: Callable[[Mapping[str, Any]], Any] = functools.partial(eval, code, _FUNCTIONS)

    def of(self, value_of: Callable[[str], Any]) -> Any:
        """The result: an array, or a single number. `value_of` gives arrays of one length or single numbers by name."""
        values = {name: value_of(name) for name in self.names}
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            return self._evaluate(values)

    def with_names(self, formulas: Mapping[str, Expression]) -> Expression:
        """A formula with others in the place of their names. Raises ExpressionError if it becomes too long."""
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


class _Compiler(ast.NodeVisitor):
    """Python's tree into one that numpy can evaluate; whatever is not in the grammar is refused."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def generic_visit(self, node: ast.AST) -> ast.expr:
        raise ExpressionError(f"uses {type(node).__name__}, which formulas do not have")

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id in _BY_NAME:
            raise ExpressionError(f"uses the function {node.id} without arguments")
        self.names.add(node.id)
        return ast.Name(node.id, ast.Load())

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        if isinstance(node.value, bool) or not isinstance(node.value, int | float):
            raise ExpressionError(f"uses {node.value!r}, which is no number")
        return ast.Constant(float(node.value))

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        if isinstance(node.op, ast.Not):
            return _call("_not", self.visit(node.operand))
        if isinstance(node.op, ast.USub | ast.UAdd):
            return ast.UnaryOp(node.op, self.visit(node.operand))
        return self.generic_visit(node.op)

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        if not isinstance(node.op, _OPERATORS):
            return self.generic_visit(node.op)
        left, right = self.visit(node.left), self.visit(node.right)
        if isinstance(node.op, ast.Div):
            return _call("_divide", left, right)  # Python's own raises if two single numbers have no quotient
        return ast.BinOp(left, node.op, right)

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        """A chain of comparisons as the conjunction of its parts."""
        sides = [self.visit(side) for side in (node.left, *node.comparators)]
        parts: list[ast.expr] = []
        for left, operator, right in zip(sides, node.ops, sides[1:], strict=False):
            if not isinstance(operator, _COMPARISONS):
                return self.generic_visit(operator)
            parts.append(ast.Compare(left, [operator], [right]))
        return functools.reduce(lambda one, other: _call("_and", one, other), parts)

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        name = "_and" if isinstance(node.op, ast.And) else "_or"
        parts: list[ast.expr] = [self.visit(value) for value in node.values]
        return functools.reduce(lambda one, other: _call(name, one, other), parts)

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        return _call("_where", self.visit(node.test), self.visit(node.body), self.visit(node.orelse))

    def visit_Call(self, node: ast.Call) -> ast.expr:
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name not in _BY_NAME or node.keywords:
            raise ExpressionError(f"calls what is none of {', '.join(sorted(_BY_NAME))}")
        function, least, most = _BY_NAME[name]
        arguments: list[ast.expr] = [self.visit(argument) for argument in node.args]
        if not least <= len(arguments) <= most:
            raise ExpressionError(f"calls {name} with {len(arguments)} arguments")
        if len(arguments) == 1:
            return _call(function, arguments[0])
        return functools.reduce(lambda one, other: _call(function, one, other), arguments)


class _Replacing(ast.NodeTransformer):
    def __init__(self, formulas: Mapping[str, Expression]) -> None:
        self._formulas = formulas

    def visit_Name(self, node: ast.Name) -> ast.expr:
        formula = self._formulas.get(node.id)
        return node if formula is None else ast.parse(formula.text, mode="eval").body


def _call(function: str, *arguments: ast.expr) -> ast.expr:
    return ast.Call(ast.Name(function, ast.Load()), list(arguments), [])


_BY_NAME: Final = {"min": ("_min", 2, 32), "max": ("_max", 2, 32), "abs": ("_abs", 1, 1)}
"""Functions of the grammar: what they are called inside, and how many arguments they take."""
_FUNCTIONS: Final[dict[str, Any]] = {
    "__builtins__": {},
    "_and": np.logical_and,
    "_or": np.logical_or,
    "_not": np.logical_not,
    "_where": np.where,
    "_min": np.minimum,
    "_max": np.maximum,
    "_abs": np.abs,
    "_divide": np.true_divide,
}
