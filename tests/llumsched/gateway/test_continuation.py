# SPDX-License-Identifier: Apache-2.0
"""Engines that vanish, hang or fail in the middle of a stream."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from llumlet.protocol.recovery import retries
from llumsched.gateway import ends, tried
from llumsched.gateway.body import Body
from llumsched.gateway.continuable import CannotContinue, outline
from llumsched.gateway.continuation import Transcript, plan
from llumsched.gateway.ends import End
from llumsched.gateway.paths import Style
from llumsched.gateway.sse import DONE, EventStream, event, numbers
from tests.llumsched.gateway.support import DEADLINE_S, Cluster, Reply, Scripted, cluster, until
from tests.support import mock_api
from tests.support.mock_api import VOCABULARY, Detokenizer, Mock, bytes_of, next_token

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "mock", "messages": [{"role": "user", "content": "Grüß dich, 世界"}], "max_tokens": 4},
    COMPLETIONS: {"model": "mock", "prompt": "one two three", "max_tokens": 4},
}
for _body in BODIES.values():
    _body |= {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0}
SPLIT: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "a"}]},
    COMPLETIONS: {"prompt": "z"},
}
"""Answered, by the mock engines, with characters of three tokens first."""


@pytest.fixture(autouse=True)
def _as_often_and_as_soon_as_one_likes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of streams are cut here, one after the other: that no retry budget allows."""
    monkeypatch.setattr(retries, "_LEAST", 1e9)
    monkeypatch.setattr(tried, "backoff_s", lambda attempt, drawn: 0.0)


def _told(reply: Reply) -> dict[str, Any]:
    """What a client makes of a stream."""
    events = reply.events
    choices = [choice for event in events for choice in event["choices"]]
    return {
        "text": reply.text,
        "roles": [choice["delta"]["role"] for choice in choices if "role" in choice.get("delta", {})],
        "token_ids": [token for choice in choices for token in choice.get("token_ids") or ()],
        "finish_reasons": [choice["finish_reason"] for choice in choices if choice["finish_reason"]],
        "usage": [event["usage"] for event in events if event.get("usage")],
        "heads": {(event["id"].split("-")[0], event["object"], event["model"], event["created"]) for event in events},
        "num_ids": len({event["id"] for event in events}),
    }


def _no_time(told: dict[str, Any]) -> dict[str, Any]:
    return told | {"heads": {head[:3] for head in told["heads"]}, "num_heads": len(told["heads"])}


@pytest.mark.asyncio
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("wishes", [{}, {"return_token_ids": True}], ids=["text", "ids"])
async def test_a_stream_cut_anywhere_is_the_stream_that_was_not_cut(path: str, wishes: dict[str, Any]) -> None:
    """At every byte: between events, inside one, inside a character of several bytes, and in the end mark."""
    body = BODIES[path] | wishes
    async with cluster(mock=Mock()) as it:
        async with it.client.post(
            f"http://127.0.0.1:{it.ports[0]}{path}", json=body | {"return_token_ids": True}
        ) as answer:
            size = len(await answer.read())
        whole = _no_time(_told(await it.post(path, body)))
        assert whole["finish_reasons"] == ["length"]
        assert whole["num_ids"] == 1
        for cut in range(0, size, 1 if wishes else 7):
            it.engines.cut_at = cut
            reply = await it.post(path, body)
            assert _no_time(_told(reply)) == whole, cut
            assert it.engines.cut_at is None


@pytest.mark.asyncio
@pytest.mark.parametrize("tokens_per_event", [1, 2, 4])
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("wishes", [{}, {"return_token_ids": True}], ids=["text", "ids"])
async def test_a_stream_cut_within_a_character_is_the_stream_that_was_not_cut(
    path: str, wishes: dict[str, Any], tokens_per_event: int
) -> None:
    """The answers begin with two characters of three tokens each."""
    body = BODIES[path] | SPLIT[path] | wishes | {"max_tokens": 7}
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    async with cluster(mock=Mock(seen=[], tokens_per_event=tokens_per_event)) as it:
        reply = await it.post(path, body)
        num_events, whole = len(reply.events), _no_time(_told(reply))
        assert whole["text"].startswith((" 日本", " 🙂"))
        for number in range(1, num_events):
            it.engines.fail_at = number
            told = _no_time(_told(await it.post(path, body)))
            counts = [usage["completion_tokens"] for usage in told["usage"]]
            assert counts == sorted(counts)
            assert told | {"usage": told["usage"][-1:]} == whole | {"usage": whole["usage"][-1:]}, number


