"""Converter and forwarder as child processes: started, niced, restarted when they die, told when there is work.

Receiver and child share a socket pair. Downwards goes one byte for "more is committed"; its end
means "finish". Upwards go JSON lines. The socket is a convenience alone: what counts is in the journal
and in the manifests, so either process may be killed at any moment.
"""

import asyncio
import contextlib
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from agentlightning.proto.process import PARENT_VARIABLE

__all__ = ["Link", "Supervisor"]

log = logging.getLogger(__name__)

NICENESS: Final = 10
"""Receivers answer agents that wait; conversion may take what is left of the processor."""
BACKOFF: Final = (0.1, 5.0)
"""Seconds before a restart: the first, and the longest, doubling in between."""
Message = Mapping[str, Any]  # JSON


class Link:
    """The child's end."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(False)
        self._closed = False

    def wait(self, timeout: float) -> bool:
        """Wait for new data, `timeout` seconds at most. False: the receiver has stopped, finish."""
        if self._closed:
            return False
        readable, _, _ = select.select([self._socket], [], [], timeout)
        if readable:
            with contextlib.suppress(BlockingIOError, ConnectionResetError):
                if not self._socket.recv(65536):
                    self._closed = True
        return not self._closed

    def send(self, message: Message) -> None:
        """Tell the receiver something. Does nothing if it has gone."""
        data = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        self._socket.setblocking(True)
        try:
            self._socket.sendall(data)
        except OSError:
            pass  # the receiver has gone; `wait` says so too
        finally:
            self._socket.setblocking(False)


class Supervisor:
    """Keeps one child alive.

    Invariant: at most one that we started is alive, and it holds the only other end of the
    socket, so that it learns of our death whichever way we die.
    """

    def __init__(self, name: str, arguments: Sequence[str], on_message: Callable[[Message], None]) -> None:
        """
        Args:
            name: of the child: the module `agentlightning.collector.NAME`.
            arguments: for its command line, without its end of the socket.
            on_message: called in the event loop with everything that it says.
        """
        self.restarts = 0
        self.pid: int | None = None
        self._name = name
        self._arguments = list(arguments)
        self._on_message = on_message
        self._writer: asyncio.StreamWriter | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep_alive())

    def notify(self) -> None:
        """Say that more has been committed. Costs nothing when it has been said and not been read."""
        writer = self._writer
        if writer is not None and not writer.is_closing() and writer.transport.get_write_buffer_size() == 0:
            writer.write(b".")

    async def stop(self, timeout: float = 10.0) -> bool:
        """Let the child finish what is ready; True if it did in time."""
        self._stopping = True
        if self._writer is not None and self._writer.can_write_eof():
            with contextlib.suppress(OSError):
                self._writer.write_eof()
        if self._task is None:
            return True
        done, _ = await asyncio.wait({self._task}, timeout=timeout)
        if done:
            return True
        log.warning("The %s did not finish within %.0f s; the journal keeps the rest.", self._name, timeout)
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
        await asyncio.wait({self._task}, timeout=5)
        return False

    async def _keep_alive(self) -> None:
        pause = BACKOFF[0]
        while True:
            began = time.monotonic()
            code = await self._run_once()
            if self._stopping:
                return
            self.restarts += 1
            if time.monotonic() - began > BACKOFF[1]:
                pause = BACKOFF[0]
            log.error("The %s ended with code %d; starting it again in %.1f s.", self._name, code, pause)
            await asyncio.sleep(pause)
            pause = min(2 * pause, BACKOFF[1])
            if self._stopping:
                return

    async def _run_once(self) -> int:
        process, ours = self._spawn()
        self._process, self.pid = process, process.pid
        reader, self._writer = await asyncio.open_unix_connection(sock=ours, limit=64 << 20)
        try:
            if self._stopping:
                self._writer.write_eof()
            await self._listen(reader)
        finally:
            self._writer.close()
            self._writer = None
            code = await self._reap(process)
            self._process = self.pid = None
        return code

    def _spawn(self) -> tuple["subprocess.Popen[bytes]", socket.socket]:
        # From the main thread: the kernel's parent-death signal is tied to the thread that forks.
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    f"agentlightning.collector.{self._name}",
                    *self._arguments,
                    "--link-fd",
                    str(theirs.fileno()),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, PARENT_VARIABLE: str(os.getpid())},
            )
        with contextlib.suppress(OSError):  # it may have died already
            os.setpriority(os.PRIO_PROCESS, process.pid, NICENESS)
        return process, ours

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        """Until the child's end of the socket closes."""
        with contextlib.suppress(ConnectionResetError):
            while line := await reader.readline():
                try:
                    message = json.loads(line)
                except ValueError:
                    log.error("The %s sent something that is no JSON: %r.", self._name, line[:200])
                    continue
                self._on_message(message)

    async def _reap(self, process: "subprocess.Popen[bytes]") -> int:
        """Its socket has closed, so it ends; if it does not, end it."""
        for number in (None, signal.SIGTERM, signal.SIGKILL):
            if number is not None:
                process.send_signal(number)
            try:
                return await asyncio.to_thread(process.wait, 5.0)
            except subprocess.TimeoutExpired:
                continue
        return await asyncio.to_thread(process.wait)
