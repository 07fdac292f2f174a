# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from tests.support.settings import ROOT, document


def test_the_reference_of_settings_is_current() -> None:
    assert (ROOT / "docs/settings.md").read_text() == document(), "run `make docs`"
