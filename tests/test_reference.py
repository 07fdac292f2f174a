# SPDX-License-Identifier: Apache-2.0
"""The generated pages of docs/reference say what the programs say."""

from __future__ import annotations

import pytest

from tests.support import failures, http, metrics, patches, portability, proto, settings
from tests.support.failures import ROOT

MODULES = (failures, http, metrics, patches, portability, proto, settings)
PAGES = {module.__name__.rpartition(".")[2]: module.document for module in MODULES}


@pytest.mark.parametrize("page", PAGES)
def test_page_is_current(page: str) -> None:
    path = f"docs/reference/{page}.md"
    written = (ROOT / path).read_text()
    assert written == PAGES[page](), f"run `make docs`, or `python -m tests.support.{page} {path}`"
