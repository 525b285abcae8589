"""LangGraph: an agent with a tool, a writer that streams and a checker, as nodes of one graph; tasks as a batch.

agl run -- python -m agentlightning.examples.frameworks.langgraph_team "6 times 7?" "3 times 5?"
"""

import os
import sys
from typing import Any

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph

from agentlightning.examples.frameworks.arithmetic import multiply


def build() -> Any:
    """The graph: solver → writer → checker."""
    model = ChatOpenAI(model=os.environ["OPENAI_MODEL"], temperature=0.7)
    solver = create_agent(
        model, [multiply], system_prompt="You are a solver. Use the tool.", name="calculator"
    )

    def writer(state: MessagesState) -> dict[str, Any]:
        prompt = [("system", "You are a writer."), ("user", str(state["messages"][-1].content))]
        text = "".join(str(chunk.content) for chunk in model.stream(prompt))
        return {"messages": [("assistant", text)]}

    async def achecker(state: MessagesState) -> dict[str, Any]:
        prompt = [("system", "You are a checker."), ("user", str(state["messages"][-1].content))]
        return {"messages": [await model.ainvoke(prompt)]}

    def checker(state: MessagesState) -> dict[str, Any]:
        prompt = [("system", "You are a checker."), ("user", str(state["messages"][-1].content))]
        return {"messages": [model.invoke(prompt)]}

    from langchain_core.runnables import RunnableLambda

    graph = StateGraph(MessagesState)
    graph.add_node("solver", solver)
    graph.add_node("writer", writer)
    graph.add_node("checker", RunnableLambda(checker, afunc=achecker))
    graph.add_edge(START, "solver")
    graph.add_edge("solver", "writer")
    graph.add_edge("writer", "checker")
    graph.add_edge("checker", END)
    return graph.compile(name="team")


def main(questions: list[str]) -> list[str]:
    """All questions as one batch, which LangChain runs in threads."""
    results = build().batch([{"messages": [("user", question)]} for question in questions])
    return [str(result["messages"][-1].content) for result in results]


if __name__ == "__main__":
    print("\n".join(main(sys.argv[1:])))
