# SPDX-License-Identifier: Apache-2.0
"""Arguments that several commands have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from llumlet.process.kinds import MARK
from llumlet.process.settings import Group

OPTIONS: Final = Group("", unit="")
"""Options that are not in a group of their own in `--help`."""


@dataclass(frozen=True, slots=True)
class Output:
    json: bool = OPTIONS.setting(
        False, MARK, "print one JSON object per line on stdout, and nothing else there", common=True
    )
