# SPDX-License-Identifier: Apache-2.0
"""Small random models that look at images.

    path = build(VISION["qwen2-vl"])

Of those whose image processors run without torchvision, which has no build for the torch of a CPU. As with
`tests.support.other_models`, greedy output is varied, and depends on every token and every image before it.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import io
import json
import random
from pathlib import Path
from typing import Any

from tests.support.model import BOS, EOS, cached, write_tokenizer

FORMAT = 1
"""Raised whenever the same model gives other files than before."""
TEXT_TOKENS = 1024
"""Of the tokenizer, before those that stand for images."""
POSITIONS = 8192
HIDDEN = 256


@dataclasses.dataclass(frozen=True)
class VisionModel:
    """`config` and `network` are names of Hugging Face's classes, `fields` arguments of the configuration. `tokens` are
    appended to the vocabulary: the configuration's name for its id, and the token."""

    config: str
    network: str
    processor: str
    image_processor: dict[str, Any]
    text: dict[str, Any]
    vision: dict[str, Any]
    tokens: dict[str, str]
    image_token: str
    chat_image: str
    gain: float = 2.4

    @property
    def digest(self) -> str:
        text = json.dumps([FORMAT, dataclasses.asdict(self)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


VISION = {
    # M-RoPE: a token behind an image has other positions than its place in the prompt.
    "paddleocr-vl": VisionModel(
        config="PaddleOCRVLConfig",
        network="PaddleOCRVLForConditionalGeneration",
        processor="PaddleOCRVLProcessor",
        image_processor={
            "image_processor_type": "PaddleOCRVLImageProcessor",
            "patch_size": 14,
            "temporal_patch_size": 1,
            "merge_size": 2,
            "size": {"shortest_edge": 28 * 28, "longest_edge": 280 * 280},
        },
        text={
            "head_dim": 64,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]},
        },
        vision={
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 280,
        },
        tokens={
            "vision_start_token_id": "<|IMAGE_START|>",
            "vision_end_token_id": "<|IMAGE_END|>",
            "image_token_id": "<|IMAGE_PLACEHOLDER|>",
            "video_token_id": "<|video_pad|>",
        },
        image_token="<|IMAGE_PLACEHOLDER|>",
        chat_image="<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
    ),
}


def build(model: VisionModel) -> Path:
    """The directory of the model, made if it is not there yet."""
    return cached(model.digest, lambda out: _write(model, out))


def picture(seed: int, width: int = 112, height: int = 112) -> str:
    """An image of coarse random colours, as a `data:` URL."""
    from PIL import Image

    draw = random.Random(seed)
    coarse = Image.new("RGB", (8, 8))
    coarse.putdata([(draw.randrange(256), draw.randrange(256), draw.randrange(256)) for _ in range(64)])
    data = io.BytesIO()
    coarse.resize((width, height), Image.Resampling.NEAREST).save(data, "PNG")
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


def _write(model: VisionModel, out: Path) -> None:
    import torch
    import transformers

    tokenizer = write_tokenizer(out, TEXT_TOKENS, POSITIONS)
    tokenizer.add_special_tokens(list(model.tokens.values()))
    tokenizer.save(str(out / "tokenizer.json"))
    _amend(out / "tokenizer_config.json", chat_template=_chat_template(model.chat_image), image_token=model.image_token)
    (out / "preprocessor_config.json").write_text(
        json.dumps({**model.image_processor, "processor_class": model.processor}, indent=1)
    )
    shared = {
        "vocab_size": TEXT_TOKENS + len(model.tokens),
        "max_position_embeddings": POSITIONS,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
        "bos_token_id": tokenizer.token_to_id(BOS),
        "eos_token_id": tokenizer.token_to_id(EOS),
        "pad_token_id": None,
    }
    config = getattr(transformers, model.config)(
        text_config=shared | model.text,
        vision_config=model.vision,
        tie_word_embeddings=False,
        dtype="float32",
        **{name: tokenizer.token_to_id(token) for name, token in model.tokens.items()},
    )
    network = getattr(transformers, model.network)._from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    deviations = {network.get_input_embeddings().weight: 1.0, network.get_output_embeddings().weight: 3 * HIDDEN**-0.5}
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if parameter.ndim > 1:
                default = (1.0 if "visual" in name else model.gain) * parameter[0].numel() ** -0.5
                parameter.normal_(0.0, deviations.get(parameter, default), generator=generator)
        network.get_output_embeddings().weight[TEXT_TOKENS:] = 0.0
    network.save_pretrained(out)


def _chat_template(image: str) -> str:
    return (
        "{% for message in messages %}{{ message['role'] }}: "
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
        "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
        "{% else %}" + image + "{% endif %}{% endfor %}{% endif %}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )


def _amend(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes, indent=1) + "\n")
