"""Streams as properties: cut anywhere, in pieces of any size, they say what the unstreamed answer says."""

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentlightning.gateway.answer import Answer
from agentlightning.gateway.chat import Chat
from agentlightning.gateway.completions import Completions
from agentlightning.gateway.memory import Recollections
from agentlightning.gateway.messages import Messages
from agentlightning.gateway.request import Api
from agentlightning.gateway.responses import Responses
from agentlightning.gateway.sse import EventParser

BODIES: dict[Any, Any] = {
    Chat: {"messages": [{"role": "user", "content": "x"}], "logprobs": True},
    Completions: {"prompt": "x", "logprobs": 0},
    Responses: {
        "input": "x",
        "include": ["message.output_text.logprobs", "reasoning.encrypted_content"],
    },
    Messages: {
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 9,
        "thinking": {"type": "adaptive"},
    },
}
TEXT = st.lists(st.text("aé €\n", min_size=1, max_size=4), max_size=4)
"""Text in the pieces in which it comes."""


def entry(text: str) -> dict[str, Any]:
    return {"token": text, "logprob": -0.5, "bytes": list(text.encode()), "top_logprobs": []}


def chunks(
    reasoning: list[str], text: list[str], calls: list[list[str]], *, chat: bool
) -> list[dict[str, Any]]:
    """What an engine streams."""
    made: list[dict[str, Any]] = []

    def add(delta: dict[str, Any], piece: str | None, finish: str | None = None) -> None:
        ids = [] if piece is None else [len(made)]
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish, "token_ids": ids}
        if chat:
            entries = [] if piece is None else [entry(piece)]
            choice |= {"delta": delta, "logprobs": {"content": entries}}
        else:
            tokens = [] if piece is None else [piece]
            logprobs = {
                "tokens": tokens,
                "token_logprobs": [-0.5] * len(tokens),
                "text_offset": [0] * len(tokens),
            }
            choice |= {"text": delta.get("content") or "", "logprobs": logprobs}
        made.append({"id": "chatcmpl-1", "created": 1, "model": "m", "model_version": 3, "choices": [choice]})

    add({"role": "assistant", "content": ""}, None)
    made[0]["prompt_token_ids"] = [1, 2, 3]
    for piece in reasoning:
        add({"reasoning_content": piece}, piece)
    for piece in text:
        add({"content": piece}, piece)
    for index, pieces in enumerate(calls):
        add(
            {
                "tool_calls": [
                    {"index": index, "id": f"c{index}", "type": "function", "function": {"name": "f"}}
                ]
            },
            "{",
        )
        for piece in pieces:
            add({"tool_calls": [{"index": index, "function": {"arguments": piece}}]}, piece)
    add({}, "<end>", "tool_calls" if calls else "stop")
    sampled = sum(len(chunk["choices"][0]["token_ids"]) for chunk in made)
    usage = {"prompt_tokens": 3, "completion_tokens": sampled, "total_tokens": 3 + sampled}
    return [*made, {**made[0], "choices": [], "usage": usage}]


def whole(parts: list[dict[str, Any]], *, chat: bool) -> dict[str, Any]:
    """The same answer unstreamed."""
    message: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []}
    choice: dict[str, Any] = {"index": 0, "token_ids": [], "logprobs": {"content": []}, "text": ""}
    if not chat:
        choice["logprobs"] = {"tokens": [], "token_logprobs": [], "text_offset": []}
    for part in parts[:-1]:
        (item,) = part["choices"]
        choice["token_ids"] += item["token_ids"]
        choice["finish_reason"] = item["finish_reason"]
        choice["text"] += item.get("text", "")
        for name, values in item["logprobs"].items():
            choice["logprobs"][name] += values
        delta = item.get("delta") or {}
        message["content"] += delta.get("content") or ""
        message["reasoning_content"] += delta.get("reasoning_content", "")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                message["tool_calls"].append(
                    {"id": call["id"], "type": "function", "function": {"name": "f", "arguments": ""}}
                )
            message["tool_calls"][-1]["function"]["arguments"] += call["function"].get("arguments", "")
    if chat:
        del choice["text"]
        choice["message"] = message
    return {**parts[0], "choices": [choice], "usage": parts[-1]["usage"]}


