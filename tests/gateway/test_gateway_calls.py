"""A model call: what the agent gets, and what is on record before it gets it."""

import json
import threading
from typing import Any

import openai
import pytest

from agentlightning.proto import ids
from agentlightning.proto.packed import unpack_floats, unpack_ids

MESSAGES: list[Any] = [{"role": "user", "content": "hello"}]
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
]


def client_of(gateway: Any, claimed: dict[str, Any], **options: Any) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{gateway.url}/v1", api_key=claimed["token"], **{"max_retries": 0, **options}
    )


def test_a_plain_call_reaches_the_agent_unchanged_and_the_record_holds_every_token(gateway, engine, sink):
    claimed = gateway.begin("plain")
    answer = client_of(gateway, claimed).chat.completions.create(model="default", messages=MESSAGES, seed=3)
    assert answer.choices[0].message.content == "".join(
        t[0] for t in engine.choices({"seed": 3, "messages": MESSAGES})[0]["tokens"]
    )
    assert answer.model == "default"
    assert not {"prompt_token_ids", "model_version"} & set(answer.model_dump())
    assert not {"token_ids", "logprobs"} & {
        key for key, value in answer.choices[0].model_dump().items() if value is not None
    }

    assert engine.requests[0]["return_token_ids"] is True
    assert engine.requests[0]["logprobs"] is True
    assert engine.requests[0]["model"] == "scripted-model"

    (span,) = sink.calls("plain")
    tokens = engine.choices({"seed": 3, "messages": MESSAGES})[0]["tokens"]
    assert unpack_ids(span["agentlightning.response.token_ids"]) == [token[1] for token in tokens]
    assert unpack_floats(span["agentlightning.response.logprobs"]) == [token[2] for token in tokens]
    assert unpack_ids(span["agentlightning.prompt.token_ids"]) == engine.prompt_ids({"messages": MESSAGES})
    assert span["agentlightning.model.version"] == 7
    assert span["agentlightning.policy"] == "default"
    assert span["agentlightning.source"] == "gateway"
    assert span["agentlightning.choice"] == 0
    assert (span["name"], span["kind"], span["scope"]) == ("chat default", 3, "agentlightning.gateway")
    assert span["gen_ai.operation.name"] == "chat"
    assert span["gen_ai.response.model"] == "scripted-model"
    assert span["gen_ai.response.id"] == answer.id
    assert span["gen_ai.response.finish_reasons"] == ["stop"]
    assert span["gen_ai.usage.output_tokens"] == len(tokens)
    assert (span["agentlightning.run.id"], span["agentlightning.group.id"]) == ("run", "group")
    assert (span["agentlightning.task.id"], span["agentlightning.split"]) == ("task", "train")
    assert span["agentlightning.attempt"] == 0
    assert json.loads(span["agentlightning.request"]) == {"messages": MESSAGES, "model": "default", "seed": 3}
    assert (
        json.loads(span["agentlightning.response"])["choices"][0]["message"]["content"]
        == answer.choices[0].message.content
    )
    assert gateway.row("plain")["calls"] == 1


@pytest.mark.parametrize("extra", [{}, {"tools": TOOLS}, {"n": 3}, {"logprobs": True}])
def test_streamed_and_unstreamed_calls_leave_the_same_record(gateway, engine, sink, extra):
    claimed = gateway.begin(f"same-{'-'.join(extra)}")
    client = client_of(gateway, claimed)
    plain = client.chat.completions.create(model="default", messages=MESSAGES, seed=1, **extra)
    with client.chat.completions.stream(model="default", messages=MESSAGES, seed=1, **extra) as stream:
        streamed = stream.get_final_completion()
    for one, other in zip(plain.choices, streamed.choices, strict=True):
        assert one.message.content == other.message.content
        assert [c.function.arguments for c in one.message.tool_calls or ()] == [
            c.function.arguments for c in other.message.tool_calls or ()
        ]
        assert one.finish_reason == other.finish_reason
    spans = sink.calls(claimed["rollout_id"])
    n = extra.get("n", 1)
    assert len(spans) == 2 * n
    assert (
        len({span["span_id"] for span in spans})
        == len({span["agentlightning.call.id"] for span in spans})
        == 2 * n
    )
    varying = {
        "agentlightning.call.id",
        "span_id",
        "start",
        "end",
        "agentlightning.request",
        "gen_ai.request.stream",
        "agentlightning.time.queue_ms",
        "agentlightning.time.first_token_ms",
    }
    for index in range(n):
        first, second = ({k: v for k, v in span.items() if k not in varying} for span in spans[index::n])
        assert first == second
        (choice,) = json.loads(first["agentlightning.response"])["choices"]
        assert choice["index"] == first["agentlightning.choice"] == index
        assert ("logprobs" in choice) == ("logprobs" in extra)
    assert gateway.row(claimed["rollout_id"])["calls"] == 2 * n


