# SPDX-License-Identifier: Apache-2.0
"""Seals that show whether bytes from a network which authenticates nobody are the bytes that were sent.

The key and the seal travel over a trusted connection. Both kinds run at the speed of the bytes' memory, unlike a
cryptographic hash.
"""

from __future__ import annotations

import hmac
import secrets
from abc import ABC, abstractmethod
from typing import Final

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from vllm_llumnix.kv.mover.messages import KEY_BYTES, SealKind

_NONCE_BYTES: Final = 12
_PIECE_WORDS: Final = 1 << 14
_PIECE_BYTES: Final = 4 * _PIECE_WORDS
_TAGS: Final = 2
"""Independent ones, of 32 bits each."""


class Sealer(ABC):
    """Seals pieces of one transfer. A number is used once with a key."""

    @abstractmethod
    def seal(self, number: int, data: torch.Tensor) -> bytes:
        """`data`: a row of bytes on any device."""

    def is_intact(self, number: int, data: torch.Tensor, seal: bytes) -> bool:
        return hmac.compare_digest(self.seal(number, data), seal)


class Gmac(Sealer):
    """GMAC (NIST SP 800-38D), computed by the processor."""

    def __init__(self, key: bytes) -> None:
        self._gcm = AESGCM(key)

    def seal(self, number: int, data: torch.Tensor) -> bytes:
        return self._gcm.encrypt(number.to_bytes(_NONCE_BYTES, "big"), b"", data.cpu().numpy().data)


class Multilinear(Sealer):
    """Computed where the bytes lie: multilinear hashing (Lemire and Kaser, "Strongly universal string hashing is fast",
    2014, theorem 1) of pieces of 64 KiB, and then of their hashes, twice with keys of AES-CTR.

    Of 32-bit words s and 64-bit keys k, `(k[0] + sum(k[i] * s[i - 1]) mod 2**64) >> 32`. Two rows of bytes of one
    length have the same two tags with probability 2**-63 at most, and who does not know the key learns nothing from a
    seal, because k[0] is another one for every number.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._of_pieces = self._keys(0, _TAGS * (_PIECE_WORDS + 1)).view(_TAGS, -1)

    def seal(self, number: int, data: torch.Tensor) -> bytes:
        if missing := -len(data) % _PIECE_BYTES:
            data = torch.cat((data, data.new_zeros(missing)))
        pieces = data.view(torch.int32).view(-1, _PIECE_WORDS)
        self._of_pieces = self._of_pieces.to(data.device)
        words = torch.cat([_hashed(pieces, keys) for keys in self._of_pieces])
        of_words = self._keys(1, _TAGS * len(words)).view(_TAGS, -1)
        fresh = self._keys(2 + number, _TAGS).view(_TAGS, 1)
        tags = [_hashed(words, keys) for keys in torch.cat((fresh, of_words), 1).to(data.device)]
        return bytes(torch.stack(tags).to(torch.int32).cpu().numpy())

    def _keys(self, purpose: int, count: int) -> torch.Tensor:
        """Random, of 64 bits each."""
        start = (purpose << 64).to_bytes(algorithms.AES.block_size // 8, "big")
        stream = Cipher(algorithms.AES(self._key), modes.CTR(start)).encryptor()
        return torch.frombuffer(bytearray(stream.update(bytes(8 * count))), dtype=torch.int64)


def _hashed(words: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """A hash of each row; 64-bit integers wrap around."""
    return ((words * keys[1:]).sum(-1) + keys[0]) >> 32


def sealer(kind: SealKind, key: bytes) -> Sealer:
    return Gmac(key) if kind == "gmac" else Multilinear(key)


def new_key() -> bytes:
    return secrets.token_bytes(KEY_BYTES)
