# SPDX-License-Identifier: Apache-2.0
"""Settings as data: a frozen dataclass says what can be set, and everything else follows from it.

    _listening = Group("listening")

    @dataclass(frozen=True, slots=True)
    class Config:
        host: str = _listening.setting("127.0.0.1", text("HOST"), "address to listen at")
        client_timeout_s: float = _listening.setting(60.0, seconds(above=0), "for a request", flag="--client-timeout")

A setting is said by a flag (`--client-timeout`), by a variable (`LLUMNIX_GATEWAY_CLIENT_TIMEOUT`), or in the file of
`--config` (`client-timeout: 3m`); the first of these that says it counts, and else the default. A flag that fields of
several classes have is one argument; each field has its own default. `add_arguments` builds the command line,
`setting_sources.read` reads all three and finds everything that is wrong at once. Other fields are not read: their
owner sets them.

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
    """What a flag means. `variable` stands in place of `LLUMNIX_<PROGRAM>_<FLAG>`, and None is no variable. `mode` is
    the only one in which it is of any use. A `flag` without dashes is a positional argument."""

    group: Group
    kind: Kind[Any]
    help: str
    flag: str
    aliases: tuple[str, ...] = ()
    variable: str | None = ""
    mode: str = ""

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
    """Settings that are shown together. Flags are `prefix` and the field's name, whose `_s` is said as `unit`, unless a
    setting says otherwise."""

    title: str
    description: str = ""
    prefix: str = "--"
    unit: str = "-seconds"

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
    ) -> D | T:
        """A field. A `secret` is not in the representation of its object."""
        return _field(default, {"": Setting(self, kind, help, flag, aliases, variable, mode)}, is_shown=not secret)

    def part(self, kind: Kind[Any], help: str, flag: str) -> Setting:
        return Setting(self, kind, help, flag)


def field_of(default: D, **parts: Setting) -> D:
    """A field that is a dataclass, of which these fields are settings: see `Group.part`."""
    return _field(default, parts)


def _field(default: D, parts: Mapping[str, Setting], *, is_shown: bool = True) -> D:
    # Not `default`, which may not be of a mutable type.
    made: D = field(default_factory=lambda: default, repr=is_shown, metadata={_METADATA: parts})
    return made


@dataclass(frozen=True, slots=True)
class Entry:
    """One flag of a class, and where its value goes."""

    field: str
    part: str
    setting: Setting
    whole: Any
    """The field's default, of which `part` is one attribute."""

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
    """Each flag once, as the first class has it."""
    found: dict[str, Entry] = {}
    for cls in classes:
        for entry in entries(cls):
            found.setdefault(entry.setting.flag, entry)
    return list(found.values())


def add_arguments(
    parser: argparse.ArgumentParser, classes: Sequence[type], into: argparse._ActionsContainer | None = None
) -> None:
    """Adds an argument for each flag, in groups of their own, or all `into` one. Nothing is read by the parser, and
    what is not given is not in its namespace."""
    groups: dict[Group, argparse._ActionsContainer] = {}
    for entry in all_entries(classes):
        setting = entry.setting
        group = into or groups.get(setting.group)
        if group is None:
            title, description = setting.group.title, setting.group.description
            group = groups[setting.group] = parser.add_argument_group(title, description or None) if title else parser
        options = dict(setting.kind.options)
        if setting.kind.metavar:
            options["metavar"] = setting.kind.metavar
        if setting.kind.repeated and setting.flag.startswith("-"):
            options["action"] = "append"
        shown = help_of(entry).replace("%", "%%")
        names = (setting.flag, *setting.aliases) if setting.flag.startswith("-") else (setting.dest,)
        group.add_argument(*names, default=argparse.SUPPRESS, help=shown, **options)


def help_of(entry: Entry) -> str:
    mode = f"{entry.setting.mode} mode: " if entry.setting.mode else ""
    default = shown_default(entry.default)
    variable = f" (or {entry.setting.variable})" if entry.setting.variable else ""
    return f"{mode}{entry.setting.help}{variable}" + (f" (default {default})" if default else "")


def shown_default(value: object) -> str:
    """A default as it would be said; empty where there is nothing to say."""
    if value is True:
        return "true"
    if isinstance(value, float):
        return f"{value:g}"
    if type(value) is tuple:
        return ",".join(map(str, value))
    return str(value) if isinstance(value, str | int | tuple) and value is not False else ""
