"""What both receivers do with a body: check it, store it, count it; or refuse it with a reason.

The one promise: when `accept` returns, the body is in the journal.
"""

import asyncio
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Final

from isal import isal_zlib
from isal.igzip_lib import IsalError

from agentlightning.collector import wire
from agentlightning.collector.journal import Journal, JournalUnavailable, Kind
from agentlightning.collector.wire import Checked

__all__ = ["ACK_SECONDS", "BODY_BYTES", "Hold", "Intake", "Latency", "Refused", "Storing", "gunzip"]

BODY_BYTES: Final = 64 << 20
"""The largest body, before and after decompression."""
HELD_BYTES: Final = 128 << 20
"""Bodies that are being received or wait for their sync, all together."""
JOURNAL_BYTES: Final = 8 << 30
"""What the journal may hold for the converter before senders are asked to wait."""
RETRY_SECONDS: Final = 1
ACK_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
"""Bounds of the histogram."""

Body = bytes | bytearray

_CHECKS: Final[dict[Kind, Callable[[Body], Checked]]] = {
    Kind.TRACES: wire.check_traces,
    Kind.TRACES_JSON: wire.check_traces_json,
    Kind.LOGS: wire.check_logs,
    Kind.LOGS_JSON: wire.check_logs_json,
}
_NAMES: Final = {
    Kind.TRACES: "spans",
    Kind.TRACES_JSON: "spans",
    Kind.LOGS: "log_records",
    Kind.LOGS_JSON: "log_records",
}


class Refused(Exception):
    """A request that is not accepted. `reason` is the counter's name, the message is for the sender."""

    HTTP: Final = {
        "malformed": 400,
        "unauthorized": 401,
        "too_large": 413,
        "slow": 408,
        "media_type": 415,
        "busy": 503,
        "journal_full": 503,
        "journal_unavailable": 503,
    }

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.status = self.HTTP[reason]

    @property
    def retryable(self) -> bool:
        """Whether the sender should try again with the same body."""
        return self.status == 503


class Intake:
    """The way into the journal."""

    def __init__(
        self,
        journal: Journal,
        *,
        body_bytes: int = BODY_BYTES,
        held_bytes: int = HELD_BYTES,
        journal_bytes: int = JOURNAL_BYTES,
    ) -> None:
        self.journal = journal
        self.body_bytes = body_bytes
        self.low = journal.begin
        """What the converter still needs begins here."""
        self.accepted: Counter[str] = Counter()
        """Acknowledged: requests, spans, log_records, bytes."""
        self.refused: Counter[str] = Counter()
        """Requests by reason; and `invalid_id`, spans that were refused in part."""
        self.latency = Latency()
        self._held = 0
        self._held_bytes = held_bytes
        self._journal_bytes = journal_bytes

    @property
    def unconverted(self) -> int:
        """Bytes in the journal that the converter still needs."""
        return max(0, self.journal.end - self.low)

    @property
    def unready(self) -> str:
        """Why no body would be accepted now; empty if one would be."""
        if self.unconverted > self._journal_bytes:
            return self._full()
        return self.journal.failed

    async def accept(self, kind: Kind, body: Body) -> Checked:
        """Store a body. Raises Refused, and then it is not stored."""
        storing = self.store(kind, body)
        if storing.stored is not None:
            try:
                await storing.stored
            except JournalUnavailable as error:
                raise Refused("journal_unavailable", str(error)) from None
        return self.count(storing)

    def store(self, kind: Kind, body: Body) -> "Storing":
        """Begin to store a body; when `stored` is done without an exception, `count` it. Raises Refused."""
        began = time.perf_counter()
        try:
            checked = _CHECKS[kind](body)
        except wire.Malformed as error:
            raise Refused("malformed", str(error)) from None
        stored = None
        if checked.items > checked.rejected:
            if self.unconverted > self._journal_bytes:
                raise Refused("journal_full", self._full())
            try:
                stored = self.journal.append(kind, body)
            except JournalUnavailable as error:
                raise Refused("journal_unavailable", str(error)) from None
        return Storing(kind, len(body), checked, began, stored)

    def count(self, storing: "Storing") -> Checked:
        """What has been stored is accepted."""
        checked, accepted = storing.checked, self.accepted
        accepted["requests"] += 1
        accepted["bytes"] += storing.size
        accepted[_NAMES[storing.kind]] += checked.items - checked.rejected
        if checked.rejected:
            self.refused["invalid_id"] += checked.rejected
        self.latency.observe(time.perf_counter() - storing.began)
        return checked

    def grow(self, size: int) -> None:
        """Raises Refused if memory for `size` more bytes is not there."""
        if self._held and self._held + size > self._held_bytes:
            raise Refused("busy", "The collector holds as many unwritten bytes as it may.")
        self._held += size

    def shrink(self, size: int) -> None:
        """The memory is free again."""
        self._held -= size

    def _full(self) -> str:
        return f"{self.unconverted >> 20} MiB wait for conversion, the limit is {self._journal_bytes >> 20}."


@dataclass(slots=True)
class Storing:
    """A body on its way into the journal."""

    kind: Kind
    size: int
    checked: Checked
    began: float
    stored: "asyncio.Future[int] | None"
    """Done when it is as durable as was asked for; None if there is nothing to be stored."""


class Latency:
    """A histogram of seconds; prometheus_client's own costs ten times as much to count one."""

    def __init__(self) -> None:
        self.counts = [0] * (len(ACK_SECONDS) + 1)
        """Not cumulative; the last one is for what took longer than the last bound."""
        self.sum = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(ACK_SECONDS, seconds)] += 1
        self.sum += seconds


class Hold:
    """The memory that one request holds while it is here."""

    def __init__(self, intake: Intake) -> None:
        self.bytes = 0
        self._intake = intake

    def __enter__(self) -> "Hold":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def add(self, size: int) -> None:
        """Raises Refused if it cannot be."""
        self._intake.grow(size)
        self.bytes += size

    def release(self) -> None:
        self._intake.shrink(self.bytes)
        self.bytes = 0


def gunzip(data: Body, limit: int) -> bytes:
    """Decompress, members and zero padding included. Raises Refused for a bomb or damaged data."""
    parts: list[bytes] = []
    room = limit
    while data:
        member = isal_zlib.decompressobj(wbits=31)
        try:
            part = member.decompress(data, room + 1)
        except IsalError as error:  # type: ignore[misc]  # its stub says that it is an instance
            raise Refused("malformed", f"The body is not valid gzip: {error}.") from None
        room -= len(part)
        if room < 0:
            raise Refused("too_large", f"The body is larger than {limit} bytes when decompressed.")
        if not member.eof:
            raise Refused("malformed", "The gzip body ends too early.")
        parts.append(part)
        data = member.unused_data.lstrip(b"\0")
    return parts[0] if len(parts) == 1 else b"".join(parts)
