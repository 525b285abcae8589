"""Names of LangGraph's nodes, which have no spans: from the run configuration that LangChain keeps per context.

The namespace of the checkpoint names all nodes from the outermost graph down, `outer:id|inner:id`. Inside an
agent of `create_agent` the nodes are its plumbing (`model`, `tools`, middleware), and the agent's name counts.
"""

import sys

__all__ = ["nodes"]

_PLUMBING = frozenset({"model", "tools"})
_HOOKS = (".before_agent", ".before_model", ".after_model", ".after_agent")


def nodes() -> tuple[str, ...]:
    """The nodes that are running in this context, outermost first."""
    module = sys.modules.get("langchain_core.runnables.config")
    variable = getattr(module, "var_child_runnable_config", None)
    config = variable.get() if variable is not None else None
    if not config:
        return ()
    metadata = config.get("metadata") or {}
    namespace = metadata.get("langgraph_checkpoint_ns")
    if not namespace:
        return ()
    names = [part.partition(":")[0] for part in namespace.split("|")]
    if metadata.get("ls_integration") == "langchain_create_agent":
        agent = metadata.get("lc_agent_name")
        innermost_is_plumbing = _is_plumbing(names[-1])
        names = [name for name in names if not _is_plumbing(name)]
        if innermost_is_plumbing and isinstance(agent, str) and agent:
            names.append(agent)
    return tuple(name for name in names if name and not name.isdecimal())  # numbers count repetitions


def _is_plumbing(node: str) -> bool:
    return node in _PLUMBING or node.endswith(_HOOKS)
