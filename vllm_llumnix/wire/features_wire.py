# SPDX-License-Identifier: Apache-2.0
"""Parts of a prompt beside its tokens, as they travel: images and the like (vLLM's multimodal features), and
embeddings.

An image travels as the API server's processor made it: pixels, and the small tensors beside them. An engine with the
prompt's KV cache needs only the positions, names (block hashes) and grids (M-RoPE) of the images; but if it preempts
the request, or takes it over within its prompt, it must read the pixels again. So they are sent whole, before the
request is frozen, or the request stays.

The way in which fields of several requests are joined does not travel: each engine has its own processor's
(`engine.requests.features`).

Nothing here is pickle: bytes, with the name of a type from `DTYPES` and a shape that must fit them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Final

import msgspec
import numpy as np
import torch
from msgspec import Meta

from llumlet.protocol.errors import Reason, Refused

MAX_INPUT_BYTES: Final = 48 << 20
"""Limit of all tensors of one request. An image of 1,024 by 1,024 pixels is 12.5 MB to Qwen2-VL in bfloat16."""
MAX_DIMENSIONS: Final = 8

DTYPES: Final = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32, torch.float16, torch.bfloat16, torch.float64,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    )
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Name = Annotated[str, Meta(max_length=1024)]
Size = Annotated[int, Meta(ge=0, lt=2**31)]


class Tensor(msgspec.Struct, frozen=True):
    """`data` in the machine's byte order, rows last. It is a view: of the tensor, or of the message it came in."""

    dtype: Name
    shape: Annotated[tuple[Size, ...], Meta(max_length=MAX_DIMENSIONS)]
    data: memoryview


Value = Tensor | Annotated[list[Tensor], Meta(max_length=4096)] | int | float
"""vLLM's `NestedTensors`, as far as processors make use of it."""


class Feature(msgspec.Struct, frozen=True):
    """An image, clip or the like: vLLM's `MultiModalFeatureSpec`. It takes positions `[offset, offset + length)` of the
    prompt; `is_embed`, a byte for each, says which of them have an embedding of it, None: all."""

    modality: Name
    identifier: Name
    mm_hash: Name | None
    offset: Size
    length: Annotated[int, Meta(ge=1, lt=2**31)]
    is_embed: memoryview | None
    fields: Annotated[dict[Name, Value], Meta(max_length=64)]


class Embeddings(msgspec.Struct, frozen=True):
    """A prompt, or parts of one, given as rows of embeddings. `is_token`, a byte for each position, says which are
    tokens all the same; None: none is."""

    rows: Tensor
    is_token: memoryview | None


# At the source, and at the origin


def is_whole(specs: Iterable[Any] | None) -> bool:
    """True if this process has all that vLLM's `MultiModalFeatureSpec`s stand for: not what an API server knows to be
    in its engine's cache, nor what lies in vLLM's shared memory, of which there is an address."""
    return all(spec.data is not None and "address" not in spec.data for spec in specs or ())


def num_bytes(specs: Iterable[Any] | None, embeds: torch.Tensor | None) -> int:
    """Bytes of all tensors of a prompt."""
    tensors = [tensor for spec in specs or () for tensor in _tensors(spec)]
    return sum(int(tensor.nbytes) for tensor in tensors) + (0 if embeds is None else int(embeds.nbytes))


def is_plain(specs: Sequence[Any] | None, embeds: torch.Tensor | None) -> bool:
    """True if `features_from` and `embeddings_from` can express it: one item behind the other, dense tensors in host
    memory, in lists at most once."""
    specs = specs or ()
    ends = [spec.mm_position.offset + spec.mm_position.length for spec in specs]
    in_line = all(spec.mm_position.offset >= end for spec, end in zip(specs[1:], ends, strict=False))
    values = [element.data for spec in specs if spec.data is not None for element in spec.data.values()]
    return in_line and all(map(_is_value, values)) and (embeds is None or _travels(embeds))


def _is_value(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_travels, value))
    return isinstance(value, int | float) or _travels(value)


def _travels(value: Any) -> bool:
    plain = isinstance(value, torch.Tensor) and value.layout is torch.strided and value.is_cpu
    return plain and value.dtype in _NAMES and value.ndim <= MAX_DIMENSIONS


def _tensors(spec: Any) -> Iterator[torch.Tensor]:
    for element in (spec.data or {}).values():
        for value in element.data if isinstance(element.data, list) else [element.data]:
            if isinstance(value, torch.Tensor):
                yield value


def features_from(specs: Iterable[Any] | None) -> list[Feature]:
    """Views of what vLLM has; nothing is copied that is contiguous. `specs` are whole and plain."""
    return [
        Feature(
            modality=spec.modality,
            identifier=spec.identifier,
            mm_hash=spec.mm_hash,
            offset=spec.mm_position.offset,
            length=spec.mm_position.length,
            is_embed=None if spec.mm_position.is_embed is None else _bytes_of(spec.mm_position.is_embed),
            fields={name: _value_from(element.data) for name, element in spec.data.items()},
        )
        for spec in specs or ()
    ]


def embeddings_from(embeds: torch.Tensor | None, is_token: list[bool] | None) -> Embeddings | None:
    if embeds is None:
        return None
    return Embeddings(_tensor_from(embeds), None if is_token is None else memoryview(bytes(is_token)))


def _value_from(value: Any) -> Value:
    if isinstance(value, list):
        return [_tensor_from(part) for part in value]
    return _tensor_from(value) if isinstance(value, torch.Tensor) else value


def _tensor_from(tensor: torch.Tensor) -> Tensor:
    return Tensor(_NAMES[tensor.dtype], tuple(tensor.shape), _bytes_of(tensor))


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


# At the destination


def tensor_of(tensor: Tensor) -> torch.Tensor:
    """A tensor with memory of its own. Raises Refused(invalid_request) for what is none."""
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        raise Refused(Reason.INVALID_REQUEST, f"a tensor of {tensor.dtype}")
    # Zeros do not make what stands beside them harmless: torch multiplies strides.
    if math.prod(max(size, 1) for size in tensor.shape) * dtype.itemsize > MAX_INPUT_BYTES:
        raise Refused(Reason.INVALID_REQUEST, f"a tensor of shape {list(tensor.shape)}")
    if math.prod(tensor.shape) * dtype.itemsize != tensor.data.nbytes:
        raise Refused(Reason.INVALID_REQUEST, f"{tensor.data.nbytes} bytes for {tensor.dtype} {list(tensor.shape)}")
    data = np.frombuffer(tensor.data, np.uint8)
    if dtype is torch.bool and data.size and data.max() > 1:
        raise Refused(Reason.INVALID_REQUEST, "a truth value that is neither")
    flat = torch.empty(data.size // dtype.itemsize, dtype=dtype)
    flat.view(torch.uint8).numpy()[:] = data
    return flat.reshape(tensor.shape)


def mask_of(mask: memoryview, length: int) -> torch.Tensor:
    return tensor_of(Tensor("bool", (length,), mask))


def num_bytes_of(features: Iterable[Feature], embeddings: Embeddings | None) -> int:
    """Bytes that have arrived of one request."""
    values = [value for feature in features for value in feature.fields.values()]
    parts = [part for value in values for part in (value if isinstance(value, list) else [value])]
    if embeddings is not None:
        parts.append(embeddings.rows)
    return sum(part.data.nbytes for part in parts if isinstance(part, Tensor))
