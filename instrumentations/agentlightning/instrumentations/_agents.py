"""The OpenAI Agents SDK: its spans go to OpenTelemetry instead of to the vendor.

Only the SDK's own exporter is taken out; processors that the program has set stay.
"""

import importlib
import os
from collections.abc import Callable
from typing import Any

from agentlightning.sdk._losses import warn_once

__all__ = ["is_agents_sdk", "replace_upload"]


def is_agents_sdk(module: Any) -> bool:
    """Whether this is the SDK; programs have packages named `agents` of their own."""
    return hasattr(module, "set_trace_processors") and hasattr(module, "Runner")


def replace_upload(agents: Any) -> Callable[[], None]:
    """Take the vendor's exporter out; returns what puts it back."""
    vendor = importlib.import_module("agents.tracing.processors").default_processor()
    provider = importlib.import_module("agents.tracing").get_trace_provider()
    present = _processors(provider)
    had_it = vendor in present
    if had_it:
        agents.set_trace_processors([processor for processor in present if processor is not vendor])
    if getattr(provider, "_manual_disabled", None) or _disabled_by_environment():
        warn_once(
            "agents.disabled",
            "Tracing of the OpenAI Agents SDK is switched off (OPENAI_AGENTS_DISABLE_TRACING or set_tracing_disabled), "
            "so its model calls carry no agent names. Nothing is uploaded to the vendor while agentlightning traces: "
            "it can be left on.",
        )

    def restore() -> None:
        if had_it and vendor not in _processors(provider):
            agents.set_trace_processors([vendor, *_processors(provider)])

    return restore


def _processors(provider: Any) -> list[Any]:
    return list(getattr(getattr(provider, "_multi_processor", None), "_processors", ()))


def _disabled_by_environment() -> bool:
    return os.environ.get("OPENAI_AGENTS_DISABLE_TRACING", "").lower() in ("1", "true")
