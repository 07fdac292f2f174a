# SPDX-License-Identifier: Apache-2.0
"""Prompts with images, and with embeddings in place of tokens, on a model with M-RoPE: whose positions behind an image
are not places in the prompt. In float32, because some of it is computed again.

`small` keeps no prefix cache: what is computed again there is computed from the image.
"""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
import os
import signal
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from llumlet.contract.client import LlumletClient
from llumlet.contract.types import AdoptRequest, Epoch, RequestInfo
from tests.engine.test_features import HOSTILE, IMAGE, PROMPT
from tests.integration.test_any_state import in_phase
from tests.integration.test_drain import exit_code
from tests.integration.test_hostile_peers import REFUSED, refusal, state_of
from tests.integration.test_input_sessions import engine_id
from tests.integration.test_lost_owner import KILLED_S, ends, engine_of, has_engine
from tests.support import input_sessions
from tests.support.client import Client, Stream, StreamFailed
from tests.support.conservation import wait_idle
from tests.support.harness import Fleet, Server, ServerSpec, free_port
from tests.support.input_sessions import Session
from tests.support.moves import migrate, move_stream
from tests.support.vision_models import HIDDEN, TEXT_TOKENS, VISION, build, picture

pytestmark = pytest.mark.asyncio

LENGTH = 80
AT = 20
SEEDED: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "seed": 7}
ROOM = 56
"""KV blocks of `small`, of 32 tokens."""
Begin = Callable[..., Awaitable[Stream]]


class Pair:
    """`roomy`, and `small`, which is started again when it has ended."""

    def __init__(self, fleet: Fleet) -> None:
        port = free_port()
        self._fleet = fleet
        self._spec = self._of(
            "small", ROOM, "--max-num-seqs", "2", "--max-num-batched-tokens", "32", "--no-enable-prefix-caching",
            "--llumlet-peers", f"127.0.0.1:{port}", "--llumlet-drain-seconds", "60",
        )  # fmt: skip
        roomy = self._of("roomy", None, "--llumlet-port", str(port))
        self.roomy, self._small = fleet.start(roomy, self._spec)

    @property
    def small(self) -> Server:
        if not (self._small.alive() and has_engine(self._small)):
            self._fleet.stop(self._small)
            (self._small,) = self._fleet.start(self._spec)
        return self._small

    def _of(self, name: str, num_kv_blocks: int | None, *flags: str) -> ServerSpec:
        return ServerSpec(
            build(VISION["paddleocr-vl"]),
            name=name,
            instance_id=name,
            max_model_len=32 * (ROOM - 2),
            num_kv_blocks=num_kv_blocks,
            flags=("--dtype", "float32", "--enable-prompt-embeds", *input_sessions.FLAGS, *flags),
        )


@pytest.fixture(scope="module")
def pair(log_dir: Any) -> Iterator[Pair]:
    with Fleet(log_dir / "images") as fleet:
        yield Pair(fleet)


def asks(*images: int) -> list[dict[str, Any]]:
    """A chat with these images, the first at its very beginning."""
    parts: list[dict[str, Any]] = []
    for number, image in enumerate(images):
        # Of different sizes, so that grids differ.
        url = picture(image, 112 + 56 * number, 168)
        parts += [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": f" and this is {number} "}]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": " what do you see in these"}]}]


async def look(client: Client, *images: int, length: int = LENGTH, salt: str | None = None, **more: Any) -> Stream:
    """A stream about images that shares no cached block with any other, unless `salt` says so. API servers send
    their engines an image once, so each test has images of its own."""
    return await client.chat(asks(*images), length, cache_salt=salt or uuid.uuid4().hex, ignore_eos=True, **more)


def embedded(num_rows: int) -> str:
    rows = torch.randn(num_rows, HIDDEN, generator=torch.Generator().manual_seed(num_rows))
    file = io.BytesIO()
    torch.save(rows, file)
    return base64.b64encode(file.getvalue()).decode()


async def feel(client: Client, num_rows: int, length: int = LENGTH, **more: Any) -> Stream:
    """A stream that goes on with embeddings alone."""
    body = {"prompt_embeds": embedded(num_rows), "cache_salt": uuid.uuid4().hex, "ignore_eos": True}
    return await client.complete(None, length, **body, **more)


async def mixed(client: Client, num_rows: int, length: int = LENGTH, **more: Any) -> Stream:
    """Embeddings among tokens."""
    parts = [
        {"type": "text", "text": "in the beginning "},
        {"type": "prompt_embeds", "data": embedded(num_rows)},
        {"type": "text", "text": " then what"},
    ]
    body = {"cache_salt": uuid.uuid4().hex, "ignore_eos": True}
    return await client.chat([{"role": "user", "content": parts}], length, **body, **more)


