"""The agents around a model call, as this process knows them: spans, and the nodes of graphs that have no span.

Every span remembers the span that it was started under and the graph nodes that were running then. The path
is read by walking from the outermost to the call: agents by their spans' names, nodes where they appear.
Who knows of nodes (LangGraph's run configuration) registers a reader; a thread's start carries them over.
"""

from collections.abc import Callable, Iterator
from difflib import SequenceMatcher
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context, create_key, get_current, get_value, set_value

from agentlightning.proto import attributes as names

__all__ = ["agent_path", "carried", "note", "readers", "stamp"]

Nodes = tuple[str, ...]
readers: dict[str, Callable[[], Nodes]] = {}
"""By framework: names of the nodes that are running in the current context, outermost first."""

_CARRIED = create_key("agentlightning-nodes")
_MEMORY = "_agentlightning_lineage"
_NAME_BY_OPERATION = {"invoke_agent": names.AGENT_NAME, "invoke_workflow": "gen_ai.workflow.name"}
_DEEPEST = 256
"""Spans that a path looks back at. A recursion deeper than this is no organisation chart."""


def note(span: Any, parent_context: Context | None) -> None:
    """Remember, at a span's start, where it is."""
    parent = trace.get_current_span(parent_context)
    setattr(span, _MEMORY, (parent if hasattr(parent, _MEMORY) else None, nodes_now(parent_context)))


def nodes_now(context: Context | None = None) -> Nodes:
    """The graph nodes that are running here."""
    for read in readers.values():
        found = read()
        if found:
            return found
    kept = get_value(_CARRIED, context)
    return kept if isinstance(kept, tuple) else ()


def carried(context: Context | None = None) -> Context:
    """A context for another thread: this one, and the nodes that only this thread can see."""
    context = get_current() if context is None else context
    found = nodes_now(context)
    return set_value(_CARRIED, found, context) if found else context


def stamp(span: Any) -> None:
    """Write the path on a model call's span where nodes are part of it; without them nesting tells it all."""
    if not readers or names.AGENT_PATH in (getattr(span, "attributes", None) or ()):
        return
    here = nodes_now()
    if here or any(nodes for _, nodes in _chain(span)):
        path = agent_path(span, here)
        around = trace.get_current_span()
        if around is not span:
            # LangChain's callbacks hang a call under its run, not under a span that the program opened within.
            path = _merged(path, agent_path(around, here, itself=True))
        if path:
            span.set_attribute(names.AGENT_PATH, path)


def agent_path(span: Any, nodes: Nodes = (), *, itself: bool = False) -> list[str]:
    """Names of the agents and nodes around a span, outermost first, no name twice in a row."""
    path: list[str] = []
    seen: Nodes = ()

    def add(name: str) -> None:
        if not path or path[-1] != name:
            path.append(name)

    def enter(now: Nodes) -> None:
        nonlocal seen
        if not now:
            return
        common = next((i for i, pair in enumerate(zip(now, seen, strict=False)) if pair[0] != pair[1]), None)
        for name in now[min(len(now), len(seen)) if common is None else common :]:
            add(name)
        seen = now

    for around, then in reversed(list(_chain(span))):
        enter(then)
        attributes = getattr(around, "attributes", None) or {}
        operation = str(attributes.get(names.OPERATION_NAME))
        name = attributes.get(_NAME_BY_OPERATION.get(operation, ""))
        if isinstance(name, str) and name and (itself or around is not span):
            add(name)
    enter(nodes)
    return path


def _merged(one: list[str], other: list[str]) -> list[str]:
    """Two views of one path: what both have once, in order, and what only one has where it has it."""
    made: list[str] = []
    for kind, i, j, k, m in SequenceMatcher(None, one, other, autojunk=False).get_opcodes():
        made += one[i:j] if kind == "equal" else one[i:j] + other[k:m]
    return made


def _chain(span: Any) -> Iterator[tuple[Any, Nodes]]:
    """The span and those around it, innermost first, with the nodes at the start of each."""
    for _ in range(_DEEPEST):
        memory = getattr(span, _MEMORY, None)
        if memory is None:
            return
        yield span, memory[1]
        span = memory[0]
