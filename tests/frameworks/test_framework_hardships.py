"""Threads, sub-graphs, exceptions, cancelled tasks, late and repeated set-up: the record stays exact and the names right."""

import sys
import threading
from collections import Counter

from scripted import Reply, last, system

HEAD = """
import asyncio, os, threading
from concurrent.futures import ThreadPoolExecutor
import agentlightning.sdk as agl
"""

GRAPH = (
    HEAD
    + """
agl.instrument()
from langchain_core.runnables import RunnableLambda
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
model = ChatOpenAI(model="default", max_retries=0)

def graph(name, **nodes):
    made = StateGraph(MessagesState)
    for node, function in nodes.items():
        made.add_node(node, function)
        made.add_edge(START, node)
    return made.compile(name=name)

def ask(text):
    return model.invoke([("system", "-"), ("user", text)])

def threads(state):
    with ThreadPoolExecutor() as pool:
        list(pool.map(ask, ["pool 1", "pool 2"]))
    thread = threading.Thread(target=ask, args=["thread"])
    thread.start(); thread.join()
    return {}

async def executor(state):
    await asyncio.get_running_loop().run_in_executor(None, ask, "executor")
    async for _ in model.astream([("system", "-"), ("user", "astream")]):
        pass
    with agl.agent("helper"):
        await model.ainvoke([("system", "-"), ("user", "helper")])
    return {}

def fails(state):
    try:
        ask("fail")
    except Exception:
        pass
    return {}

def leaf(state):
    ask("leaf")
    return {}

inner = graph("inner", leaf=leaf)

async def main():
    team = graph("team", threads=threads, executor=executor, fails=fails, sub=inner)
    with agl.agent("boss"):
        await asyncio.gather(*(team.ainvoke({"messages": []}) for _ in range(2)))
    ask("outside")

asyncio.run(main())
"""
)


def fail_or_answer(body):
    return Reply(status=400) if last(body) == "fail" else f"about {last(body)}"


def test_nodes_are_known_in_threads_executors_streams_subgraphs_and_failed_calls(stack):
    ran = stack.program(fail_or_answer, GRAPH)
    ran.check()
    paths = Counter(ran.agents())
    assert paths == {
        ("boss", "team", "threads"): 6,
        ("boss", "team", "executor"): 4,
        ("boss", "team", "executor", "helper"): 2,
        ("boss", "team", "fails"): 2,
        ("boss", "team", "sub", "leaf"): 2,
        (): 1,
    }
    assert {call["agent_path"][-1] for call in ran.calls if call["error"]} == {"fails"}


TEAM = (
    HEAD
    + """
from autogen_agentchat.agents import AssistantAgent
from agentlightning.examples.frameworks.autogen_swarm import client
models = [client(), client(), client()]           # made before
agl.instrument()
agl.instrument()                                  # and twice

async def main():
    first, second, third = (
        AssistantAgent(name, model, system_message=name)
        for name, model in zip(["calm", "broken", "slow"], models)
    )
    slow = asyncio.create_task(third.run(task="wait"))
    results = await asyncio.gather(first.run(task="hello"), second.run(task="fail"), return_exceptions=True)
    print(type(results[1]).__name__)
    await asyncio.sleep(0.5)
    slow.cancel()
    print(type((await asyncio.gather(slow, return_exceptions=True))[0]).__name__)
    await first.run(task="again")

asyncio.run(main())
"""
)


def test_an_exception_and_a_cancelled_task_harm_no_neighbour(stack):
    hold = threading.Event()

    def script(body):
        return Reply("too late", hold=hold) if system(body) == "slow" else fail_or_answer(body)

    try:
        ran = stack.program(script, TEAM)
    finally:
        hold.set()
    assert ran.output.split() == ["BadRequestError", "CancelledError"]
    ran.check()
    good = [call for call in ran.calls if call["error"] is None]
    assert Counter(call["agent"] for call in good) == {"calm": 2}
    assert Counter(call["agent"] for call in ran.calls) == {"calm": 2, "broken": 1, "slow": 1}


ZERO = """
import asyncio, sys
from agentlightning.examples.frameworks import langgraph_team
print(langgraph_team.main(["6 times 7?"])[0])
from opentelemetry import trace
provider = trace.get_tracer_provider()
print(hasattr(provider, "_agentlightning_processor"))
"""


def test_the_launcher_of_opentelemetry_does_the_same_from_the_environment_alone(stack, tmp_path):
    path = tmp_path / "agent.py"
    path.write_text(ZERO)
    launch = "from opentelemetry.instrumentation.auto_instrumentation import run; run()"
    ran = stack.run(
        lambda body: f"I am {system(body)}",
        *(sys.executable, "-c", launch, sys.executable, str(path)),
        OTEL_PYTHON_DISTRO="agentlightning",
    )
    assert ran.output.splitlines() == ["I am You are a checker.", "True"]
    assert ran.errors == ""
    ran.check()
    assert ran.agents() == [("team", "checker"), ("team", "solver", "calculator"), ("team", "writer")]
