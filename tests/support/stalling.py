"""The letters agent; one of those that see the file STALL_FILE takes it away and hangs."""

import contextlib
import os
import threading

import letters
from letters import evaluate, tasks

__all__ = ["evaluate", "solve", "tasks"]


def solve(word: str) -> str:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.environ["STALL_FILE"])  # one of them can
        threading.Event().wait()
    return letters.solve(word)
