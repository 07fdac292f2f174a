# SPDX-License-Identifier: Apache-2.0
"""Tokens that the end of an answer tells, as each API writes them."""

from __future__ import annotations

import pytest

from llumsched.gateway.sse import Usage, usage_of


@pytest.mark.parametrize(
    ("end", "usage"),
    [
        (b'"usage":{"prompt_tokens":70,"completion_tokens":5,"prompt_tokens_details":null}}', (70, 5)),
        (b'"usage":{"prompt_tokens":70,"details":{"cached_tokens":64},"completion_tokens":5}}', (70, 5, 64)),
        (b'"usage":{"input_tokens":70,"details":{"cached_tokens":64},"output_tokens":5}}', (70, 5, 64)),
        (b'"usage": {"input_tokens": 6, "output_tokens": 5, "cache_read_input_tokens": 64}}', (70, 5, 64)),
        (b'{"text":"\\"cached_tokens\\":64"}', ()),
    ],
)  # fmt: skip
def test_usage_is_read_whatever_its_api_calls_it(end: bytes, usage: tuple[int, ...]) -> None:
    assert usage_of(b"x" * 9000 + end) == Usage(*usage)
