"""The dialects that instrumentations speak, one module each.

A dialect is one function that says what a span is, or None if another may know. `DIALECTS`
lists them in the order in which they are asked: those that mark their spans first, the plain GenAI
conventions last, because others write those attributes too. What our own transport hook and gateway
add (`ours.complete`) is laid over whatever a dialect has read.
"""

from collections.abc import Callable
from typing import Final

from agentlightning.collector.dialects import autogen, genai, langsmith, openinference, openllmetry
from agentlightning.collector.roles import Other, Role
from agentlightning.collector.span import Span

__all__ = ["DIALECTS", "Dialect"]

Dialect = Callable[[Span], Role | Other | None]

DIALECTS: Final[tuple[tuple[str, Dialect], ...]] = (
    ("langsmith", langsmith.read),
    ("openinference", openinference.read),
    ("openllmetry", openllmetry.read),
    ("autogen", autogen.read),
    ("genai", genai.read),
)