def test_what_the_client_asks_for_it_gets(gateway):
    claimed = gateway.begin("asks")
    answer = gateway.chat(claimed["token"], logprobs=True, return_token_ids=True).json()
    assert answer["prompt_token_ids"]
    assert answer["choices"][0]["token_ids"]
    assert answer["choices"][0]["logprobs"]["content"]
    events = gateway.chat(claimed["token"], stream=True, stream_options={"include_usage": True}).text.split(
        "\n\n"
    )
    assert json.loads(events[-3].removeprefix("data: "))["usage"]["completion_tokens"] == 6
    assert events[-2] == "data: [DONE]"
    assert "usage" not in gateway.chat(claimed["token"], stream=True).text


def test_no_last_byte_before_the_collector_has_the_span(gateway, sink, until):
    claimed = gateway.begin("held-back")
    sink.mode = "hang"
    got: list[str] = []
    done = threading.Event()

    def read() -> None:
        stream = client_of(gateway, claimed).chat.completions.create(
            model="default", messages=MESSAGES, stream=True
        )
        for chunk in stream:
            got.append(chunk.choices[0].finish_reason or chunk.choices[0].delta.content or "")
        done.set()

    reader = threading.Thread(target=read)
    reader.start()
    until(lambda: sink.waiting and len("".join(got).split()) == 6)
    assert not done.wait(0.3)
    assert "stop" not in got
    assert gateway.row("held-back")["calls"] == 0
    sink.proceed.set()
    assert done.wait(10)
    reader.join()
    assert got[-1] == "stop"
    assert len(sink.calls("held-back")) == 1


def test_a_call_joins_the_trace_of_its_caller_whatever_the_flags(gateway, sink):
    claimed = gateway.begin("joined")
    trace, parent = "ab" * 16, "cd" * 8
    headers = {"authorization": f"Bearer {claimed['token']}"}
    for traceparent in (
        f"00-{trace}-{parent}-03",
        f"00-{'0' * 32}-{parent}-01",
        "nonsense",
        f"ff-{trace}-{parent}-01",
    ):
        body = {"model": "default", "messages": MESSAGES}
        answer = gateway.http.post(
            "/v1/chat/completions", json=body, headers={**headers, "traceparent": traceparent}
        )
        assert answer.status_code == 200
    joined, *others = sink.calls("joined")
    assert (joined["trace_id"], joined["parent_id"]) == (trace, parent)
    for span in others:  # else the attempt's own trace, under its root
        assert span["trace_id"] == ids.derived_trace_id("joined", 0)
        assert span["parent_id"] == ids.rollout_span_id("joined", 0)


def test_the_runs_sampling_replaces_the_agents_and_both_are_recorded(gateway, engine, sink):
    claimed = gateway.begin("sampled", sampling={"temperature": 0.5, "top_k": 20, "max_tokens": 64})
    wish = {
        "temperature": 0,
        "top_p": 0.1,
        "seed": 1,
        "frequency_penalty": 1.5,
        "max_completion_tokens": 9,
        "stop": ["x"],
    }
    assert gateway.chat(claimed["token"], **wish).status_code == 200
    asked = engine.requests[0]
    assert {key: asked.get(key) for key in (*wish, "top_k", "max_tokens")} == {
        "temperature": 0.5,
        "top_k": 20,
        "top_p": None,
        "seed": None,
        "frequency_penalty": None,
        "max_completion_tokens": 9,
        "max_tokens": None,
        "stop": ["x"],
    }
    (span,) = sink.calls("sampled")
    assert json.loads(span["agentlightning.request"])["temperature"] == 0
    assert (span["gen_ai.request.temperature"], span["gen_ai.request.top_k"]) == (0.5, 20)
    assert (span["gen_ai.request.max_tokens"], span["gen_ai.request.stop_sequences"]) == (9, ["x"])
    assert "gen_ai.request.seed" not in span


