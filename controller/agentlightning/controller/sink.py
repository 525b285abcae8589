"""Where the launcher puts what a process writes: bounded, and what is over the bound is counted."""

import os

__all__ = ["LogSink", "ResultSink", "Sink"]

LOG_LIMIT = 16 << 20
"""Bytes of each stream that are kept."""
TAIL = 4096
"""Last bytes of a stream, kept for the error message even where the file is full."""
RESULT_LIMIT = 4 << 20
"""Bytes of an agent's output as JSON."""


class Sink:
    """Takes bytes and counts those it did not keep."""

    handle: int | None = None

    def __init__(self) -> None:
        self.kept = 0
        self.dropped = 0

    def take(self, data: bytes) -> None:
        """Keep `data`, or so much of it as fits."""
        raise NotImplementedError(f"{type(self).__name__}.take")

    def tail(self) -> str:
        """The last lines, as text."""
        return ""

    def text(self) -> str | None:
        """All of it, as text; None if there was nothing or too much."""
        return None

    def close(self) -> None:
        """Nothing more will come."""


class LogSink(Sink):
    """A file that holds the beginning of a stream; there is none if nothing is written."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path
        self._last = b""

    def take(self, data: bytes) -> None:
        """Write to the file while it has room."""
        self._last = (self._last + data)[-TAIL:]
        written = 0
        if (room := LOG_LIMIT - self.kept) > 0:
            try:
                if self.handle is None:
                    # Appending, so that two streams may share a file.
                    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
                    self.handle = os.open(self._path, flags, 0o600)
                written = os.write(self.handle, data[:room])
            except OSError:  # the disk is full: the agent goes on, and the loss is counted
                written = 0
        self.kept += written
        self.dropped += len(data) - written

    def tail(self) -> str:
        """The last lines of the stream, also where the file is full."""
        return self._last.decode(errors="replace")

    def close(self) -> None:
        """Say in the file how much is missing from it."""
        if self.handle is not None:
            try:
                if self.dropped:
                    os.write(self.handle, f"\n[{self.dropped:,} more bytes were not kept]\n".encode())
            except OSError:
                pass
            finally:
                os.close(self.handle)
                self.handle = None


class ResultSink(Sink):
    """A result in memory, out of reach of the agent's own children."""

    def __init__(self) -> None:
        super().__init__()
        self._data = bytearray()

    def take(self, data: bytes) -> None:
        """Keep it whole, or not at all."""
        self._data += data
        if len(self._data) > RESULT_LIMIT or self.dropped:
            self.dropped += len(self._data)
            self._data.clear()

    def text(self) -> str | None:
        """The result, or None."""
        return self._data.decode(errors="replace") if self._data else None
