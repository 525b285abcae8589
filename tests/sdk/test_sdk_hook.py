"""The transport hook: every model call of every client, with exact tokens, and nothing changed for the caller."""

import asyncio
import json
import threading
from typing import Any

import httpx
import httpx2
import openai
import pytest
from opentelemetry import trace

import agentlightning.sdk as agl
from agentlightning.proto.packed import unpack_floats, unpack_ids

ASK = {"model": "m", "messages": [{"role": "user", "content": "What is 6*7?"}]}
EXACT = {**ASK, "return_token_ids": True, "logprobs": True, "temperature": 0.7, "max_tokens": 64, "seed": 1}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "calculate", "parameters": {"type": "object", "properties": {}}},
    }
]
LIBRARIES = pytest.mark.parametrize("library", [httpx, httpx2], ids=["httpx", "httpx2"])


def tokens(span: Any) -> tuple[list[int], list[int], list[float]]:
    read = span.attributes
    return (
        unpack_ids(read["agentlightning.prompt.token_ids"]),
        unpack_ids(read["agentlightning.response.token_ids"]),
        unpack_floats(read["agentlightning.response.logprobs"]),
    )


def stream(client: Any, url: str, body: dict[str, Any]) -> bytes:
    with client.stream("POST", url, json={**body, "stream": True}) as response:
        return b"".join(response.iter_raw())


async def stream_async(client: Any, url: str, body: dict[str, Any]) -> bytes:
    async with client.stream("POST", url, json={**body, "stream": True}) as response:
        return b"".join([chunk async for chunk in response.aiter_raw()])


@LIBRARIES
def test_plain_call_is_recorded_exactly(traced, llm, exact, library):
    with library.Client() as client:
        response = client.post(
            llm.url + "/chat/completions", json=EXACT, headers={"authorization": f"Bearer {exact.key}"}
        )
    assert agl.flush()
    span = traced.one("chat m")
    read = span.attributes
    assert span.kind == 3
    assert tokens(span) == (exact.prompt, exact.ids, exact.logprobs)
    assert read["agentlightning.response"] == response.text
    assert read["agentlightning.request"].encode() == llm.requests[0].raw
    assert read["agentlightning.model.version"] == 3
    assert read["agentlightning.source"] == "sdk"
    assert read["gen_ai.operation.name"] == "chat"
    assert read["gen_ai.response.id"] == response.json()["id"]
    assert read["gen_ai.response.finish_reasons"] == ["stop"]
    assert read["gen_ai.request.temperature"] == 0.7
    assert (read["gen_ai.usage.input_tokens"], read["gen_ai.usage.output_tokens"]) == (4, 5)
    assert read["server.address"] == "127.0.0.1"


@LIBRARIES
def test_async_and_sync_streamed_and_plain_calls_have_equal_records(traced, llm, exact, library):
    url = llm.url + "/chat/completions"

    async def ask() -> None:
        async with library.AsyncClient() as client:
            await client.post(url, json=EXACT)
            await stream_async(client, url, EXACT)

    asyncio.run(ask())
    with library.Client() as client:
        client.post(url, json=EXACT)
        stream(client, url, EXACT)
    assert agl.flush()
    spans = traced.named("chat m")
    assert len(spans) == 4
    for span in spans:
        assert tokens(span) == (exact.prompt, exact.ids, exact.logprobs)
        body = json.loads(span.attributes["agentlightning.response"])
        assert body["choices"][0]["message"] == {"role": "assistant", "content": exact.text}
        assert body["object"] == "chat.completion"
        assert body["usage"]["total_tokens"] == 9


@pytest.mark.parametrize("model", ["torn", "zipped"])
def test_streams_cut_anywhere_or_compressed_are_read_right(traced, llm, exact, model):
    with httpx2.Client() as client:
        stream(client, llm.url + "/chat/completions", {**EXACT, "model": model, "tools": TOOLS})
        client.post(llm.url + "/chat/completions", json={**EXACT, "model": model, "tools": TOOLS})
    assert agl.flush()
    streamed, plain = traced.named(f"chat {model}")
    assert tokens(streamed) == tokens(plain) == (exact.prompt, exact.ids, exact.logprobs)
    (choice,) = json.loads(streamed.attributes["agentlightning.response"])["choices"]
    assert (
        choice["message"]["tool_calls"]
        == json.loads(plain.attributes["agentlightning.response"])["choices"][0]["message"]["tool_calls"]
    )


