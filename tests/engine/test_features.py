# SPDX-License-Identifier: Apache-2.0
"""What travels of images and embeddings, and what is made of it where it arrives."""

from __future__ import annotations

import base64
import functools
import io
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from PIL import Image
from vllm.config import VllmConfig
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
    nested_tensors_equal,
)
from vllm.sampling_params import SamplingParams
from vllm.v1.request import RequestStatus

from llumlet.protocol.errors import Reason, Refused
from llumlet.protocol.ids import Epoch
from tests.engine.rig import new_request, new_scheduler
from tests.support.vision_models import HIDDEN, TEXT_TOKENS, VISION, build, picture
from vllm_llumnix.engine.load.scheduler_events import send_whole_images
from vllm_llumnix.engine.requests.prompts import Forms, Prompt, prompt_of, why_features_stay
from vllm_llumnix.engine.requests.request_state import residence_of
from vllm_llumnix.wire.features_wire import (
    DTYPES,
    MAX_INPUT_BYTES,
    Embeddings,
    Feature,
    Tensor,
    embeddings_from,
    features_from,
    is_plain,
    is_whole,
    num_bytes,
    tensor_of,
)
from vllm_llumnix.wire.request_wire import RequestState, decode_state, encode, encode_params


@pytest.fixture(scope="module")
def engine() -> Any:
    """As much of one as is looked at."""
    model = build(VISION["paddleocr-vl"])
    scheduler, block_hasher = new_scheduler(model, False, 64, dtype="float32", enable_prompt_embeds=True)
    return SimpleNamespace(scheduler=scheduler, vllm_config=scheduler.vllm_config, request_block_hasher=block_hasher)


@pytest.fixture(scope="module")
def config(engine: Any) -> VllmConfig:
    return engine.vllm_config


@pytest.fixture(scope="module")
def forms(engine: Any) -> Forms:
    return Forms(engine)


def processed(config: VllmConfig, *sizes: tuple[int, int]) -> tuple[list[int], list[MultiModalFeatureSpec]]:
    """Tokens and features of a prompt about images of these sizes, as an API server has them of vLLM's processor."""
    processor = MULTIMODAL_REGISTRY.create_processor(config.model_config)
    images = [Image.open(io.BytesIO(base64.b64decode(picture(n, *size)[22:]))) for n, size in enumerate(sizes)]
    text = VISION["paddleocr-vl"].chat_image * len(sizes)
    made = processor(text + " what is it", processor.info.parse_mm_data({"image": images}))
    items, places = made["mm_kwargs"]["image"], made["mm_placeholders"]["image"]
    specs = [
        MultiModalFeatureSpec(item, "image", f"image-{n}", place, f"hash-{n}")
        for n, (item, place) in enumerate(zip(items, places, strict=True))
    ]
    return made["prompt_token_ids"], specs


def state_of(**changes: Any) -> RequestState:
    fields: dict[str, Any] = {
        "request_id": "r", "external_request_id": "r", "origin": "", "prompt_token_ids": PROMPT, "output_token_ids": [],
        "sampling_params": encode_params(SamplingParams(max_tokens=3)), "arrival_time": 0.0, "features": [IMAGE],
    }  # fmt: skip
    return RequestState(**(fields | changes))


def arrived(state: RequestState, forms: Forms, config: VllmConfig) -> Prompt:
    """As it is after its travel. Raises Refused."""
    return prompt_of(decode_state(encode(state)), forms, config)


def test_images_arrive_as_they_were(forms: Forms, config: VllmConfig) -> None:
    tokens, specs = processed(config, (112, 84), (56, 168))
    prompt = arrived(state_of(prompt_token_ids=tokens, features=features_from(specs)), forms, config)
    assert prompt.features == specs
    for ours, theirs in zip(prompt.features, specs, strict=True):
        assert (ours.identifier, ours.mm_hash, ours.mm_position) == (
            theirs.identifier,
            theirs.mm_hash,
            theirs.mm_position,
        )
        assert _fields(ours) == _fields(theirs)


