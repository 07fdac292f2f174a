# SPDX-License-Identifier: Apache-2.0
"""All that is wrapped or set in vLLM at run time, in one list; for people and for `doctor`. Imports nothing of vLLM."""

from __future__ import annotations

from vllm_llumnix.engine.seams import SEAMS as ENGINE
from vllm_llumnix.frontend.seams import SEAMS as FRONTEND
from vllm_llumnix.kv.seams import SEAMS as KV
from vllm_llumnix.patching.seam import Seam

ALL: tuple[Seam, ...] = (*ENGINE, *KV, *FRONTEND)
