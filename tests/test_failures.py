# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from tests.support.failures import ROOT, document


def test_the_table_of_failures_is_current() -> None:
    assert (ROOT / "docs/reference/failures.md").read_text() == document(), "run `make docs`"
