# SPDX-License-Identifier: Apache-2.0
"""Errors of this package; `llumlet.protocol.errors` has the ends of moves.

LlumnixError
├── ConfigError            a flag or a variable is wrong; all faults are listed at once
├── PatchError             the running vLLM is not the one the patch series is for
└── TransportError
    ├── TransportUnavailable   this transport cannot reach that peer; the text says why
    └── TransferFailed         a transfer ended without all its bytes
"""

from __future__ import annotations


class LlumnixError(Exception):
    """Base of all errors of this package."""


class ConfigError(LlumnixError):
    """Faulty configuration; `faults` holds every fault found, one sentence each."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("; ".join(faults))
        self.faults = faults


class PatchError(LlumnixError):
    """The installed vLLM does not match the patch series, or only some processes are patched."""


class TransportError(LlumnixError):
    """KV bytes could not be moved."""


class TransportUnavailable(TransportError):
    """The transport cannot be used between these two processes; the text says why."""


class TransferFailed(TransportError):
    """A transfer ended before its last byte."""
