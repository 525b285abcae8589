"""The journal's format, and its reader.

A record is a header (magic, length, crc32, kind, sequence, time) and a body. A position is one integer,
the byte offset in the endless log; a segment file is named by the position at which it begins.
"""

import enum
import logging
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from isal.isal_zlib import crc32

from agentlightning.proto.errors import DataError

__all__ = [
    "HEADER",
    "JournalReader",
    "Kind",
    "Record",
    "encode_header",
    "find_record",
    "read_record",
    "segment_bases",
    "segment_path",
]

log = logging.getLogger(__name__)

MAGIC: Final = b"ALJ1"
HEADER: Final = struct.Struct("<4sIIB3xQQ")  # magic, body length, crc32, kind, sequence, time in ns
_CHECKED: Final = struct.Struct(
    "<QIBQQ"
)  # what the checksum covers before the body; begins with the position
_SCAN: Final = 1 << 20


class Kind(enum.IntEnum):
    """What a record's body is."""

    QUARANTINED = 0
    """Never written: a reader's report that it skipped damaged bytes."""
    TRACES = 1
    """ExportTraceServiceRequest, protobuf."""
    TRACES_JSON = 2
    LOGS = 3
    """ExportLogsServiceRequest, protobuf."""
    LOGS_JSON = 4
    SEAL = 5
    """JSON: `{"attempts": [{"rollout_id", "attempt", "calls_expected"}]}`."""


@dataclass(frozen=True, slots=True)
class Record:
    """One record of the journal."""

    position: int
    end: int
    """Where to read on."""
    sequence: int
    """Count of records before this one."""
    time_ns: int
    """When it was accepted, Unix time."""
    kind: Kind
    body: bytes


class JournalReader:
    """Reads beside the writer, in another process if need be."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.id = (folder / "id").read_text().strip()
        self._committed = os.open(folder / "committed", os.O_RDONLY | os.O_CLOEXEC)
        self._bases: list[int] = []
        self._open: dict[int, int] = {}  # base → file descriptor

    def committed(self) -> int:
        """The durable end."""
        return int.from_bytes(os.pread(self._committed, 8, 0), "little")

    def read_from(self, position: int) -> Iterator[Record]:
        """Records from `position` to the durable end of now. Damaged bytes come as one QUARANTINED record."""
        limit = self.committed()
        self._bases = segment_bases(self.folder)  # after `limit`, so that every segment below it is listed
        while position < limit:
            base, following = self._segment(position)
            position = max(position, base)
            stop = min(limit, following or limit)
            fd = self._descriptor(base)
            record = read_record(fd, base, position, stop)
            if record is None:
                found = find_record(fd, base, position + 1, stop)
                record = self._quarantine(fd, base, position, stop if found is None else found)
            yield record
            position = record.end

    def read_at(self, position: int) -> Record:
        """One record again. Raises DataError if it is gone or damaged."""
        if not self._bases or position < self._bases[0]:
            self._bases = segment_bases(self.folder)
        base, _ = self._segment(position)
        record = (
            read_record(self._descriptor(base), base, position, self.committed())
            if base <= position
            else None
        )
        if record is None:
            raise DataError(f"The journal at {self.folder} has no record at position {position}.")
        return record

    def close(self) -> None:
        for fd in (self._committed, *self._open.values()):
            os.close(fd)
        self._open.clear()

    def _segment(self, position: int) -> tuple[int, int | None]:
        """Base of the segment for a position, and of the one after it. Before the first: the first."""
        if not self._bases:
            raise DataError(f"The journal at {self.folder} has no segments.")
        index = max(0, sum(base <= position for base in self._bases) - 1)
        return self._bases[index], (self._bases[index + 1] if index + 1 < len(self._bases) else None)

    def _descriptor(self, base: int) -> int:
        if base not in self._open:
            while len(self._open) >= 8:
                os.close(self._open.pop(next(iter(self._open))))
            self._open[base] = os.open(segment_path(self.folder, base), os.O_RDONLY | os.O_CLOEXEC)
        return self._open[base]

    def _quarantine(self, fd: int, base: int, position: int, end: int) -> Record:
        folder = self.folder / "quarantine"
        folder.mkdir(exist_ok=True)
        kept = os.pread(fd, end - position, position - base)
        (folder / f"{position:016x}.bin").write_bytes(kept)
        log.error(
            "Journal bytes %d–%d are damaged; a copy is in %s and reading goes on.", position, end, folder
        )
        return Record(position, end, -1, 0, Kind.QUARANTINED, b"")


def encode_header(position: int, sequence: int, now: int, kind: Kind, body: bytes | bytearray) -> bytes:
    crc = crc32(body, crc32(_CHECKED.pack(position, len(body), kind, sequence, now)))
    return HEADER.pack(MAGIC, len(body), crc, kind, sequence, now)


def read_record(fd: int, base: int, position: int, stop: int) -> Record | None:
    """The record at `position` if it is whole and ends at or before `stop`.

    Always pread: a buffered file returns the zeros that it read ahead before they were overwritten.
    """
    head = os.pread(fd, HEADER.size, position - base)
    if len(head) < HEADER.size or head[:4] != MAGIC:
        return None
    _, length, crc, kind, sequence, time_ns = HEADER.unpack(head)
    end = position + HEADER.size + length
    if end > stop:
        return None
    body = os.pread(fd, length, position - base + HEADER.size)
    # The position is in the checksum: a record that somebody sent inside a body is not one of ours.
    if crc32(body, crc32(_CHECKED.pack(position, length, kind, sequence, time_ns))) != crc:
        return None
    try:
        return Record(position, end, sequence, time_ns, Kind(kind), body)
    except ValueError:
        return None


def find_record(fd: int, base: int, position: int, stop: int) -> int | None:
    """Where the next whole record begins, at or after `position`."""
    offset = position - base
    while offset < stop - base:
        block = os.pread(fd, _SCAN, offset)
        if len(block) < len(MAGIC):
            return None
        at = block.find(MAGIC)
        while at >= 0:
            if read_record(fd, base, base + offset + at, stop) is not None:
                return base + offset + at
            at = block.find(MAGIC, at + 1)
        offset += len(block) - len(MAGIC) + 1
    return None


def segment_bases(folder: Path) -> list[int]:
    """Bases of the segments, ascending."""
    names = (name for name in os.listdir(folder) if name.endswith(".log"))
    return sorted(int(name.removesuffix(".log"), 16) for name in names)


def segment_path(folder: Path, base: int) -> Path:
    return folder / f"{base:016x}.log"