def _fields(spec: MultiModalFeatureSpec) -> dict[str, tuple[Any, ...]]:
    """How each is put together with those of other items. Where it lay in its own prompt's tensors is past."""
    fields = {name: element.field for name, element in spec.data.items()}
    return {name: (type(it), it.keep_on_cpu, getattr(it, "dim", None)) for name, it in fields.items()}


@pytest.mark.parametrize("is_token", [None, [True, False, False]])
def test_embeddings_arrive_as_they_were(forms: Forms, config: VllmConfig, is_token: list[bool] | None) -> None:
    rows = torch.randn(3, HIDDEN)
    state = state_of(
        prompt_token_ids=[7, 8, 9] if is_token else [], features=[], embeddings=embeddings_from(rows, is_token)
    )
    prompt = arrived(state, forms, config)
    assert (prompt.length, prompt.is_token, prompt.features) == (3, is_token, [])
    assert prompt.token_ids == ([7, 8, 9] if is_token else None)
    assert prompt.embeds is not None
    assert torch.equal(prompt.embeds, rows)


def test_tokens_under_embeddings_may_be_strange(forms: Forms, config: VllmConfig) -> None:
    """vLLM's front-end writes one of the tokenizer's there that the model need not have."""
    rows, vocab_size = torch.randn(4, HIDDEN), config.model_config.get_vocab_size()
    embeddings = embeddings_from(rows, [True, False, False, False])
    prompt = arrived(state_of(prompt_token_ids=[7, 8, 10**6, -5], features=[], embeddings=embeddings), forms, config)
    assert prompt.token_ids == [7, 8, vocab_size, vocab_size], "what vLLM's penalties look past"


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_tensors_arrive_as_they_were(dtype: torch.dtype) -> None:
    whole = torch.arange(24).reshape(2, 3, 4).to(dtype)
    for tensor in (whole, whole.transpose(0, 2), whole[:, 1:], whole[0, 0, 0], whole[:0]):
        item = MultiModalKwargsItem({"x": MultiModalFieldElem([tensor], MultiModalBatchedField())})
        spec = MultiModalFeatureSpec(item, "image", "i", PlaceholderRange(0, 1))
        assert is_plain([spec], None)
        (feature,) = msgspec.msgpack.decode(msgspec.msgpack.encode(features_from([spec])), type=list[Feature])
        (value,) = feature.fields["x"]
        assert nested_tensors_equal(tensor_of(value), tensor)


def test_engine_without_the_data_cannot_send_features(config: VllmConfig) -> None:
    _, specs = processed(config, (112, 84))
    (spec,) = specs
    address = MultiModalKwargsItem({"address": spec.data["image_grid_thw"]})
    assert is_whole(None)
    assert is_whole(specs)
    assert not is_whole([spec, MultiModalFeatureSpec(None, "image", "i", spec.mm_position)])
    assert not is_whole([MultiModalFeatureSpec(address, "image", "i", spec.mm_position)])


def test_unsupported_features_cannot_travel(config: VllmConfig) -> None:
    _, specs = processed(config, (112, 84), (112, 84))
    assert is_plain(specs, torch.zeros(2, 2))
    assert not is_plain([specs[0], specs[0]], None), "one in another"
    assert not is_plain(specs, torch.zeros(2, 2).to_sparse())
    assert not is_plain(specs, torch.zeros(2, 2, device="meta"))
    assert not is_plain(specs, torch.zeros(2, dtype=torch.complex64))
    nested = MultiModalKwargsItem({"x": MultiModalFieldElem([[torch.zeros(2)]], MultiModalBatchedField())})
    assert not is_plain([MultiModalFeatureSpec(nested, "image", "i", PlaceholderRange(0, 1))], None)


def test_bytes_are_counted(config: VllmConfig) -> None:
    _, specs = processed(config, (112, 84))
    assert num_bytes(specs, torch.zeros(5, dtype=torch.int16)) == 48 * 3 * 14 * 14 * 4 + 3 * 8 + 10
    assert num_bytes(None, None) == 0


