"""Every request field is honoured or refused by name."""

from typing import Any

import pytest
from engine_harness import CONTEXT

from agentlightning.trainer.engine.chat import ChatRequest, Template, parse_chat
from agentlightning.trainer.engine.errors import RequestError
from agentlightning.trainer.engine.grammar import Grammars
from agentlightning.trainer.engine.sampling import Sampling

MESSAGES = [{"role": "user", "content": "hi"}]
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}},
}


def parse(tokenizer: Any, **fields: Any) -> ChatRequest:
    body = {"model": "tiny", "messages": MESSAGES} | fields
    template = Template(tokenizer, verbatim_arguments=True)
    grammars = Grammars(tokenizer, vocabulary=len(tokenizer), end_tokens=frozenset({1}))
    return parse_chat(
        body, template=template, grammars=grammars, model="tiny", context=CONTEXT, tool_parser=True
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0"),
        ({"messages": [{"role": "user"}]}, "messages.0"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}, "messages.0.tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, "messages.0.tool_calls.0"),
        ({"messages": [{"role": "user", "content": "x", "cache_control": 1}]}, "messages.0.cache_control"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"seed": "x"}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": 3}, "stop"),
        ({"stream": 1}, "stream"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logit_bias": {"x": 10}}, "logit_bias"),
        ({"logit_bias": {"999999": 10}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "int"}}}},
            "response_format.json_schema.schema",
        ),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"min_p": 0.1}, "min_p"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
        ({"tools": [{"type": "function"}]}, "tools.0"),
        (
            {
                "tools": [
                    TOOL,
                    {
                        "type": "function",
                        "function": {"name": "f", "strict": True, "parameters": {"not": {}}},
                    },
                ]
            },
            "tools.1.function.parameters",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": 3}}]},
            "tools.0.function.parameters",
        ),
        ({"frobnicate": 1}, "frobnicate"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(tokenizer: Any, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as refused:
        parse(tokenizer, **fields)
    assert refused.value.status == 400
    assert refused.value.param == param
    assert param.split(".")[-1] in str(refused.value) or param in str(refused.value)


def test_an_unknown_model_is_openais_404(tokenizer: Any) -> None:
    with pytest.raises(RequestError, match="'gpt-5' does not exist") as refused:
        parse(tokenizer, model="gpt-5")
    assert (refused.value.status, refused.value.code) == (404, "model_not_found")


def test_neutral_values_and_nulls_are_accepted(tokenizer: Any) -> None:
    request = parse(
        tokenizer, temperature=None, stop=None, tools=None, presence_penalty=0, frequency_penalty=0.0, logit_bias={},
        response_format={"type": "text"}, parallel_tool_calls=True, user="u", metadata={"a": "b"}, tool_choice="auto",
    )  # fmt: skip
    assert request.sampling == Sampling(max_tokens=CONTEXT - len(request.prompt))
    assert not request.parse_tools


def test_settings_arrive(tokenizer: Any) -> None:
    request = parse(
        tokenizer, temperature=0.5, top_p=0.9, top_k=5, seed=-3, stop="x", max_tokens=9, max_completion_tokens=7, n=3,
        logprobs=True, top_logprobs=4, stream=True, stream_options={"include_usage": True}, return_token_ids=True,
    )  # fmt: skip
    assert request.sampling == Sampling(0.5, 0.9, 5, -3, 7, ("x",), 4)
    assert (request.choices, request.logprobs, request.stream) == (3, True, True)
    assert request.include_usage
    assert request.return_token_ids


@pytest.mark.parametrize("top_k", [-1, 0, None])
def test_no_top_k_is_spelt_in_several_ways(tokenizer: Any, top_k: int | None) -> None:
    assert parse(tokenizer, top_k=top_k).sampling.top_k == 0


def test_a_prompt_beyond_the_context_is_openais_error(tokenizer: Any) -> None:
    long = [{"role": "user", "content": "word " * CONTEXT}]
    for fields in ({"messages": long}, {"messages": MESSAGES, "max_tokens": CONTEXT}):
        with pytest.raises(RequestError, match=f"maximum context length is {CONTEXT} tokens") as refused:
            parse(tokenizer, **fields)
        assert refused.value.code == "context_length_exceeded"


def test_parts_developers_and_calls_render_as_their_plain_forms(tokenizer: Any) -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    assert parse(tokenizer, messages=[{"role": "user", "content": parts}]).prompt == parse(tokenizer).prompt
    system, developer = (
        parse(tokenizer, messages=[{"role": role, "content": "be brief"}, *MESSAGES]).prompt
        for role in ("system", "developer")
    )
    assert system == developer


def test_a_call_in_the_history_gives_the_very_tokens_that_were_sampled(tokenizer: Any) -> None:
    first = parse(tokenizer, tools=[TOOL])
    arguments = '{"a":  1, "b": 2}'
    text = f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'
    sampled = [*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    history = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "3"},
    ]
    second = parse(tokenizer, messages=history, tools=[TOOL])
    assert second.prompt[: len(first.prompt) + len(sampled)] == first.prompt + sampled
