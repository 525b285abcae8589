"""A program that runs another hand's instrumentation: `agl.instrument()` builds on it, and one real call is one transition."""

from collections import Counter

import pytest
from scripted import Reply, answered, last, system

QUESTIONS = ["6 times 7?", "3 times 5?"]
PROGRAM = """
{foreign}
import agentlightning.sdk as agl
agl.instrument()
import asyncio, inspect
from agentlightning.examples.frameworks import {example}
done = {example}.main({questions})
print("\\n".join(asyncio.run(done) if inspect.iscoroutine(done) else done))
"""
LANGCHAIN_OI = (
    "from openinference.instrumentation.langchain import LangChainInstrumentor as A; A().instrument()"
)
LANGCHAIN_TL = (
    "from opentelemetry.instrumentation.langchain import LangchainInstrumentor as A; A().instrument()"
)
AGENTS_OI = (
    "from openinference.instrumentation.openai_agents import OpenAIAgentsInstrumentor as A; A().instrument()"
)
AGENTS_TL = (
    "from opentelemetry.instrumentation.openai_agents import OpenAIAgentsInstrumentor as A; A().instrument()"
)
AUTOGEN_OI = "from openinference.instrumentation.autogen_agentchat import AutogenAgentChatInstrumentor as A; A().instrument()"
OPENAI_OI = "from openinference.instrumentation.openai import OpenAIInstrumentor as B; B().instrument()"
OPENAI_TL = "from opentelemetry.instrumentation.openai import OpenAIInstrumentor as B; B().instrument()"


def script(body):
    who = system(body)
    if "writer" in who or "checker" in who:
        return f"{who[10:-1]} saw {last(body)}"
    if "triage" in who:
        return Reply(tools=[("transfer_to_solver", {})])
    if not answered(body) or "Transferred" in last(body) or "assistant" in last(body):
        question = next(str(m["content"]) for m in body["messages"] if m["role"] == "user")
        a, _, b = question.removesuffix("?").split()
        return Reply(tools=[("multiply", {"a": int(a), "b": int(b)})])
    return f"It is {last(body)}. DONE"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "foreign", "agents"),
    [
        ("langgraph_team", f"{LANGCHAIN_OI}\n{OPENAI_OI}", {"calculator": 4, "writer": 2, "checker": 2}),
        ("langgraph_team", f"{LANGCHAIN_TL}\n{OPENAI_TL}", {"calculator": 4, "writer": 2, "checker": 2}),
        ("agents_handoff", AGENTS_OI, {"triage": 2, "solver": 4}),
        ("agents_handoff", AGENTS_TL, {"triage": 2, "solver": 4}),
        ("autogen_swarm", f"{AUTOGEN_OI}\n{OPENAI_TL}", {"triage": 2, "solver": 4}),
    ],
)
def test_foreign_spans_are_built_on(stack, example, foreign, agents):
    ran = stack.program(script, PROGRAM.format(foreign=foreign, example=example, questions=QUESTIONS))
    assert len(ran.output.splitlines()) == 2, ran.errors
    ran.check()
    assert Counter(call["agent"] for call in ran.calls) == agents
