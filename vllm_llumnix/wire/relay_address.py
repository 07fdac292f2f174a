# SPDX-License-Identifier: Apache-2.0
"""The address of an origin's relay, as engines tell it to each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_KEY_MARK: Final = "#"


@dataclass(frozen=True, slots=True)
class RelayAddress:
    """The address at which an origin listens: `tcp://IP:PORT`, and `#` and 64 hexadecimal digits if it has a key."""

    endpoint: str
    key: bytes = b""
    """32 bytes, or empty."""

    @classmethod
    def parse(cls, text: str) -> RelayAddress:
        """Raises ValueError for a key that is none. The endpoint is taken as it is."""
        endpoint, mark, digits = text.partition(_KEY_MARK)
        key = bytes.fromhex(digits) if len(digits) == 64 and digits.isalnum() else b""
        if mark and not key:
            raise ValueError("the relay's key is not 64 hexadecimal digits")
        return cls(endpoint, key)

    def __str__(self) -> str:
        return f"{self.endpoint}{_KEY_MARK}{self.key.hex()}" if self.key else self.endpoint