@pytest.mark.asyncio
async def test_a_client_with_ids_of_half_a_character_does_not_get_another(monkeypatch: pytest.MonkeyPatch) -> None:
    num_asked = itertools.count()

    def other_than_the_first_engine(tokens: list[int]) -> int:
        return next_token(tokens) if next(num_asked) < 4 else 5

    monkeypatch.setattr(mock_api, "next_token", other_than_the_first_engine)
    body = BODIES[CHAT] | SPLIT[CHAT]
    async with cluster() as it:
        it.engines.fail_at = 2
        error = _error(await it.post(CHAT, body | {"return_token_ids": True}))
        assert (error["code"], "another one was chosen" in error["message"]) == (502, True)
        num_asked = itertools.count()
        it.engines.fail_at = 2
        assert (await it.post(CHAT, body)).text == " of5" * 4


@pytest.mark.asyncio
async def test_replacement_characters_of_the_models_own_are_not_taken_back_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mock_api, "next_token", lambda tokens: VOCABULARY + 3)
    async with cluster() as it:
        it.engines.fail_at = 18
        error = _error(await it.post(COMPLETIONS, BODIES[COMPLETIONS] | {"max_tokens": 40}))
        assert "its last characters are not whole" in error["message"]


@pytest.mark.asyncio
@pytest.mark.parametrize(("status", "content"), [(404, b""), (200, b"{}")])
async def test_an_engine_that_does_not_detokenize_is_not_gone_on_with(status: int, content: bytes) -> None:
    class WithoutTokenizer(Mock):
        async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
            if request.path == "/detokenize":
                return web.Response(status=status, body=content)
            return await super().answer(request)

    async with cluster(num_engines=3, mock=WithoutTokenizer()) as it:
        it.engines.fail_at = 2
        reply = await it.post(COMPLETIONS, BODIES[COMPLETIONS])
        assert f"did not detokenize: it answered {status}" in _error(reply)["message"]


@pytest.mark.parametrize("keeps_ids", [True, False])
def test_prompt_ids_are_kept_once_and_as_they_came(keeps_ids: bool) -> None:
    events = EventStream(wants_ids=True, keeps_ids=keeps_ids)
    data = event({"id": "x", "choices": [{"text": "a", "prompt_token_ids": [7, 8, 90], "token_ids": [1]}]})
    assert (events.feed(data) == data) == keeps_ids
    assert (events.prompt_ids, events.token_ids) == (b"7,8,90", [1])
    assert b"90" not in events.first
    transcript = Transcript(is_chat=False, keeps_ids=keeps_ids)
    transcript.take(events)
    assert (transcript.num_prompt, json.loads(b"".join(transcript.prompt_and_tokens_json))) == (3, [7, 8, 90, 1])
    assert transcript.head["id"] == "x"
    assert (Transcript(is_chat=False, keeps_ids=True, prompt_ids=b" ").num_prompt, numbers(b" ")) == (0, [])
    body = Body.read(b'{"model": "m"}')
    (part, _) = body.with_token_ids()
    assert isinstance(part, memoryview)
    assert part.obj is body.content


def test_retracted_tokens_are_delivered_once() -> None:
    """Also if the second engine is lost before it has generated all of it."""
    body = Body.read(json.dumps(BODIES[COMPLETIONS]).encode())
    transcript = Transcript(is_chat=False, keeps_ids=True, prompt_ids=b"1", token_ids=[2, 3, 4])
    transcript.take_back()
    transcript.take_back()
    assert (transcript.token_ids, transcript.again) == ([2], [3, 4])
    assert _ids_told(body, transcript, [3]) == []
    transcript.take(_read([3]))
    assert (transcript.token_ids, transcript.again) == ([2, 3], [4])
    assert _ids_told(body, transcript, [4, 5], [4]) == [[5], [4]]
    with pytest.raises(CannotContinue, match="another one was chosen"):
        _ids_told(body, transcript, [5])


def _read(*ids: list[int]) -> EventStream:
    events = EventStream(wants_ids=True)
    for one in ids:
        events.feed(event({"choices": [{"index": 0, "text": "", "token_ids": one}]}))
    return events


