# SPDX-License-Identifier: Apache-2.0
"""Settings as data: where a value comes from, what is said of faulty ones, and that all of it is said at once."""

from __future__ import annotations

import argparse
import enum
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from llumlet.process import setting_sources, settings
from llumlet.process.kinds import (
    MARK,
    SWITCH,
    Kind,
    file,
    integer,
    is_file,
    number,
    one_of,
    port,
    seconds,
    several,
    text,
)
from llumlet.process.setting_sources import PROGRAMS, Reading
from llumlet.process.settings import Group


class Colour(enum.StrEnum):
    RED = "red"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class Pair:
    left: float = 1.0
    right: str = "r"
    both: int = 2


_paint = Group("paint", "What it looks like.")
_time = Group("time", prefix="--for-")


@dataclass(frozen=True, slots=True)
class Config:
    colour: Colour = _paint.setting(Colour.RED, one_of(Colour), "of it, 100% of it")
    glossy: bool = _paint.setting(False, MARK, "shines")
    thick: bool = _paint.setting(True, SWITCH, "is thick", mode="wet")
    names: tuple[str, ...] = _paint.setting((), several(text("NAME"), "NAME,…"), "of it")
    layers: tuple[str, ...] = _paint.setting((), Kind(tuple, "LAYER", repeated=True), "on it", aliases=("--coat",))
    password: str = _paint.setting("", text("TEXT"), "that opens it", secret=True, variable="LLUMNIX_CMS")
    drying_s: float = _time.setting(60.0, seconds(above=0), "until dry", flag="--drying-time")
    years: int | None = _time.setting(None, integer(at_least=1), "to last", variable=None)
    pair: Pair = settings.field_of(
        Pair(),
        left=_paint.part(number(), "of the pair", flag="--pair-left"),
        right=_paint.part(text("R"), "of the pair", flag="--pair-right"),
    )
    made: str = ""

    @property
    def lasts(self) -> bool:
        return (self.years or 0) > 9


@dataclass(frozen=True, slots=True)
class Other:
    """Has a flag of the first class, with a default of its own."""

    colour: Colour | None = _paint.setting(None, one_of(Colour), "of the other")


def read(*words: str, path: str = "", **environ: str) -> Reading:
    parser = argparse.ArgumentParser()
    settings.add_arguments(parser, (Config, Other))
    args, unknown = parser.parse_known_args(words)
    assert not unknown
    return setting_sources.read("gateway", (Config, Other), args, environ, path)


def config(*words: str, path: str = "", **environ: str) -> Config:
    reading = read(*words, path=path, **environ)
    assert not reading.faults
    return reading.make(Config)


def written(tmp_path: Path, content: str) -> str:
    (tmp_path / "c.yaml").write_text(content)
    return str(tmp_path / "c.yaml")


def test_missing_value_is_the_default() -> None:
    assert config() == Config()
    assert config().pair is Config().pair


def test_a_command_line() -> None:
    said = config(
        *("--colour", "OFF", "--glossy", "--thick=false", "--names", "a, b,,a", "--coat", "1,2", "--layers", "3"),
        *("--drying-time", "1.5m", "--for-years", "8", "--pair-left", "-2", "--password", "x"),
    )
    assert (said.colour, said.glossy, said.thick, said.names) == (Colour.OFF, True, False, ("a", "b"))
    assert (said.layers, said.drying_s, said.years) == (("1,2", "3"), 90.0, 8)
    assert said.pair == Pair(left=-2.0)
    assert "password" not in repr(said)
    assert not config("--no-glossy").glossy
    assert config("--thick").thick


def test_command_line_then_variable_then_file_then_default(tmp_path: Path) -> None:
    path = written(tmp_path, "colour: off\nfor_years: 1\ndrying-time: 5\n")
    said = config("--for-years=3", path=path, LLUMNIX_GATEWAY_DRYING_TIME="6")
    assert (said.colour, said.years, said.drying_s, said.thick) == (Colour.OFF, 3, 6.0, True)
    assert config(path=path).drying_s == 5
    assert config(LLUMNIX_CMS="from a variable of everybody").password
    assert config(LLUMNIX_CMS="").password == "", "an empty variable says nothing"


def test_a_file_has_words_and_lists(tmp_path: Path) -> None:
    said = config(
        path=written(tmp_path, "names: [a, b]\nlayers: [1, '2,3']\nglossy: true\nthick: false\npair-right: no\n")
    )
    assert (said.names, said.layers, said.glossy, said.thick) == (("a", "b"), ("1", "2,3"), True, False)
    assert said.pair.right == "no"
    assert config(path=written(tmp_path, "")) == Config()


def test_a_flag_of_two_classes_is_one_argument_with_two_defaults() -> None:
    reading = read()
    assert (reading.make(Config).colour, reading.make(Other).colour) == (Colour.RED, None)
    reading = read("--colour=off")
    assert (reading.make(Config).colour, reading.make(Other).colour) == (Colour.OFF, Colour.OFF)
    assert len(read("--colour=blue").faults) == 1


