# SPDX-License-Identifier: Apache-2.0
"""`llumnix up` asks whether there is such a model before anything starts."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest
from huggingface_hub import errors

from llumsched.console.exit_codes import ExitCode
from llumsched.up import hub


def failing(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def download(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)


def refused(kind: type[errors.HfHubHTTPError]) -> Exception:
    return kind("no", response=httpx.Response(404, request=httpx.Request("HEAD", "https://hub")))


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (refused(errors.RepositoryNotFoundError), "the hub has no such model"),
        (refused(errors.GatedRepoError), "set HF_TOKEN"),
        (refused(errors.RevisionNotFoundError), "no revision main of a/b"),
        (errors.LocalEntryNotFoundError("no"), "the hub cannot be reached"),
    ],
)
def test_models_that_are_nowhere(monkeypatch: pytest.MonkeyPatch, error: Exception, why: str) -> None:
    failing(monkeypatch, error)
    assert why in hub.fault("a/b", "main", {})


@pytest.mark.parametrize("error", [refused(errors.RemoteEntryNotFoundError), ValueError("a surprise")])
def test_doubt_is_for_vllm(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    failing(monkeypatch, error)
    assert not hub.fault("a/b", None, {})


def test_hub_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    monkeypatch.setattr(hub, "ANSWER_S", 0.1)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_, **__: over.wait())
    assert "has not answered" in hub.fault("a/b", None, {})
    over.set()


def test_model_in_the_cache_needs_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "ANSWER_S", 0.0)

    def cached(*_: Any, **__: Any) -> str:
        time.sleep(0.1)
        return "config.json"

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", cached)
    assert not hub.fault("a/b", None, {})


def test_directories_and_other_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    failing(monkeypatch, errors.LocalEntryNotFoundError("no"))
    assert hub.fault(str(tmp_path)) == f"the directory {tmp_path} holds no config.json"
    (tmp_path / "params.json").touch()
    assert not hub.fault(str(tmp_path))
    assert not hub.fault("s3://bucket/model")
    assert not hub.fault("owner/repo:Q4_K_M")
    assert not hub.fault("a/b", None, {"VLLM_USE_MODELSCOPE": "True"})
    assert "neither a directory" in hub.fault("a/b/c", None, {})


def test_up_ends_at_once_with_the_reason_in_its_last_line() -> None:
    words = ["up", "no-such/model", "--port", "0", "--scheduler-port", "0", "--cms-port", "0"]
    done = subprocess.run(
        [sys.executable, "-m", "llumsched.cli", *words], capture_output=True, text=True, timeout=120,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == ExitCode.USAGE
    assert not done.stdout, "nothing was started"
    last = done.stderr.splitlines()[-1]
    assert last.startswith("llumnix up: no-such/model is not a directory here")