def test_openai_client_made_before_instrument_is_recorded(sink, llm, exact):
    client = openai.OpenAI(base_url=llm.url, api_key=exact.key)
    raw = client.chat.completions.with_raw_response
    agl.instrument(endpoint=sink.url)
    try:
        extra = {"extra_body": {"return_token_ids": True}, "logprobs": True}
        plain = client.chat.completions.create(**ASK, **extra)
        again = raw.create(**ASK, **extra).parse()
        with client.chat.completions.with_streaming_response.create(**ASK, **extra) as response:
            streamed = response.parse()
        chunks = list(client.chat.completions.create(**ASK, **extra, stream=True))
        assert plain.choices[0].message.content == again.choices[0].message.content == exact.text
        assert streamed.choices[0].message.content == exact.text
        assert (
            "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == exact.text
        )
        assert agl.flush()
        spans = sink.named("chat m")
        assert [tokens(span) for span in spans] == [(exact.prompt, exact.ids, exact.logprobs)] * 4
        assert spans[0].attributes["gen_ai.response.id"] == plain.id
    finally:
        agl.uninstrument()


def test_openai_async_client_tools_and_gather(traced, llm, exact):
    async def ask() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=llm.url, api_key=exact.key) as client:

            async def one(number: int) -> Any:
                with agl.agent(f"agent-{number}"):
                    return await client.chat.completions.create(
                        **ASK, tools=TOOLS, extra_body={"return_token_ids": True}
                    )

            return await asyncio.gather(*(one(number) for number in range(8)))

    answers = asyncio.run(ask())
    assert all(answer.choices[0].message.tool_calls for answer in answers)
    assert agl.flush()
    agents = {span.span_id: span.name for span in traced.spans() if span.name.startswith("invoke_agent")}
    parents = [agents[span.parent] for span in traced.named("chat m")]
    assert sorted(parents) == [f"invoke_agent agent-{number}" for number in range(8)]
    assert {span.attributes["gen_ai.response.id"] for span in traced.named("chat m")} == {
        one.id for one in answers
    }


def test_completions_and_responses_are_recorded(traced, llm, exact):
    client = openai.OpenAI(base_url=llm.url, api_key=exact.key)
    client.completions.create(model="m", prompt="6*7=")
    list(client.completions.create(model="m", prompt="6*7=", stream=True))
    client.responses.create(model="m", input="6*7?")
    list(client.responses.create(model="m", input="6*7?", stream=True))
    assert agl.flush()
    for span in traced.named("text_completion m"):
        assert tokens(span) == (exact.prompt, exact.ids, exact.logprobs)
    assert len(traced.named("text_completion m")) == 2
    plain, streamed = traced.named("chat m")
    assert (
        json.loads(plain.attributes["agentlightning.response"])["output"][0]["content"][0]["text"]
        == exact.text
    )
    assert streamed.attributes["gen_ai.usage.output_tokens"] == 5
    assert streamed.attributes["gen_ai.response.finish_reasons"] == ["completed"]


def test_several_answers_to_one_request_are_a_span_each(traced, llm, exact):
    with httpx.Client() as client, agl.agent("solver"):
        client.post(llm.url + "/chat/completions", json={**EXACT, "n": 3})
    assert agl.flush()
    spans = sorted(traced.named("chat m"), key=lambda span: span.attributes["agentlightning.choice"])
    assert [unpack_ids(span.attributes["agentlightning.response.token_ids"])[0] for span in spans] == [
        101,
        1101,
        2101,
    ]
    assert len({span.attributes["agentlightning.call.id"] for span in spans}) == 3
    assert (
        len({(span.trace_id, span.parent) for span in spans}) == 3
        or len({span.parent for span in spans}) == 1
    )
    assert {span.parent for span in spans} == {traced.one("invoke_agent solver").span_id}
    for number, span in enumerate(spans):
        (choice,) = json.loads(span.attributes["agentlightning.response"])["choices"]
        assert choice["index"] == number


