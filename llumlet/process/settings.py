# SPDX-License-Identifier: Apache-2.0
"""Settings as data: a frozen dataclass declares the settings, and everything else follows from it.

    _listening = Group("listening", unit="")

    @dataclass(frozen=True, slots=True)
    class Config:
        host: str = _listening.setting("127.0.0.1", text("HOST"), "address to listen on", common=True)
        client_timeout_s: float = _listening.setting(60.0, seconds(above=0), "longest time for a request, in seconds")

A value comes from a flag (`--client-timeout`), else a variable (`LLUMNIX_GATEWAY_CLIENT_TIMEOUT`), else the file of
`--config` (`client-timeout: 3m`), else the default. Fields of several classes may share a flag; each has its own
default. `add_arguments` builds the command line; `setting_sources.read` reads all sources and reports all faults at
once. Fields without `setting` are set by their owner. `--help` of a program with many settings shows only the `common`
ones.

Standard library only, as parsers are built early.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, TypeVar, cast

from llumlet.process.kinds import Kind

D = TypeVar("D")
T = TypeVar("T")

_METADATA: Final = "settings"


@dataclass(frozen=True, slots=True)
class Setting:
    """The meaning of a flag. `variable` replaces `LLUMNIX_<PROGRAM>_<FLAG>`; None is no variable. A setting with a
    `mode` has no effect in other modes. A `flag` without dashes is a positional argument."""

    group: Group
    kind: Kind[Any]
    help: str
    flag: str
    aliases: tuple[str, ...] = ()
    variable: str | None = ""
    mode: str = ""
    common: bool = False
    """True for the settings that most people need."""

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def names(self) -> list[str]:
        """Keys of the setting in a file."""
        return [flag.removeprefix("--") for flag in (self.flag, *self.aliases)]

    @property
    def dest(self) -> str:
        return self.name.replace("-", "_")

    def variable_of(self, program: str) -> str | None:
        if self.variable == "":
            name = self.name if self.name.startswith(f"{program}-") else f"{program}-{self.name}"
            return f"LLUMNIX_{name}".upper().replace("-", "_")
        return self.variable


@dataclass(frozen=True, slots=True)
class Group:
    """Settings that are shown together. By default a flag is `prefix` and the field's name, with `unit` in place of its
    `_s`."""

    title: str
    description: str = ""
    prefix: str = "--"
    unit: str = "-seconds"
    mode: str = ""
    common: bool = False

    def flag(self, name: str) -> str:
        said = name.removesuffix("_s") + self.unit if name.endswith("_s") else name
        return self.prefix + said.replace("_", "-")

    def setting(
        self,
        default: D,
        kind: Kind[T],
        help: str,
        *,
        flag: str = "",
        aliases: tuple[str, ...] = (),
        variable: str | None = "",
        mode: str = "",
        secret: bool = False,
        common: bool = False,
    ) -> D | T:
        """A field. A `secret` is left out of the representation of its object."""
        setting = Setting(self, kind, help, flag, aliases, variable, mode or self.mode, common or self.common)
        return _field(default, {"": setting}, is_shown=not secret)

    def part(self, kind: Kind[Any], help: str, flag: str) -> Setting:
        return Setting(self, kind, help, flag)


def field_of(default: D, **parts: Setting) -> D:
    """A field that is a dataclass, with settings for some of its fields: see `Group.part`."""
    return _field(default, parts)


def _field(default: D, parts: Mapping[str, Setting], *, is_shown: bool = True) -> D:
    # Not `default`, which may not be of a mutable type.
    made: D = field(default_factory=lambda: default, repr=is_shown, metadata={_METADATA: parts})
    return made


@dataclass(frozen=True, slots=True)
class Entry:
    """A flag of a class, and the field or part of a field that takes its value."""

    field: str
    part: str
    setting: Setting
    whole: Any
    """The field's default, which has the attribute `part`."""

    @property
    def default(self) -> Any:
        return getattr(self.whole, self.part) if self.part else self.whole


def entries(cls: type) -> Iterator[Entry]:
    for each in fields(cls):
        for part, setting in each.metadata.get(_METADATA, {}).items():
            flag = setting.flag or setting.group.flag(each.name)
            default = cast(Callable[[], Any], each.default_factory)()
            yield Entry(each.name, part, replace(setting, flag=flag), default)


def all_entries(classes: Iterable[type]) -> list[Entry]:
    """The flags of all classes. A flag of several classes is that of the first."""
    found: dict[str, Entry] = {}
    for cls in classes:
        for entry in entries(cls):
            found.setdefault(entry.setting.flag, entry)
    return list(found.values())


def add_arguments(parser: argparse.ArgumentParser, classes: Sequence[type], *, only_common: bool = False) -> int:
    """Adds an argument for each flag. The parser converts no value and sets no default. With `only_common`, help leaves
    the other settings out. Returns the number of those."""
    groups: dict[Group, argparse._ActionsContainer] = {}
    num_hidden = 0
    for entry in all_entries(classes):
        setting = entry.setting
        is_hidden = only_common and not setting.common
        num_hidden += is_hidden
        group = parser if is_hidden else groups.get(setting.group)
        if group is None:
            title, description = setting.group.title, setting.group.description
            group = groups[setting.group] = parser.add_argument_group(title, description or None) if title else parser
        options = dict(setting.kind.options)
        if setting.kind.metavar:
            options["metavar"] = setting.kind.metavar
        if setting.kind.repeated and setting.flag.startswith("-"):
            options["action"] = "append"
        shown = argparse.SUPPRESS if is_hidden else help_of(entry).replace("%", "%%")
        names = (setting.flag, *setting.aliases) if setting.flag.startswith("-") else (setting.dest,)
        group.add_argument(*names, default=argparse.SUPPRESS, help=shown, **options)
    return num_hidden


def help_of(entry: Entry) -> str:
    mode = f"{entry.setting.mode} mode: " if entry.setting.mode else ""
    default = shown_default(entry.default)
    variable = f" (or {entry.setting.variable})" if entry.setting.variable else ""
    return f"{mode}{entry.setting.help}{variable}" + (f" (default {default})" if default else "")


def shown_default(value: object) -> str:
    """The text that would set the default; empty where nothing can be shown."""
    if value is True:
        return "true"
    if isinstance(value, float):
        return f"{value:g}"
    if type(value) is tuple:
        return ",".join(map(str, value))
    return str(value) if isinstance(value, str | int | tuple) and value is not False else ""
