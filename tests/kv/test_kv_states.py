# SPDX-License-Identifier: Apache-2.0
"""Which bytes of a state are copied from behind an accepted draft, against vLLM's own functions that carry it on."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from vllm.model_executor.layers.mamba import mamba_utils
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateCopyFuncCalculator as Calculator
from vllm.v1 import kv_cache_interface as vllm_names

from vllm_llumnix.errors import TransportUnavailable
from vllm_llumnix.kv.memory.layout import BlockLayout, Cut, StatePart, TensorRegion, cuts_behind, pair_pieces
from vllm_llumnix.kv.memory.vllm_cache import layout_of

NUM_DRAFTS = 3
NUM_BLOCKS = 7
NUM_LAYERS = 2
PAGE_BYTES = 512
CONV = ((2 + NUM_DRAFTS, 12), torch.bfloat16)
RECURRENT = ((2, 4, 6), torch.float32)
MODELS: dict[str, tuple[Sequence[tuple[tuple[int, ...], torch.dtype]], Any]] = {
    "GDN": ((CONV, RECURRENT), Calculator.gated_delta_net_state_copy_func()),
    "short convolutions": ((CONV,), Calculator.short_conv_state_copy_func()),
    "linear attention": ((RECURRENT,), Calculator.linear_attention_state_copy_func()),
}


class Worker:
    """The memory of a model with one group of attention and one of states, whose pages have something behind them.
    `model_runner` and `layers` are what `layout_of` wants to see."""

    def __init__(self, model: str, order: str, seed: int, num_drafts: int = NUM_DRAFTS) -> None:
        parts, functions = MODELS[model]
        blocks_outside = order.startswith("B")
        size = NUM_LAYERS * NUM_BLOCKS * PAGE_BYTES
        layer_stride = PAGE_BYTES * (1 if blocks_outside else NUM_BLOCKS)
        block_stride = PAGE_BYTES * (NUM_LAYERS if blocks_outside else 1)
        self.memory = torch.randint(0, 255, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
        attention = vllm_names.FullAttentionSpec(block_size=4, num_kv_heads=4, head_size=8, dtype=torch.bfloat16)
        state = vllm_names.MambaSpec(
            block_size=4,
            shapes=tuple(shape for shape, _ in parts),
            dtypes=tuple(dtype for _, dtype in parts),
            page_size_padded=PAGE_BYTES,
            num_speculative_blocks=num_drafts,
        )
        assert attention.page_size_bytes == state.page_size_bytes == PAGE_BYTES
        groups, tensors = [], []
        for kind, spec in (("attention", attention), ("state", state)):
            names = [f"{kind}.{layer}" for layer in range(NUM_LAYERS)]
            groups.append(vllm_names.KVCacheGroupSpec(names, spec))
            tensors.append(
                vllm_names.KVCacheTensor(size=size, layers=names, layer_stride=layer_stride, block_stride=block_stride)
            )
        config = vllm_names.KVCacheConfig(
            num_blocks=NUM_BLOCKS, kv_cache_tensors=tensors, kv_cache_groups=groups, kv_cache_layout=order
        )
        self.states: dict[str, list[torch.Tensor]] = {}
        for layer in range(NUM_LAYERS):
            at, of_layer = layer * layer_stride, []
            for shape, dtype in parts:
                item = dtype.itemsize
                strides = torch.empty(shape).stride()
                of_layer.append(
                    torch.as_strided(
                        self.memory.view(dtype), (NUM_BLOCKS, *shape), (block_stride // item, *strides), at // item
                    )
                )
                at += torch.Size(shape).numel() * item
            self.states[f"state.{layer}"] = of_layer
        self.functions = functions
        copied_by = SimpleNamespace(get_mamba_state_copy_funcs=lambda kinds: dict.fromkeys(kinds, functions))
        self.model_runner: Any = SimpleNamespace(kv_cache_config=config, kv_caches=[self.memory], model=copied_by)
        self.layers = {name: SimpleNamespace(kv_cache=tuple(states)) for name, states in self.states.items()}

    @property
    def layout(self) -> BlockLayout:
        return layout_of(self.model_runner, "none", self.layers)

    def carried_on(self, blocks: list[int], num_accepted: int) -> dict[str, list[bytes]]:
        """Of each layer and part of its state, what vLLM copies when it goes on behind so many drafts in another block,
        without the room of drafts behind it."""
        found: dict[str, list[bytes]] = {}
        for name, states in self.states.items():
            for state, copied in zip(states, self.functions, strict=True):
                spec = copied(state, blocks, 0, 1 + num_accepted)
                needed = spec.num_elements
                if copied is mamba_utils.get_conv_copy_spec:
                    needed -= (NUM_DRAFTS - num_accepted) * state.shape[-1]
                found.setdefault(name, []).append(ctypes.string_at(spec.start_addr, needed * state.element_size()))
        return found

    def states_in(self, block: int) -> dict[str, list[bytes]]:
        """What a step without drafts looks at there."""
        return self.carried_on([block], 0)


@pytest.mark.parametrize("order", ["LBHNC", "BLHNC"])
@pytest.mark.parametrize("num_accepted", range(1, NUM_DRAFTS + 1))
@pytest.mark.parametrize("model", MODELS)
def test_arrived_state_equals_vllm_s(model: str, num_accepted: int, order: str) -> None:
    source, destination = Worker(model, order, 1), Worker(model, order, 2)
    blocks, here = [5, 2, 6, 1], 3
    expected, before = source.carried_on(blocks, num_accepted), destination.memory.clone()
    there, layout = source.layout, destination.layout
    for kind in {part.is_of for part in there.states}:
        cuts = cuts_behind(num_accepted, kind)
        from_block = blocks[num_accepted if kind == "recurrent" else 0]
        pieces = pair_pieces(there.cut(cuts.source), [from_block], layout.cut(cuts.destination), [here])
        for source_at, to, length in zip(*(array.tolist() for array in pieces), strict=True):
            ctypes.memmove(to, source_at, length)
    assert destination.states_in(here) == expected
    changed = (destination.memory != before).nonzero().flatten().tolist()
    assert {*changed} <= {at for region in layout.regions for at in _places(region, here)}, "another block was written"


def _places(region: TensorRegion, block: int) -> Sequence[int]:
    starts = (
        region.offset + layer * region.layer_stride + block * region.block_stride for layer in range(region.num_layers)
    )
    return [at for start in starts for at in range(start, start + region.page_bytes)]


def test_without_drafts_nothing_is_told_apart() -> None:
    layout = Worker("GDN", "LBHNC", 1, num_drafts=0).layout
    assert layout.states == ()
    with pytest.raises(ValueError, match="0 parts"):
        layout.cut(Cut(1, 2, "inputs"))


def test_convolutions_whose_inputs_lie_number_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM can have it; it carries them on by a kernel, and answers nobody."""
    monkeypatch.setattr(mamba_utils, "is_conv_state_dim_first", lambda: True)
    with pytest.raises(TransportUnavailable, match="vLLM does not say"):
        _ = Worker("GDN", "LBHNC", 1).layout


def test_a_model_that_does_not_say() -> None:
    worker = Worker("GDN", "LBHNC", 1)
    worker.model_runner.model = SimpleNamespace()
    with pytest.raises(TransportUnavailable, match="vLLM does not say"):
        _ = worker.layout


@pytest.mark.parametrize(
    ("states", "complaint"),
    [
        ((StatePart(0, 513),), "beyond its page"),
        ((StatePart(-1, 8),), "negative"),
        ((StatePart(0, 0),), "of no bytes"),
        ((StatePart(0, 8, -2),), "negative"),
    ],
)
def test_impossible_parts_cannot_be_decoded(states: tuple[StatePart, ...], complaint: str) -> None:
    fields = msgspec.structs.asdict(Worker("GDN", "LBHNC", 1).layout) | {"states": states}
    with pytest.raises(msgspec.ValidationError, match=complaint):
        msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=BlockLayout)


def test_more_drafts_than_there_is_room_for() -> None:
    layout = Worker("GDN", "LBHNC", 1).layout
    far = PAGE_BYTES // (12 * 2)
    with pytest.raises(ValueError, match="beyond their page"):
        layout.cut(Cut(far, far + 1, "inputs"))
