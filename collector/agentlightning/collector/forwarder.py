"""The forwarder: tails the journal, and re-exports everything to another OTLP backend.

    python -m agentlightning.collector.forwarder --state DIR --to URL --link-fd N

A process of its own: a backend that is slow, dead, or makes it crash costs the receivers nothing. Its
cursor is moved when the backend has answered, and is on disk before it is believed; killed in between,
it sends once more. What the backend refuses for good is counted, and the rest goes on.
"""

import argparse
import logging
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any, Final

from agentlightning.collector.forward import Cursor, Signal, Target, connect
from agentlightning.collector.forward_bodies import SIGNALS, Request, count, halves, portable
from agentlightning.collector.logs import FORMATS, setup_logs
from agentlightning.collector.records import JournalReader, Kind, segment_bases
from agentlightning.collector.supervise import Link
from agentlightning.proto.process import die_with_parent, lock_directory, run_main

__all__ = ["Forwarder", "main"]

log = logging.getLogger(__name__)

BATCH_BYTES: Final = 1 << 20
"""Aim for one request; gRPC's default limit for a receiver is four times this."""
BACKOFF: Final = (0.5, 30.0)
"""Seconds before a request is tried again: the first, and the longest, doubling in between."""
SAVE_SECONDS: Final = 0.5
"""The cursor is saved this often at most: it decides how much is sent twice after a kill."""
TICK_SECONDS: Final = 1.0


class _Later(Exception):
    def __init__(self, message: str, after: float | None) -> None:
        super().__init__(message)
        self.after = after


class Forwarder:
    """The work of the process, without its life: `step` again and again."""

    def __init__(self, reader: JournalReader, cursor: Cursor, target: Target) -> None:
        self.cursor = cursor
        self.error = ""
        """Why the last request did not succeed; empty if it did."""
        self.wait = 0.0
        """Seconds before the next step."""
        self._reader = reader
        self._target = target
        self._pause = BACKOFF[0]

    @property
    def caught_up(self) -> bool:
        return self.cursor.position >= self._reader.committed()

    def step(self) -> bool:
        """Send one batch; whether there may be more to do at once."""
        self._skip_removed()
        batch, end, found = self._read()
        if end == self.cursor.position:
            return False
        self.wait = 0.0
        if batch is not None:
            try:
                self._deliver(*batch, found)
            except _Later as later:
                if self.error != str(later):
                    log.warning("The backend does not take what is forwarded: %s", later)
                self.error = str(later)
                self.wait = self._pause if later.after is None else later.after
                self._pause = min(2 * self._pause, BACKOFF[1])
                return False
            if self.error:
                log.info("The backend takes what is forwarded again.")
            self.error, self._pause = "", BACKOFF[0]
        self.cursor.position = end
        self.cursor.counters.update(found)
        return not self.caught_up

    def progress(self) -> dict[str, Any]:
        """What the receiver shows."""
        return {
            "type": "progress",
            "cursor": self.cursor.position,
            "up": not self.error and bool(self.cursor.counters["requests"]),
            "error": self.error,
            "counters": dict(self.cursor.counters),
        }

    def _skip_removed(self) -> None:
        """The journal keeps only so much for a backend that is down."""
        bases = segment_bases(self._reader.folder)
        if bases and bases[0] > self.cursor.position:
            gone = bases[0] - self.cursor.position
            if self.cursor.position:  # at first, what is gone was never ours
                self.cursor.counters["skipped_bytes"] += gone
                log.error("%d bytes of the journal were removed before they could be forwarded.", gone)
            self.cursor.position = bases[0]

    def _read(self) -> tuple[tuple[Signal, Request] | None, int, Counter[str]]:
        """The next records of one signal as one request, the position behind them, and what to count."""
        batch: tuple[Signal, Request] | None = None
        end, size, found = self.cursor.position, 0, Counter[str]()
        for record in self._reader.read_from(end):
            if record.kind in SIGNALS:
                if batch is not None and batch[0] != SIGNALS[record.kind]:
                    break
                request = portable(record.kind, record.body, found)
                if batch is None:
                    batch = SIGNALS[record.kind], request
                else:
                    batch[1].MergeFrom(request)
                size += len(record.body)
            elif record.kind == Kind.QUARANTINED:
                found["journal_quarantined"] += 1
            end = record.end
            if size >= BATCH_BYTES:
                break
        return (batch if batch is not None and count(batch[1]) else None), end, found

    def _deliver(self, signal_name: Signal, request: Request, found: Counter[str]) -> None:
        """Send it, in parts if the backend refuses the whole. Raises _Later, and then all of it is sent again."""
        items = count(request)
        outcome = self._target.send(signal_name, request.SerializeToString())
        if outcome.kind == "later":
            raise _Later(outcome.message, outcome.after)
        found["requests"] += 1
        if outcome.kind == "taken":
            found["spans" if signal_name == "traces" else "log_records"] += items - outcome.rejected
            found["rejected"] += outcome.rejected
        elif items > 1:
            for half in halves(request):
                self._deliver(signal_name, half, found)
        else:
            found["refused"] += items
            log.error("The backend refuses one of the %s: %s", signal_name, outcome.message)


def main(argv: list[str] | None = None) -> int:
    """The process. Returns its exit code."""
    return run_main(lambda: _main(argv))


def _main(argv: list[str] | None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m agentlightning.collector.forwarder",
        description="The collector's third process: journal to another backend. `agl collector` starts it.",
    )
    parser.add_argument("--state", type=Path, required=True, help="the collector's state, with its journal")
    parser.add_argument("--to", required=True, help="the backend's URL")
    parser.add_argument("--header-file", type=Path, help="headers for it")
    parser.add_argument("--link-fd", type=int, required=True, help="socket to the receiver")
    parser.add_argument("--log-level", default="info")
    parser.add_argument("--log-format", default="text", choices=FORMATS)
    arguments = parser.parse_args(argv)
    die_with_parent()
    setup_logs("forwarder", arguments.log_level, arguments.log_format)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the receiver, which closes the link
    stopping: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stopping.append(number))
    link = Link(arguments.link_fd)
    with lock_directory(arguments.state / "forward", "The forwarder's state"):
        reader = JournalReader(arguments.state / "journal")
        cursor = Cursor.load(arguments.state, reader.id)
        _run(Forwarder(reader, cursor, connect(arguments.to, arguments.header_file)), link, stopping)
    return 0


def _run(forwarder: Forwarder, link: Link, stopping: list[int]) -> None:
    link.send(forwarder.progress())
    cursor = forwarder.cursor
    saved, saved_at = cursor.position, time.monotonic()
    told, not_before, busy = time.monotonic(), 0.0, True
    while not stopping:
        pause = min(TICK_SECONDS, not_before - time.monotonic())
        alive = link.wait(0.0 if busy else pause if pause > 0 else TICK_SECONDS)
        if time.monotonic() >= not_before:
            try:
                busy = forwarder.step()
            except FileNotFoundError:
                busy = True  # a segment was removed while we came to it
            not_before = time.monotonic() + forwarder.wait
        now = time.monotonic()
        if cursor.position != saved and (not busy or now - saved_at >= SAVE_SECONDS):
            cursor.save()
            saved, saved_at = cursor.position, now
            # Only what is on disk is told: the receiver removes the journal behind it.
            link.send(forwarder.progress())
            told = now
        elif cursor.position == saved and now - told >= TICK_SECONDS:
            link.send(forwarder.progress())
            told = now
        if not alive and not busy:
            break
    if cursor.position != saved:
        cursor.save()


if __name__ == "__main__":
    raise SystemExit(main())