def test_the_llm_span_of_an_instrumentation_takes_the_record(traced, llm, exact):
    tracer = trace.get_tracer("some.instrumentation")
    url = llm.url + "/chat/completions"
    with httpx2.Client() as client:
        with tracer.start_as_current_span("chat theirs", attributes={"gen_ai.operation.name": "chat"}):
            client.post(url, json=EXACT)
        span = tracer.start_span("chat streamed", attributes={"gen_ai.operation.name": "chat"})
        with trace.use_span(span), client.stream("POST", url, json={**EXACT, "stream": True}) as response:
            for line in response.iter_lines():
                if line == "data: [DONE]":  # instrumentations end their span here
                    span.end()
    assert agl.flush()
    assert [span.name for span in traced.spans()] == ["chat theirs", "chat streamed"]
    for span in traced.spans():
        assert tokens(span) == (exact.prompt, exact.ids, exact.logprobs)
        assert span.attributes["gen_ai.response.id"].startswith("chatcmpl-")
    assert llm.requests[0].headers["traceparent"].split("-")[2] == traced.one("chat theirs").span_id


def test_tokens_survive_an_llm_span_that_ended_too_early(traced, llm, exact):
    span = trace.get_tracer("hasty").start_span("chat hasty", attributes={"gen_ai.operation.name": "chat"})
    with trace.use_span(span), httpx.Client() as client:
        request = client.build_request("POST", llm.url + "/chat/completions", json={**EXACT, "stream": True})
        response = client.send(request, stream=True)
        span.end()
        response.read()
    assert agl.flush()
    theirs, ours = traced.named("chat hasty")
    if ours.scope == "hasty":
        theirs, ours = ours, theirs
    assert ours.parent == theirs.span_id
    assert tokens(ours) == (exact.prompt, exact.ids, exact.logprobs)
    assert agl.counters()["llm_spans_ended_early"] >= 1


def test_a_stream_is_not_held_up(traced, llm):
    llm.gate.clear()
    with (
        httpx2.Client() as client,
        client.stream(
            "POST", llm.url + "/chat/completions", json={**EXACT, "model": "held", "stream": True}
        ) as response,
    ):
        chunks = response.iter_raw()
        first = next(chunks)  # comes though the server has not gone on
        assert b"prompt_token_ids" in first
        llm.gate.set()
        rest = b"".join(chunks)
    assert rest.rstrip().endswith(b"data: [DONE]")


def test_the_record_is_complete_before_the_terminal_event_is_seen(traced, llm):
    url = llm.url + "/chat/completions"
    with httpx2.Client() as client, client.stream("POST", url, json={**EXACT, "stream": True}) as response:
        for line in response.iter_lines():
            if line == "data: [DONE]":
                break
        assert agl.flush()
        assert traced.one("chat m").attributes["gen_ai.response.finish_reasons"] == ["stop"]


@LIBRARIES
def test_the_caller_sees_the_same_with_and_without_us(sink, llm, library):
    url = llm.url + "/chat/completions"

    def everything() -> list[Any]:
        llm.number = 0
        with library.Client() as client:
            plain = client.post(url, json=EXACT)
            raw = stream(client, url, EXACT)
            with client.stream("POST", url, json={**EXACT, "model": "zipped", "stream": True}) as response:
                text = "".join(response.iter_text())
            assert response.elapsed.total_seconds() > 0
            broken = client.post(url, json={**EXACT, "model": "broken"})
            with pytest.raises(library.RemoteProtocolError):
                stream(client, url, {**EXACT, "model": "dies"})
            other = client.post(llm.base + "/survey/responses", json={"answers": [1, 2]})
        return [
            plain.content,
            sorted(plain.headers),
            raw,
            text,
            broken.status_code,
            broken.content,
            other.content,
        ]

    sends = library.Client.send, library.AsyncClient.send
    before = everything()
    agl.instrument(endpoint=sink.url)
    try:
        assert everything() == before
        assert [
            {name: value for name, value in one.headers.items() if name not in ("traceparent", "baggage")}
            for one in llm.requests[6:]
        ] == [one.headers for one in llm.requests[:6]]
        assert [one.raw for one in llm.requests[6:]] == [one.raw for one in llm.requests[:6]]
    finally:
        agl.uninstrument()
    assert (library.Client.send, library.AsyncClient.send) == sends


