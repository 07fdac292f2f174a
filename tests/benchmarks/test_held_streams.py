# SPDX-License-Identifier: Apache-2.0
"""A held stream costs its request and its prompt's ids, once each, and little else."""

from __future__ import annotations

import argparse
import resource

import pytest

from benchmarks import held_streams

_LITTLE_BYTES = 60_000
"""Of connections, buffers and holes in the heap. A list of the ids alone would be 300 kB."""


def test_a_gateway_keeps_body_and_prompt_ids_once() -> None:
    args = argparse.Namespace(
        streams=120, prompt_tokens=8192, output_tokens=8, interval=60.0, hold=1.0, concurrency=8, engines=1
    )
    row = held_streams.run(args)
    assert row["lost"] == 0
    assert row["request_bytes"] < row["bytes_per_stream"] < 2 * row["request_bytes"] + _LITTLE_BYTES
    assert row["rss_of_10000_mb"] < held_streams.BAR_MB


def test_too_few_descriptors_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    held_streams.raise_descriptors(400)
    with pytest.raises(OSError, match="20200 descriptors are needed, and the hard limit is 4096"):
        held_streams.raise_descriptors(10_000)
