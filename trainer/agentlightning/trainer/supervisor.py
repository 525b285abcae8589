"""The other components as child processes: started in order, watched, restarted, stopped.

The one idea: a component that dies is started again with the same address and the same state
directory, because each of them keeps what it must on disk. A component that keeps dying ends the run
with a sentence. Children end when this process ends, even by `kill -9` (see proto.process).
"""

import contextlib
import json
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from agentlightning.proto.errors import LightningError
from agentlightning.proto.process import PARENT_VARIABLE, read_ready

__all__ = ["Child", "ChildFailed", "Supervisor", "free_port"]

logger = logging.getLogger(__name__)

MAX_RESTARTS = 5
"""Within RESTART_WINDOW seconds; more means that the component cannot run."""
RESTART_WINDOW = 120.0
STOP_GRACE = 15.0


class ChildFailed(LightningError):
    """A component could not be started, or keeps dying."""


@dataclass
class Child:
    """One component: how to start it, and what became of it."""

    name: str
    command: Callable[[], list[str]]
    """The command line, asked for anew at each start."""
    log: Path
    ready: Path
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    restarts: list[float] = field(default_factory=list)
    total_restarts: int = 0
    failure: str | None = None


class Supervisor:
    """Owns the children. All of them are started by one thread that lives as long as this process:
    Linux ties a child's life to the thread that started it."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self.children: dict[str, Child] = {}
        self._environment = {**os.environ, **(environment or {}), PARENT_VARIABLE: str(os.getpid())}
        self._commands: queue.Queue[tuple[Child, Future[None]]] = queue.Queue()
        self._stopping = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="supervisor", daemon=True)
        self._thread.start()

    def start(self, name: str, command: Callable[[], list[str]], *, log: Path, ready: Path) -> Child:
        """Start a component; returns at once. Use `wait_ready` for its addresses."""
        child = Child(name, command, log, ready)
        self.children[name] = child
        started: Future[None] = Future()
        self._commands.put((child, started))
        started.result()
        return child

    def wait_ready(self, child: Child, *, timeout: float) -> dict[str, str]:
        """Addresses of a component once it serves. Raises ChildFailed with the end of its log."""
        deadline = time.monotonic() + timeout
        while True:
            addresses = read_ready(child.ready)
            if addresses is not None:
                return addresses
            self.check()
            process = child.process
            if process is not None and process.poll() is not None:
                self._stopping.set()
                raise ChildFailed(f"The {child.name} did not start: {_tail(child.log)} (log: {child.log})")
            if time.monotonic() > deadline:
                raise ChildFailed(
                    f"The {child.name} was not ready within {timeout:.0f} s (log: {child.log})."
                )
            time.sleep(0.02)

    def check(self) -> None:
        """Raise ChildFailed if a component has been given up."""
        for child in self.children.values():
            if child.failure is not None:
                raise ChildFailed(child.failure)

    def restart(self, name: str) -> bool:
        """Kill a component, so that it is started again; False if it is none of ours.

        With it go the processes that it started and left in its group: one of them may be what hangs. The
        controller's launcher has to end the agents first, and does so when the controller is gone.
        """
        child = self.children.get(name)
        if child is None or child.process is None:
            return False
        logger.warning("The %s is killed, to be started again.", name)
        with contextlib.suppress(ProcessLookupError):
            if name == "controller":
                child.process.kill()
            else:
                os.killpg(child.process.pid, signal.SIGKILL)
        return True

    def starting(self, *, patience: float) -> list[str]:
        """Components that do not serve yet; each for at most `patience` seconds."""
        now = time.monotonic()
        return [
            name
            for name, child in self.children.items()
            if child.process is not None
            and ready_pid(child.ready) != child.process.pid
            and now - child.started < patience
        ]

    def restarts(self) -> dict[str, int]:
        """How often each component had to be started again."""
        return {name: child.total_restarts for name, child in self.children.items() if child.total_restarts}

    def stop(self) -> None:
        """End all children, the last started first, gracefully while that works."""
        self._stopping.set()
        for child in reversed(self.children.values()):
            process = child.process
            if process is None or process.poll() is not None:
                continue
            process.terminate()
            try:
                process.wait(STOP_GRACE)
            except subprocess.TimeoutExpired:
                logger.warning("The %s did not stop within %.0f s: killed.", child.name, STOP_GRACE)
                process.kill()
                process.wait()
        self._stopped.set()

    def _watch(self) -> None:
        while not self._stopping.is_set():
            with contextlib.suppress(queue.Empty):
                child, started = self._commands.get(timeout=0.1)
                try:
                    self._spawn(child)
                    started.set_result(None)
                except OSError as error:
                    started.set_exception(ChildFailed(f"The {child.name} cannot be started: {error}."))
            for child in list(self.children.values()):
                if not self._stopping.is_set():
                    self._revive(child)
        self._stopped.wait()  # the children would be told to end as soon as this thread does

    def _revive(self, child: Child) -> None:
        process = child.process
        if process is None or process.poll() is None or child.failure is not None:
            return
        if not child.ready.exists():
            return  # it never served: wait_ready reports that
        now = time.monotonic()
        child.restarts = [moment for moment in child.restarts if now - moment < RESTART_WINDOW] + [now]
        if len(child.restarts) > MAX_RESTARTS:
            child.failure = (
                f"The {child.name} died {len(child.restarts)} times in {RESTART_WINDOW:.0f} s: "
                f"{_tail(child.log)} (log: {child.log})"
            )
            return
        child.total_restarts += 1
        logger.warning("The %s ended with %s: started again.", child.name, _ending(process.returncode))
        try:
            self._spawn(child)
        except OSError as error:
            child.failure = f"The {child.name} cannot be started again: {error}."

    def _spawn(self, child: Child) -> None:
        child.log.parent.mkdir(parents=True, exist_ok=True)
        first = child.process is None
        if first:
            child.ready.unlink(missing_ok=True)
        with open(child.log, "ab") as log:
            child.started = time.monotonic()
            child.process = subprocess.Popen(
                [sys.executable, *child.command()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,  # Ctrl-C is for us; we stop the children in order
            )


def ready_pid(path: Path) -> int | None:
    """The process that wrote a ready file."""
    try:
        return int(json.loads(path.read_text())["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def free_port() -> int:
    """A port on loopback that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _ending(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _tail(log: Path) -> str:
    """The last line that says something."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return "no log was written"
    lines = [line.strip() for line in lines if line.strip()]
    return lines[-1].removeprefix("agl: error: ") if lines else "its log is empty"
