# SPDX-License-Identifier: Apache-2.0
"""The access log: one line per request on stdout, written ten times a second. Lines that nobody reads are dropped and
counted."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import asdict

import msgspec
from prometheus_client import Counter

from llumsched.gateway.config import AccessLog
from llumsched.gateway.gateway_metrics import Record
from llumsched.gateway.lines import STDOUT, LineWriter

_log = logging.getLogger(__name__)
_FLUSH_S = 0.1


class AccessLogger:
    def __init__(self, form: AccessLog, dropped: Counter, descriptor: int = STDOUT) -> None:
        self._form = form
        self._dropped = dropped
        self._num_dropped = 0
        """Lines dropped since the last one was written."""
        self._lines: list[str] = []
        self._writer = None if form is AccessLog.OFF else LineWriter(descriptor)

    def ended(self, record: Record) -> None:
        if self._writer is None:
            return
        if not self._lines:
            asyncio.get_running_loop().call_later(_FLUSH_S, self._flush)
        self._lines.append(_json(record) if self._form is AccessLog.JSON else _line(record))

    def close(self) -> None:
        if self._writer is not None:
            self._flush()
            self._writer.close()

    def _flush(self) -> None:
        if not self._lines or self._writer is None:
            return
        lines, self._lines = self._lines, []
        if not self._writer.write("\n".join(lines) + "\n"):
            self._num_dropped += len(lines)
            self._dropped.inc(len(lines))
        elif self._num_dropped:
            _log.warning("%d lines of the access log were dropped: stdout is blocked", self._num_dropped)
            self._num_dropped = 0


def _line(record: Record) -> str:
    ttft = "-" if record.ttft_s is None else f"{record.ttft_s * 1e3:.1f}ms"
    key = f"key={_word(record.key)} " if record.key else ""
    return (
        f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {record.status} {_word(record.path)} id={record.id} {key}"
        f"model={_word(record.model)} instance={record.instance or '-'} e2e={record.e2e_s * 1e3:.1f}ms ttft={ttft} "
        f"schedule={record.schedule_s * 1e3:.1f}ms in={record.num_input_tokens} out={record.num_output_tokens} "
        f"retries={record.num_retries} continuations={record.num_continuations}"
    )


def _word(text: str) -> str:
    """Quotes a client's text as one field of a line."""
    return "".join(char if char.isprintable() and char != " " else f"\\u{ord(char):04x}" for char in text) or "-"


def _json(record: Record) -> str:
    return msgspec.json.encode({"time": round(time.time(), 3)} | asdict(record)).decode()
