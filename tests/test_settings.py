# SPDX-License-Identifier: Apache-2.0
"""The settings of every program."""

from __future__ import annotations

from collections import Counter

import pytest

from llumlet.process.credentials import CredentialFiles
from llumlet.process.setting_sources import SHARED_VARIABLES
from llumlet.process.settings import Entry, all_entries, shown_default
from llumsched.cli import MOST_IN_HELP
from llumsched.commands import COMMANDS, load
from vllm_llumnix.config import LlumletConfig, Switch

PROGRAMS = {name: (*load(name).SETTINGS, CredentialFiles) for name in COMMANDS} | {"llumlet": (Switch, LlumletConfig)}
WITH_DEFAULT = [
    pytest.param(entry, id=f"{name}{entry.setting.flag}")
    for name, classes in PROGRAMS.items()
    for entry in all_entries(classes)
    if shown_default(entry.default)
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_no_two_have_one_name(program: str) -> None:
    settings = [entry.setting for entry in all_entries(PROGRAMS[program])]
    for names in (
        [name for setting in settings for name in setting.names],
        [setting.dest for setting in settings],
        [variable for setting in settings if (variable := setting.variable_of(program))],
    ):
        assert [name for name, number in Counter(names).items() if number > 1] == []


def test_own_variables_are_shared() -> None:
    named = {entry.setting.variable for classes in PROGRAMS.values() for entry in all_entries(classes)}
    assert named - {"", None} == SHARED_VARIABLES - {"LLUMNIX_LLUMLET", "LLUMNIX_FAULTS"}


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_shows_at_most_ten_settings_of_a_large_program(program: str) -> None:
    found = all_entries(PROGRAMS[program])
    if len(found) > MOST_IN_HELP:
        assert 5 < sum(entry.setting.common for entry in found) <= 10


@pytest.mark.parametrize("entry", WITH_DEFAULT)
def test_a_default_can_be_said(entry: Entry) -> None:
    assert entry.setting.kind.read(shown_default(entry.default)) == entry.default