def test_a_policys_sampling_applies_by_split(gateway, engine):
    sampling = {"train": {"temperature": 1}, "val": {"temperature": 0, "max_tokens": 5}}
    gateway.ask("POST", "/api/policies", {"policy": "default", "sampling": sampling})
    try:
        for split, expected in (("train", (1, None)), ("val", (0, 5))):
            gateway.chat(gateway.begin(f"split-{split}", split=split)["token"], temperature=0.3)
            asked = engine.requests[-1]
            assert (asked["temperature"], asked.get("max_tokens")) == expected
    finally:
        gateway.ask("POST", "/api/policies", {"policy": "default", "sampling": {}})
    gateway.chat(gateway.begin("split-none")["token"], temperature=0.3)
    assert engine.requests[-1]["temperature"] == 0.3


def test_the_token_works_as_a_path_prefix_and_as_x_api_key(gateway, sink):
    claimed = gateway.begin("prefix")
    body = {"model": "default", "messages": MESSAGES}
    assert gateway.http.post(f"/r/{claimed['token']}/v1/chat/completions", json=body).status_code == 200
    headers = {"x-api-key": claimed["token"]}
    assert gateway.http.post("/v1/chat/completions", json=body, headers=headers).status_code == 200
    assert gateway.http.get(f"/r/{claimed['token']}/v1/models").json()["data"][0]["id"] == "default"
    assert len(sink.calls("prefix")) == 2
    assert claimed["token"] not in gateway.log()


def test_a_retry_of_the_client_gets_the_first_answer_again(gateway, engine, sink):
    claimed = gateway.begin("retried")
    body = {"model": "default", "messages": MESSAGES, "tools": TOOLS}
    key = {"authorization": f"Bearer {claimed['token']}"}
    for stream in (False, True):
        request = {**body, "stream": stream}
        first = gateway.http.post("/v1/chat/completions", json=request, headers=key)
        again = gateway.http.post(
            "/v1/chat/completions", json=request, headers={**key, "x-stainless-retry-count": "1"}
        )
        assert again.headers["x-agentlightning-call-id"] == first.headers["x-agentlightning-call-id"]
        assert again.content == first.content
        assert again.headers["content-type"] == first.headers["content-type"]
    assert len(engine.requests) == len(sink.calls("retried")) == 2
    gateway.http.post(
        "/v1/chat/completions", json=body, headers=key
    )  # the same question asked anew is a new call
    assert len(engine.requests) == 3
    assert gateway.counters("run")["calls_replayed"] >= 2


def test_a_retry_while_the_first_is_in_flight_waits_for_its_answer(gateway, engine, until):
    claimed = gateway.begin("overtaken")
    engine.mode = "wait"
    key = {"authorization": f"Bearer {claimed['token']}"}
    body = {"model": "default", "messages": MESSAGES}
    answers: list[Any] = []

    def post(retry: str) -> None:
        answers.append(
            gateway.http.post(
                "/v1/chat/completions", json=body, headers={**key, "x-stainless-retry-count": retry}
            )
        )

    threads = [threading.Thread(target=post, args=(retry,)) for retry in "01"]
    threads[0].start()
    until(lambda: engine.waiting)
    threads[1].start()
    engine.proceed.set()
    for thread in threads:
        thread.join()
    assert answers[0].content == answers[1].content
    assert len(engine.requests) == 1


