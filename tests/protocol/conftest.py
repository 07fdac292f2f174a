# SPDX-License-Identifier: Apache-2.0
"""Options of the transcript tests."""

from __future__ import annotations

import os

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite", action="store_true", help="write what the transcripts print into tests/scenarios/")


@pytest.fixture
def rewrite(request: pytest.FixtureRequest) -> bool:
    # As an environment variable too: pytest knows the option only if tests/protocol is among its arguments.
    return bool(request.config.getoption("--rewrite", False)) or bool(os.environ.get("LLUMNIX_REWRITE"))
