# SPDX-License-Identifier: Apache-2.0
"""Checks the existence of a model before engines start, which would need minutes to fail.

Only certain faults count: vLLM knows sources that are not checked here (other hubs, buckets, other formats).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Final

_CONFIGS: Final = ("config.json", "params.json")
ANSWER_S: Final = 12.0
"""Longest wait for the hub, for a model that is not cached."""


def fault(model: str, revision: str | None = None, environ: Mapping[str, str] = os.environ) -> str:
    """The reason why no engine can load `model`, a directory or a name on the hub; "" if none is known."""
    if Path(model).is_dir():
        there = any((Path(model) / name).is_file() for name in _CONFIGS) or any(Path(model).glob("*.gguf"))
        return "" if there else f"the directory {model} holds no {_CONFIGS[0]}"
    if Path(model).exists() or ":" in model or environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true"):
        return ""
    try:  # before the time runs: the import alone takes seconds where the disk is cold
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:  # where engines have another Python
        return ""
    try:
        if any(isinstance(try_to_load_from_cache(model, name, revision=revision), str) for name in _CONFIGS):
            return ""
    except HFValidationError:
        return f"{model} is neither a directory here nor a name that the hub may have"
    found: list[str] = []
    # A thread that nobody waits for: the hub's client tries again and again, and cannot be called off.
    asking = threading.Thread(target=lambda: found.append(_ask_hub(model, revision)), daemon=True)
    asking.start()
    asking.join(ANSWER_S)
    return found[0] if found else f"{model} is not a directory here, and the hub has not answered in {ANSWER_S:.0f} s"


def _ask_hub(model: str, revision: str | None) -> str:
    from huggingface_hub import errors, hf_hub_download
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    known: dict[type[Exception], str] = {
        errors.GatedRepoError: f"the hub shows {model} only to those that its owner allows: set HF_TOKEN",
        errors.RepositoryNotFoundError: f"{model} is not a directory here, and the hub has no such model "
        "(or it is private: set HF_TOKEN)",
        errors.RevisionNotFoundError: f"the hub has no revision {revision} of {model}",
        errors.LocalEntryNotFoundError: f"{model} is not a directory here, there is no copy of it in the hub's cache, "
        "and the hub cannot be reached",
    }
    try:
        hf_hub_download(model, _CONFIGS[0], revision=revision)
    except tuple(known) as error:
        return next(text for kind, text in known.items() if isinstance(error, kind))
    except Exception:  # noqa: BLE001 - no answer to the question: vLLM will say more
        return ""
    return ""