async def unmoved(server: Server, begin: Begin, *arguments: int, **more: Any) -> Stream:
    async with Client(server.base_url) as client:
        stream = await (await begin(client, *arguments, **more)).result()
    assert len(set(stream.token_ids)) > len(stream.token_ids) / 3, "a loop: too little depends on what came before"
    return stream


@pytest.mark.parametrize(
    ("begin", "arguments", "more"),
    [
        pytest.param(look, (1, 2), {}, id="images"),
        pytest.param(look, (3, 4), SEEDED | {"repetition_penalty": 1.2}, id="images-seeded", marks=pytest.mark.rest),
        pytest.param(feel, (70,), {}, id="embeddings", marks=pytest.mark.full),
        pytest.param(mixed, (71,), SEEDED, id="embeddings-among-tokens", marks=pytest.mark.rest),
    ],
)
async def test_there_and_back(pair: Pair, begin: Begin, arguments: tuple[int, ...], more: dict[str, Any]) -> None:
    roomy, small = pair.roomy, pair.small
    expected = await unmoved(roomy, begin, *arguments, **more)
    async with Client(roomy.base_url) as client:
        stream = await begin(client, *arguments, **more)
        moves = []
        for source, destination in itertools.pairwise((roomy, small, roomy)):
            await stream.wait_for(len(stream.token_ids) + AT)
            moves.append(await move_stream(source, destination, stream))
        assert (await stream.result()).token_ids == expected.token_ids
    assert all(move.live for move in moves), moves
    assert stream.usage == expected.usage
    for server in (roomy, small):
        await wait_idle(server)


@pytest.mark.rest
async def test_the_same_image_is_found_in_the_cache_and_no_other(pair: Pair) -> None:
    roomy, small = pair.roomy, pair.small
    salt = uuid.uuid4().hex
    hits, said = [], []
    async with Client(small.base_url) as client:
        for image in (8, 8, 9):
            stream = await look(client, image, salt=salt)
            await stream.wait_for(AT)
            move = await move_stream(small, roomy, stream)
            assert move.live, move
            hits.append(move.hit_tokens)
            said.append((await stream.result()).token_ids)
    assert hits[0] == hits[2] == 0 < hits[1], hits
    assert said[0] == said[1] != said[2], "what is seen decides"
    await wait_idle(roomy)


@pytest.mark.rest
async def test_waiting(pair: Pair) -> None:
    roomy, small = pair.roomy, pair.small
    expected = await unmoved(roomy, look, 10)
    async with Client(small.base_url) as client:
        hogs = [await client.complete(list(range(300 + n, 340 + n)), 500, ignore_eos=True) for n in range(2)]
        await asyncio.gather(*(hog.wait_for(1) for hog in hogs))
        stream = await look(client, 10)
        waits = await in_phase(small, RequestInfo.WAITING)
        (move,) = await migrate(small, roomy, request_ids=[waits])
        assert (await stream.result()).token_ids == expected.token_ids
        for hog in hogs:
            await hog.disconnect()
    assert (move.phase, move.mode) == ("moved", "waiting"), move
    await wait_idle(small)


@pytest.mark.rest
async def test_in_the_middle_of_an_image(pair: Pair) -> None:
    """The destination goes on with the prompt, and looks at what is left of its images."""
    roomy, small = pair.roomy, pair.small
    images = range(20, 36)
    expected = await unmoved(roomy, look, *images)
    async with Client(small.base_url) as client:
        stream = await look(client, *images)
        await in_phase(small, RequestInfo.PREFILL)
        move = await move_stream(small, roomy, stream, method="blocking")
        assert (await stream.result()).token_ids == expected.token_ids
    assert (move.phase, move.mode) == ("moved", "blocking"), move
    assert move.context_tokens == expected.usage["prompt_tokens"], "the prefill had ended"
    assert move.copied_bytes > 0
    await wait_idle(small)


@pytest.mark.parametrize(("begin", "arguments"), [(look, (11, 12)), pytest.param(mixed, (73,), marks=pytest.mark.full)])
@pytest.mark.rest
async def test_preempted_where_it_has_moved_to(pair: Pair, begin: Begin, arguments: tuple[int, ...]) -> None:
    """`small` has no room for both in the end. Who loses its KV cache there is computed again from what came along."""
    roomy, small = pair.roomy, pair.small
    kinds: list[tuple[Begin, Sequence[int]]] = [(look, range(40, 54)), (begin, arguments)]
    expected = [(await unmoved(roomy, how, *what, length=250)).token_ids for how, what in kinds]
    async with Client(roomy.base_url) as client:
        streams = [await how(client, *what, length=250) for how, what in kinds]
        moves = []
        for stream in streams:
            await stream.wait_for(1)
            moves.append(await move_stream(roomy, small, stream))
        assert all(move.live for move in moves), moves
        assert await in_phase(small, RequestInfo.PREEMPTED) in {move.request_id for move in moves}
        assert [(await stream.result()).token_ids for stream in streams] == expected
    assert has_engine(small), "it looked for the image in vain, and its requests went on elsewhere"
    await wait_idle(small)


