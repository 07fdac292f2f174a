# SPDX-License-Identifier: Apache-2.0
"""Whether bytes that came over a network which authenticates nobody are those that were sent: GMAC (NIST SP 800-38D).

The key and the seal travel over a connection that is trusted. It runs at the speed of memory, unlike a hash.
"""

from __future__ import annotations

import hmac
import secrets
from typing import Final

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from vllm_llumnix.kv.messages import KEY_BYTES

Bytes = npt.NDArray[np.uint8]

_NONCE_BYTES: Final = 12


class Sealer:
    """Seals pieces of one transfer. A number is used once with a key."""

    def __init__(self, key: bytes) -> None:
        self._gcm = AESGCM(key)

    def seal(self, number: int, data: Bytes) -> bytes:
        return self._gcm.encrypt(number.to_bytes(_NONCE_BYTES, "big"), b"", data.data)

    def is_intact(self, number: int, data: Bytes, seal: bytes) -> bool:
        return hmac.compare_digest(self.seal(number, data), seal)


def new_key() -> bytes:
    return secrets.token_bytes(KEY_BYTES)
