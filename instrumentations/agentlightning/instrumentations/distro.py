"""`opentelemetry-instrument python agent.py` does what `agl.instrument()` does, by environment variables alone.

OpenTelemetry's launcher would start every instrumentation that is installed; several of them call themselves
`openai`, and each would add a set of spans. So this distro starts by entry point only those of other libraries,
and leaves the GenAI ones to the configurator, which chooses one for each library.
"""

import logging
import os
from typing import Any

from opentelemetry.instrumentation.distro import BaseDistro

import agentlightning.sdk

__all__ = ["Configurator", "Distro"]

NAME = "agentlightning"
_GENAI_MODULES = (
    "agentlightning.",
    "openinference.instrumentation.",
    "opentelemetry.instrumentation.genai.",
    *(
        f"opentelemetry.instrumentation.{library}"
        for library in ("openai", "openai_v2", "openai_agents", "langchain", "threading")
    ),
)


class Distro(BaseDistro):
    """Chosen by OpenTelemetry's launcher if it is the only one, else by `OTEL_PYTHON_DISTRO=agentlightning`."""

    def _configure(self, **kwargs: Any) -> None:
        os.environ.setdefault("OTEL_PYTHON_CONFIGURATOR", NAME)
        if os.environ["OTEL_PYTHON_CONFIGURATOR"] == NAME:
            # That the SDK's own configurator is there too, and was not asked for, is no news to the user.
            logging.getLogger("opentelemetry.instrumentation.auto_instrumentation._load").addFilter(
                _not_chosen
            )

    def load_instrumentor(self, entry_point: Any, **kwargs: Any) -> None:
        """Start an instrumentation that is not ours to choose."""
        module = entry_point.value.partition(":")[0]
        if not any(
            module == known or module.startswith(known + ("" if known[-1] == "." else "."))
            for known in _GENAI_MODULES
        ):
            super().load_instrumentor(entry_point, **kwargs)


class Configurator:
    """Sets up the provider and the exporter, and starts what `agl.instrument()` starts."""

    def configure(self, **kwargs: Any) -> None:
        """Called once by OpenTelemetry's launcher."""
        agentlightning.sdk.instrument()


def _not_chosen(record: logging.LogRecord) -> bool:
    return not (isinstance(record.args, tuple) and NAME in record.args and "not loaded" in str(record.msg))
