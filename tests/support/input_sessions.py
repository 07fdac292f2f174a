# SPDX-License-Identifier: Apache-2.0
"""Streaming input of tokens and images, which vLLM's engine client takes and its API server offers for sound alone.

`--middleware tests.support.input_sessions.Sessions` has a server answer WebSockets at `PATH`: each message is a part of
the input, each answer what a step has produced. `Session` is the client.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Any, Self

import aiohttp
from vllm.engine.protocol import StreamingInput
from vllm.inputs import TokensPrompt
from vllm.renderers.inputs.preprocess import parse_model_prompt
from vllm.sampling_params import RequestOutputKind, SamplingParams

PATH = "/input-sessions"
FLAGS = ("--middleware", f"{__name__}.Sessions")
SECONDS = 60.0


class Sessions:
    """ASGI middleware."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "websocket" or scope["path"] != PATH:
            await self._app(scope, receive, send)
            return
        await receive()
        await send({"type": "websocket.accept"})
        first = json.loads((await receive())["text"])
        client = scope["app"].state.engine_client
        parts = _parts(receive, client, first["salt"])
        outputs = client.generate(parts, _params(first["params"]), first["request_id"])
        try:
            async for output in outputs:
                answer = output.outputs[0]
                told = {
                    "tokens": list(zip(answer.token_ids, _logprobs(answer), strict=True)),
                    "finish_reason": answer.finish_reason,
                }
                await send({"type": "websocket.send", "text": json.dumps(told)})
        finally:
            await outputs.aclose()
        await send({"type": "websocket.close"})


def _logprobs(answer: Any) -> list[float]:
    return [of[token].logprob for token, of in zip(answer.token_ids, answer.logprobs, strict=True)]


def _params(more: dict[str, Any]) -> SamplingParams:
    return SamplingParams(temperature=0, ignore_eos=True, output_kind=RequestOutputKind.DELTA, logprobs=0, **more)


async def _parts(receive: Any, client: Any, salt: str) -> AsyncIterator[StreamingInput]:
    while True:
        message = await receive()
        if message["type"] == "websocket.disconnect":
            raise ConnectionResetError("the client has left")
        part = json.loads(message["text"])
        if "prompt" not in part:
            return
        prompt = TokensPrompt(prompt_token_ids=part["prompt"], cache_salt=salt)
        if part["images"]:
            prompt["multi_modal_data"] = {"image": [_image(url) for url in part["images"]]}
        (prepared,) = await client.renderer.render_cmpl_async([parse_model_prompt(client.model_config, prompt)])
        yield StreamingInput(prompt=prepared, sampling_params=_params(part["params"]))


def _image(url: str) -> Any:
    from PIL import Image

    return Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))


class Session:
    """One session. `answers`: the tokens that came for each part, each with its log probability, and `reasons`, how
    each answer ended."""

    def __init__(self, base_url: str, request_id: str, **params: Any) -> None:
        self._url = base_url + PATH
        self._first = {"request_id": request_id, "salt": request_id, "params": params}
        self.request_id = request_id
        self.answers: list[list[tuple[int, float]]] = []
        self.reasons: list[str] = []
        self._answer: list[tuple[int, float]] = []

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10 * SECONDS))
        self._socket = await self._http.ws_connect(self._url)
        await self._socket.send_json(self._first)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        await self._socket.close()
        await self._http.close()

    async def say(self, prompt: Sequence[int], max_tokens: int, images: Sequence[str] = ()) -> None:
        """The next part, to be answered with so many tokens. `images`: `data:` URLs of those whose places are in it."""
        part = {"prompt": [*prompt], "images": [*images], "params": {"max_tokens": max_tokens}}
        await self._socket.send_json(part)

    async def end(self) -> None:
        """No more input: once everything is answered, the server closes."""
        await self._socket.send_json({})

    async def hear(self) -> bool:
        """What the next step has produced. False when the session is over."""
        message = await self._socket.receive(timeout=SECONDS)
        if message.type != aiohttp.WSMsgType.TEXT:
            return False
        told = json.loads(message.data)
        self._answer += [(token, logprob) for token, logprob in told["tokens"]]
        if told["finish_reason"] is not None:
            self.answers.append(self._answer)
            self.reasons.append(told["finish_reason"])
            self._answer = []
        return True

    async def answered(self, count: int) -> None:
        """Wait until so many parts are."""
        while len(self.answers) < count:
            if not await self.hear():
                raise AssertionError(f"{len(self.answers)} answers, and no more come")

    async def over(self) -> None:
        while await self.hear():
            pass