def _ids_told(body: Body, transcript: Transcript, *ids: list[int]) -> list[list[int]]:
    """Of another engine's events with these."""
    change = plan(body, outline(body.document()), COMPLETIONS, transcript, None).change
    changed = [change({"choices": [{"index": 0, "text": "", "token_ids": one}]}) for one in ids]
    return [document["choices"][0]["token_ids"] for document in changed if document is not None]


def test_mock_engines_detokenize_as_tokenizers_does() -> None:
    """Also from prompts that end within a character, after which all of the prompt comes as new text."""
    tokens = [20, 1134, 2134, 3134, 1193, 2193, 3193, 6]
    to_letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocabulary = {}
    for token in tokens:
        parts = [bytes_of(part) for part in range(token % VOCABULARY, token, VOCABULARY)][1:]
        start = sum(map(len, parts))
        word, _ = to_letters.pre_tokenize_str(bytes_of(token % VOCABULARY).decode())[0]
        vocabulary[word[start : start + len(bytes_of(token))]] = token
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=""))
    tokenizer.decoder = decoders.ByteLevel()
    for cut in range(len(tokens)):
        theirs = decoders.DecodeStream(ids=tokens[:cut], skip_special_tokens=True)
        ours = Detokenizer(tokens[:cut])
        for token in tokens[cut:]:
            assert ours.step(token) == (theirs.step(tokenizer, token) or ""), cut


@pytest.mark.asyncio
@pytest.mark.parametrize("path", BODIES)
async def test_the_other_engine_is_asked_for_the_rest_only(path: str) -> None:
    async with cluster() as it:
        it.engines.fail_at = 3
        told = _told(await it.post(path, BODIES[path] | {"min_tokens": 3, "return_token_ids": True, "top_k": 5}))
        first, second = (json.loads(seen["content"]) for seen in it.engines.seen or [])
        assert (it.engines.seen or [])[1]["path"] == COMPLETIONS
        num_delivered = 3 if path == COMPLETIONS else 2
        assert second["prompt"][-num_delivered:] == told["token_ids"][:num_delivered]
        assert second["max_tokens"] == 4 - num_delivered
        assert second["min_tokens"] == 3 - num_delivered
        assert (second["top_k"], second["temperature"]) == (5, 0)
        assert not {"messages", "tools"} & set(second)
        assert first["max_tokens"] == 4


@pytest.mark.asyncio
async def test_continuous_usage_goes_on_counting() -> None:
    async with cluster() as it:
        body = BODIES[COMPLETIONS] | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        whole = _told(await it.post(COMPLETIONS, body))["usage"]
        it.engines.fail_at = 2
        assert _told(await it.post(COMPLETIONS, body))["usage"] == whole


@pytest.mark.asyncio
async def test_a_chat_without_limit_goes_on_to_the_end_of_the_context() -> None:
    async with cluster(mock=Mock(seen=[], num_tokens=6)) as it:
        body = {name: value for name, value in BODIES[CHAT].items() if name != "max_tokens"}
        await it.get("/v1/models")
        it.engines.fail_at = 3
        reply = await it.post(CHAT, body)
        second = json.loads((it.engines.seen or [])[1]["content"])
        assert second["max_tokens"] == 4096 - len(second["prompt"])
        assert reply.events[-1]["usage"]["completion_tokens"] == 2 + second["max_tokens"]


@pytest.mark.asyncio
@pytest.mark.parametrize("position", [0, 10, 400, 700])
async def test_a_hung_engine_is_noticed(position: int) -> None:
    async with cluster(stall_s=0.2, health_timeout_s=1.0) as it:
        whole = _no_time(_told(await it.post(CHAT, BODIES[CHAT])))
        it.engines.hang_at = position
        assert _no_time(_told(await it.post(CHAT, BODIES[CHAT]))) == whole
        assert len(it.engines.hung) == 1
        for _ in range(4):  # the hung one is not chosen any more
            assert (await it.post(CHAT, BODIES[CHAT])).status == 200


@pytest.mark.asyncio
async def test_an_engine_core_that_hangs_behind_a_healthy_server_is_noticed() -> None:
    async with cluster(stall_s=0.1, engine_stall_s=0.6) as it:
        whole = _no_time(_told(await it.post(CHAT, BODIES[CHAT])))
        it.engines.hang_at, it.engines.is_healthy_while_hung = 600, True
        assert _no_time(_told(await it.post(CHAT, BODIES[CHAT]))) == whole


