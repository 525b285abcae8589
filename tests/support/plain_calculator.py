"""The quickstart's agent once more, with the openai package alone: no framework, no tracing."""

import json
import os
from typing import Any

from openai import OpenAI

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
                "additionalProperties": False,
            },
            "strict": False,
        },
    }
]


def worked(question: str, expression: str, result: str) -> list[dict[str, Any]]:
    call = {"name": "calculator", "arguments": f'{{"expression": "{expression}"}}'}
    return [
        {"role": "user", "content": f"Use the calculator: {question}"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "e", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "e", "content": result},
        {"role": "assistant", "content": result},
    ]


def solve(question: str) -> str:
    client = OpenAI()
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Answer with a tool call."},
        *worked("A box holds 6 pens. How many pens are in 7 boxes?", "7 * 6", "42"),
        *worked("Tom has 12 apples and buys 31 more. How many apples does Tom have now?", "12 + 31", "43"),
        {"role": "user", "content": f"Use the calculator: {question}"},
    ]
    for _ in range(2):
        answer = client.chat.completions.create(
            model=os.environ["OPENAI_MODEL"],
            messages=messages,  # type: ignore[arg-type]
            tools=TOOLS,  # type: ignore[arg-type]
            max_tokens=48,
            temperature=0.7,
        )
        message = answer.choices[0].message
        if not message.tool_calls:
            return message.content or ""
        calls = [call.model_dump() for call in message.tool_calls]
        messages.append({"role": "assistant", "content": message.content, "tool_calls": calls})
        for call in calls:
            result = compute(json.loads(call["function"]["arguments"]))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    return str(messages[-1]["content"])


def compute(arguments: dict[str, Any]) -> str:
    from agentlightning.examples.calculator.agent import calculator

    return calculator(arguments["expression"])