def pixels(num_patches: int, *changed: int) -> Tensor:
    shape = changed or (num_patches, 3, 14, 14)
    count = 1
    for size in shape:
        count *= size
    return Tensor("float32", tuple(shape), memoryview(bytes(4 * count)))


def grid(*sizes: int) -> Tensor:
    return Tensor(
        "int64", (len(sizes),), memoryview(b"".join(size.to_bytes(8, "little", signed=True) for size in sizes))
    )


IMAGE = Feature("image", "0" * 64, None, 1, 4, None, {"pixel_values": pixels(16), "image_grid_thw": grid(1, 4, 4)})
PROMPT = [1, *[TEXT_TOKENS + 2] * 4, 2, 3]
NO_TOKENS = memoryview(bytes(7))
ROWS = Tensor("float32", (7, HIDDEN), memoryview(bytes(7 * HIDDEN * 4)))


def image(**changes: Any) -> Feature:
    fields = changes.pop("fields", {})
    return msgspec.structs.replace(IMAGE, fields=IMAGE.fields | fields, **changes)


HOSTILE: dict[str, dict[str, Any]] = {
    "behind the prompt": {"features": [image(offset=4)]},
    "of no length": {"features": [image(length=2**30)]},
    "one in another": {"features": [IMAGE, image(offset=3)]},
    "out of order": {"features": [image(offset=3), image(offset=0, length=2)]},
    "another modality": {"features": [image(modality="video")]},
    "no such modality": {"features": [image(modality="x" * 1000)]},
    "a name without end": {"features": [image(identifier="x" * 5000)]},
    "more fields": {"features": [image(fields={"image_embeds": pixels(1)})]},
    "fewer fields": {"features": [msgspec.structs.replace(IMAGE, fields={"image_grid_thw": grid(1, 4, 4)})]},
    "an address": {"features": [msgspec.structs.replace(IMAGE, fields={"address": grid(1)})]},
    "too few bytes": {"features": [image(fields={"pixel_values": Tensor("int8", (16, 3), memoryview(b"1"))})]},
    "too many": {"features": [image(fields={"pixel_values": Tensor("float32", (2**30, 2**30), memoryview(b""))})]},
    "of zero": {"features": [image(fields={"pixel_values": Tensor("float32", (0, 2**30), memoryview(b""))})]},
    "no such type": {"features": [image(fields={"pixel_values": Tensor("quint8", (1,), memoryview(b"1"))})]},
    "another type": {"features": [image(fields={"pixel_values": Tensor("uint8", (16,), memoryview(bytes(16)))})]},
    "a number": {"features": [image(fields={"pixel_values": 5})]},
    "a list": {"features": [image(fields={"pixel_values": [pixels(16)]})]},
    "other patches": {"features": [image(fields={"pixel_values": pixels(0, 16, 3, 14, 15)})]},
    "fewer patches": {"features": [image(fields={"pixel_values": pixels(15)})]},
    "another grid": {"features": [image(fields={"image_grid_thw": grid(1, 4, 6)})]},
    "a grid below zero": {"features": [image(fields={"image_grid_thw": grid(1, -4, -4)})]},
    "a grid without end": {"features": [image(fields={"image_grid_thw": grid(2**31, 2**31, 2**31)})]},
    "half a grid": {"features": [image(fields={"image_grid_thw": grid(4, 4)})]},
    "places for more": {"features": [image(length=5)]},
    "a mask for fewer": {"features": [image(is_embed=memoryview(b"\x01\x00\x01\x01"))]},
    "a mask of twos": {"features": [image(is_embed=memoryview(b"\x02\x01\x01\x01"))]},
    "a short mask": {"features": [image(is_embed=memoryview(b"\x01"))]},
    "no embedding": {"features": [image(is_embed=memoryview(bytes(4)))]},
    "narrow rows": {"embeddings": Embeddings(Tensor("float32", (7, 2), memoryview(bytes(56))), NO_TOKENS)},
    "fewer rows": {"embeddings": Embeddings(Tensor("float32", (1, HIDDEN), ROWS.data[: 4 * HIDDEN]), NO_TOKENS)},
    "flat rows": {"embeddings": Embeddings(Tensor("float32", (7 * HIDDEN,), ROWS.data), NO_TOKENS)},
    "rows of integers": {"embeddings": Embeddings(Tensor("int32", (7, HIDDEN), ROWS.data), NO_TOKENS)},
    "rows and tokens": {"embeddings": Embeddings(ROWS, None)},
    "rows and no tokens": {"prompt_token_ids": [], "embeddings": Embeddings(ROWS, NO_TOKENS)},
    "no rows": {"prompt_token_ids": [], "embeddings": Embeddings(Tensor("int8", (0, HIDDEN), memoryview(b"")), None)},
    "strange tokens": {"prompt_token_ids": [10**6, *PROMPT[1:]]},
    "among rows": {"prompt_token_ids": [10**6, *PROMPT[1:]], "embeddings": Embeddings(ROWS, memoryview(b"\1" * 7))},
    "below zero": {"prompt_token_ids": [-1, *PROMPT[1:]], "embeddings": Embeddings(ROWS, memoryview(b"\1" * 7))},
}  # fmt: skip