@pytest.mark.asyncio
async def test_a_hung_engine_core_is_noticed_by_requests_that_have_nothing_yet() -> None:
    mock = Mock(seen=[], is_healthy_while_hung=True)
    async with cluster(mock=mock, stall_s=0.1, engine_stall_s=0.6, models_refresh_s=0.5) as it:
        await it.get("/v1/models")
        it.engines.hung.add(it.ports[0])
        bodies = [BODIES[COMPLETIONS] | {"stream": stream} for stream in (False, False, True, True)]
        replies = await asyncio.gather(*(it.post(COMPLETIONS, body) for body in bodies))
        assert {reply.status for reply in replies} == {200}
        assert [backend.is_stalled for backend in it.gateway.backends] == [True, False]
        num_seen = len(it.engines.seen or [])
        for body in bodies:  # the hung one is not chosen any more
            assert (await it.post(COMPLETIONS, body)).status == 200
        assert len(it.engines.seen or []) == num_seen + len(bodies)
        it.engines.hung.clear()
        await until(lambda: not any(backend.is_stalled for backend in it.gateway.backends))


@pytest.mark.asyncio
async def test_new_streams_at_a_hung_engine_core_are_no_sign_of_life() -> None:
    """Its API server answers them with a head at once."""
    mock = Mock(is_healthy_while_hung=True)
    async with cluster(num_engines=1, mock=mock, stall_s=0.1, engine_stall_s=0.5) as it:
        it.engines.hung.add(it.ports[0])
        streams = [asyncio.create_task(it.post(COMPLETIONS, BODIES[COMPLETIONS]))]
        async with asyncio.timeout(DEADLINE_S):
            while not next(iter(it.gateway.backends)).is_stalled:
                streams.append(asyncio.create_task(it.post(COMPLETIONS, BODIES[COMPLETIONS])))
                await asyncio.sleep(0.1)
        assert {reply.status for reply in await asyncio.gather(*streams[:4])} == {503}
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        await it.until_idle()


class _Counting(Mock):
    """So busy that it takes nothing new; it counts what it computes."""

    num_steps = 0

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path == "/metrics":
            self.num_steps += 1
            return web.Response(text=f'vllm:generation_tokens_total{{engine="0"}} {self.num_steps}\n')
        return await super().answer(request)


class _WantsKey(Mock):
    """So busy that it takes nothing new; it answers nobody who has no key."""

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path.startswith("/v1") and "Authorization" not in request.headers:
            return web.Response(status=401)
        return await super().answer(request)


@dataclass
class _Queueing(Mock):
    """One request at a time, the others wait."""

    slot: asyncio.Semaphore = field(default_factory=asyncio.Semaphore)

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path != COMPLETIONS:
            return await super().answer(request)
        async with self.slot:
            return await super().answer(request)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("mock", "num_tokens"),
    [(Mock(interval_s=0.1), 40), (_Counting(interval_s=1.0), 4), (_WantsKey(interval_s=1.0), 4)],
    ids=["takes more", "counts", "wants a key"],
)
async def test_an_engine_that_is_slow_does_not_hang(mock: Mock, num_tokens: int) -> None:
    async with cluster(num_engines=1, mock=mock, stall_s=0.1, engine_stall_s=1.2) as it:
        body = BODIES[COMPLETIONS] | {"stream": False, "max_tokens": num_tokens}
        assert (await it.post(COMPLETIONS, body, {"Authorization": "Bearer key"})).status == 200
        assert not it.gateway.backends.avoided()


@pytest.mark.asyncio
async def test_an_engine_whose_queue_is_long_does_not_hang() -> None:
    """The gateway's own question waits in it, for longer than is waited for its answer."""
    async with cluster(num_engines=1, mock=_Queueing(interval_s=0.15), stall_s=0.1, engine_stall_s=1.2) as it:
        body = BODIES[COMPLETIONS] | {"stream": False}
        replies = await asyncio.gather(*(it.post(COMPLETIONS, body) for _ in range(12)))
        assert {reply.status for reply in replies} == {200}