def test_everything_wrong_is_said_at_once_and_where_it_was_said(tmp_path: Path) -> None:
    path = written(tmp_path, "for-years: 1.5\ncolor: red\npair-left: {a: b}\nglossy: 1\nglossy: true\n")
    faults = read(
        *("--colour", "blue", "--pair-right", "x"),
        path=path,
        LLUMNIX_GATEWAY_DRYING_TIME="0",
        LLUMNIX_GATEWAY_THIK="1",
        LLUMNIX_GATEWAY_FOR_YEARS="9",
    ).faults
    assert faults == [
        f"{path}:2: color is not a setting; did you mean colour?",
        f"{path}:3: pair-left is neither a value nor a list of values",
        f"{path}:5: glossy is repeated",
        "--colour 'blue' is not one of red, off",
        f"{path}:4: glossy '1' is neither true nor false",
        "LLUMNIX_GATEWAY_DRYING_TIME must be positive",
        f"{path}:1: for-years must be a whole number",
        "unknown variables LLUMNIX_GATEWAY_FOR_YEARS, LLUMNIX_GATEWAY_THIK; docs/reference/settings.md has all",
    ]


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (None, "No such file"),
        ("a: b: c", "cannot be read"),
        ("- a", "holds no settings"),
        ("[1]: 2", "is not a setting"),
    ],
)
def test_files_that_are_none(tmp_path: Path, content: str | None, fault: str) -> None:
    path = str(tmp_path / "none.yaml") if content is None else written(tmp_path, content)
    (said,) = read(path=path).faults
    assert fault in said
    assert path in said


def test_variables_of_others() -> None:
    """Of other programs, and of a Service of Kubernetes that is called `llumnix-gateway`."""
    links = {
        "LLUMNIX_GATEWAY_SERVICE_HOST": "10.96.0.8",
        "LLUMNIX_GATEWAY_SERVICE_PORT_HTTP": "8001",
        "LLUMNIX_GATEWAY_PORT": "tcp://10.96.0.8:8001",
        "LLUMNIX_GATEWAY_PORT_8001_TCP_ADDR": "10.96.0.8",
    }
    assert not read(**links, LLUMNIX_SCHEDULER_TYPO="1", LLUMNIX_LLUMLET="{}").faults
    assert read(LLUMNIX_GATEWAY_PORT="8001").faults
    assert read(LLUMNIX_GATEAWY_COLOUR="off").faults == [
        "unknown variables LLUMNIX_GATEAWY_COLOUR; docs/reference/settings.md has all"
    ]


def test_every_command_looks_after_its_own_variables() -> None:
    from llumsched.commands import COMMANDS

    assert set(PROGRAMS) == {"llumlet", *COMMANDS}


def test_check_ends_at_an_unread_setting() -> None:
    def lasting(config: Config) -> Iterator[str]:
        yield "first"
        if not config.lasts:
            yield "does not last"

    for words, found in ((("--for-years=x",), ["first"]), (("--for-years=1",), ["first", "does not last"])):
        reading = read(*words)
        before = len(reading.faults)
        reading.check(lasting, reading.make(Config))
        assert reading.faults[before:] == found
    with pytest.raises(AttributeError, match="pears"):
        reading.check(lambda config: [config.pears], reading.make(Config))


def test_setting_of_another_mode_is_a_fault() -> None:
    assert read("--thick").of_other_modes("dry") == ["--thick has no effect in dry mode"]
    assert read("--thick", "--glossy").of_other_modes("wet") == []


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read("--help")
    shown = " ".join(capsys.readouterr().out.split())
    for part in (
        "paint: What it looks like.",
        "--colour red|off of it, 100% of it (default red)",
        "--glossy, --no-glossy shines",
        "--thick [BOOL] wet mode: is thick (default true)",
        "--layers LAYER, --coat LAYER on it",
        "--password TEXT that opens it (or LLUMNIX_CMS)",
        "--drying-time TIME until dry (default 60)",
        "--pair-left N of the pair (default 1)",
    ):
        assert part in shown, part


@pytest.mark.parametrize(
    ("kind", "said", "value"),
    [
        (seconds(), "500ms", 0.5),
        (seconds(), "1h", 3600.0),
        (seconds(), "0", 0.0),
        (integer(), "12345678901234567890", 12345678901234567890),
        (integer(), "8e3", 8000),
        (number(), "1e9", 1e9),
        (port(), "65535", 65535),
        (file(is_file), __file__, __file__),
    ],
)
def test_values(kind: Kind[object], said: str, value: object) -> None:
    assert kind.read(said) == value


@pytest.mark.parametrize(
    ("kind", "said", "fault"),
    [
        (seconds(), "soon", "'soon' is not a duration like 5, 500ms or 3m"),
        (seconds(), "ms", "'ms' is not a duration like 5, 500ms or 3m"),
        (seconds(), "-1s", "must not be negative"),
        (seconds(at_least=1), "999ms", "must be at least 1"),
        (integer(), "x", "'x' is not a number"),
        (integer(at_least=1, at_most=9), "10", "must be from 1 to 9"),
        (number(above=0, at_most=1), "0", "must be above 0 and at most 1"),
        (number(), "nan", "'nan' is not a number"),
        (port(1), "0", "'0' is not a port"),
        (port(), "٣", "'٣' is not a port"),
        (several(port(), ""), "1,x,y", "'x' is not a port; 'y' is not a port"),
        (file(is_file), "/none", "'/none' is not a file"),
    ],
)
def test_values_that_are_none(kind: Kind[object], said: str, fault: str) -> None:
    with pytest.raises(ValueError) as refusal:  # noqa: PT011 - the text is compared
        kind.read(said)
    assert str(refusal.value) == fault
