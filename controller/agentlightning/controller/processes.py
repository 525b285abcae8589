"""The controller's side of a launcher: start processes and hear how each ended, whatever happens to the launcher.

A launcher that dies takes its agents with it; what is left of them falls to the controller, which kills it, starts
the launcher anew, and tells those who wait that their process was lost.
"""

import asyncio
import logging
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from agentlightning.controller import containment
from agentlightning.controller.frames import Unpacker, pack
from agentlightning.proto.errors import ConfigError, ServiceError

__all__ = ["Ended", "Processes"]

log = logging.getLogger(__name__)

RESTARTS = 5
"""Deaths of a launcher in a row, none of its processes having ended properly, after which the controller gives up."""

LAST_WAIT = 8.0
"""Seconds for a launcher to kill everything it started, before it is killed itself."""


@dataclass(frozen=True)
class Ended:
    """How a process ended."""

    ending: Literal["exited", "timeout", "stopped", "not_started", "lost"]
    code: int = 0
    """Exit code; a negative one is the signal that killed it."""
    result: str | None = None
    """JSON of what the function returned."""
    result_dropped: int = 0
    """Bytes of a result that was too large to keep."""
    dropped: int = 0
    """Bytes printed that were not kept."""
    stderr: str = ""
    """The last lines of it."""
    error: str = ""
    """Why it could not be started, or was lost."""
    seconds: float = 0.0
    cpu_s: float = 0.0

    def last_line(self) -> str:
        """The last line of stderr, which in Python says what was raised."""
        return (self.stderr.strip().splitlines() or ["it printed no error"])[-1]


class Processes:
    """Processes forked by one launcher."""

    workers: set[int] = set()  # noqa: RUF012 - of all launchers of this process: their trees are not orphans
    """Process ids of the launchers that are alive."""

    def __init__(
        self,
        name: str,
        *,
        environ: Mapping[str, str],
        directory: Path,
        counters: Counter[str],
        agent: str | None = None,
        setup: str | None = None,
        evaluator: str | None = None,
    ) -> None:
        self._name = name
        self._environ = dict(environ)
        self._directory = directory
        self._counters = counters
        self._load = {
            "do": "load",
            "agent": agent,
            "setup": setup,
            "evaluator": evaluator,
            "private": bool(evaluator),
        }
        self._waiting: dict[str, asyncio.Future[Ended]] = {}
        self._ready = asyncio.Event()
        self._deaths = 0
        self._closing = False
        self._launcher: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def start(self) -> None:
        """Start the launcher and wait until the user's functions are imported. Raises ConfigError if they cannot be."""
        self.serving = asyncio.create_task(self._keep_alive())
        ready = asyncio.create_task(self._ready.wait())
        await asyncio.wait([ready, self.serving], return_when=asyncio.FIRST_COMPLETED)
        if self.serving.done():
            ready.cancel()
            self.serving.result()

    async def run(self, job: dict[str, Any]) -> Ended:
        """Run one job to its end."""
        await self._ready.wait()
        waiting: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        self._waiting[job["id"]] = waiting
        self._say({"do": "run", **job})
        try:
            return await waiting
        finally:
            self._waiting.pop(job["id"], None)
            if not waiting.done() or waiting.cancelled():
                self._say({"do": "stop", "id": job["id"]})

    def stop(self, job_id: str) -> None:
        """Ask a process to end; it is killed after its grace."""
        self._say({"do": "stop", "id": job_id})

    async def close(self) -> None:
        """End the launcher, which kills everything it started."""
        self._closing = True
        if self._launcher is not None and not self._ready.is_set():
            self._launcher.kill()  # it is importing the user's module, and does not listen
        if self._writer is not None:
            self._writer.close()
        await asyncio.wait([self.serving])

    async def _keep_alive(self) -> None:
        while not self._closing:
            await self._serve()

    async def _serve(self) -> None:
        """One life of the launcher."""
        ours, theirs = socket.socketpair()
        with theirs:
            # Its own session: Ctrl-C and signals to our process group are for us to answer.
            self._launcher = launcher = subprocess.Popen(  # noqa: ASYNC220 - forking here takes a millisecond
                [sys.executable, "-m", "agentlightning.controller.launcher", str(theirs.fileno())],
                env=self._environ,
                cwd=self._directory,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno(),
                start_new_session=True,
            )
        self.workers.add(launcher.pid)
        reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        self._say(self._load)
        unpacker = Unpacker()
        refused = ""
        try:
            while not refused and (data := await _read(reader)):
                for message in unpacker.feed(data):
                    refused = refused or self._hear(message)
        finally:
            self._ready.clear()
            self._writer.close()
            try:
                await asyncio.to_thread(launcher.wait, LAST_WAIT)
            except subprocess.TimeoutExpired:
                launcher.kill()
                await asyncio.to_thread(launcher.wait)
            self.workers.discard(launcher.pid)
        if refused:
            raise ConfigError(refused)
        # Agents die with their launcher; what they had started is ours now.
        if orphans := containment.kill_below(self.workers):
            self._counters["leftover_processes_killed"] += orphans
        if not self._closing:
            self._mourn(launcher.returncode)

    def _hear(self, message: dict[str, Any]) -> str:
        """Take an event; returns why the launcher refuses to work, if it does."""
        event = message.pop("event")
        if event == "ready":
            self._ready.set()
        elif event == "refused":
            return str(message["error"])
        elif event == "leftovers":
            self._counters["leftover_processes_killed"] += message["killed"]
        else:
            self._deaths = 0
            waiting = self._waiting.get(message.pop("id"))
            if waiting is not None and not waiting.done():
                waiting.set_result(Ended(**message))
        return ""

    def _mourn(self, code: int | None) -> None:
        self._counters["launcher_deaths"] += 1
        self._deaths += 1
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        log.error(
            "The %s launcher ended (%s): its processes are lost, and it is started again.", self._name, how
        )
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_result(Ended("lost", error=f"the {self._name} launcher ended ({how})"))
        if self._deaths > RESTARTS:
            raise ServiceError(
                f"The {self._name} launcher ended {self._deaths} times in a row ({how}): the lines above this one say why."
            )

    def _say(self, message: dict[str, Any]) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(pack(message))


async def _read(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read(1 << 16)
    except ConnectionResetError:
        return b""