@pytest.mark.asyncio
async def test_a_gateway_that_stands_still_holds_nobody_else_for_silent() -> None:
    mock = Mock(interval_s=0.05, is_healthy_while_hung=True)
    async with cluster(num_engines=1, mock=mock, stall_s=0.1, engine_stall_s=0.4, read_timeout_s=0.5) as it:
        body = BODIES[COMPLETIONS] | {"max_tokens": 30}
        streams = [asyncio.create_task(it.post(COMPLETIONS, body)) for _ in range(9)]
        await until(lambda: sum(call.is_stream for call in it.gateway.upstream.calls) == 9)
        for _ in range(3):
            time.sleep(0.8)  # noqa: ASYNC251 - nothing runs meanwhile
            await asyncio.sleep(0.1)
        assert all(reply.events for reply in await asyncio.gather(*streams))
        assert not it.gateway.backends.avoided()


@pytest.mark.asyncio
async def test_silence_alone_is_no_fault() -> None:
    async with cluster(num_engines=1, mock=Mock(interval_s=0.5), stall_s=0.1, health_timeout_s=5.0) as it:
        reply = await it.post(COMPLETIONS, BODIES[COMPLETIONS])
        assert reply.events[-1]["usage"]["completion_tokens"] == 4


@pytest.mark.asyncio
async def test_every_stream_of_a_lost_engine_goes_on() -> None:
    async with cluster(num_engines=3, mock=Mock(interval_s=0.02)) as it:
        body = BODIES[CHAT] | {"max_tokens": 40}
        whole = _no_time(_told(await it.post(CHAT, body)))
        streams = [asyncio.create_task(it.post(CHAT, body)) for _ in range(12)]
        await asyncio.sleep(0.3)
        await it.lose(0)
        for reply in await asyncio.gather(*streams):
            assert _no_time(_told(reply)) == whole


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "wishes",
    [
        {"seed": 1, "temperature": 1},
        {"logprobs": 1},
        {"stop": ["x"]},
        {"frequency_penalty": 0.5},
        {"n": 2},
        {"echo": True},
    ],
)
async def test_inexact_continuation_ends_with_a_clear_error(wishes: dict[str, Any]) -> None:
    async with cluster() as it:
        it.engines.cut_at = 300
        error = _error(await it.post(COMPLETIONS, BODIES[COMPLETIONS] | wishes))
        assert error["code"] == 502
        assert "could not be continued" in error["message"]
        assert len(it.engines.seen or []) == 1


def _choice(index: int, text: str, finish_reason: str | None = None) -> bytes:
    choice = {"index": index, "text": text, "finish_reason": finish_reason}
    return event({"id": "x", "object": "text_completion", "choices": [choice]})


USAGE = {"prompt_tokens": 3, "total_tokens": 8, "completion_tokens": 5}


@pytest.mark.asyncio
@pytest.mark.parametrize("wishes", [{"n": 2}, {"prompt": ["a", "b"]}, {"prompt": [[1, 2], [3]]}])
async def test_a_stream_is_complete_when_all_of_its_choices_are(wishes: dict[str, Any]) -> None:
    begun = [_choice(0, "a", "stop"), _choice(1, "b")]
    async with cluster(mock=(engines := Scripted(script=begun))) as it:
        reply = await it.post(COMPLETIONS, BODIES[COMPLETIONS] | wishes)
        assert "could not be continued: it has several" in _error(reply)["message"]
        engines.script = [*begun, _choice(1, "c", "stop")]
        reply = await it.post(COMPLETIONS, BODIES[COMPLETIONS] | wishes)
        assert "could not be continued: it has several" in _error(reply)["message"]
        engines.script += [event({"id": "x", "choices": [], "usage": USAGE})]
        reply = await it.post(COMPLETIONS, BODIES[COMPLETIONS] | wishes)
        assert (reply.text, reply.events[-1]["usage"]) == ("abc", USAGE)


@pytest.mark.asyncio
@pytest.mark.parametrize("wishes", [{}, {"n": 2}])
async def test_a_connection_that_breaks_behind_the_end_mark_is_no_loss(wishes: dict[str, Any]) -> None:
    async with cluster(mock=Scripted(script=[_choice(0, "a", "stop"), DONE])) as it:
        reply = await it.post(COMPLETIONS, BODIES[COMPLETIONS] | wishes)
        assert (reply.text, len(reply.events)) == ("a", 1)


@dataclass
class Breaking(Scripted):
    """The first answer breaks off, the others are the mock's."""

    has_broken: bool = False

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path in BODIES and not self.has_broken:
            self.has_broken = True
            return await super().answer(request)
        return await Mock.answer(self, request)


