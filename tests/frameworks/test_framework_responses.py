"""The Responses API through the SDK and the gateway: streamed and not, with tools, the record is the gateway's, token by token."""

from collections import Counter

from scripted import Reply, answered, last, system

RAW = """
import asyncio, json, os
import agentlightning.sdk as agl
agl.instrument()
from openai import AsyncOpenAI
TOOL = {"type": "function", "name": "multiply", "strict": True, "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"], "additionalProperties": False}}

async def solve(client, question, stream):
    items = [{"role": "user", "content": question}]
    for _ in range(4):
        ask = dict(model="default", input=items, instructions="You are a solver.", tools=[TOOL], store=False)
        if stream:
            async for event in await client.responses.create(**ask, stream=True):
                if event.type == "response.completed":
                    answer = event.response
        else:
            answer = await client.responses.create(**ask)
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            return answer.output_text
        items += [item.model_dump(exclude_none=True) for item in answer.output]
        for call in calls:
            numbers = json.loads(call.arguments)
            result = str(numbers["a"] * numbers["b"])
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})

async def main():
    async with AsyncOpenAI() as client:
        with agl.agent("plain"):
            print(await solve(client, "6 times 7?", False))
        with agl.agent("streamed"):
            print(await solve(client, "3 times 5?", True))

asyncio.run(main())
"""

AGENTS = """
import asyncio
import agentlightning.sdk as agl
agl.instrument()
from agents import Agent, Runner, function_tool

@function_tool
def multiply(a: int, b: int) -> int:
    return a * b

solver = Agent("solver", instructions="You are a solver.", model="default", tools=[multiply])
triage = Agent("triage", instructions="You are triage.", model="default", handoffs=[solver])

async def streamed(question):
    result = Runner.run_streamed(triage, question)
    async for _ in result.stream_events():
        pass
    return result.final_output

async def main():
    print((await Runner.run(triage, "6 times 7?")).final_output)
    print(await streamed("3 times 5?"))

asyncio.run(main())
"""


def solver(body):
    if "triage" in system(body):
        return Reply(tools=[("transfer_to_solver", {})])
    if answered(body) and last(body).isdecimal():
        return f"The answer is {last(body)}."
    question = next(str(m["content"]) for m in body["messages"] if m["role"] == "user")
    a, b = (6, 7) if "6" in question else (3, 5)
    return Reply(tools=[("multiply", {"a": a, "b": b})])


def test_responses_of_the_openai_client_plain_and_streamed(stack):
    ran = stack.program(solver, RAW)
    assert ran.output.splitlines() == ["The answer is 42.", "The answer is 15."]
    ran.check()
    assert Counter(call["agent"] for call in ran.calls) == {"plain": 2, "streamed": 2}
    for call in ran.calls:
        assert call["response_token_ids"]
        assert len(call["response_token_ids"]) == len(call["response_logprobs"])
    # One row for each call although two tell of it, and the agent's own span holds nothing a second time.
    mine = [span for span in ran.spans if span["name"] == "chat default" and "gateway" not in span["scope"]]
    assert len(mine) == 4
    assert all("agentlightning.call.id" in span["attributes"] for span in mine)
    assert not any("agentlightning.request" in span["attributes"] for span in mine)


def test_the_agents_sdk_with_its_own_model_class(stack):
    ran = stack.program(solver, AGENTS)
    assert ran.output.splitlines() == ["The answer is 42.", "The answer is 15."], ran.errors
    ran.check()
    assert Counter(call["agent"] for call in ran.calls) == {"triage": 2, "solver": 4}
    assert Counter(call["finish_reason"] for call in ran.calls) == {"tool_calls": 4, "stop": 2}
