"""What both receivers do with a body: check it, store it, count it; or refuse it with a reason.

The one promise: when `accept` returns, the body is in the journal.
"""

import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from agentlightning.collector import wire
from agentlightning.collector.journal import Journal, JournalUnavailable, Kind
from agentlightning.collector.wire import Checked

__all__ = ["BODY_BYTES", "Intake", "Refused", "gunzip"]

BODY_BYTES: Final = 64 << 20
"""The largest body, before and after decompression."""
HELD_BYTES: Final = 128 << 20
"""Bodies that are being received or wait for their sync, all together."""
JOURNAL_BYTES: Final = 8 << 30
"""What the journal may hold for the converter before senders are asked to wait."""
RETRY_SECONDS: Final = 1

_CHECKS: Final[dict[Kind, Callable[[bytes], Checked]]] = {
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
        self._held = 0
        self._held_bytes = held_bytes
        self._journal_bytes = journal_bytes

    @property
    def unconverted(self) -> int:
        """Bytes in the journal that the converter still needs."""
        return max(0, self.journal.end - self.low)

    async def accept(self, kind: Kind, body: bytes) -> Checked:
        """Store a body. Raises Refused, and then it is not stored."""
        try:
            checked = _CHECKS[kind](body)
        except wire.Malformed as error:
            raise Refused("malformed", str(error)) from None
        if checked.items > checked.rejected:
            if self.unconverted > self._journal_bytes:
                raise Refused(
                    "journal_full",
                    f"{self.unconverted >> 20} MiB wait for conversion, the limit is {self._journal_bytes >> 20}.",
                )
            try:
                await self.journal.append(kind, body)
            except JournalUnavailable as error:
                raise Refused("journal_unavailable", str(error)) from None
        self.accepted["requests"] += 1
        self.accepted["bytes"] += len(body)
        self.accepted[_NAMES[kind]] += checked.items - checked.rejected
        if checked.rejected:
            self.refused["invalid_id"] += checked.rejected
        return checked

    @contextmanager
    def holding(self) -> "Iterator[Hold]":
        """Account for the memory of one request while it is here."""
        hold = Hold(self)
        try:
            yield hold
        finally:
            self._held -= hold.bytes

    def grow(self, size: int) -> None:
        """Raises Refused if memory for `size` more bytes is not there."""
        if self._held and self._held + size > self._held_bytes:
            raise Refused("busy", "The collector holds as many unwritten bytes as it may.")
        self._held += size


class Hold:
    """The bytes that one request holds."""

    def __init__(self, intake: Intake) -> None:
        self.bytes = 0
        self._intake = intake

    def add(self, size: int) -> None:
        """Raises Refused if it cannot be."""
        self._intake.grow(size)
        self.bytes += size


def gunzip(data: bytes, limit: int) -> bytes:
    """Decompress, members and zero padding included. Raises Refused for a bomb or damaged data."""
    parts: list[bytes] = []
    room = limit
    while data:
        member = zlib.decompressobj(wbits=31)
        try:
            part = member.decompress(data, room + 1)
        except zlib.error as error:
            raise Refused("malformed", f"The body is not valid gzip: {error}.") from None
        room -= len(part)
        if room < 0:
            raise Refused("too_large", f"The body is larger than {limit} bytes when decompressed.")
        if not member.eof:
            raise Refused("malformed", "The gzip body ends too early.")
        parts.append(part)
        data = member.unused_data.lstrip(b"\0")
    return parts[0] if len(parts) == 1 else b"".join(parts)