@pytest.mark.asyncio
async def test_tokens_that_a_parser_withholds_are_not_continued_as_text() -> None:
    """Reasoning begins with a token that has no text: what follows it belongs to the other engine's parser."""
    head = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "mock"}
    delta = {"index": 0, "logprobs": None, "finish_reason": None}
    begun = [
        event(head | {"choices": [delta | {"delta": {"role": "assistant"}}], "prompt_token_ids": [1, 2, 3]}),
        event(head | {"choices": [delta | {"delta": {}, "token_ids": [11]}]}),
    ]
    async with cluster(mock=(engines := Breaking(seen=[], script=begun))) as it:
        reply = await it.post(CHAT, BODIES[CHAT])
        assert [seen["path"] for seen in engines.seen or []] == [CHAT]
        whole = await it.post(CHAT, BODIES[CHAT])
        assert _told(reply)["finish_reasons"] == ["length"]
        assert reply.text == whole.text
        assert {event["id"] for event in reply.events} == {"x"}
        engines.has_broken = False
        reply = await it.post(CHAT, BODIES[CHAT] | {"return_token_ids": True})
        assert "could not be continued: the engine had begun reasoning" in _error(reply)["message"]


@pytest.mark.asyncio
@pytest.mark.parametrize(("limit", "is_continued"), [("20", True), (20.0, True), ("many", False), ([20], False)])
async def test_limits_are_read_as_engines_read_them(limit: object, is_continued: bool) -> None:
    begun = event(
        {"id": "x", "choices": [{"index": 0, "text": " a", "finish_reason": None, "token_ids": [11],
                                 "prompt_token_ids": [1, 2]}]}
    )  # fmt: skip
    async with cluster(mock=(engines := Breaking(seen=[], script=[begun]))) as it:
        reply = await it.post(COMPLETIONS, BODIES[COMPLETIONS] | {"max_tokens": limit})
        if is_continued:
            assert json.loads((engines.seen or [])[-1]["content"])["max_tokens"] == 19
            assert len(reply.events) > 1
        else:
            assert "its token limits are not numbers" in _error(reply)["message"]


@pytest.mark.asyncio
async def test_unreadable_limits_end_with_a_clear_error() -> None:
    body = json.dumps(BODIES[COMPLETIONS]).encode().replace(b'"temperature": 0', b'"temperature": 1e999')
    async with cluster() as it:
        it.engines.cut_at = 300
        error = _error(await it.post(COMPLETIONS, body))
        assert "could not be continued: The body cannot be read" in error["message"]


@pytest.mark.asyncio
async def test_a_client_can_opt_out() -> None:
    async with cluster() as it:
        it.engines.cut_at = 300
        reply = await it.post(COMPLETIONS, BODIES[COMPLETIONS], {"X-Llumnix-Continuation": "off"})
        assert "the client disabled it" in _error(reply)["message"]
        assert b"return_token_ids" not in (it.engines.seen or [])[0]["content"]


@pytest.mark.asyncio
async def test_no_other_instance_ends_with_a_clear_error() -> None:
    async with cluster(num_engines=1) as it:
        it.engines.cut_at = 300
        reply = await it.post(COMPLETIONS, BODIES[COMPLETIONS])
        assert _error(reply)["code"] == 503


def _error(reply: Reply) -> dict[str, Any]:
    """The last event, which must be an error, and what came before must be whole."""
    assert reply.status == 200
    error: dict[str, Any] = reply.events[-1]["error"]
    assert all("choices" in event for event in reply.events[:-1])
    return error


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, ""),
        ({"n": 1, "seed": 7, "temperature": 0, "repetition_penalty": 1.2, "logprobs": False}, ""),
        ({"response_format": {"type": "text"}}, ""),
        ({"tools": [{}], "tool_choice": "none"}, ""),
        ({"tools": [{}]}, "its output may hold tool calls"),
        ({"response_format": {"type": "json_object"}}, "its output is constrained"),
        ({"prompt": ["a", "b"]}, "it has several prompts"),
        ({"prompt": [[1], [2]]}, "it has several prompts"),
        ({"prompt": ["a"]}, ""),
        ({"messages": [{"content": [{"type": "image_url"}]}]}, "its prompt is not text only"),
        ({"messages": [{"content": [{"type": "text", "text": ""}]}]}, ""),
    ],
)
def test_some_requests_are_not_continued(fields: dict[str, Any], reason: str) -> None:
    assert outline(fields).refusal == reason


