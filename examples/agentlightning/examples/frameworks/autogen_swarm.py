"""AutoGen: a swarm in which triage hands over to a solver with a tool; the answers are streamed; two teams at once.

agl run -- python -m agentlightning.examples.frameworks.autogen_swarm "6 times 7?" "3 times 5?"
"""

import asyncio
import os
import sys

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import MaxMessageTermination, TextMentionTermination
from autogen_agentchat.teams import Swarm
from autogen_core.models import ModelFamily
from autogen_ext.models.openai import OpenAIChatCompletionClient

from agentlightning.examples.frameworks.arithmetic import multiply


def client() -> OpenAIChatCompletionClient:
    """The model, of whose abilities AutoGen must be told."""
    return OpenAIChatCompletionClient(
        model=os.environ["OPENAI_MODEL"],
        model_info={
            "vision": False,
            "function_calling": True,
            "json_output": False,
            "structured_output": False,
            "family": ModelFamily.UNKNOWN,
        },
    )


async def solve(question: str) -> str:
    """One team for one question."""
    model = client()
    triage = AssistantAgent(
        "triage", model, handoffs=["solver"], system_message="You are triage. Hand over to the solver."
    )
    solver = AssistantAgent(
        "solver",
        model,
        tools=[multiply],
        system_message="You are a solver. Use the tool, then say DONE.",
        reflect_on_tool_use=True,
        model_client_stream=True,
    )
    ending = TextMentionTermination("DONE") | MaxMessageTermination(12)
    result = await Swarm([triage, solver], termination_condition=ending).run(task=question)
    await model.close()
    return str(getattr(result.messages[-1], "content", ""))


async def main(questions: list[str]) -> list[str]:
    """All teams at once."""
    return list(await asyncio.gather(*(solve(question) for question in questions)))


if __name__ == "__main__":
    print("\n".join(asyncio.run(main(sys.argv[1:]))))
