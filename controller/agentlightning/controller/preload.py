"""Importing once, in the launcher, what every forked process would else import anew.

First the user's functions; then whatever the first processes imported late, as large libraries do: with AutoGen and
the `openai` package that is two thirds of the CPU time of a short rollout. Only what is installed is learnt, never a
file that an agent may have written.
"""

import importlib
import importlib.util
import json
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable
from typing import Any

from agentlightning.proto.errors import ConfigError, nearest

__all__ = ["Preload", "find"]

INSTALLED = tuple(
    {os.path.join(sysconfig.get_path(n), "") for n in ("stdlib", "platstdlib", "purelib", "platlib")}
)


class Preload:
    """What has been learnt from processes that ended well."""

    def __init__(self) -> None:
        self._refused: set[str] = set()

    def learn(self, names: str) -> bool:
        """Import the modules of a JSON list, as far as they are installed; returns whether there was anything new."""
        try:
            wanted = [
                name for name in json.loads(names) if name not in sys.modules and name not in self._refused
            ]
        except (TypeError, ValueError):  # there is no list, or the process spoilt it
            return False
        for name in wanted:
            try:
                spec = importlib.util.find_spec(name)
                if spec is None or not (spec.origin or "").startswith(INSTALLED):
                    self._refused.add(name)
                else:
                    importlib.import_module(name)
            except (Exception, SystemExit):  # noqa: BLE001 - then each process imports it for itself, as before
                self._refused.add(name)
        return bool(wanted)


def find(target: str | None) -> Callable[..., Any] | None:
    """Import `module:function`. Raises ConfigError with what is wrong with it."""
    if target is None:
        return None
    name, _, path = target.partition(":")
    try:
        found: Any = importlib.import_module(name)
    except BaseException as error:  # noqa: BLE001 - the user's module may raise anything, even SystemExit
        if not isinstance(error, ModuleNotFoundError) or error.name != name:
            traceback.print_exc()  # the user's own stack says where; the sentence says what
        raise ConfigError(
            f"The module of {target} cannot be imported: {type(error).__name__}: {error}. "
            f"(Modules are looked for in {os.getcwd()} and in PYTHONPATH. An agent that needs its key while it is "
            "imported is given as a command line.)"
        ) from None
    for part in path.split("."):
        if not hasattr(found, part):
            public = [name for name in vars(found) if not name.startswith("_")]
            raise ConfigError(f"{target}: there is no {part!r} in {name}.{nearest(part, public)}")
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(f"{target} is not a function.")
    return found