def test_long_document_is_not_continued() -> None:
    bias = {str(token): 1.0 for token in range(40_000)}
    assert outline({"prompt": [1] * 200_000, "logit_bias": {"1": 1.0}}).refusal == ""
    assert outline({"prompt": [1], "logit_bias": bias}).refusal == "its fields beside the prompt are too long"


@pytest.mark.parametrize(
    ("prompt", "tokens"), [([7, 8, 90], [1, 2]), ([7], []), ([], [1]), ([], []), (list(range(3000)), [5])]
)
def test_a_prompt_goes_on_as_it_came(prompt: list[int], tokens: list[int]) -> None:
    ids = ",".join(map(str, prompt)).encode()
    transcript = Transcript(is_chat=False, keeps_ids=True, prompt_ids=ids, token_ids=tokens)
    assert json.loads(b"".join(transcript.prompt_and_tokens_json)) == prompt + tokens
    assert json.loads(transcript.last_tokens("m")) == {"model": "m", "tokens": (prompt + tokens)[-1024:]}


@pytest.mark.asyncio
async def test_a_long_prompt_goes_on() -> None:
    """Its request is read by another process."""
    body = BODIES[COMPLETIONS] | {"prompt": [7] * 50_000, "return_token_ids": True}
    async with cluster(mock=Mock(seen=[])) as it:
        whole = _told(await it.post(COMPLETIONS, body))
        it.engines.fail_at = 2
        assert _told(await it.post(COMPLETIONS, body)) == whole
        assert it.gateway.services.tokens._readers._workers


def test_reasoning_and_tool_calls_are_not_continued() -> None:
    body = Body.read(json.dumps(BODIES[CHAT]).encode())
    for delta in ({"reasoning": "hm"}, {"tool_calls": [{"index": 0}]}):
        events = EventStream(wants_ids=True)
        event = {"prompt_token_ids": [1], "choices": [{"index": 0, "delta": delta, "token_ids": [2]}]}
        events.feed(b"data: " + json.dumps(event).encode() + b"\n\n")
        transcript = Transcript(is_chat=True, keeps_ids=False)
        transcript.take(events)
        with pytest.raises(CannotContinue, match="reasoning or a tool call"):
            plan(body, outline(body.document()), CHAT, transcript, None)


@pytest.mark.asyncio
async def test_before_the_first_event_another_instance_gets_the_same_bytes() -> None:
    async with cluster(num_engines=3) as it:
        await it.lose(0)
        for _ in range(3):
            assert (await it.post(COMPLETIONS, BODIES[COMPLETIONS] | {"stream": False})).status == 200
        it.engines.cut_at = 0
        assert (await it.post(COMPLETIONS, BODIES[COMPLETIONS] | {"n": 2})).status == 200
        contents = {seen["content"] for seen in (it.engines.seen or [])[-2:]}
        assert len(contents) == 1


@pytest.mark.asyncio
async def test_failing_engines_are_tried_each_once_and_the_last_word_is_theirs() -> None:
    async with cluster(num_engines=4, retry_max_count=2) as it:
        it.engines.status = 503
        reply = await it.post(COMPLETIONS, BODIES[COMPLETIONS])
        assert (reply.status, reply.json["error"]["message"]) == (503, "mocked")
        assert len(it.engines.seen or []) == 3


async def _unreachable(it: Cluster) -> None:
    for number in range(len(it.ports)):
        await it.lose(number)


@pytest.mark.asyncio
async def test_no_engine_at_all() -> None:
    async with cluster() as it:
        await _unreachable(it)
        reply = await it.post(COMPLETIONS, BODIES[COMPLETIONS])
        assert reply.status in (502, 503)
        assert reply.json["error"]["message"]


@pytest.mark.parametrize(
    ("code", "end"),
    [(400, End.REFUSED), (422, End.REFUSED), (500, End.ERROR), (None, End.ERROR), ("400", End.ERROR),
     (503, End.UNAVAILABLE)],
)  # fmt: skip
def test_whose_fault_an_error_in_a_stream_is(code: Any, end: End) -> None:
    failure = b"data: " + json.dumps({"error": {"message": "x", "code": code}}).encode() + b"\n\n"
    assert ends.in_events(failure + b"data: [DONE]\n\n", Style.OPENAI) == (end, 0)
    assert ends.in_events(b": comment\n\n" + failure, Style.OPENAI) == (end, 11)
