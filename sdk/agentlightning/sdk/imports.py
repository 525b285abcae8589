"""Code that runs when a library is first imported, however late that is.

An agent's process should not load every framework that happens to be installed only to trace it. So what
concerns a library waits for it: `when_imported` runs at once if the library is there already.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType

from agentlightning.sdk._losses import count, guarded

__all__ = ["forget_imports", "when_imported"]

Action = Callable[[ModuleType], None]
_waiting: dict[str, dict[str, Action]] = {}
"""By module, then by the name of who waits: who asks twice is told once."""


def when_imported(module: str, who: str, action: Action) -> None:
    """Run `action` with the module now, or right after it has been loaded. Faults are counted, not raised."""
    present = sys.modules.get(module)
    if present is not None and not getattr(getattr(present, "__spec__", None), "_initializing", False):
        _run(action, present)
        return
    _waiting.setdefault(module, {})[who] = action
    if not any(isinstance(finder, _LateFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _LateFinder())


def forget_imports() -> None:
    """Nobody waits any more, and the import system is as it was."""
    _waiting.clear()
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _LateFinder)]


@guarded("prepare a library for tracing")
def _run(action: Action, module: ModuleType) -> None:
    action(module)


class _LateFinder(importlib.abc.MetaPathFinder):
    """Finds nothing itself: lets the others find what is waited for, and adds the actions to its loading."""

    def __init__(self) -> None:
        self._searching = threading.local()  # other threads import meanwhile

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _waiting or getattr(self._searching, "now", False):
            return None
        self._searching.now = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching.now = False
        loader = spec.loader if spec is not None else None
        if loader is None or not hasattr(loader, "exec_module"):
            return None
        execute = loader.exec_module

        def execute_and_tell(module: ModuleType) -> None:
            execute(module)
            for action in list(_waiting.pop(fullname, {}).values()):
                _run(action, module)

        try:
            loader.exec_module = execute_and_tell  # type: ignore[method-assign] # this loader's alone
        except AttributeError:
            count("internal_error")
        return spec
