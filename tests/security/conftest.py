# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest

from llumlet.process.credentials import CredentialFiles
from tests.support.authority import Authority, credential_files, token_file


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def token(tmp_path: Path) -> Path:
    return token_file(tmp_path)


@pytest.fixture
def files(authority: Authority, token: Path) -> CredentialFiles:
    """Of an instance."""
    return credential_files(authority, "instance", token)
