"""The openai client alone: a loop around a tool, a streamed summary, two questions at once.

agl run -- python -m agentlightning.examples.frameworks.openai_tools "6 times 7?" "3 times 5?"
"""

import asyncio
import json
import os
import sys
from typing import Any

from openai import AsyncOpenAI

from agentlightning.examples.frameworks.arithmetic import multiply

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "multiply",
            "description": "Multiply two whole numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        },
    }
]


async def solve(client: AsyncOpenAI, question: str) -> str:
    """Ask, run the tools that the model calls, and ask again until it answers."""
    model = os.environ["OPENAI_MODEL"]
    messages: list[Any] = [
        {"role": "system", "content": "You are a solver. Use the tool."},
        {"role": "user", "content": question},
    ]
    for _ in range(5):
        answer = await client.chat.completions.create(model=model, messages=messages, tools=TOOLS)
        message = answer.choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            if call.type == "function":
                result = multiply(**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
    return ""


async def summarise(client: AsyncOpenAI, answers: list[str]) -> str:
    """One sentence about all answers, as it comes."""
    stream = await client.chat.completions.create(
        model=os.environ["OPENAI_MODEL"],
        messages=[
            {"role": "system", "content": "You are an editor. Write one sentence."},
            {"role": "user", "content": "\n".join(answers)},
        ],
        stream=True,
    )
    parts = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
    return "".join(parts)


async def main(questions: list[str]) -> str:
    """All questions at once, then the summary."""
    async with AsyncOpenAI() as client:
        answers = await asyncio.gather(*(solve(client, question) for question in questions))
        return await summarise(client, list(answers))


if __name__ == "__main__":
    print(asyncio.run(main(sys.argv[1:])))
