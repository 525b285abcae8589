"""Instrumentations by other hands: how to find them, whether they run, how to start one.

All derive from OpenTelemetry's BaseInstrumentor, one object per class, which knows whether it runs. A module
that was not imported cannot be running, so looking is free.
"""

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

__all__ = [
    "GENAI",
    "LLM_SETS",
    "OPENAI_CLASSES",
    "Instrumentor",
    "content_captured",
    "running",
    "unwrap_left_over",
]

_CAPTURE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"


@dataclass(frozen=True)
class Instrumentor:
    """One instrumentation: where it is, and the package that brings it."""

    module: str
    name: str
    package: str

    def is_installed(self) -> bool:
        """Whether it could be imported."""
        if self.module in sys.modules:
            return True
        try:
            return importlib.util.find_spec(self.module) is not None
        except ModuleNotFoundError:  # not even its parent
            return False

    def is_running(self) -> bool:
        """Whether somebody has started it."""
        kind = getattr(sys.modules.get(self.module), self.name, None)
        return bool(kind is not None and kind().is_instrumented_by_opentelemetry)

    def start(self) -> Any:
        """Start it; returns the object that stops it."""
        instrumentor = getattr(importlib.import_module(self.module), self.name)()
        # Our own look at versions names what was tried; this one would refuse without a word to the program.
        instrumentor.instrument(skip_dep_check=True)
        return instrumentor


def _official(library: str, name: str) -> Instrumentor:
    package = f"opentelemetry-instrumentation-genai-{library.replace('_', '-')}"
    return Instrumentor(f"opentelemetry.instrumentation.genai.{library}", name, package)


GENAI = {
    "openai": _official("openai", "OpenAIInstrumentor"),
    "langchain": _official("langchain", "LangChainInstrumentor"),
    "openai-agents": _official("openai_agents", "OpenAIAgentsInstrumentor"),
}
"""OpenTelemetry's own."""

OPENAI_CLASSES = {
    "genai": GENAI["openai"],
    "openllmetry": Instrumentor(
        "opentelemetry.instrumentation.openai", "OpenAIInstrumentor", "opentelemetry-instrumentation-openai"
    ),
    "openinference": Instrumentor(
        "openinference.instrumentation.openai", "OpenAIInstrumentor", "openinference-instrumentation-openai"
    ),
}

LLM_SETS = {
    "openai": [
        OPENAI_CLASSES["openllmetry"],
        OPENAI_CLASSES["openinference"],
        Instrumentor("opentelemetry.instrumentation.openai_v2", "OpenAIInstrumentor", "…-openai-v2"),
    ],
    "langchain": [
        Instrumentor("opentelemetry.instrumentation.langchain", "LangchainInstrumentor", "…-langchain"),
        Instrumentor("openinference.instrumentation.langchain", "LangChainInstrumentor", "…-langchain"),
    ],
    "openai-agents": [
        Instrumentor("opentelemetry.instrumentation.openai_agents", "OpenAIAgentsInstrumentor", "…-agents"),
        Instrumentor("openinference.instrumentation.openai_agents", "OpenAIAgentsInstrumentor", "…-agents"),
    ],
    "autogen": [
        Instrumentor(
            "openinference.instrumentation.autogen_agentchat", "AutogenAgentChatInstrumentor", "…-autogen"
        ),
    ],
}
"""Other sets of spans that a program may have for a library. Where one runs, we build on it."""


def running(library: str) -> Instrumentor | None:
    """The foreign instrumentation that runs for a library."""
    return next((other for other in LLM_SETS.get(library, ()) if other.is_running()), None)


def unwrap_left_over(library: str, instrumentation: str) -> None:
    """Take off what an instrumentation left wrapped when it was stopped, as OpenLLMetry 0.62 does."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith(library)]
    classes = {kind for module in modules for kind in vars(module).values() if isinstance(kind, type)}
    for kind in classes:
        for name, method in list(vars(kind).items()):
            wrapper = getattr(method, "_self_wrapper", None)  # wrapt's
            if str(getattr(wrapper, "__module__", "")).startswith(instrumentation):
                setattr(kind, name, method.__wrapped__)


@contextmanager
def content_captured() -> Iterator[None]:
    """Official instrumentations read once, when they start, whether messages are wanted. They are."""
    before = os.environ.get(_CAPTURE)
    if (before or "").strip().upper() not in ("SPAN_ONLY", "SPAN_AND_EVENT"):
        os.environ[_CAPTURE] = "SPAN_ONLY"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_CAPTURE, None)
        else:
            os.environ[_CAPTURE] = before
