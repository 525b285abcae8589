"""Whatever API an agent spoke, its conversation is the same chat messages."""

import json
from typing import Any

from agentlightning.trainer.conversation import Exchange, chains, read_exchange

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION = {"name": "add", "description": "adds", "parameters": SCHEMA}

CHAT = (
    {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "1 + 1?"}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "2"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
    },
    {
        "choices": [
            {"message": {"role": "assistant", "content": "two", "refusal": None, "reasoning_content": "hm"}}
        ]
    },
)
MESSAGES = (
    {
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "1 + 1?"},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}}],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "2"}]},
        ],
        "tools": [{"name": "add", "description": "adds", "input_schema": SCHEMA}],
    },
    {
        "type": "message",
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": "s"},
            {"type": "text", "text": "two"},
        ],
    },
)
RESPONSES = (
    {
        "instructions": "Be brief.",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "1 + 1?"}]},
            {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
            {"type": "function_call_output", "call_id": "c1", "output": "2"},
        ],
        "tools": [{"type": "function", **FUNCTION}, {"type": "web_search"}],
    },
    {
        "object": "response",
        "output": [
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "two"}]},
        ],
    },
)


def row(request: Any, response: Any, **fields: Any) -> dict[str, Any]:
    empty = dict.fromkeys(("agent", "policy", "model", "error", "reward"))
    bodies = {"request": json.dumps(request), "response": json.dumps(response)}
    return {"rollout_id": "r", "attempt": 0, "seq": 0, "call_id": "c", **empty, **bodies, **fields}


def test_three_apis_tell_one_conversation() -> None:
    told = [read_exchange(row(*bodies)) for bodies in (CHAT, MESSAGES, RESPONSES)]
    assert all(isinstance(exchange, Exchange) for exchange in told)
    chat, messages, responses = (e for e in told if isinstance(e, Exchange))
    assert chat.whole == messages.whole == responses.whole
    assert chat.tools == messages.tools == responses.tools
    assert [message["role"] for message in chat.whole] == ["system", "user", "assistant", "tool", "assistant"]
    assert chat.answer == {"role": "assistant", "content": "two", "reasoning_content": "hm"}


def test_calls_of_each_api_continue_each_other() -> None:
    """The request of the next call holds the answer of the one before: one conversation."""
    for (request, response), longer in (
        (
            CHAT,
            {
                "messages": [
                    *CHAT[0]["messages"],
                    CHAT[1]["choices"][0]["message"],
                    {"role": "user", "content": "?"},
                ]
            },
        ),
        (
            MESSAGES,
            {
                **MESSAGES[0],
                "messages": [*MESSAGES[0]["messages"], MESSAGES[1], {"role": "user", "content": "?"}],
            },
        ),
        (
            RESPONSES,
            {
                **RESPONSES[0],
                "input": [*RESPONSES[0]["input"], *RESPONSES[1]["output"], {"role": "user", "content": "?"}],
            },
        ),
    ):
        first = read_exchange(row(request, response))
        second = read_exchange(row(longer, response, seq=1, call_id="d"))
        assert isinstance(first, Exchange)
        assert isinstance(second, Exchange)
        assert chains([first, second]) == [second]


def test_an_answer_of_text_and_several_calls_is_one_message() -> None:
    output = [
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "add", "arguments": "{}"},
    ]
    exchange = read_exchange(row({"input": "go"}, {"output": output}))
    assert isinstance(exchange, Exchange)
    assert exchange.answer["content"] == "Let me see."
    assert [call["id"] for call in exchange.answer["tool_calls"]] == ["c1", "c2"]


def test_what_cannot_be_told_has_a_name() -> None:
    reasons = [
        read_exchange(row({"input": "go", "previous_response_id": "resp_1"}, RESPONSES[1])),
        read_exchange(row({"prompt": "Once"}, {"choices": [{"text": "upon"}]})),
        read_exchange(row(CHAT[0], {})),
        read_exchange(row(CHAT[0], {"choices": CHAT[1]["choices"] * 2})),
        read_exchange(row(CHAT[0], CHAT[1], error="boom")),
        read_exchange({**row(*CHAT), "request": "{"}),
    ]
    assert reasons == [
        "continues_stored_response",
        "no_messages",
        "no_answer",
        "several_answers",
        "call_error",
        "no_messages",
    ]


def test_images_stay_parts_and_errors_of_tools_say_that_they_are() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    seen = read_exchange(row({"messages": [{"role": "user", "content": [image]}]}, CHAT[1]))
    assert isinstance(seen, Exchange)
    assert seen.messages[0]["content"] == [image]
    failed = {
        "type": "tool_result",
        "tool_use_id": "c",
        "content": [{"type": "text", "text": "no"}],
        "is_error": True,
    }
    told = read_exchange(row({"messages": [{"role": "user", "content": [failed]}]}, MESSAGES[1]))
    assert isinstance(told, Exchange)
    assert told.messages == ({"role": "tool", "tool_call_id": "c", "content": "Error: no"},)
