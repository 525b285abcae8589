"""A calculator agent in AutoGen, written as AutoGen's documentation would write it.

Nothing here knows of agentlightning: the model's address and key come from the usual `OPENAI_BASE_URL` and
`OPENAI_API_KEY` (the `openai` client reads them), the model's name from `OPENAI_MODEL`.

    OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=none \
        python -m agentlightning.examples.calculator.agent "A box holds 6 pens. How many pens are in 7 boxes?"
"""

import ast
import asyncio
import operator
import os
import sys
from collections.abc import Callable

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.messages import BaseChatMessage
from autogen_core import FunctionCall
from autogen_core.model_context import UnboundedChatCompletionContext
from autogen_core.models import (
    AssistantMessage,
    FunctionExecutionResult,
    FunctionExecutionResultMessage,
    LLMMessage,
    ModelFamily,
    UserMessage,
)
from autogen_ext.models.openai import OpenAIChatCompletionClient

SYSTEM_MESSAGE = "Answer with a tool call."


def worked(question: str, expression: str, result: str) -> list[LLMMessage]:
    """A solved problem, as the messages that such a conversation leaves behind."""
    call = FunctionCall(id="example", name="calculator", arguments=f'{{"expression": "{expression}"}}')
    outcome = FunctionExecutionResult(content=result, name="calculator", call_id="example", is_error=False)
    return [
        UserMessage(content=ask(question), source="user"),
        AssistantMessage(content=[call], source="solver"),
        FunctionExecutionResultMessage(content=[outcome]),
        AssistantMessage(content=result, source="solver"),
    ]


def ask(question: str) -> str:
    """What the agent is told to do."""
    return f"Use the calculator: {question}"


EXAMPLES = [
    *worked("A box holds 6 pens. How many pens are in 7 boxes?", "7 * 6", "42"),
    *worked("Tom has 12 apples and buys 31 more. How many apples does Tom have now?", "12 + 31", "43"),
]

OPERATORS: dict[type[ast.AST], Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression."""
    if len(expression) > 100:
        raise ValueError("the expression is longer than 100 characters")

    def value(node: ast.AST) -> float:
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, int | float)
            and not isinstance(node.value, bool)
        ):
            return float(node.value)
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](value(node.operand))
        raise ValueError("only numbers, + - * / and parentheses are allowed")

    return f"{value(ast.parse(expression, mode='eval').body):.10g}"


async def solve(question: str) -> str:
    """The agent's answer to one question."""
    client = OpenAIChatCompletionClient(
        model=os.environ.get("OPENAI_MODEL", "gpt-4o-mini"),
        # AutoGen asks for this wherever it does not know the model's name.
        model_info={
            "vision": False,
            "function_calling": True,
            "json_output": False,
            "structured_output": False,
            "family": ModelFamily.UNKNOWN,
        },
        temperature=0.7,
        max_tokens=48,
    )
    agent = AssistantAgent(
        "solver",
        model_client=client,
        tools=[calculator],
        system_message=SYSTEM_MESSAGE,
        model_context=UnboundedChatCompletionContext(initial_messages=EXAMPLES),
        max_tool_iterations=2,  # one call of the tool, then the answer
    )
    result = await agent.run(task=ask(question))
    await client.close()
    answer = result.messages[-1]
    return answer.to_text() if isinstance(answer, BaseChatMessage) else ""


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: python -m {__spec__.name if __spec__ else __file__} QUESTION")
    print(asyncio.run(solve(sys.argv[1])))