def test_a_patch_over_ours_is_left_alone(sink, llm, monkeypatch):
    import functools

    agl.instrument(endpoint=sink.url)
    ours = httpx.Client.send

    @functools.wraps(ours)
    def theirs(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs)

    try:
        httpx.Client.send = theirs  # type: ignore[method-assign]
        agl.uninstrument()
        assert httpx.Client.send is theirs
        with httpx.Client() as client:
            client.post(llm.url + "/chat/completions", json=ASK)
            agl.instrument(endpoint=sink.url)
            client.post(llm.url + "/chat/completions", json=ASK)
        assert agl.flush()
        assert len(sink.named("chat m")) == 1, "silent while off, once when on"
    finally:
        httpx.Client.send = ours  # type: ignore[method-assign]
        agl.uninstrument()


def test_other_posts_are_not_recorded(traced, llm):
    with httpx.Client() as client:
        client.post(llm.base + "/survey/responses", json={"answers": [1]})
        client.post(llm.base + "/something", json=ASK)
    assert agl.flush()
    assert traced.spans() == []
    assert all("traceparent" not in one.headers for one in llm.requests)


def test_failures_are_recorded_with_what_there_is(traced, llm):
    url = llm.url + "/chat/completions"
    with httpx2.Client() as client:
        client.post(url, json={**EXACT, "model": "broken"})
        with pytest.raises(httpx2.RemoteProtocolError):
            stream(client, url, {**EXACT, "model": "dies"})
        stream(client, url, {**EXACT, "model": "reports"})
        with pytest.raises(httpx2.ConnectError):
            client.post("http://127.0.0.1:1/v1/chat/completions", json={**EXACT, "model": "nobody"})
    assert agl.flush()
    found = {span.attributes["gen_ai.request.model"]: span for span in traced.spans()}
    assert all(span.status == 2 for span in found.values())
    assert {name: span.attributes["error.type"] for name, span in found.items()} == {
        "broken": "500",
        "dies": "httpx2.RemoteProtocolError",
        "reports": "engine_error",
        "nobody": "httpx2.ConnectError",
    }
    assert unpack_ids(found["dies"].attributes["agentlightning.response.token_ids"]) == [101, 102, 103]
    assert "agentlightning.response.token_ids" not in found["nobody"].attributes


def test_abandoned_and_cancelled_calls_are_recorded_as_aborted(traced, llm):
    url = llm.url + "/chat/completions"
    llm.gate.clear()
    with (
        httpx2.Client() as client,
        client.stream("POST", url, json={**EXACT, "model": "slow", "stream": True}) as response,
    ):
        next(response.iter_raw())

    async def cancelled(body: dict[str, Any]) -> None:
        async with httpx2.AsyncClient() as client:
            task = asyncio.create_task(stream_async(client, url, body))
            await asyncio.to_thread(llm.wait_for_requests, 2)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(cancelled({**EXACT, "model": "slow"}))
    llm.gate.set()
    assert agl.flush()
    spans = traced.named("chat slow")
    assert [span.attributes["error.type"] for span in spans] == ["aborted", "aborted"]
    assert unpack_ids(spans[0].attributes["agentlightning.response.token_ids"])[0] == 101


def test_trace_context_and_identity_reach_the_server(traced, llm):
    with httpx.Client() as client, agl.rollout(rollout_id="ro-1", group_id="g1", attempt=2):
        client.post(llm.url + "/chat/completions", json=ASK)
        client.post(
            llm.url + "/chat/completions", json=ASK, headers={"traceparent": "mine", "baggage": "a=b"}
        )
    assert agl.flush()
    first, second = (one.headers for one in llm.requests)
    spans = traced.named("chat m")
    assert first["traceparent"].split("-")[1:3] == [spans[0].trace_id, spans[0].span_id]
    assert "agentlightning.rollout.id=ro-1" in first["baggage"]
    assert "agentlightning.attempt=2" in first["baggage"]
    assert (second["traceparent"], second["baggage"]) == ("mine", "a=b")


def test_a_request_that_is_sent_twice_is_two_calls(traced, llm):
    with httpx2.Client() as client:
        request = client.build_request("POST", llm.url + "/chat/completions", json=ASK)
        client.send(request)
        client.send(request)
    assert agl.flush()
    assert {one.headers["traceparent"].split("-")[2] for one in llm.requests} == {
        span.span_id for span in traced.named("chat m")
    }


