# SPDX-License-Identifier: Apache-2.0
"""Names of blocks of tokens, computed by the engine that caches them and by anyone who has the prompt.

A name stands for a block *and all that is before it*:

    root      = blake2b(block size, cache salt)
    block i   = blake2b(its token ids, keyed with block i - 1; the first one with the root)

each of 8 bytes; token ids are 32 bits, little endian. What an engine computes with a LoRA adapter has the adapter's
name mixed in by exclusive or, so that one chain of a prompt serves for every adapter. vLLM's own hashes would not do:
they hang on a seed of the process and on how Python pickles. A collision costs a detour: nothing is read by these
names, they only say where it may pay to go.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Iterator, Sequence
from typing import Final

HASH_BYTES: Final = 8
MOST_TOKEN_ID: Final = (1 << 32) - 1


def root_of(block_size: int, salt: str = "") -> bytes:
    """The parent of every first block."""
    return _digest(block_size.to_bytes(4, "little") + salt.encode(errors="surrogatepass"))


def chain(token_ids: Sequence[int], block_size: int, parent: bytes) -> Iterator[bytes]:
    """Names of the full blocks of `token_ids`, which begin where `parent` ends. Raises OverflowError for an invalid
    token id."""
    content = array("I", token_ids)
    if sys.byteorder == "big":
        content.byteswap()
    view = memoryview(content).cast("B")
    stride = block_size * content.itemsize
    for end in range(stride, len(view) + 1, stride):
        parent = hashlib.blake2b(view[end - stride : end], digest_size=HASH_BYTES, key=parent).digest()
        yield parent


def adapter_mask(name: str) -> int:
    """The mask of an adapter's blocks; 0 for the base model."""
    return int.from_bytes(_digest(b"adapter\0" + name.encode(errors="surrogatepass")), "little") if name else 0


def held_names(token_ids: Sequence[int], block_size: int, salt: str = "", adapter: str = "") -> bytes:
    """Names on the wire of the full blocks of `token_ids`, as an engine with this adapter holds them. Raises
    OverflowError for an invalid token id."""
    names, mask = chain(token_ids, block_size, root_of(block_size, salt)), adapter_mask(adapter)
    if mask:
        names = ((int.from_bytes(name, "little") ^ mask).to_bytes(HASH_BYTES, "little") for name in names)
    return b"".join(names)


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=HASH_BYTES).digest()
