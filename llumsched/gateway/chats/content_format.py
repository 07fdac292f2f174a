# SPDX-License-Identifier: Apache-2.0
"""Finds the form of messages that a chat template expects, as vLLM does, from the template's syntax tree.

vLLM: `_detect_content_format` and `_detect_developer_role_support` of vllm/renderers/hf.py, and
`_detect_merge_inline_system` of its Anthropic front end.
"""

from __future__ import annotations

from collections.abc import Iterator

import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes
from jinja2.parser import Parser


class _Generation(jinja2.ext.Extension):
    """Transformers' tag around the assistant's words, which some templates contain."""

    tags = {"generation"}  # noqa: RUF012 - the library's

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def knows_developer(template: str) -> bool:
    """True if a template has a case for the role `developer`."""
    return '"developer"' in template or "'developer'" in template


def takes_parts(template: str) -> bool:
    """True if a template iterates over the parts of a message's content. It then gets lists of them instead of
    texts."""
    try:
        root = _environment(jinja2.ext.loopcontrols, _Generation).parse(template)
        return any(True for _ in _loops_over_content(root))
    except (jinja2.TemplateError, AssertionError):
        return False


def wants_system_first(template: str) -> bool:
    """True if a template refuses a system message that is not the first."""
    messages = [{"role": role, "content": "t"} for role in ("system", "user", "system", "user")]
    try:
        _environment(jinja2.ext.loopcontrols).from_string(template).render(
            messages=messages, add_generation_prompt=False
        )
    except jinja2.TemplateError:
        return True
    return False


def _environment(*extensions: type[jinja2.ext.Extension]) -> jinja2.Environment:
    return jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)


def _loops_over_content(root: nodes.Template) -> Iterator[nodes.For]:
    """Loops over the content of a message, or over a macro's parameter that receives one."""
    messages = set(_names_of_a_message(root))
    of_macros: set[int] = set()
    parameters: dict[int, set[str]] = {}
    for macro in root.find_all(nodes.Macro):
        loops = {id(loop) for loop in macro.find_all(nodes.For)}
        of_macros |= loops
        if found := set(_parameters_with_content(root, macro, messages)):
            parameters.update(dict.fromkeys(loops, found))
    for loop in root.find_all(nodes.For):
        over = loop.iter
        name = over.name if isinstance(over, nodes.Name) else None
        if any(_reads(over, message, "content") for message in messages) or (
            name is not None
            and (name in parameters.get(id(loop), ()) or (id(loop) not in of_macros and name == "content"))
        ):
            assert isinstance(loop.target, nodes.Name)
            yield loop


def _parameters_with_content(root: nodes.Template, macro: nodes.Macro, messages: set[str]) -> Iterator[str]:
    for call in root.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name == macro.name:
            given = [*zip(macro.args, call.args, strict=False)]
            named = {argument.name: argument for argument in macro.args}
            given += [(named[one.key], one.value) for one in call.kwargs if one.key in named]
            for parameter, value in given:
                if any(_reads(value, message, "content") for message in messages):
                    yield parameter.name


def _names_of_a_message(root: nodes.Template) -> Iterator[str]:
    """Variables of the loops over messages."""
    lists = _names_of_messages(root)
    for loop in root.find_all(nodes.For):
        if any(_reads(loop.iter, name) for name in lists):
            assert isinstance(loop.target, nodes.Name)
            yield loop.target.name


def _names_of_messages(root: nodes.Template) -> list[str]:
    """`messages`, and variables that it, or a slice of it, is assigned to."""
    found = ["messages"]
    for name in found:  # grows
        for assignment in root.find_all(nodes.Assign):
            if _reads(assignment.node, name):
                assert isinstance(assignment.target, nodes.Name)
                if assignment.target.name not in found:
                    found.append(assignment.target.name)
    return found


def _reads(node: nodes.Node | None, name: str, field: str | None = None) -> bool:
    """True if an expression is this variable, this field of it, or a filter, test or slice of that."""
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    if field is not None:
        if isinstance(node, nodes.Getitem):
            is_field = isinstance(node.arg, nodes.Const) and node.arg.value == field
        else:
            is_field = isinstance(node, nodes.Getattr) and node.attr == field
        if not is_field:
            return False
        assert isinstance(node, nodes.Getitem | nodes.Getattr)
        node = node.node
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name
