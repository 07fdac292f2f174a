# SPDX-License-Identifier: Apache-2.0
"""How long a prompt is, roughly, of a body whose form is not known. Pure.

A token per four bytes of text, and one per number of a list of numbers. Images and audio count nothing: how many tokens
they take is the model's to say, and too many would be refused by schedulers that look for room.
"""

from __future__ import annotations

from typing import Any, Final

_BYTES_PER_TOKEN: Final = 4
_MOST_VALUES: Final = 10_000
"""Values that are looked at: some milliseconds. What is beyond does not count."""
_NO_TEXT: Final = frozenset(
    ("model", "audio", "data", "file_data", "format", "id", "image", "image_url", "input_audio", "metadata", "role",
     "type", "url", "user", "video_url")
)  # fmt: skip
_DATA_URL: Final = "data:"


def num_tokens(document: Any) -> int:
    """A rough number of tokens of a body's JSON."""
    num_bytes = num_numbers = num_seen = 0
    to_see = [document]
    while to_see and num_seen < _MOST_VALUES:
        value = to_see.pop()
        num_seen += 1
        if isinstance(value, str):
            num_bytes += 0 if value.startswith(_DATA_URL) else len(value.encode(errors="replace"))
        elif isinstance(value, dict):
            to_see += [part for name, part in value.items() if name not in _NO_TEXT]
        elif isinstance(value, list) and value:
            if isinstance(value[0], int):
                num_numbers += len(value)
            else:
                to_see += value[: _MOST_VALUES - num_seen]
    return -(-num_bytes // _BYTES_PER_TOKEN) + num_numbers
