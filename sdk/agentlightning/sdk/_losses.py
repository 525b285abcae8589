"""What the SDK lost or could not do, by name; and the boundary that keeps our faults from the host.

Whatever is dropped is counted here under a name, and said once when the process ends.
"""

import functools
import logging
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["count", "counters", "forget", "guarded", "logger", "warn_once"]

logger = logging.getLogger("agentlightning.sdk")

_lock = threading.Lock()
_counters: dict[str, int] = {}
_warned: set[str] = set()


def count(name: str, number: int = 1) -> None:
    """Add to a counter."""
    with _lock:
        _counters[name] = _counters.get(name, 0) + number


def counters() -> dict[str, int]:
    """What was delivered, lost or left out so far in this process, by name."""
    with _lock:
        return dict(_counters)


def warn_once(name: str, message: str, *args: object) -> None:
    """Log a warning the first time that `name` comes up in this process."""
    with _lock:
        if name in _warned:
            return
        _warned.add(name)
    logger.warning(message, *args)


def forget() -> None:
    """Begin at zero: a forked child tells its own losses, not its parent's."""
    global _lock
    _lock = threading.Lock()  # another thread of the parent may have held it at the fork
    _counters.clear()
    _warned.clear()


def guarded(what: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a function that runs inside the host's calls: its faults are counted and logged once, never raised."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except Exception:  # the boundary: tracing must not break a call
                count("internal_error")
                with _lock:
                    first = what not in _warned
                    _warned.add(what)
                if first:
                    logger.warning("agentlightning could not %s; the program goes on.", what, exc_info=True)
                return None

        return wrapper

    return decorate