def test_a_stock_client_is_held_through_a_weight_update_and_does_not_notice(
    start_gateway, engine, sink, until
):
    gateway = start_gateway()
    claimed = gateway.begin("held")
    engine.mode = "wait"
    client = client_of(gateway, claimed)
    texts: list[str] = []

    def ask(stream: bool) -> None:
        if stream:
            chunks = client.chat.completions.create(model="default", messages=MESSAGES, stream=True)
            texts.append("".join(chunk.choices[0].delta.content or "" for chunk in chunks))
        else:
            answer = client.chat.completions.create(model="default", messages=MESSAGES)
            texts.append(answer.choices[0].message.content or "")

    first = threading.Thread(target=ask, args=(False,))
    first.start()
    until(lambda: engine.waiting)
    hold = gateway.ask("POST", "/api/hold", {"policy": "default", "ttl_s": 30, "drain_s": 0.1})
    assert (hold["drained"], hold["in_flight"]) == (False, 1)
    engine.proceed.set()
    first.join()
    hold = gateway.ask("POST", "/api/hold", {"policy": "default", "ttl_s": 30, "drain_s": 10})
    assert hold["drained"] is True

    engine.mode = "ok"
    others = [threading.Thread(target=ask, args=(stream,)) for stream in (False, True)]
    for thread in others:
        thread.start()
    until(lambda: gateway.counters().get("calls_held") == 2)
    assert len(engine.requests) == 1
    engine.version = 8
    release = {"policy": "default", "hold_id": hold["hold_id"], "version": 8}
    assert gateway.ask("POST", "/api/release", release) == {
        "policy": "default",
        "version": 8,
        "expired": False,
    }
    for thread in others:
        thread.join()
    assert len(set(texts)) == 1
    assert sorted(span["agentlightning.model.version"] for span in sink.calls("held")) == [7, 8, 8]
    assert gateway.ask("POST", "/api/release", release)["expired"] is True


def test_a_hold_ends_by_itself_and_a_newer_one_wins(gateway, sink):
    claimed = gateway.begin("expiring")
    body = {"policy": "default", "ttl_s": 0.3, "drain_s": 0}
    old, new = (gateway.ask("POST", "/api/hold", body)["hold_id"] for _ in range(2))
    stale = gateway.send("POST", "/api/release", {"policy": "default", "hold_id": old, "version": 1})
    assert (stale.status_code, stale.json()["error"]["code"]) == (409, "stale_hold")
    assert gateway.chat(claimed["token"]).status_code == 200  # after 0.3 s, with nobody releasing
    assert old != new
    assert gateway.send("POST", "/api/hold", {**body, "policy": "nobody"}).status_code == 404


def test_the_version_is_the_trainers_where_the_engine_says_none(gateway, engine, sink):
    claimed = gateway.begin("versionless")
    engine.version = None
    hold = gateway.ask("POST", "/api/hold", {"policy": "default", "ttl_s": 5, "drain_s": 1})["hold_id"]
    gateway.ask("POST", "/api/release", {"policy": "default", "hold_id": hold, "version": 11})
    gateway.chat(claimed["token"])
    assert sink.calls("versionless")[0]["agentlightning.model.version"] == 11


def test_without_tokens_any_caller_is_recorded_under_its_trace_or_its_baggage(start_gateway, sink):
    gateway = start_gateway(tokens=False)
    body = {"model": "scripted-model", "messages": MESSAGES}
    trace = "12" * 16
    for headers in (
        {"traceparent": f"00-{trace}-{'34' * 8}-01"},
        {"baggage": "agentlightning.rollout.id=mine,agentlightning.attempt=2;x=y,agentlightning.run.id=r%31"},
        {"baggage": "agentlightning.rollout.id=../../etc"},
        {},
    ):
        assert gateway.http.post("/v1/chat/completions", json=body, headers=headers).status_code == 200
    first, second, third, fourth = [span for span in sink.spans if "agentlightning.call.id" in span]
    assert first["agentlightning.rollout.id"] == first["trace_id"] == trace
    assert (second["agentlightning.rollout.id"], second["agentlightning.attempt"]) == ("mine", 2)
    assert second["agentlightning.run.id"] == "r1"
    assert third["agentlightning.rollout.id"] == third["trace_id"]
    assert fourth["agentlightning.rollout.id"] == fourth["trace_id"]
    assert gateway.counters()["bad_baggage"] == 1
