"""Spans from files: OTLP JSON, OTLP protobuf, and the `spans` table of a data set.

What a file is, its content says: JSON (one document, a list, or one per line, as the collector's file
exporter writes), protobuf (one message, or a stream of messages with their lengths), Parquet, or any
of these packed by gzip or zstd, as a whole or message by message.
"""

import gzip
import hashlib
import itertools
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, Final, cast

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from google.protobuf.message import DecodeError

from agentlightning.collector import json_stream, wire
from agentlightning.collector.otlp import decode_logs, decode_traces
from agentlightning.collector.otlp_json import decode_logs_json, decode_traces_json
from agentlightning.collector.span import Span
from agentlightning.collector.tables import CALL_COLUMNS, spans_from_table
from agentlightning.proto.dataset import MANIFESTS, open_dataset
from agentlightning.proto.errors import DataError
from agentlightning.proto.schemas import conform

__all__ = ["find_files", "fingerprint", "read_file"]

Refuse = Callable[[str], None]
"""Called with a sentence for every part of a file that cannot be read; the rest goes on."""
Advance = Callable[[int], None]
"""Called with a number of bytes that have been read of a file."""

GZIP: Final = b"\x1f\x8b"
ZSTD: Final = b"\x28\xb5\x2f\xfd"
PARQUET: Final = b"PAR1"
MAX_BYTES: Final = 4 << 30
"""Of one file after decompression, where it must be read whole."""
WHOLE_BYTES: Final = 8 << 20
"""A file up to this size is read at once; beyond it piece by piece."""
BATCH_ROWS: Final = 4096
_RESOURCE: Final = 0x0A
"""Tag of field 1 of a message: the spans, or the log records, of a resource."""
_LONGEST_LENGTH: Final = 6
_MARK: Final = b"\xef\xbb\xbf"
_SPAN_COLUMNS: Final = {"trace_id", "span_id", "attributes", "resource", "signal"}


def find_files(path: Path) -> list[Path]:
    """The files to read for an input: itself, or what is in the folder. Raises DataError if there is none."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DataError(f"{path} does not exist.")
    for root in (path, path / "data"):
        if (root / MANIFESTS).is_dir():  # only what its manifests name exists
            return [root]
    files = sorted(
        file
        for file in path.rglob("*")
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts)
    )
    if not files:
        raise DataError(f"The folder {path} holds no files.")
    return files


def fingerprint(path: Path) -> str:
    """What the content of a file, or of a data set's spans, depends on; the name does not matter."""
    files = open_dataset(path).files("spans") if path.is_dir() else [path]
    digest = hashlib.sha256()
    for file in files:
        try:
            with open(file, "rb") as content:
                digest.update(hashlib.file_digest(content, "sha256").digest())
        except OSError:
            continue  # read_file says so
    return digest.hexdigest()


def read_file(
    path: Path, counters: Counter[str], refuse: Refuse, advance: Advance = lambda size: None
) -> Iterator[Span]:
    """The spans of a file, or of a data set's folder. What cannot be read is refused with a sentence."""
    if path.is_dir():
        try:
            for part in open_dataset(path).parts({"spans": None, "transitions": CALL_COLUMNS}):
                yield from spans_from_table(part["spans"], part["transitions"], counters)
        except DataError as error:
            refuse(str(error))
        return
    try:
        with _Counted(path, advance) as file:
            head = file.peek()
            if head.startswith(PARQUET):
                yield from _read_parquet(path, counters, refuse)
            elif head.lstrip(_MARK + b" \t\r\n")[:1] in (b"{", b"["):
                yield from _read_json(path, file, counters, refuse)
            elif head[4:8] == ZSTD:
                yield from _read_packed(path, file, counters, refuse)
            elif (
                len(file.peek(WHOLE_BYTES + 1)) > WHOLE_BYTES
                and (length := _framing(file.peek())) is not None
            ):
                yield from _read_frames(path, file, length, counters, refuse)
            else:
                data = file.rest()
                if data.strip():
                    yield from _read_protobuf(path, data, counters, refuse)
                else:
                    refuse(f"{path} is empty.")
    except (OSError, EOFError, zlib.error, DataError) as error:
        refuse(f"{path} cannot be read: {error}.")


