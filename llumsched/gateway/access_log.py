# SPDX-License-Identifier: Apache-2.0
"""One line a request on stdout, written together ten times a second."""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import asdict

import msgspec

from llumsched.gateway.config import AccessLog
from llumsched.gateway.metrics import Record

_FLUSH_S = 0.1


class AccessLogger:
    def __init__(self, form: AccessLog) -> None:
        self._form = form
        self._lines: list[str] = []

    def ended(self, record: Record) -> None:
        if self._form is AccessLog.OFF:
            return
        if not self._lines:
            asyncio.get_running_loop().call_later(_FLUSH_S, self.flush)
        self._lines.append(_json(record) if self._form is AccessLog.JSON else _line(record))

    def flush(self) -> None:
        if self._lines:
            lines, self._lines = self._lines, []
            sys.stdout.write("\n".join(lines) + "\n")
            sys.stdout.flush()


def _line(record: Record) -> str:
    ttft = "-" if record.ttft_s is None else f"{record.ttft_s * 1e3:.1f}ms"
    key = f"key={_word(record.key)} " if record.key else ""
    return (
        f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {record.status} {record.path} id={record.id} {key}"
        f"model={_word(record.model)} instance={record.instance or '-'} e2e={record.e2e_s * 1e3:.1f}ms ttft={ttft} "
        f"schedule={record.schedule_s * 1e3:.1f}ms in={record.num_input_tokens} out={record.num_output_tokens} "
        f"retries={record.num_retries} continuations={record.num_continuations}"
    )


def _word(text: str) -> str:
    """Whatever a client wrote there, as one field of one line."""
    return "".join(char if char.isprintable() and char != " " else f"\\u{ord(char):04x}" for char in text) or "-"


def _json(record: Record) -> str:
    return msgspec.json.encode({"time": round(time.time(), 3)} | asdict(record)).decode()
