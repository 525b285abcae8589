"""Our parts as OpenTelemetry instrumentors, one each, for programs that are launched under another distro.

There the launcher starts the official ones by their own entry points; these add what those lack and start none of
them, so nothing is doubled.
"""

from collections.abc import Collection
from typing import Any

from opentelemetry.instrumentation.instrumentor import BaseInstrumentor

import agentlightning.sdk
from agentlightning.instrumentations import _activate

__all__ = [
    "AutoGenInstrumentor",
    "LangGraphInstrumentor",
    "OpenAIAgentsInstrumentor",
    "ThreadsInstrumentor",
    "TransportInstrumentor",
]


class TransportInstrumentor(BaseInstrumentor):
    """The hook that records every model call with its exact tokens, and the exporter."""

    def instrumentation_dependencies(self) -> Collection[str]:
        return ()

    def _instrument(self, **kwargs: Any) -> None:
        agentlightning.sdk.instrument(frameworks=(), openai="none")

    def _uninstrument(self, **kwargs: Any) -> None:
        agentlightning.sdk.uninstrument()


class _Part(BaseInstrumentor):
    part = ""

    def instrumentation_dependencies(self) -> Collection[str]:
        return ()

    def _instrument(self, **kwargs: Any) -> None:
        _activate.start_part(self.part)

    def _uninstrument(self, **kwargs: Any) -> None:
        _activate.stop_part(self.part)


class LangGraphInstrumentor(_Part):
    """Names of LangGraph's nodes on model calls."""

    part = "langchain"


class AutoGenInstrumentor(_Part):
    """AutoGen's runtime without its messaging spans."""

    part = "autogen"


class OpenAIAgentsInstrumentor(_Part):
    """The Agents SDK without its upload to the vendor."""

    part = "openai-agents"


class ThreadsInstrumentor(_Part):
    """Context and graph nodes in threads and executors."""

    part = "threads"