@pytest.mark.parametrize("changes", HOSTILE.values(), ids=HOSTILE)
def test_malformed_image_is_refused(forms: Forms, config: VllmConfig, changes: dict[str, Any]) -> None:
    assert len(arrived(state_of(), forms, config).features) == 1
    with pytest.raises(Refused) as refused:
        arrived(state_of(**changes), forms, config)
    assert refused.value.reason in {Reason.INVALID_REQUEST, Reason.INCOMPATIBLE_ENGINE}


def test_too_much_is_refused(forms: Forms, config: VllmConfig) -> None:
    large = Tensor("uint8", (MAX_INPUT_BYTES // 4,), memoryview(bytes(MAX_INPUT_BYTES // 4)))
    features = [image(offset=n, length=1, fields={"pixel_values": large}) for n in range(5)]
    with pytest.raises(Refused, match="more than"):
        arrived(state_of(features=features), forms, config)


@pytest.mark.parametrize(
    ("name", "attribute", "value"),
    [
        ("pruned", "model_config.multimodal_config.video_pruning_rate", 0.5),
        ("connector", "ec_transfer_config", object()),
        ("manager", "ec_manager_config.encoder_cache_manager_cls", "some.Manager"),
    ],
)
def test_whose_images_stay(
    engine: Any, config: VllmConfig, name: str, attribute: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert why_features_stay(engine) is None
    *way, last = attribute.split(".")
    owner = functools.reduce(getattr, way, config)
    monkeypatch.setitem(vars(owner), last, value)
    assert name in (why_features_stay(engine) or "")


@pytest.mark.parametrize(("epoch", "is_whole_there"), [(Epoch(0, 1), True), (Epoch(0, 0), False)])
def test_the_v1_runner_gets_the_images_of_who_moved_here(
    engine: Any, config: VllmConfig, epoch: Epoch, is_whole_there: bool
) -> None:
    """Its own requests are sent as vLLM does."""
    tokens, specs = processed(config, (112, 84))
    scheduler = engine.scheduler
    request = new_request("r", tokens * 3, 5, mm_features=specs, block_hasher=engine.request_block_hasher)
    residence = residence_of(request)
    assert residence is not None
    residence.epoch = epoch
    scheduler.add_request(request)
    scheduler.waiting.remove_requests([request])
    scheduler.kv_cache_manager.allocate_slots(request, 32, delay_cache_blocks=True)
    request.num_computed_tokens, request.prefill_stats = 32, None
    scheduler.kv_holding_waiting.add_request(request)
    output = scheduler.schedule()
    send_whole_images(scheduler, output)
    (new,) = output.scheduled_new_reqs
    (sent,) = new.mm_features
    assert ("pixel_values" in sent.data) == is_whole_there
    assert "image_grid_thw" in sent.data
    scheduler.finish_requests("r", RequestStatus.FINISHED_ABORTED)
