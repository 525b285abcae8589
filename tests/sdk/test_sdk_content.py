"""No call of an openai client goes without its content: whatever transport it has, however the server packs its answer."""

import asyncio
import json
import zlib
from typing import Any

import httpx
import httpx2
import openai
import pytest

import agentlightning.sdk as agl

ASK: Any = {"model": "m", "messages": [{"role": "user", "content": "What is 6*7?"}]}
ANSWER = {
    "id": "r-1",
    "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "42"}}],
}


class Own(httpx2.HTTPTransport):
    """A program's own transport."""


def clients(llm: Any, key: str) -> list[openai.OpenAI | openai.AsyncOpenAI]:
    to: Any = {"base_url": llm.url, "api_key": key}
    return [
        openai.OpenAI(**to),
        openai.OpenAI(**to, http_client=httpx2.Client(transport=Own())),
        openai.OpenAI(**to, http_client=openai.DefaultHttpxClient()),
        openai.OpenAI(**to).with_options(timeout=5),
        openai.AsyncOpenAI(**to),
        openai.AsyncOpenAI(**to, http_client=openai.DefaultAioHttpClient()),
    ]


def test_every_kind_of_client_is_seen_with_the_official_spans_too(sink, llm, exact):
    agl.instrument(endpoint=sink.url, openai="genai")
    try:

        async def ask(client: openai.AsyncOpenAI) -> None:
            async with client:
                await client.chat.completions.create(**ASK)
                async for _ in await client.chat.completions.create(**ASK, stream=True):
                    pass

        made = clients(llm, exact.key)
        for client in made:
            if isinstance(client, openai.AsyncOpenAI):
                asyncio.run(ask(client))
            else:
                client.chat.completions.create(**ASK)
                list(client.chat.completions.create(**ASK, stream=True))
        assert agl.flush()
        spans = sink.named("chat m")
        assert len(spans) == 2 * len(made)
        for span in spans:
            assert json.loads(span.attributes["agentlightning.request"])["messages"] == ASK["messages"]
            message = json.loads(span.attributes["agentlightning.response"])["choices"][0]["message"]
            assert message["content"] == exact.text
    finally:
        agl.uninstrument()


def packed(encoding: str, data: bytes) -> bytes:
    if encoding == "zstd":
        return pytest.importorskip("zstandard").ZstdCompressor().compress(data)  # type: ignore[no-any-return]
    packer = zlib.compressobj(wbits=-15 if encoding == "deflate without a header" else 15)
    return packer.compress(data) + packer.flush()


@pytest.mark.parametrize("encoding", ["deflate", "deflate without a header", "zstd"])
@pytest.mark.parametrize("size", [1 << 20, 7])
def test_a_packed_answer_is_recorded_unpacked(traced, encoding, size):
    data = packed(encoding, json.dumps(ANSWER).encode())

    class Pieces(httpx.SyncByteStream):
        def __iter__(self) -> Any:
            yield from (data[start : start + size] for start in range(0, len(data), size))

    headers = {"content-type": "application/json", "content-encoding": encoding.split()[0]}
    transport = httpx.MockTransport(lambda request: httpx.Response(200, headers=headers, stream=Pieces()))
    with httpx.Client(transport=transport) as client:
        assert client.post("http://m/v1/chat/completions", json=ASK).json() == ANSWER
    assert agl.flush()
    assert json.loads(traced.one("chat m").attributes["agentlightning.response"]) == ANSWER


def test_an_answer_that_nobody_can_unpack_is_counted_and_the_call_is_kept(traced):
    headers = {"content-type": "application/json", "content-encoding": "rot13"}
    transport = httpx.MockTransport(
        lambda request: httpx.Response(200, headers=headers, stream=httpx.ByteStream(b"x"))
    )
    before = agl.counters().get("bodies_in_unknown_encoding", 0)
    with (
        httpx.Client(transport=transport) as client,
        client.stream("POST", "http://m/v1/chat/completions", json=ASK) as answer,
    ):
        list(answer.iter_raw())
    assert agl.flush()
    assert "agentlightning.request" in traced.one("chat m").attributes
    assert agl.counters()["bodies_in_unknown_encoding"] == before + 1
