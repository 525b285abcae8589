"""Puts the parts together: what is asked for, what is there, what others run already.

Each part that is started leaves behind how to undo it; `deactivate` undoes them in reverse. Starting twice
changes nothing.
"""

import logging
import os
import threading
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType
from typing import Any

from agentlightning.instrumentations import _agents, _langgraph, _threads
from agentlightning.instrumentations._choice import Plan
from agentlightning.instrumentations._others import (
    GENAI,
    OPENAI_CLASSES,
    Instrumentor,
    content_captured,
    running,
    unwrap_left_over,
)
from agentlightning.sdk import lineage
from agentlightning.sdk._losses import count, warn_once
from agentlightning.sdk.imports import when_imported
from agentlightning.sdk.versions import TESTED, installed, is_tested, tested_range

__all__ = ["activate", "deactivate", "start_part", "stop_part"]

AUTOGEN_SWITCH = "AUTOGEN_DISABLE_RUNTIME_TRACING"

Undo = Callable[[], None]
_lock = threading.RLock()
_undo: dict[str, Undo] = {}
"""By part, in the order of starting. `langchain/spans` are the official spans beside our part `langchain`."""
_plan: Plan | None = None


def activate(plan: Plan) -> None:
    """Prepare for the frameworks of the plan; what an earlier plan had and this one has not is undone."""
    global _plan
    with _lock:
        if _plan is not None:
            for framework in set(_plan.frameworks) - set(plan.frameworks):
                stop_part(framework)
            if plan.openai != _plan.openai:
                stop_part("openai")
        _plan = plan
        for part in ("threads", *plan.frameworks):
            start_part(part)
        when_imported("openai", "spans", _openai_spans)
        when_imported("langchain_core", "spans", _langchain_spans)
        when_imported("agents", "spans", _agents_spans)


def deactivate() -> None:
    """Undo everything that was started."""
    global _plan
    with _lock:
        _plan = None
        for part in reversed(list(_undo)):
            stop_part(part)


def start_part(part: str) -> None:
    """Start what is our own for a framework, without the spans of others."""
    with _lock:
        if part not in _undo:
            _undo[part] = _PARTS[part]()


def stop_part(part: str) -> None:
    """Undo what was started for a framework."""
    with _lock:
        for name in [name for name in reversed(_undo) if name == part or name.startswith(part + "/")]:
            try:
                _undo.pop(name)()
            except Exception:  # noqa: BLE001 - one that cannot be undone must not keep the others
                count("internal_error")


# -- our own parts ----------------------------------------------------------------------------------


def _threads_part() -> Undo:
    _threads.follow()
    return _threads.unfollow


def _langgraph_part() -> Undo:
    lineage.readers["langgraph"] = _langgraph.nodes
    when_imported("langgraph", "version", lambda _: _check("langgraph"))

    def undo() -> None:
        lineage.readers.pop("langgraph", None)

    return undo


def _autogen_part() -> Undo:
    when_imported("autogen_agentchat", "version", lambda _: _check("autogen-agentchat"))
    if AUTOGEN_SWITCH in os.environ:
        return lambda: None
    # Read when a runtime is made: thirty spans of message passing per turn, that tell nothing here.
    os.environ[AUTOGEN_SWITCH] = "true"

    def undo() -> None:
        os.environ.pop(AUTOGEN_SWITCH, None)

    return undo


def _agents_part() -> Undo:
    restore: list[Undo] = []
    stopped = threading.Event()

    def replace(module: ModuleType) -> None:
        if not stopped.is_set() and _agents.is_agents_sdk(module):
            _check("openai-agents")
            restore.append(_agents.replace_upload(module))

    def undo() -> None:
        stopped.set()
        for put_back in restore:
            put_back()

    when_imported("agents", "upload", replace)
    return undo


_PARTS: dict[str, Callable[[], Undo]] = {
    "threads": _threads_part,
    "langchain": _langgraph_part,
    "autogen": _autogen_part,
    "openai-agents": _agents_part,
}

# -- spans that others make -------------------------------------------------------------------------


def _openai_spans(module: ModuleType) -> None:
    with _lock:
        if _plan is None or _plan.openai == "none" or "openai" in _undo:
            return
        _check("openai")
        chosen = _plan.openai
        if chosen is None:
            # With a foreign set for a framework above, another set for the client would double its spans.
            if any(running(library) for library in ("openai", "langchain", "openai-agents", "autogen")):
                return
            chosen = "genai"
        # The hook records this client's exact bodies on the same span; parsed messages beside them would say the same
        # again, at a tenth of the client's own CPU. Who wants them sets OpenTelemetry's variable.
        _start("openai", OPENAI_CLASSES[chosen], content=False)


def _langchain_spans(module: ModuleType) -> None:
    with _lock:
        if _is_planned("langchain"):
            for name in ("langchain-core", "langchain"):
                _check(name)
            _start("langchain/spans", GENAI["langchain"])


def _agents_spans(module: ModuleType) -> None:
    with _lock:
        if _is_planned("openai-agents") and _agents.is_agents_sdk(module):
            _start("openai-agents/spans", GENAI["openai-agents"])


def _is_planned(framework: str) -> bool:
    return (
        _plan is not None
        and framework in _plan.frameworks
        and f"{framework}/spans" not in _undo
        and running(framework) is None
    )


def _start(part: str, instrumentor: Instrumentor, *, content: bool = True) -> None:
    """Start an instrumentation, unless it runs or is not there."""
    if not instrumentor.is_installed() or instrumentor.is_running():
        return
    _check(instrumentor.package)
    with content_captured() if content else nullcontext():
        started = instrumentor.start()

    def undo() -> None:
        _end(started)
        if instrumentor is OPENAI_CLASSES["openllmetry"]:
            unwrap_left_over("openai.resources", instrumentor.module)

    _undo[part] = undo


def _end(instrumentor: Any) -> None:
    logger = logging.getLogger("opentelemetry.instrumentation.instrumentor")
    before = logger.disabled
    logger.disabled = True  # somebody may have stopped it already, which is no news
    try:
        instrumentor.uninstrument()
    finally:
        logger.disabled = before


def _check(name: str) -> None:
    """One warning for a version that nobody has tried."""
    version = installed(name)
    if version is not None and not is_tested(version, TESTED[name]):
        warn_once(
            f"version.{name}",
            "%s %s is untested with this release of agentlightning, which was tried with %s.",
            name,
            version,
            tested_range(name, TESTED[name]),
        )