class _Counted:
    """A file, unpacked if it is packed; `advance` learns how much of it is behind us."""

    def __init__(self, path: Path, advance: Advance) -> None:
        self._raw = open(path, "rb")  # noqa: SIM115 - closed by __exit__
        self._advance = advance
        self._told = 0
        mark = self._raw.read(4)
        self._raw.seek(0)
        self._file: IO[bytes] = self._raw
        if mark[:2] == GZIP:
            self._file = cast(IO[bytes], gzip.GzipFile(fileobj=self._raw))
        elif mark == ZSTD:
            self._file = cast(IO[bytes], pa.CompressedInputStream(pa.PythonFile(self._raw), "zstd"))
        self._head = b""

    def __enter__(self) -> "_Counted":
        return self

    def __exit__(self, *_: object) -> None:
        self._tell()
        self._file.close()
        self._raw.close()

    def peek(self, size: int = 1 << 16) -> bytes:
        """The beginning of what is left, at least so much of it if there is so much."""
        while len(self._head) < size:
            chunk = self._file.read(size - len(self._head))
            if not chunk:
                break
            self._head += chunk
        return self._head

    def read(self, size: int) -> bytes:
        """The next bytes; none at the end."""
        self._tell()
        if self._head:
            data, self._head = self._head[:size], self._head[size:]
            return data
        return self._file.read(size)

    def take(self, size: int) -> bytes:
        """Exactly so many bytes; fewer at the end."""
        parts = []
        while size:
            part = self.read(size)
            if not part:
                break
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def rest(self) -> bytes:
        """All that is left."""
        data = self._head + self._file.read(MAX_BYTES + 1)
        self._head = b""
        if len(data) > MAX_BYTES:
            raise DataError(f"it holds more than {MAX_BYTES >> 30} GiB")
        return data

    def lines(self) -> Iterator[bytes]:
        """What is left, line by line."""
        left = b""
        while chunk := self.read(1 << 20):
            *whole, left = (left + chunk).split(b"\n")
            yield from whole
        yield left

    def _tell(self) -> None:
        position = self._raw.tell()
        self._advance(position - self._told)
        self._told = position


def _read_parquet(path: Path, counters: Counter[str], refuse: Refuse) -> Iterator[Span]:
    try:
        file = pq.ParquetFile(path)
        missing = sorted(_SPAN_COLUMNS - set(file.schema_arrow.names))
        if missing:
            refuse(
                f"{path} is not a file of the spans table: it has no column {missing[0]}. "
                "Give the data set's folder, or files below its spans/ folder."
            )
            return
        calls = None
        beside = path.parent.parent / "transitions" / path.name
        if beside.is_file():
            calls = conform("transitions", pq.read_table(beside)).select(CALL_COLUMNS)
        before = counters["without_transition"]
        for batch in file.iter_batches(BATCH_ROWS):
            yield from spans_from_table(conform("spans", pa.Table.from_batches([batch])), calls, counters)
        lost = counters["without_transition"] - before
        if lost:
            refuse(
                f"{path} leaves {lost} token lists and bodies of calls to {beside}, which is not there: they are "
                "missing. Give the data set's folder."
            )
    except pa.ArrowException as error:
        refuse(f"{path} cannot be read as Parquet: {error}.")


def _read_json(path: Path, file: _Counted, counters: Counter[str], refuse: Refuse) -> Iterator[Span]:
    head = file.peek(WHOLE_BYTES + 1)
    if len(head) > WHOLE_BYTES and head.removeprefix(_MARK).lstrip()[:1] == b"{":
        if _is_lines(head):
            for number, line in enumerate(file.lines(), 1):
                if line.strip():
                    yield from _read_line(path, number, line.removeprefix(_MARK), counters, refuse)
            return
        try:
            parts = json_stream.documents(file.read)
            first = next(parts, None)
            if first is None:  # no spans: whatever its beginning says that it is
                part = b'{"resourceMetrics":[]}' if b'"resourceMetrics"' in head[:4096] else b"{}"
                yield from _read_document(str(path), orjson.loads(part), counters, refuse)
                return
            for document in itertools.chain([first], parts):
                yield from _read_document(str(path), document, counters, refuse)
        except ValueError as error:
            refuse(f"{path} is not JSON to its end: {error}. What comes before is converted.")
        return
    data = file.rest().removeprefix(_MARK)
    try:
        document = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        lines = data.splitlines()
        if len(lines) < 2:
            refuse(f"{path} is neither JSON nor JSON lines: {error}.")
            return
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield from _read_line(path, number, line, counters, refuse)
        return
    for index, part in enumerate(document if isinstance(document, list) else [document]):
        where = f"{path}, document {index + 1}" if isinstance(document, list) else str(path)
        yield from _read_document(where, part, counters, refuse)


def _is_lines(head: bytes) -> bool:
    """Whether a large file holds a document per line, rather than one that is broken into lines."""
    line, end, _ = head.removeprefix(_MARK).partition(b"\n")
    return bool(end) and line.strip().startswith(b"{") and line.strip().endswith(b"}")


def _read_line(
    path: Path, number: int, line: bytes, counters: Counter[str], refuse: Refuse
) -> Iterable[Span]:
    try:
        document = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        refuse(f"{path}, line {number} is not JSON: {error}. The line is left out.")
        return []
    return _read_document(f"{path}, line {number}", document, counters, refuse)


def _read_document(where: str, document: Any, counters: Counter[str], refuse: Refuse) -> list[Span]:
    if isinstance(document, dict):
        try:
            if "resourceSpans" in document or "resource_spans" in document:
                return decode_traces_json(document, counters)
            if "resourceLogs" in document or "resource_logs" in document:
                return decode_logs_json(document, counters)
        except ValueError as error:
            refuse(f"{where} is left out: {error}.")
            return []
        if "resourceMetrics" in document:
            counters["metrics_ignored"] += 1
            return []
    refuse(
        f"{where} is not OTLP/JSON: an object with resourceSpans or resourceLogs was expected. "
        "Export traces as OTLP, for example with the collector's file exporter."
    )
    return []


