# SPDX-License-Identifier: Apache-2.0
"""docs/reference/patches.md says what the headers say."""

from __future__ import annotations

from tests.support.patches import DOCUMENT, render


def test_current() -> None:
    assert DOCUMENT.read_text() == render(), "run: make docs"
