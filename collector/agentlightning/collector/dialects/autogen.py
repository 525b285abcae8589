"""AutoGen's built-in spans: agents and tools.

It writes no span of a model call, no messages and no results: those come from an instrumentation of
the client underneath. The runtime's spans of messages being sent and processed are nobody's work.
"""

from agentlightning.collector.roles import Agent, Role, Tool, operation, string
from agentlightning.collector.span import Span
from agentlightning.proto.attributes import AGENT_NAME

__all__ = ["read"]


def read(span: Span) -> Role | None:
    """What a span of AutoGen is."""
    if not span.scope.startswith("autogen") and span.attributes.get("gen_ai.system") != "autogen":
        return None
    match operation(span):
        case "invoke_agent":
            name = string(span.attributes.get(AGENT_NAME))
            return Agent(name or span.name.removeprefix("invoke_agent").strip() or "agent")
        case "execute_tool":
            return Tool(string(span.attributes.get("gen_ai.tool.name")) or span.name)
    return None
