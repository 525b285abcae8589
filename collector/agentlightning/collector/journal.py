"""The journal: what has been acknowledged is in it, on disk, until the data set has it.

One endless log of records, cut into segment files named by their base. A position is one integer, the
byte offset in the endless log; positions only grow, over restarts too. A committer thread writes for
all requests that wait and syncs once for all of them; then they are acknowledged.

    journal/0000000000000000.log   records: header, body as received (decompressed), … then zeros
    journal/committed              the durable end: a reader goes no further
    journal/id                     identity: manifests name it, since several journals may feed a data set
    journal/quarantine/            damaged bytes that a reader had to skip

The invariant: everything below `committed` has been synced, and is never overwritten.
"""

import asyncio
import contextlib
import itertools
import logging
import mmap
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from agentlightning.collector.records import (
    HEADER,
    JournalReader,
    Kind,
    Record,
    encode_header,
    find_record,
    read_record,
    segment_bases,
    segment_path,
)

__all__ = ["Durability", "Journal", "JournalReader", "JournalUnavailable", "Kind", "Record", "identity"]

log = logging.getLogger(__name__)

Durability = Literal["fsync", "os", "none"]
"""Acknowledge when the bytes are on disk, with the operating system, or merely in memory."""

SEGMENT_BYTES: Final = 64 << 20
BATCH_BYTES: Final = 32 << 20
"""One sync covers at most this much, so that the first waiter does not wait for all others."""

GATHER_SECONDS: Final = 0.001
"""A commit waits at most so long for senders that came to the one before it: a sync and the two thread
switches around it cost more than a request."""

_IOV_MAX: Final = 1000
_DSYNC: Final = getattr(os, "RWF_DSYNC", 0)  # Linux's: this write is on disk when it returns


class JournalUnavailable(Exception):
    """A record could not be stored (disk full, shutting down): nothing was acknowledged."""


@dataclass(slots=True)
class _Ticket:
    kind: Kind
    body: bytes | bytearray
    future: "asyncio.Future[int]"