def _read_protobuf(path: Path, data: bytes, counters: Counter[str], refuse: Refuse) -> Iterator[Span]:
    messages = [data] if data[0] == _RESOURCE else _split(data)
    if messages is None:
        refuse(
            f"{path} is neither OTLP JSON, OTLP protobuf (one message, or messages with their lengths) nor Parquet."
        )
        return
    for number, message in enumerate(messages, 1):
        where = str(path) if len(messages) == 1 else f"{path}, message {number}"
        try:
            yield from _decode_message(message, counters)
        except ValueError as error:
            refuse(f"{where} is left out: {error}.")


def _framing(head: bytes) -> Callable[[bytes, int], tuple[int, int]] | None:
    """How the pieces of a large protobuf file are told apart; None if it is no protobuf that we know.

    A message itself is pieces too: each of its resources is a field with a length.
    """
    if head[0] == _RESOURCE:
        return _field_length
    for length in (_fixed_length, _varint_length):
        size, begin = length(head, 0)
        if size > 0 and head[begin : begin + 1] == bytes([_RESOURCE]):
            return length
    return None


def _read_frames(
    path: Path,
    file: _Counted,
    length: Callable[[bytes, int], tuple[int, int]],
    counters: Counter[str],
    refuse: Refuse,
) -> Iterator[Span]:
    number = 0
    while head := file.peek(_LONGEST_LENGTH):
        number += 1
        size, begin = length(head, 0)
        if size < 0 or size > MAX_BYTES:
            refuse(f"{path}, message {number} has no length: the rest of the file is left out.")
            return
        frame = file.take(begin + size)
        if len(frame) < begin + size:
            refuse(f"{path}, message {number} is cut off. It is left out.")
            return
        try:
            yield from _decode_message(frame if length is _field_length else frame[begin:], counters)
        except ValueError as error:
            refuse(f"{path}, message {number} is left out: {error}.")


def _read_packed(path: Path, file: _Counted, counters: Counter[str], refuse: Refuse) -> Iterator[Span]:
    """The collector's file exporter with compression: each message is a zstd frame behind its length."""
    number = 0
    while head := file.take(4):
        number += 1
        where, size = f"{path}, message {number}", int.from_bytes(head, "big")
        frame = file.take(size)
        if len(head) < 4 or len(frame) < size:
            refuse(f"{where} is cut off. It is left out.")
            return
        try:
            message = pa.CompressedInputStream(pa.BufferReader(frame), "zstd").read(MAX_BYTES + 1)
            if len(message) > MAX_BYTES:
                raise ValueError(f"it holds more than {MAX_BYTES >> 30} GiB")
            if message[:1] == b"{":
                yield from _read_document(where, orjson.loads(message), counters, refuse)
            else:
                yield from _decode_message(message, counters)
        except (OSError, ValueError) as error:
            refuse(f"{where} is left out: {error}.")


def _field_length(data: bytes, position: int) -> tuple[int, int]:
    if data[position] != _RESOURCE:
        return -1, position
    return _varint_length(data, position + 1)


def _decode_message(message: bytes, counters: Counter[str]) -> list[Span]:
    """Spans or log records: on the wire both are field 1, and only what is in them tells them apart."""
    found: Counter[str] = Counter()
    try:
        spans = decode_traces(message, found)
    except ValueError:
        if _holds_logs(message):
            return decode_logs(message, counters)
        raise
    if not spans and found["invalid_id"] and _holds_logs(message):
        return decode_logs(message, counters)
    counters.update(found)
    return spans


def _holds_logs(message: bytes) -> bool:
    try:
        request = wire.LogsRequest.FromString(message)
    except DecodeError:
        return False
    records = (r for resource in request.resource_logs for s in resource.scope_logs for r in s.log_records)
    return any(record.time_unix_nano or record.observed_time_unix_nano for record in records)


def _split(data: bytes) -> list[bytes] | None:
    """The messages of a stream: lengths as varints (protobuf's way) or as four bytes (the file exporter's)."""
    return _split_by(data, _fixed_length) or _split_by(data, _varint_length)


def _split_by(data: bytes, length: Callable[[bytes, int], tuple[int, int]]) -> list[bytes] | None:
    messages = []
    position = 0
    while position < len(data):
        size, begin = length(data, position)
        if size < 0 or begin + size > len(data) or (size and data[begin] != 0x0A):
            return None
        messages.append(data[begin : begin + size])
        position = begin + size
    return messages


def _fixed_length(data: bytes, position: int) -> tuple[int, int]:
    if position + 4 > len(data):
        return -1, position
    return int.from_bytes(data[position : position + 4], "big"), position + 4


def _varint_length(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    for index in range(position, min(position + 5, len(data))):
        value |= (data[index] & 0x7F) << shift
        if data[index] < 0x80:
            return value, index + 1
        shift += 7
    return -1, position
