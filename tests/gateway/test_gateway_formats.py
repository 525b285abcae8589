"""Streams cut anywhere, and answers put together from chunks."""

import json
from typing import Any

import pytest

from agentlightning.gateway.answer import Answer, BadAnswer
from agentlightning.gateway.chat import Chat
from agentlightning.gateway.memory import Recollections
from agentlightning.gateway.request import ModelRequest
from agentlightning.gateway.sse import EventParser

STREAM = (
    b': comment\r\n\r\ndata: {"text": "\xc3\xa9"}\n\nevent: x\rid: 3\rdata: one\rdata: two\r\r'
    b"data:tight\n\ndata\n\nretry: 5\n\ndata: [DONE]\n\ndata: unfinished"
)
EVENTS = ['{"text": "é"}'.encode(), b"one\ntwo", b"tight", b"", b"[DONE]"]


def test_events_are_the_same_wherever_the_bytes_are_cut():
    for cut in range(len(STREAM) + 1):
        parser = EventParser()
        assert parser.feed(STREAM[:cut]) + parser.feed(STREAM[cut:]) == EVENTS
    parser = EventParser()
    assert [event for i in range(len(STREAM)) for event in parser.feed(STREAM[i : i + 1])] == EVENTS


def request(**fields: Any) -> ModelRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}
    return Chat().parse(json.dumps(body).encode(), Recollections().of("me"))


def chunk(
    ids: list[int], *, finish: str | None = None, version: int | None = None, **delta: Any
) -> dict[str, Any]:
    entries = [{"token": "t", "logprob": -0.5} for _ in ids]
    choice = {
        "index": 0,
        "delta": delta,
        "finish_reason": finish,
        "token_ids": ids,
        "logprobs": {"content": entries},
    }
    made: dict[str, Any] = {"id": "a", "created": 1, "model": "engine", "choices": [choice]}
    return made if version is None else {**made, "model_version": version}


def test_weights_that_change_inside_an_answer_are_told_token_by_token():
    answer = Answer()
    for part in (chunk([1, 2], version=4), chunk([3]), chunk([4, 5], version=5), chunk([6], finish="stop")):
        answer.read_chunk(part)
    assert answer.versions_of(answer.choices[0]) == (4, [0, 4, 3, 5])
    said = Answer()
    said.read_plain(
        {
            "model_version": 5,
            "choices": [
                {
                    "index": 0,
                    "message": {"content": "x"},
                    "finish_reason": "stop",
                    "model_versions": [0, 4, 3, 5],
                }
            ],
        }
    )
    assert said.versions_of(said.choices[0]) == (4, [0, 4, 3, 5])


def test_reasoning_and_tool_calls_are_put_together():
    answer = Answer()
    call = {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a"'}}
    for part in (
        chunk([1], role="assistant", reasoning_content="hm"),
        chunk([2], reasoning_content="m"),
        chunk([3], tool_calls=[call]),
        chunk([4], finish="tool_calls", tool_calls=[{"index": 0, "function": {"arguments": ": 1}"}}]),
    ):
        answer.read_chunk(part)
    record = Chat().writer(request()).record(answer, answer.choices[0])
    assert record["choices"] == [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
                ],
                "reasoning_content": "hmm",
            },
            "finish_reason": "tool_calls",
        }
    ]


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        {},
        {"choices": None},
        {"choices": []},
        {"choices": [{}]},
        {"choices": [{"index": 0, "message": None, "finish_reason": "stop"}]},
        {"choices": [{"index": -1, "message": {}, "finish_reason": "stop"}]},
        {"choices": [{"index": 0, "message": {}, "finish_reason": None}]},
        {"choices": [{"index": 0, "message": {}, "finish_reason": "stop", "token_ids": 5}]},
        {"error": {"message": "boom"}},
        {"error": "boom"},
    ],
)
def test_an_answer_of_another_shape_is_a_bad_answer(data):
    with pytest.raises(BadAnswer):
        Answer().read_plain(data)


def test_log_probabilities_must_be_parallel_to_the_ids():
    answer = Answer()
    answer.read_chunk(chunk([1, 2, 3], finish="stop"))
    answer.choices[0].token_ids = [1, 2]
    with pytest.raises(BadAnswer, match="2 token ids came with 3"):
        answer.choices[0].logprobs()


def test_the_runs_limit_on_tokens_is_an_upper_bound():
    assert request(max_tokens=10).for_engine("e", {"max_tokens": 64})["max_tokens"] == 10
    assert request(max_tokens=100).for_engine("e", {"max_tokens": 64})["max_tokens"] == 64
    assert request().for_engine("e", {"max_tokens": 64})["max_tokens"] == 64
    assert request(temperature=0.2, seed=1).for_engine("e", None)["seed"] == 1