class Journal:
    """The writer. One per directory; it belongs to the event loop in which `append` is called."""

    def __init__(
        self,
        folder: Path,
        *,
        durability: Durability = "fsync",
        segment_bytes: int = SEGMENT_BYTES,
        start: int = 0,
        on_commit: Callable[[int], None] | None = None,
    ) -> None:
        """Recover what is there, or begin.

        Args:
            start: no record is written below it: what the data set has consumed, should the end have been
                lost with the machine's power.
            on_commit: called in the event loop with the new durable end.
        """
        self.folder = folder
        self.id = identity(folder)
        self.on_commit = on_commit
        self.commits = 0
        """Syncs so far; fewer than records when requests were committed as a group."""
        self.failed = ""
        """Why the last commit failed; empty when it did not."""
        self._durability = durability
        self._segment_bytes = segment_bytes
        self._queue: queue.SimpleQueue[list[_Ticket] | None] = queue.SimpleQueue()
        self._waiting: list[_Ticket] = []
        self._waiting_lock = threading.Lock()
        self._expected = 1
        self._committing = False
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._fd = -1
        self._base = 0
        self._capacity = 0
        fd = os.open(folder / "committed", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.posix_fallocate(fd, 0, 8)
        self._committed = mmap.mmap(fd, 8)
        os.close(fd)
        self.end, self._sequence = self._recover(start)
        self._publish(self.end)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._commit_forever, name="journal", daemon=True)
        self._thread.start()

    @property
    def begin(self) -> int:
        """Position of the oldest record that is kept."""
        segments = segment_bases(self.folder)
        return segments[0] if segments else self.end

    def append(self, kind: Kind, body: bytes | bytearray) -> "asyncio.Future[int]":
        """Store a record; done, with its end, when it is as durable as was asked for.

        Raises:
            JournalUnavailable: it is not stored; now, or from the future.
        """
        if self._closed:
            raise JournalUnavailable("The collector is shutting down.")
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        ticket = _Ticket(kind, body, self._loop.create_future())
        self._waiting.append(ticket)
        self._gather()
        if self._durability == "none":
            ticket.future.add_done_callback(_swallow)
            at_once = self._loop.create_future()
            at_once.set_result(self.end)
            return at_once
        return ticket.future

    def remove_below(self, low: int) -> int:
        """Remove the segments that end at or below `low`; returns how many."""
        segments = segment_bases(self.folder)
        removed = 0
        for base, following in itertools.pairwise(segments):
            if following > low:
                break
            segment_path(self.folder, base).unlink(missing_ok=True)
            removed += 1
        return removed

    def close(self) -> None:
        """Commit what waits, and stop."""
        if self._closed:
            return
        self._closed = True
        while batch := self._take():
            self._queue.put(batch)
        self._queue.put(None)
        self._thread.join()
        self._abandon_segment()
        self._committed.close()

    # ---- in the event loop: who is committed together ----

    def _gather(self) -> None:
        """Hand what waits to the committer, when it is free and the expected senders are here."""
        if self._committing or not self._waiting or self._loop is None:
            return
        if len(self._waiting) >= self._expected:
            self._hand_over()
        elif self._timer is None:
            self._timer = self._loop.call_later(GATHER_SECONDS, self._hand_over)

    def _hand_over(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        batch = self._take()
        if batch:
            self._committing = True
            self._queue.put(batch)

    def _take(self) -> list[_Ticket]:
        """The next batch of what waits. `close` may ask from another thread."""
        with self._waiting_lock:
            size = count = 0
            while count < len(self._waiting) and size < BATCH_BYTES:
                size += len(self._waiting[count].body)
                count += 1
            batch = self._waiting[:count]
            del self._waiting[:count]
        return batch

    # ---- the committer thread ----

    def _commit_forever(self) -> None:
        while (batch := self._queue.get()) is not None:
            self._commit(batch)

    def _commit(self, batch: list[_Ticket]) -> None:
        done: list[tuple[_Ticket, int]] = []
        failure = ""
        try:
            self._write(batch, done)
        except OSError as error:
            failure = f"The journal at {self.folder} cannot be written: {error.strerror or error}."
            if failure != self.failed:
                log.error("%s Requests are refused until it can.", failure)
            self._abandon_segment()
        self._sequence += len(done)
        self.failed = failure
        assert self._loop is not None, "a ticket is made in a loop"
        failed = batch[len(done) :]
        if failed and self._durability == "none":
            log.error("%d acknowledged records are lost (durability is none).", len(failed))
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._resolve, done, failed, failure)

    def _resolve(self, done: list[tuple[_Ticket, int]], failed: list[_Ticket], failure: str) -> None:
        for ticket, end in done:
            if not ticket.future.done():  # a client may have gone
                ticket.future.set_result(end)
        for ticket in failed:
            if not ticket.future.done():
                ticket.future.set_exception(JournalUnavailable(failure))
        if done and self.on_commit is not None:
            self.on_commit(done[-1][1])
        # Those that were answered now will be back soon, if they send one after the other.
        self._committing = False
        self._expected = len(done) + len(failed) + len(self._waiting)
        self._gather()

    def _write(self, batch: list[_Ticket], done: list[tuple[_Ticket, int]]) -> None:
        """Write and sync; `done` grows as records become durable."""
        position = self.end
        parts: list[bytes | bytearray] = []
        written: list[tuple[_Ticket, int]] = []
        now = time.time_ns()
        for ticket in batch:
            size = HEADER.size + len(ticket.body)
            if self._fd < 0 or (position - self._base + size > self._capacity and position > self._base):
                self._flush(parts, written, done)
                parts, written = [], []
                self._open_segment(position, size)
            elif position == self._base and size > self._capacity:
                self._open_segment(position, size)  # a record larger than a segment gets its own
            sequence = self._sequence + len(done) + len(written)
            parts.append(encode_header(position, sequence, now, ticket.kind, ticket.body))
            parts.append(ticket.body)
            position += size
            written.append((ticket, position))
        self._flush(parts, written, done)

    def _flush(
        self,
        parts: list[bytes | bytearray],
        written: list[tuple[_Ticket, int]],
        done: list[tuple[_Ticket, int]],
    ) -> None:
        if not written:
            return
        offset = self.end - self._base
        synced = False
        if self._durability == "fsync" and _DSYNC and len(parts) <= _IOV_MAX:
            # One call instead of two: after each the thread must win the interpreter's lock anew.
            offset += os.pwritev(self._fd, parts, offset, _DSYNC)
            synced = offset == written[-1][1] - self._base
            if not synced:
                offset = self.end - self._base  # in part: again, the usual way
        if not synced:
            for first in range(0, len(parts), _IOV_MAX):
                offset = _write_all(self._fd, parts[first : first + _IOV_MAX], offset)
            if self._durability == "fsync":
                os.fdatasync(self._fd)
        self.commits += 1
        self.end = written[-1][1]
        self._publish(self.end)
        done.extend(written)

    def _open_segment(self, base: int, first_record: int) -> None:
        """Begin a segment at `base`; on failure there is none, and the next commit tries again."""
        self._abandon_segment()
        fd = os.open(
            segment_path(self.folder, base), os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600
        )
        capacity = max(self._segment_bytes, first_record)
        try:
            # Preallocated, a sync need not write the file's size, and a full disk shows here.
            os.posix_fallocate(fd, 0, capacity)
            os.fsync(fd)
            _sync_folder(self.folder)
        except OSError:
            os.close(fd)
            raise
        self._fd, self._base, self._capacity = fd, base, capacity

    def _abandon_segment(self) -> None:
        """Close the current segment, cut to what is committed in it."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):  # the zeros behind the end do no harm
                os.ftruncate(self._fd, self.end - self._base)
            os.close(self._fd)
            self._fd = -1

    def _publish(self, end: int) -> None:
        self._committed[:8] = end.to_bytes(8, "little")  # readers see it at once: it is the same memory

    def _recover(self, start: int) -> tuple[int, int]:
        """Find the end; returns it and the next sequence. The segment there is open afterwards."""
        segments = segment_bases(self.folder)
        committed = int.from_bytes(self._committed[:8], "little")
        end, sequence = (segments[-1] if segments else start), 0
        for base in reversed(segments):
            end_here, last = _scan_segment(segment_path(self.folder, base), base)
            end = max(end, end_here)
            if last is not None:
                sequence = last + 1
                break
        if committed > end and segments:
            # Synced once, unreadable now: not a torn tail. The reader quarantines and counts it.
            log.error("The journal's last %d committed bytes are damaged; they are skipped.", committed - end)
            end = committed
        if start > end:
            log.warning(
                "The journal ends at %d, the data set has consumed it to %d: going on there.", end, start
            )
        if segments and start <= end:
            base = segments[-1]
            fd = os.open(segment_path(self.folder, base), os.O_RDWR | os.O_CLOEXEC)
            if os.pread(fd, HEADER.size, end - base).strip(b"\0"):
                log.warning("A torn record at the journal's end was cut off; it was never acknowledged.")
            capacity = max(self._segment_bytes, end - base)
            os.ftruncate(fd, end - base)  # what a torn write left must not come back
            os.posix_fallocate(fd, 0, capacity)
            os.fsync(fd)
            self._fd, self._base, self._capacity = fd, base, capacity
        return max(end, start), sequence


def _scan_segment(path: Path, base: int) -> tuple[int, int | None]:
    """End of the last whole record in a segment, and that record's sequence."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        position, last = base, None
        stop = base + os.fstat(fd).st_size
        while True:
            record = read_record(fd, base, position, stop)
            if record is not None:
                position, last = record.end, record.sequence
                continue
            found = find_record(fd, base, position + 1, stop)
            if found is None:
                return position, last
            position = found
    finally:
        os.close(fd)


def identity(folder: Path) -> str:
    """The journal's identity; a fresh one for a folder without."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "id"
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        fresh = secrets.token_hex(8)
        temporary = folder / ".id"
        with open(temporary, "w") as file:
            file.write(fresh + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(folder)
        return fresh


def _write_all(fd: int, parts: Sequence[bytes | bytearray], offset: int) -> int:
    """pwritev until everything is written; returns the offset behind it."""
    views = [memoryview(part) for part in parts if part]
    while views:
        count = os.pwritev(fd, views, offset)
        offset += count
        while views and count >= len(views[0]):
            count -= len(views[0])
            views.pop(0)
        if views and count:
            views[0] = views[0][count:]
    return offset


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _swallow(future: "asyncio.Future[int]") -> None:
    if not future.cancelled():
        future.exception()