@pytest.mark.parametrize("spans", ["none", "genai"])
def test_what_the_gateway_has_on_disk_is_named_and_not_sent_again(sink, llm, spans):
    agl.instrument(endpoint=sink.url, openai=spans)
    try:
        client = openai.OpenAI(base_url=llm.url, api_key="none")
        ask = {**ASK, "model": "recorded", "extra_body": {"return_token_ids": True}}
        assert client.chat.completions.create(**ask).choices[0].message.content
        assert sum(1 for _ in client.chat.completions.create(**ask, stream=True)) > 3
        assert agl.flush()
    finally:
        agl.uninstrument()
    made = sink.named("chat recorded")
    assert len(made) == 2
    for span in made:
        assert span.attributes["agentlightning.call.id"] == "call-of-the-gateway"
        assert span.attributes["agentlightning.source"] == "sdk"
        assert span.attributes["gen_ai.request.model"] == "recorded"
        exact = {"agentlightning.request", "agentlightning.response", "agentlightning.response.token_ids"}
        assert not exact & set(span.attributes)


def test_threads_with_a_copied_context_keep_their_rollout(traced, llm):
    import contextvars

    def ask() -> None:
        with httpx.Client() as client:
            client.post(llm.url + "/chat/completions", json=ASK)

    threads = []
    for number in range(4):
        with agl.rollout(rollout_id=f"ro-{number}"):
            threads.append(threading.Thread(target=contextvars.copy_context().run, args=(ask,)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert agl.flush()
    assert sorted(span.attributes["agentlightning.rollout.id"] for span in traced.named("chat m")) == [
        f"ro-{number}" for number in range(4)
    ]


def test_a_fault_of_ours_never_reaches_the_caller(traced, llm, monkeypatch, caplog):
    from agentlightning.sdk import _bodies

    def bug(*_: Any) -> Any:
        raise RuntimeError("a bug of ours")

    monkeypatch.setattr(_bodies, "response_attributes", bug)
    before = agl.counters().get("internal_error", 0)
    with httpx2.Client() as client:
        assert client.post(llm.url + "/chat/completions", json=EXACT).status_code == 200
        assert stream(client, llm.url + "/chat/completions", EXACT).rstrip().endswith(b"[DONE]")
    monkeypatch.setattr(_bodies, "request_attributes", bug)
    with httpx2.Client() as client:
        assert client.post(llm.url + "/chat/completions", json=EXACT).status_code == 200
    assert agl.counters()["internal_error"] == before + 3
    assert sum("could not record a model call" in record.message for record in caplog.records) <= 1


def test_a_stream_that_cuts_characters_in_two_keeps_them():
    from agentlightning.sdk import _call, _streams

    deltas = [r"\ud83d", r"\ude00", " ünd", r"\ud83d"]
    data = "".join(
        f'data: {{"choices":[{{"index":0,"delta":{{"content":"{text}"}}}}]}}\r\n\r\n' for text in deltas
    )
    answer, error = _streams.rebuild("chat", data.encode())
    assert error is None
    text = _call._dumps(answer)
    text.encode()
    assert json.loads(text)["choices"][0]["message"]["content"] == "\U0001f600 ünd\ud83d"


def test_odd_token_ids_are_counted_and_the_call_is_kept(traced, llm):
    from agentlightning.sdk import _bodies

    before = agl.counters()
    answers = [
        {"choices": [{"index": 0, "token_ids": [2**40], "logprobs": {"content": [{"logprob": -1.0}]}}]},
        {"choices": [{"index": 0, "token_ids": [1, 2], "logprobs": {"content": [{"logprob": -1.0}]}}]},
        {"choices": [{"index": 0, "token_ids": [1], "logprobs": {"content": [{"logprob": None}]}}]},
        {"choices": [{"index": 0, "token_ids": "1,2"}, "nonsense"], "prompt_token_ids": {"a": 1}},
    ]
    assert [len(list(_bodies.choices_of(answer))) for answer in answers] == [1, 1, 1, 1]
    after = agl.counters()
    for name in ("token_ids_unreadable", "logprobs_not_parallel", "logprobs_unreadable"):
        assert after[name] == before.get(name, 0) + 1
