# SPDX-License-Identifier: Apache-2.0
"""What an API server keeps of a prompt for a replay, beside its tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)

from tests.frontend.fakes import request
from vllm_llumnix.frontend import kept_inputs
from vllm_llumnix.frontend.calls import state_of
from vllm_llumnix.frontend.kept_inputs import named_tokens, room_for, why_not_kept
from vllm_llumnix.frontend.origin import ClientStream
from vllm_llumnix.wire.features_wire import MAX_INPUT_BYTES

PROMPT = list(range(70))


def about(*sizes: int, sent: bool = True) -> Any:
    """A request about images of so many bytes. `sent`: with them, because its engine does not know them."""
    specs = []
    for number, size in enumerate(sizes):
        pixels = MultiModalFieldElem(torch.zeros(size, dtype=torch.uint8), MultiModalBatchedField())
        item = MultiModalKwargsItem({"pixel_values": pixels}) if sent else None
        specs.append(MultiModalFeatureSpec(item, "image", f"image-{number}", PlaceholderRange(40 + 9 * number, 9)))
    return request("r", prompt_token_ids=PROMPT, mm_features=specs)


def test_images_are_kept_and_go_along() -> None:
    stream = ClientStream(about(100, 200), "home", 1000)
    assert stream.never == ""
    state = state_of(stream.request, [7], "tcp://127.0.0.1:1", None)
    assert [it.fields["pixel_values"].data.nbytes for it in state.features] == [100, 200]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("asked", "room", "why"),
    [
        (about(100, sent=False), 1000, "an image of its prompt is in the cache of its first engine alone"),
        (about(600, 600), 1000, "too large to be kept"),
        (about(MAX_INPUT_BYTES + 1), 4 * MAX_INPUT_BYTES, "too large to be kept"),
        (request("r", prompt_token_ids=None, prompt_embeds=torch.zeros(2, 8).to_sparse()), 1000, "host memory"),
    ],
)
def test_unmovable_inputs_are_not_kept(asked: Any, room: int, why: str) -> None:
    stream = ClientStream(asked, "home", room)
    assert why in stream.never
    assert not stream.request.mm_features
    assert stream.request.prompt_embeds is None
    assert asked.mm_features or asked.prompt_embeds is not None, "vLLM still has to send it"


def test_all_streams_together_keep_so_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_inputs, "MAX_KEPT_BYTES", 1000)
    kept = [
        SimpleNamespace(request=about(300)),
        SimpleNamespace(request=about(200)),
        SimpleNamespace(request=request("t")),
    ]
    assert room_for(about(1), kept) == 500
    assert why_not_kept(about(400), 500) == ""
    assert why_not_kept(about(600), 500) != ""
    assert why_not_kept(request("t"), room_for(request("t"), kept)) == "", "tokens take no room"


def test_a_prompt_of_embeddings_has_a_length() -> None:
    stream = ClientStream(request("r", prompt_token_ids=None, prompt_embeds=torch.zeros(5, 8)), "home", 1000)
    assert (stream.never, stream.num_prompt_tokens) == ("", 5)
    state = state_of(stream.request, [], "tcp://127.0.0.1:1", None)
    assert (state.prompt_token_ids, state.embeddings.rows.shape) == ([], (5, 8))  # type: ignore[union-attr]


def test_blocks_have_names_up_to_the_first_image() -> None:
    assert named_tokens(request("r", prompt_token_ids=PROMPT), [1, 2]) == [*PROMPT, 1, 2]
    assert named_tokens(about(5, 5), [1, 2]) == PROMPT[:40]
    assert named_tokens(request("r", prompt_token_ids=PROMPT, prompt_embeds=torch.zeros(70, 8)), [1]) == []
