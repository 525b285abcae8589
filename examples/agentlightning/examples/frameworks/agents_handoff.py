"""OpenAI Agents SDK: triage hands off to a solver with a tool, whose translator is an agent used as a tool.

agl run -- python -m agentlightning.examples.frameworks.agents_handoff "6 times 7?" "3 times 5?"
"""

import asyncio
import os
import sys

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool
from openai import AsyncOpenAI

from agentlightning.examples.frameworks import arithmetic


@function_tool
def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers."""
    return arithmetic.multiply(a, b)


def build(client: AsyncOpenAI) -> Agent[None]:
    """triage → solver, which may use its tool and the translator."""
    model = OpenAIChatCompletionsModel(os.environ["OPENAI_MODEL"], client)
    translator: Agent[None] = Agent("translator", instructions="You are a translator.", model=model)
    solver: Agent[None] = Agent(
        "solver",
        instructions="You are a solver. Use the tool.",
        model=model,
        tools=[multiply, translator.as_tool("translate", "Translate a sentence into French.")],
    )
    return Agent(
        "triage",
        instructions="You are triage. Hand off to the solver.",
        model=model,
        handoffs=[solver],
        model_settings=ModelSettings(tool_choice="required", parallel_tool_calls=False),
    )


async def main(questions: list[str]) -> list[str]:
    """The first question streamed, the others plain, all at once."""
    async with AsyncOpenAI() as client:
        triage = build(client)

        async def streamed(question: str) -> str:
            result = Runner.run_streamed(triage, question)
            async for _ in result.stream_events():
                pass
            return str(result.final_output)

        async def plain(question: str) -> str:
            return str((await Runner.run(triage, question)).final_output)

        return list(await asyncio.gather(streamed(questions[0]), *map(plain, questions[1:])))


if __name__ == "__main__":
    print("\n".join(asyncio.run(main(sys.argv[1:]))))