@pytest.mark.full
async def test_drain(pair: Pair) -> None:
    """Two that run and one that waits."""
    leaver = pair.small
    kinds: list[tuple[Begin, tuple[int, ...]]] = [(look, (13, 14)), (mixed, (74,)), (look, (15,))]
    expected = [(await unmoved(pair.roomy, begin, *arguments)).token_ids for begin, arguments in kinds]
    async with Client(leaver.base_url) as client:
        streams = [await begin(client, *arguments) for begin, arguments in kinds]
        await asyncio.gather(*(stream.wait_for(AT) for stream in streams[:2]))
        os.kill(leaver.pid, signal.SIGTERM)
        assert [(await stream.result()).token_ids for stream in streams] == expected
    assert await exit_code(leaver) == 0
    assert "3 moved away" in leaver.log_text()
    await wait_idle(pair.roomy)


@pytest.mark.rest
async def test_the_owner_is_killed(pair: Pair) -> None:
    """The API server starts again what it has the image of. Of one that it has sent before, its engine alone had it."""
    victim = pair.small
    kinds: list[tuple[Begin, tuple[int, ...]]] = [(look, (16,)), (feel, (75,))]
    expected = [(await unmoved(pair.roomy, begin, *arguments, length=160)).token_ids for begin, arguments in kinds]
    async with Client(victim.base_url) as client:
        streams = [await begin(client, *arguments, length=160) for begin, arguments in kinds]
        # It waits in `small`: what it is about has been sent.
        again = await look(client, 16, 17, length=160)
        await asyncio.gather(*(stream.wait_for(AT) for stream in streams))
        engine_of(victim).kill()
        assert [(await stream.result()).token_ids for stream in streams] == expected
        with pytest.raises(StreamFailed, match="error"):
            await again.result()
    assert max(gap for stream in streams for gap in stream.gaps) < KILLED_S
    assert "an image of its prompt is in the cache of its first engine alone" in victim.log_text()
    await ends(victim)
    await wait_idle(pair.roomy)


async def test_image_metadata_from_a_peer_is_checked(pair: Pair) -> None:
    """What is left over of it after the checks would end the engine in its next step."""
    roomy = pair.roomy
    async with LlumletClient(str(roomy.llumlet)) as client:
        digest = (await client.get_instance_metadata()).compatibility_digest
        for name, changes in HOSTILE.items():
            state = state_of(**({"prompt_token_ids": PROMPT, "features": [IMAGE]} | changes))
            ask = AdoptRequest(epoch=Epoch(term=1), compatibility_digest=digest, request_state=state)
            refused = await refusal(client.adopt(ask))
            assert refused.reason in REFUSED, f"{name}: {refused}"
        # The same without a fault: its origin is nobody, so it is ended soon.
        state = state_of(prompt_token_ids=PROMPT, features=[IMAGE])
        await client.adopt(AdoptRequest(epoch=Epoch(term=1), compatibility_digest=digest, request_state=state))
    await unmoved(roomy, look, 18)


@pytest.mark.rest
async def test_parts_of_an_input_with_images(pair: Pair) -> None:
    """Positions behind the images of a part depend on all images before it, wherever those were looked at."""
    here = [TEXT_TOKENS, TEXT_TOKENS + 2, TEXT_TOKENS + 1]  # begin, image, end
    words = list(range(100, 140))
    shown = [here + words, words[::3], words[:2] + here + words[5:9] + here]

    async def conversation(name: str, *, moves: bool) -> Session:
        ways = itertools.cycle([(pair.roomy, pair.small), (pair.small, pair.roomy)])
        images = itertools.count(900)
        async with Session(pair.roomy.base_url, name) as session:
            for number, prompt in enumerate(shown):
                if number and moves:
                    source, destination = next(ways)
                    (move,) = await migrate(source, destination, request_ids=[await engine_id(source, name)])
                    assert (move.phase, move.reason, move.recomputed_tokens) == ("moved", "", 0)
                pictures = [picture(next(images), 112, 168) for _ in range(prompt.count(here[1]))]
                await session.say(prompt, 20, pictures)
                await session.answered(number + 1)
            await session.end()
            await session.over()
        return session

    expected = await conversation("unmoved", moves=False)
    assert len({token for answer in expected.answers for token, _ in answer}) > 20
    moved = await conversation("moved", moves=True)
    assert moved.answers == expected.answers
    for server in (pair.roomy, pair.small):
        await wait_idle(server)
