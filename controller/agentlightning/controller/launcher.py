"""The launcher: a single-threaded process that forks agents, and answers for every one of them.

    python -m agentlightning.controller.launcher FD

FD is a socket to the controller. The first message says which functions to import; then each `run` forks a process
that has them imported already. The launcher keeps what agents print (so much of it, and counts the rest), holds
them to their time limit, and kills whatever they leave behind. When the socket closes, it kills everything and ends.

    → {"do": "load", "agent": "module:function" | null, "setup": …, "evaluator": …, "private": bool}
    ← {"event": "ready"} | {"event": "refused", "error": sentence}
    → {"do": "run", "id", "kind": "function" | "command" | "evaluation", "environ", "seed", "stdout", "stderr",
       "timeout", "grace", and "arguments" | "argv" | "task", "output"}
    → {"do": "stop", "id"}
    ← {"event": "ended", …the fields of processes.Ended}
    ← {"event": "leftovers", "killed": n}
"""

import contextlib
import gc
import os
import resource
import selectors
import signal
import socket
import sys
import threading
import time
from typing import Any, NoReturn

from agentlightning.controller import containment
from agentlightning.controller.child import OPEN_FILES, Loaded, become
from agentlightning.controller.frames import Unpacker, pack
from agentlightning.controller.preload import Preload, find
from agentlightning.controller.sink import LogSink, ResultSink, Sink
from agentlightning.proto.errors import ConfigError

__all__ = ["Launcher", "main"]

SWEEP_EVERY = 0.05
"""Seconds between two looks through the process table, which costs some milliseconds."""
DRAIN = 2.0
"""Seconds to wait for the rest of an ended agent's output, should a process out of reach hold its pipes."""


class Running:
    """One forked process and what it was asked to do."""

    def __init__(self, job: dict[str, Any], pid: int, sinks: dict[int, Sink]) -> None:
        self.id = str(job["id"])
        self.pid = pid
        self.sinks = sinks
        """By the descriptor to read; an entry goes when it is read to its end."""
        self.all_sinks = list(sinks.values())
        self.grace = float(job["grace"])
        self.started = time.monotonic()
        self.deadline = self.started + float(job["timeout"])
        self.kill_at: float | None = None
        self.ending = "exited"
        self.status: int | None = None
        self.ended = 0.0
        self.cpu = 0.0
        self.swept = False
        """Whether what it left behind has been killed."""


