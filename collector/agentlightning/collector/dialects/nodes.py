"""LangGraph's nodes as agents: what the metadata that every LangChain span carries say.

A graph is an agent, and so is each of its nodes. The nodes of a prebuilt agent (`create_agent`) are
not: the model's node is the agent itself, its tools' node holds tools.
"""

from collections.abc import Mapping
from typing import Any, Final

from agentlightning.collector.roles import Agent, string

__all__ = ["chain_role", "node_of"]

_INNER_NODES: Final = {"model", "tools", "agent", "call_model", "model_request"}
_GRAPH: Final = "LangGraph"  # a graph's name, if nobody gave it one


def node_of(metadata: Mapping[str, Any]) -> str | None:
    """The agent in which a call was made."""
    node, agent = string(metadata.get("langgraph_node")), string(metadata.get("lc_agent_name"))
    if agent is not None and (node is None or node in _INNER_NODES or "." in node):  # a dot: a middleware's
        return agent
    return node


def chain_role(name: str, metadata: Mapping[str, Any]) -> Agent | None:
    """Whether a chain's span is a graph or a node; the many runnables inside are nobody's work."""
    node = string(metadata.get("langgraph_node"))
    integration = metadata.get("ls_integration")
    if node is not None and name == node:
        agent = node_of(metadata)
        return Agent(agent) if agent is not None else None
    if name == _GRAPH:
        return Agent(name)
    if node is None and integration == "langchain_create_agent":
        return Agent(string(metadata.get("lc_agent_name")) or name)
    if node is None and integration == "langgraph":
        return Agent(name)
    return None
