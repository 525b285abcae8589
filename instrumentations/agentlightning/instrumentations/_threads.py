"""Threads belong to the agent that started them: OpenTelemetry's context goes along, and the graph node.

`threading.Thread`, `Timer` and `ThreadPoolExecutor` (thus `run_in_executor`, which asks the executor) begin
with an empty context. OpenTelemetry's own instrumentation of threading does this too, but knows no nodes; both
together do no harm.
"""

import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from opentelemetry import context as context_api
from opentelemetry.context import Context

from agentlightning.sdk.lineage import carried

__all__ = ["follow", "unfollow"]

_MEMORY = "_agentlightning_context"
_active = False
_patched: dict[tuple[type, str], tuple[Callable[..., Any], Callable[..., Any]]] = {}
"""By class and method: ours, and what was there."""


def follow() -> None:
    """Threads that start from now on are followed."""
    global _active
    _active = True
    for owner, method, wrap in (
        (threading.Thread, "start", _remembering),
        (threading.Thread, "run", _restoring),
        (threading.Timer, "run", _restoring),
        (ThreadPoolExecutor, "submit", _submitting),
    ):
        if (owner, method) not in _patched:
            original = getattr(owner, method)
            ours = wrap(original)
            setattr(owner, method, ours)
            _patched[owner, method] = ours, original


def unfollow() -> None:
    """As before. Where another has patched over us, ours stays and does nothing."""
    global _active
    _active = False
    for (owner, method), (ours, original) in list(_patched.items()):
        if vars(owner).get(method) is ours:
            setattr(owner, method, original)
            del _patched[owner, method]


def _remembering(start: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(start)
    def remembered(self: threading.Thread) -> None:
        if _active:
            setattr(self, _MEMORY, carried())
        start(self)

    return remembered


def _restoring(run: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(run)
    def restored(self: threading.Thread) -> None:
        _within(self.__dict__.pop(_MEMORY, None), run, self)

    return restored


def _submitting(submit: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(submit)
    def submitted(
        self: ThreadPoolExecutor, function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        if not _active:
            return submit(self, function, *args, **kwargs)
        return submit(self, functools.partial(_within, carried(), function), *args, **kwargs)

    return submitted


def _within(context: Context | None, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    if context is None:
        return function(*args, **kwargs)
    token = context_api.attach(context)
    try:
        return function(*args, **kwargs)
    finally:
        context_api.detach(token)
