# SPDX-License-Identifier: Apache-2.0
"""Whether vLLM's objects have what the protocols that stand for them ask for."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from types import ModuleType

_OF_PROTOCOLS = {"_abc_impl", "_is_protocol", "_is_runtime_protocol", "_non_callable_proto_members_"}


def protocols_of(module: ModuleType) -> set[type]:
    """The protocols that a module defines."""
    classes = {one for one in vars(module).values() if isinstance(one, type) and one.__module__ == module.__name__}
    return {cls for cls in classes if getattr(cls, "_is_protocol", False)}


def members(protocol: type) -> set[str]:
    """Names of what a protocol asks for, those that it inherits included."""
    classes = [cls for cls in protocol.__mro__ if getattr(cls, "_is_protocol", False)]
    defined = {name for cls in classes for name in vars(cls) if not name.startswith("__")}
    return (defined | {name for cls in classes for name in cls.__annotations__}) - _OF_PROTOCOLS


def missing(protocol: type, found: object, but: Iterable[str] = ()) -> set[str]:
    """What `found` lacks, as `Protocol.member`. Of a class counts what it or its bases define, declare, or set on
    `self`. `but`: members that are not to be there."""
    wanted = {name for name in members(protocol).difference(but) if not hasattr(found, name)}
    if isinstance(found, type):
        own = [cls for cls in found.__mro__ if cls.__module__.startswith("vllm.")]
        source = "".join(map(inspect.getsource, own))
        declared = {name for cls in own for name in inspect.get_annotations(cls)}
        wanted = {name for name in wanted - declared if not re.search(rf"\bself\.{name}\b\s*(:|=(?!=))", source)}
    return {f"{protocol.__name__}.{name}" for name in wanted}