class Launcher:
    """Forks on request and supervises. `run` returns only by the end of the process."""

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.selector = selectors.DefaultSelector()
        self.running: dict[int, Running] = {}
        self.loaded = Loaded()
        self.preload = Preload()
        self.warned = False
        self.residents: frozenset[int] = frozenset()
        """Processes that importing the user's module has started; they stay until the end."""
        self.last_sweep = 0.0
        self.strays: set[int] = set()
        """Killed in the last sweep, and not yet seen gone."""

    def run(self) -> NoReturn:
        """Serve the controller until it is gone."""
        unpacker = Unpacker()
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_read, False)
        os.set_blocking(wake_write, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # only to be woken by it
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        self.wake = (wake_read, wake_write)
        self.selector.register(self.control, selectors.EVENT_READ)
        self.selector.register(wake_read, selectors.EVENT_READ)
        while True:
            for key, _ in self.selector.select(self.patience()):
                if key.fileobj is self.control:
                    data = self.control.recv(1 << 16)
                    if not data:
                        self.end()
                    for message in unpacker.feed(data):
                        self.obey(message)
                elif key.fd == wake_read:
                    os.read(wake_read, 4096)
                    self.reap()
                else:
                    self.read(key.fd, key.data)
            self.keep_time()

    def end(self) -> NoReturn:
        """Kill everything, then this process, without the exit handlers of what was imported."""
        containment.kill_below()
        os._exit(0)

    def patience(self) -> float | None:
        """Seconds until something is due."""
        times = [self.due(running) for running in self.running.values()]
        if self.strays:
            times.append(self.last_sweep + SWEEP_EVERY)
        return max(0.0, min(times) - time.monotonic()) if times else None

    def due(self, running: Running) -> float:
        """When something must be done about a process, if it does nothing itself."""
        if running.status is None:
            return running.deadline if running.kill_at is None else running.kill_at
        return running.ended + DRAIN if running.swept else self.last_sweep + SWEEP_EVERY

    def obey(self, message: dict[str, Any]) -> None:
        """Do what the controller says."""
        if message["do"] == "load":
            self.load(message)
        elif message["do"] == "run":
            self.fork(message)
        elif message["do"] == "stop":
            for running in self.running.values():
                if running.id == message["id"]:
                    self.terminate(running, "stopped")

    def load(self, message: dict[str, Any]) -> None:
        """Import the user's functions, once."""
        if message["private"]:
            containment.hide_memory()
        containment.die_with(os.getppid())  # importing runs the user's code, which may hang
        try:
            self.loaded = Loaded(
                agent=find(message["agent"]),
                setup=find(message["setup"]),
                evaluator=find(message["evaluator"]),
            )
        except ConfigError as error:
            self.say({"event": "refused", "error": str(error)})
            return
        containment.outlive_parent()  # from here on, the closing of the socket says so, and there is cleaning to do
        self.residents = frozenset(containment.children().get(os.getpid(), ()))
        self.settle()
        self.say({"event": "ready"})

    def settle(self) -> None:
        """Take stock after importing."""
        if (threads := threading.enumerate()[1:]) and not self.warned:
            self.warned = True
            print(
                f"agl: warning: importing started threads ({', '.join(thread.name for thread in threads)}), which do "
                "not exist in the forked processes: if agents hang, start them when the function is called.",
                file=sys.stderr,
            )
        gc.collect()
        gc.freeze()  # a collection in a child would touch, and so copy, every page of it

    def fork(self, job: dict[str, Any]) -> None:
        """Start one process."""
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        pipes: list[tuple[int, int]] = []
        try:
            pipes.extend(os.pipe() for _ in range(3))
            pid = os.fork()
        except OSError as error:  # too many processes, or too many open files
            for pipe in pipes:
                os.close(pipe[0])
                os.close(pipe[1])
            self.say({"event": "ended", "id": job["id"], "ending": "not_started", "error": error.strerror})
            return
        if pid == 0:
            self.forget([pipe[0] for pipe in pipes])
            become(job, self.loaded, parent, *(pipe[1] for pipe in pipes))
        sinks: list[Sink] = [LogSink(job["stdout"]), LogSink(job["stderr"]), ResultSink()]
        running = Running(job, pid, {pipe[0]: sink for pipe, sink in zip(pipes, sinks, strict=True)})
        for read, write in pipes:
            os.close(write)
            os.set_blocking(read, False)
            self.selector.register(read, selectors.EVENT_READ, running)
        self.running[pid] = running

    def forget(self, handles: list[int]) -> None:
        """In a forked process: close whatever is the launcher's alone."""
        self.control.close()
        self.selector.close()
        for running in self.running.values():
            handles += [
                *running.sinks,
                *(sink.handle for sink in running.all_sinks if sink.handle is not None),
            ]
        for handle in (*handles, *self.wake):
            os.close(handle)

    def read(self, handle: int, running: Running) -> None:
        """Take what a process wrote."""
        try:
            data = os.read(handle, 1 << 16)
        except BlockingIOError:
            return
        if data:
            running.sinks[handle].take(data)
            return
        self.close(handle, running)
        self.report_if_over(running)

    def close(self, handle: int, running: Running) -> None:
        """Stop reading from a process."""
        running.sinks.pop(handle).close()
        self.selector.unregister(handle)
        os.close(handle)

    def reap(self) -> None:
        """See which first processes have ended."""
        for running in self.running.values():
            if running.status is None:
                pid, status, usage = os.wait4(running.pid, os.WNOHANG)
                if pid:
                    running.status, running.ended = status, time.monotonic()
                    running.cpu = usage.ru_utime + usage.ru_stime

    def keep_time(self) -> None:
        """Enforce limits, and clear away what ended attempts have left."""
        now = time.monotonic()
        for running in list(self.running.values()):
            if running.status is None:
                if running.kill_at is not None and now >= running.kill_at:
                    running.kill_at = now + 1.0
                    tree = containment.descendants(running.pid, containment.children())
                    containment.kill_all([running.pid, *tree])
                elif running.kill_at is None and now >= running.deadline:
                    self.terminate(running, "timeout")
        unswept = [
            running for running in self.running.values() if running.status is not None and not running.swept
        ]
        if (unswept or self.strays) and now >= self.last_sweep + SWEEP_EVERY:
            self.sweep(unswept)
        for running in list(self.running.values()):
            if running.swept and now >= running.ended + DRAIN:
                for handle in list(running.sinks):
                    self.close(handle, running)
                self.report_if_over(running)

    def sweep(self, unswept: list[Running]) -> None:
        """Kill what is below this process but below no living attempt."""
        alive = {pid for pid, running in self.running.items() if running.status is None} | self.residents
        found = set(containment.sweep(alive))
        self.last_sweep = time.monotonic()
        if new := found - self.strays:
            self.say({"event": "leftovers", "killed": len(new)})
            self.strays = found
            return  # they are told to be over when a second look finds these gone, or beyond killing
        self.strays = found
        for running in unswept:
            running.swept = True
            self.report_if_over(running)

    def terminate(self, running: Running, why: str) -> None:
        """Ask a process to end; after its grace it is killed."""
        if running.status is not None or running.kill_at is not None:
            return
        running.ending = why
        running.kill_at = time.monotonic() + running.grace
        with contextlib.suppress(ProcessLookupError):
            try:
                os.killpg(running.pid, signal.SIGTERM)
            except ProcessLookupError:  # it has not yet come to its own group
                os.kill(running.pid, signal.SIGTERM)

    def report_if_over(self, running: Running) -> None:
        """Tell the controller of a process that is gone, with all that it had written read."""
        if running.status is None or not running.swept or running.sinks or running.pid not in self.running:
            return
        del self.running[running.pid]
        stdout, stderr, result = running.all_sinks
        value, _, imported = (result.text() or "").partition("\n")
        self.say(
            {
                "event": "ended",
                "id": running.id,
                "ending": running.ending,
                "code": os.waitstatus_to_exitcode(running.status),
                "result": value or None,
                "result_dropped": result.dropped,
                "dropped": stdout.dropped + stderr.dropped,
                "stderr": stderr.tail(),
                "seconds": round(running.ended - running.started, 3),
                "cpu_s": round(running.cpu, 3),
            }
        )
        if running.status == 0 and self.preload.learn(imported):
            self.settle()

    def say(self, message: dict[str, Any]) -> None:
        """Send an event; a controller that is gone needs none."""
        try:
            self.control.sendall(pack(message))
        except (BrokenPipeError, ConnectionResetError):
            self.end()


def main(argv: list[str] | None = None) -> NoReturn:
    """Entry point; see the module's docstring."""
    (handle,) = sys.argv[1:] if argv is None else argv
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the controller, which says what to do
    # Five descriptors for each agent: the usual thousand would be few.
    with contextlib.suppress(OSError, ValueError):  # not every system lets a process have so many
        resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES[1], OPEN_FILES[1]))
    containment.adopt_orphans()
    control = socket.socket(fileno=int(handle))
    control.set_inheritable(False)
    Launcher(control).run()


if __name__ == "__main__":
    main()
