"""Python runs this before a program whose PYTHONPATH begins with this folder: `agl run` sees to that.

Whatever goes wrong here, the program runs. An interpreter of another environment, which a child process may be,
has no agentlightning and is left alone. A `sitecustomize` that this one hides gets its turn.
"""

import importlib.machinery
import importlib.util
import os
import sys


def _trace() -> None:
    try:
        import agentlightning.sdk
    except ImportError:
        return
    try:
        agentlightning.sdk.instrument()
    except Exception as error:  # noqa: BLE001 - the program must run
        print(f"agl run: the program runs untraced: {error}", file=sys.stderr)


def _next() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    others = [path for path in sys.path if os.path.abspath(path or ".") != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


_trace()
_next()
