"""A bar on the terminal: how far a long command is. Silent where no one watches."""

import sys
import time
from types import TracebackType
from typing import Final, TextIO

__all__ = ["Progress"]

WIDTH: Final = 30
INTERVAL_SECONDS: Final = 0.1


class Progress:
    """One line on standard error, written over; gone at the end."""

    def __init__(self, stream: TextIO | None = None, *, shown: bool | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._shown = self._stream.isatty() if shown is None else shown
        self._last = 0.0
        self._length = 0

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._length:
            self._write("")
            self._stream.write("\r")
            self._stream.flush()

    def update(self, what: str, done: int, whole: int) -> None:
        """Show how much of the whole is done."""
        now = time.monotonic()
        if not self._shown or (now - self._last < INTERVAL_SECONDS and done < whole):
            return
        self._last = now
        share = min(1.0, done / whole) if whole else 1.0
        full = int(share * WIDTH)
        self._write(f"{what:<9} [{'#' * full}{'.' * (WIDTH - full)}] {share:4.0%}")

    def _write(self, line: str) -> None:
        self._stream.write("\r" + line.ljust(self._length))
        self._stream.flush()
        self._length = len(line)