def relay(api: Api, stream: bytes, cuts: list[int]) -> tuple[bytes, Any]:
    """What the client gets of a stream that comes in pieces, and what is recorded of it."""
    body = {"model": "m", "stream": True, **BODIES[type(api)]}
    request = api.parse(json.dumps(body).encode(), Recollections().of("me"))
    parser, answer, writer = EventParser(), Answer(), api.writer(request)
    now, later = b"", b""
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        for event in parser.feed(stream[start:end]):
            if event != b"[DONE]":
                data = json.loads(event)
                answer.read_chunk(data)
                ready, held = writer.chunk(data, answer)
                now, later = now + ready, later + held
    answer.check_complete()
    record = writer.record(answer, answer.choices[0])
    return now + later + writer.end(answer), record


def encode(parts: list[dict[str, Any]]) -> bytes:
    events = [b"data: " + json.dumps(part, ensure_ascii=False).encode() + b"\n\n" for part in parts]
    return b": comment\n\n" + b"".join(events) + b"data: [DONE]\n\n"


@pytest.mark.parametrize("api", [kind() for kind in BODIES], ids=lambda api: api.path)
def test_a_stream_cut_at_every_byte_is_relayed_and_recorded_the_same(api):
    parts = chunks(["h", "é"], ["€ a", "b"], [["{}"], ['{"a"', ": 1}"]], chat=api.operation == "chat")
    stream = encode(parts)
    expected = relay(api, stream, [])
    for cut in range(1, len(stream)):
        assert relay(api, stream, [cut]) == expected
    assert relay(api, stream, list(range(1, len(stream)))) == expected


@pytest.mark.parametrize("api", [kind() for kind in BODIES], ids=lambda api: api.path)
@settings(max_examples=60, deadline=None)
@given(reasoning=TEXT, text=TEXT, calls=st.lists(TEXT, max_size=3), data=st.data())
def test_streamed_and_unstreamed_answers_leave_one_record(api, reasoning, text, calls, data):
    chat = api.operation == "chat"
    if not chat:
        reasoning, calls = [], []
    parts = chunks(reasoning, text, calls, chat=chat)
    stream = encode(parts)
    cuts = sorted(data.draw(st.lists(st.integers(1, len(stream) - 1), max_size=5)))
    _, record = relay(api, stream, cuts)
    request = api.parse(json.dumps({"model": "m", **BODIES[type(api)]}).encode(), Recollections().of("me"))
    answer, writer = Answer(), api.writer(request)
    engine = whole(parts, chat=chat)
    answer.read_plain(copy.deepcopy(engine))
    body = json.loads(writer.plain(engine, answer))
    assert writer.record(answer, answer.choices[0]) == record
    if api.path in ("responses", "messages"):  # made from the record, where the others pass the engine's own
        assert body == json.loads(json.dumps(record))


@given(text=TEXT, late=st.sampled_from(["reasoning_content", "content"]))
@settings(max_examples=30, deadline=None)
def test_what_comes_late_for_an_earlier_block_still_belongs_to_it(text, late):
    parts = chunks(["thought"], ["said", *text], [["{}"]], chat=True)
    parts.insert(-2, {**parts[1], "choices": [{"index": 0, "delta": {late: "LATE"}, "finish_reason": None}]})
    for api in (Responses(), Messages()):
        events, record = relay(api, encode(parts), [])
        told = [
            json.loads(line.removeprefix("data: "))
            for line in events.decode().split("\n")
            if line.startswith("data: ")
        ]
        if api.path == "responses":
            assert told[-1]["response"] == record
            done = [event["item"] for event in told if event["type"] == "response.output_item.done"]
            assert done == record["output"]
        else:
            texts: dict[int, str] = {}
            for event in told:
                if event["type"] == "content_block_delta":
                    delta = event["delta"]
                    texts[event["index"]] = texts.get(event["index"], "") + "".join(
                        delta.get(name, "") for name in ("text", "thinking", "partial_json")
                    )
            assert texts[0] == record["content"][0]["thinking"]
            assert texts[1] == record["content"][1]["text"]
