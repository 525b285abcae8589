"""Keeping hold of every process that an agent starts, so that all of them end with it.

The one idea: an orphan goes to its nearest ancestor that is a *subreaper*. Each agent's first process is one, so
whatever daemonises itself below it stays below it; when that first process ends, the rest falls to the launcher,
and when the launcher is killed, to the controller. Hence the invariant: a child of the launcher that is not the
first process of a living attempt is left over from one that has ended, and may be killed.

Outside Linux there are no subreapers: there only the agent's own process group is sure to end.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterable

__all__ = [
    "adopt_orphans",
    "children",
    "descendants",
    "die_with",
    "hide_memory",
    "kill_all",
    "kill_below",
    "outlive_parent",
    "sweep",
]

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36

# Looked up once: a forked agent should not pay for it.
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parents end."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with(parent: int) -> None:
    """Be killed when the process `parent`, which forked this one, ends in any way."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)


def outlive_parent() -> None:
    """Undo `die_with`."""
    _prctl(PR_SET_PDEATHSIG, 0)


def hide_memory() -> None:
    """Refuse other processes of the same user (agents) a look at this one's memory and environment."""
    _prctl(PR_SET_DUMPABLE, 0)


def children() -> dict[int, list[int]]:
    """Every process of this machine that has children, with their ids."""
    families: dict[int, list[int]] = {}
    for pid, parent in _parents():
        families.setdefault(parent, []).append(pid)
    return families


def descendants(pid: int, families: dict[int, list[int]], spare: Collection[int] = ()) -> list[int]:
    """Everything below `pid`, without the trees of those to spare; parents before their children."""
    found: list[int] = []
    queue = [pid]
    while queue:
        for child in families.get(queue.pop(), ()):
            if child not in spare:
                found.append(child)
                queue.append(child)
    return found


def kill_all(pids: Iterable[int]) -> None:
    """SIGKILL, to those that are still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def sweep(spare: Collection[int] = ()) -> list[int]:
    """One round of killing and reaping below this process: what was found alive there, and killed."""
    me = os.getpid()
    families = children()
    for pid in families.get(me, []).copy():
        with contextlib.suppress(ChildProcessError):
            if pid not in spare and os.waitpid(pid, os.WNOHANG)[0] == pid:
                families[me].remove(pid)
    found = descendants(me, families, spare)
    kill_all(found)
    return found


def kill_below(spare: Collection[int] = (), patience: float = 5.0) -> int:
    """Kill everything below this process, without the trees of those to spare; returns how many there were.

    A process may fork while it is being killed, so this looks again until nothing is found.
    """
    killed: set[int] = set()
    deadline = time.monotonic() + patience
    while found := sweep(spare):
        killed.update(found)
        if time.monotonic() > deadline:  # only a process stuck in the kernel survives this long
            break
        time.sleep(0.005)
    return len(killed)


def _prctl(option: int, value: int) -> None:
    if _libc is not None and _libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}, {value}): {os.strerror(number)}")


def _parents() -> Iterable[tuple[int, int]]:
    if _libc is None:
        listing = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True)
        for line in listing.stdout.splitlines():
            pid, parent = line.split()
            yield int(pid), int(parent)
        return
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                handle = os.open(f"/proc/{name}/stat", os.O_RDONLY | os.O_CLOEXEC)
                try:
                    text = os.read(handle, 512)
                finally:
                    os.close(handle)
            except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
                continue
            # pid (any name, even with parentheses) state ppid …
            yield int(name), int(text[text.rindex(b")") + 4 :].split(b" ", 1)[0])
