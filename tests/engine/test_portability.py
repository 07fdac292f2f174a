# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from vllm_llumnix.engine.portability import DOCUMENT, render


def test_the_table_is_current() -> None:
    assert DOCUMENT.read_text() == render(), "run `make docs`"
