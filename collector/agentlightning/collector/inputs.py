"""Spans from files: OTLP JSON, OTLP protobuf, and the `spans` table of a data set.

What a file is, its content says: JSON (one document, a list, or one per line, as the collector's file
exporter writes), protobuf (one message, or a stream of messages with their lengths), Parquet, or any
of these gzipped.
"""

import gzip
import hashlib
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from google.protobuf.message import DecodeError

from agentlightning.collector import wire
from agentlightning.collector.otlp import decode_logs, decode_traces
from agentlightning.collector.otlp_json import decode_logs_json, decode_traces_json
from agentlightning.collector.span import Span
from agentlightning.collector.tables import spans_from_table
from agentlightning.proto.dataset import MANIFESTS, open_dataset
from agentlightning.proto.errors import DataError
from agentlightning.proto.schemas import conform

__all__ = ["find_files", "fingerprint", "read_file"]

Refuse = Callable[[str], None]
"""Called with a sentence for every part of a file that cannot be read; the rest goes on."""

GZIP: Final = b"\x1f\x8b"
PARQUET: Final = b"PAR1"
MAX_BYTES: Final = 4 << 30
"""Of one file after decompression."""
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


def read_file(path: Path, counters: Counter[str], refuse: Refuse) -> Iterator[Span]:
    """The spans of a file, or of a data set's folder. What cannot be read is refused with a sentence."""
    if path.is_dir():
        try:
            table = open_dataset(path).table("spans")
        except DataError as error:
            refuse(str(error))
            return
        yield from spans_from_table(table, counters)
        return
    try:
        data = path.read_bytes()
        if data.startswith(GZIP):
            data = _decompress(data)
    except (OSError, EOFError, zlib.error, DataError) as error:
        refuse(f"{path} cannot be read: {error}.")
        return
    if data.startswith(PARQUET):
        yield from _read_parquet(path, counters, refuse)
    elif not data.strip():
        refuse(f"{path} is empty.")
    elif data.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"["):
        yield from _read_json(path, data.removeprefix(b"\xef\xbb\xbf"), counters, refuse)
    else:
        yield from _read_protobuf(path, data, counters, refuse)


def _decompress(data: bytes) -> bytes:
    with gzip.GzipFile(fileobj=pa.BufferReader(data)) as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise DataError(f"it holds more than {MAX_BYTES >> 30} GiB")
    return content


def _read_parquet(path: Path, counters: Counter[str], refuse: Refuse) -> Iterator[Span]:
    try:
        table = pq.read_table(path, memory_map=False)
    except (OSError, pa.ArrowException) as error:
        refuse(f"{path} cannot be read as Parquet: {error}.")
        return
    missing = sorted(_SPAN_COLUMNS - set(table.column_names))
    if missing:
        refuse(
            f"{path} is not a file of the spans table: it has no column {missing[0]}. "
            "Give the data set's folder, or files below its spans/ folder."
        )
        return
    yield from spans_from_table(conform("spans", table), counters)


def _read_json(path: Path, data: bytes, counters: Counter[str], refuse: Refuse) -> Iterator[Span]:
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
    messages = [data] if data[0] == 0x0A else _split(data)  # 0x0A: field 1 of the message itself
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
