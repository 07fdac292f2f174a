# SPDX-License-Identifier: Apache-2.0
"""Reads settings from the command line, variables and a file, with all faults.

A setting whose text cannot be read has a fault and its default; checks that look at it end there (`check`). Standard
library only; YAML is imported when a file is read.
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import os
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FunctionType
from typing import Any, Final, TypeVar

from llumlet.process.kinds import faults_of
from llumlet.process.settings import Setting, all_entries, entries

T = TypeVar("T")

PROGRAMS: Final = (
    "llumlet", "up", "top", "ps", "status", "migrate", "drain", "explain", "profile", "doctor", "gateway",
    "scheduler", "rescheduler",
)  # fmt: skip
"""Programs whose variables are `LLUMNIX_<PROGRAM>_<FLAG>`. Each checks its own. The first is in `vllm serve`."""
SHARED_VARIABLES: Final = frozenset(
    {
        "LLUMNIX_CMS", "LLUMNIX_CLUSTER", "LLUMNIX_TLS_CERT", "LLUMNIX_TLS_KEY", "LLUMNIX_TLS_CA",
        "LLUMNIX_TOKEN_FILE", "LLUMNIX_LLUMLET", "LLUMNIX_FAULTS",
    }
)  # fmt: skip
"""Variables of several programs. The last two are no settings: an engine's configuration for its child processes, and
the failures that tests inject."""
_OF_A_KUBERNETES_SERVICE: Final = re.compile(
    r"LLUMNIX_(\w+_)?("
    r"SERVICE_HOST=.*|SERVICE_PORT(_\w+)?=.*|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?=.*|PORT=(tcp|udp|sctp)://.*)"
)


class _Unread(Exception):
    """A check looks at a setting that could not be read."""


class _Seen:
    """An object as a check sees it: without the settings that could not be read."""

    def __init__(self, made: object, unread: Container[str]) -> None:
        self._made, self._unread = made, unread

    def __getattr__(self, name: str) -> Any:
        if name in self._unread:
            raise _Unread
        of_class = inspect.getattr_static(type(self._made), name, None)
        # Properties and methods see the same object.
        return of_class.__get__(self) if isinstance(of_class, property | FunctionType) else getattr(self._made, name)


class Reading:
    """The settings read for some classes."""

    def __init__(self, faults: list[str], further: tuple[str, ...] = ()) -> None:
        self.faults = faults
        """All faults, a sentence each."""
        self.further = further
        """Arguments after `--`."""
        self.given: dict[str, str] = {}
        """The source of each value by flag: the flag itself, a variable, or a line of the file."""
        self._values: dict[type, dict[str, Any]] = {}
        self._unread: dict[type, set[str]] = {}
        """Fields that could not be read, by class."""

    def take(self, cls: type, sources: Mapping[str, tuple[str, Any]]) -> None:
        values = self._values.setdefault(cls, {})
        for entry in entries(cls):
            if (said := sources.get(entry.setting.flag)) is None:
                continue
            where, text = said
            self.given[entry.setting.flag] = where
            try:
                value = entry.setting.kind.read(text)
            except ValueError as error:
                self.faults += [fault for said in faults_of(error) if (fault := f"{where} {said}") not in self.faults]
                self._unread.setdefault(cls, set()).add(entry.field)
                continue
            if entry.part:
                value = replace(values.get(entry.field, entry.whole), **{entry.part: value})
            values[entry.field] = value

    def make(self, cls: type[T], **others: Any) -> T:
        """An object with the values that were read, else `others`, else defaults."""
        return cls(**(others | self._values[cls]))

    def check(self, check: Callable[..., Iterable[str]], *arguments: Any) -> None:
        """Adds the faults that `check` finds in the made objects. The check ends where it looks at a setting that could
        not be read: that has its fault already, and its default would cause others."""
        seen = [_Seen(each, unread) if (unread := self._unread.get(type(each))) else each for each in arguments]
        try:
            for fault in check(*seen):
                self.faults.append(fault)
        except _Unread:
            pass

    def of_other_modes(self, mode: str) -> list[str]:
        """Faults of given settings that have no effect in `mode`."""
        settings = [entry.setting for entry in all_entries(self._values)]
        return [
            f"{self.given[setting.flag]} has no effect in {mode} mode"
            for setting in settings
            if setting.flag in self.given and setting.mode not in ("", mode)
        ]


def read(
    program: str,
    classes: Sequence[type],
    args: argparse.Namespace,
    environ: Mapping[str, str] = os.environ,
    file: str = "",
    further: tuple[str, ...] = (),
) -> Reading:
    """Reads all sources. `args`: of a parser with `add_arguments`. `file`: see `--config`."""
    settings = {entry.setting.flag: entry.setting for entry in all_entries(classes)}
    reading = Reading([], further)
    sources: dict[str, tuple[str, Any]] = {}
    if file:
        sources |= _of_file(file, settings, reading.faults)
    variables = {variable: flag for flag, each in settings.items() if (variable := each.variable_of(program))}
    for name, flag in variables.items():
        if (value := environ.get(name)) and not _is_of_kubernetes(name, value):
            sources[flag] = (name, [value] if settings[flag].kind.repeated else value)
    for flag, setting in settings.items():
        said = getattr(args, setting.dest, None)
        if said is not None:
            sources[flag] = (flag, said if isinstance(said, list) else _text(said))
    for cls in classes:
        reading.take(cls, sources)
    if unknown := unknown_variables(program, classes, environ):
        reading.faults.append(f"unknown variables {', '.join(unknown)}; docs/reference/settings.md has all")
    return reading


def unknown_variables(program: str, classes: Iterable[type], environ: Mapping[str, str]) -> list[str]:
    """Variables with our prefix that are unknown: misspelt, or of another release."""
    known = SHARED_VARIABLES.union(filter(None, (each.setting.variable_of(program) for each in all_entries(classes))))
    own = f"LLUMNIX_{program}_".upper()
    others = tuple(f"LLUMNIX_{each}_".upper() for each in PROGRAMS if each != program)
    return sorted(
        name
        for name, value in environ.items()
        if name.startswith("LLUMNIX_")
        and name not in known
        and (name.startswith(own) or not name.startswith(others))
        and not _is_of_kubernetes(name, value)
    )


def _is_of_kubernetes(name: str, value: str) -> bool:
    """True if kubelet made the variable for a Service called `llumnix` or `llumnix-…`: such variables are in every
    container of the namespace, and `LLUMNIX_GATEWAY_PORT` is also a setting."""
    return _OF_A_KUBERNETES_SERVICE.fullmatch(f"{name}={value}") is not None


def _of_file(path: str, settings: Mapping[str, Setting], faults: list[str]) -> dict[str, tuple[str, Any]]:
    """Texts and their places, by flag. Scalars stay as written: `off` is a word, and 1:30 is not a number."""
    import yaml

    try:
        root = yaml.compose(Path(path).read_text(), Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        faults.append(f"--config {path} cannot be read: {' '.join(str(error).split())}")
        return {}
    if root is not None and not isinstance(root, yaml.MappingNode):
        faults.append(f"--config {path} holds no settings, such as `port: 8001`")
    by_name = {name: setting for setting in settings.values() for name in setting.names}
    found: dict[str, tuple[str, Any]] = {}
    for key, value in root.value if isinstance(root, yaml.MappingNode) else ():
        name, where = str(key.value).replace("_", "-"), f"{path}:{key.start_mark.line + 1}: {key.value}"
        texts = [one.value for one in (value.value if isinstance(value, yaml.SequenceNode) else [value])]
        if name not in by_name:
            close = difflib.get_close_matches(name, by_name, 1)
            hint = f"did you mean {close[0]}?" if close else "see docs/reference/settings.md"
            faults.append(f"{where} is not a setting; {hint}")
        elif by_name[name].flag in found:
            faults.append(f"{where} is repeated")
        elif not all(isinstance(text, str) for text in texts):
            faults.append(f"{where} is neither a value nor a list of values")
        else:
            found[by_name[name].flag] = (where, texts if by_name[name].kind.repeated else ",".join(texts))
    return found


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
