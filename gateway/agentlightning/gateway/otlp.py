"""Spans in protobuf's wire form, put together from bytes.

The gateway writes a span with two dozen attributes for every model call: as message objects they cost more than all
else that recording needs. A test holds this against the protobuf library over random spans.
"""

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

__all__ = ["Value", "encode_attributes", "encode_request", "encode_span"]

Value = str | bool | int | float | bytes | Sequence[str] | Sequence[int]
_KIND: Final = b"\x30"
_START, _END, _FLAGS = b"\x39", b"\x41", b"\x85\x01"
_fixed64 = struct.Struct("<Q").pack
_double = struct.Struct("<d").pack
_SAMPLED: Final = _FLAGS + struct.pack("<I", 1)
_keys: dict[str, bytes] = {}
"""The encoded keys of attributes: their names are few."""


def encode_span(
    *,
    trace_id: str,
    span_id: str,
    parent_id: str | None,
    name: str,
    kind: int,
    start_ns: int,
    end_ns: int,
    attributes: Mapping[str, Value],
    error: str | None = None,
) -> bytes:
    """A span as OTLP has it. `error`: its message, if the span's status is an error."""
    parts = [
        _bytes(0x0A, bytes.fromhex(trace_id)),
        _bytes(0x12, bytes.fromhex(span_id)),
        _bytes(0x22, bytes.fromhex(parent_id)) if parent_id else b"",
        _bytes(0x2A, name.encode()),
        _KIND,
        _varint(kind),
        _START,
        _fixed64(start_ns),
        _END,
        _fixed64(max(start_ns, end_ns)),
        encode_attributes(attributes),
        _SAMPLED,
    ]
    if error is not None:
        parts.append(_bytes(0x7A, (_bytes(0x12, error.encode()) if error else b"") + b"\x18\x02"))
    return b"".join(parts)


def encode_attributes(attributes: Mapping[str, Value]) -> bytes:
    """The attributes of a span, each with its field's tag."""
    parts: list[bytes] = []
    for key, value in attributes.items():
        told = _keys.get(key)
        if told is None:
            told = _keys[key] = _bytes(0x0A, key.encode())
        known = _any(value)
        size = _varint(len(known))
        parts += (b"\x4a", _varint(len(told) + 1 + len(size) + len(known)), told, b"\x12", size, known)
    return b"".join(parts)


def encode_request(service: str, scope: str, spans: Iterable[bytes]) -> bytes:
    """An export request with the spans of one scope."""
    resource = _bytes(0x0A, _bytes(0x0A, b"service.name") + _bytes(0x12, _any(service)))
    told = [_bytes(0x0A, _bytes(0x0A, scope.encode()))]
    for span in spans:
        told += (b"\x12", _varint(len(span)), span)
    scoped = b"".join(told)
    return _bytes(0x0A, _bytes(0x0A, resource) + _bytes(0x12, scoped))


def _any(value: Value) -> bytes:
    if isinstance(value, str):
        return _bytes(0x0A, value.encode())
    if isinstance(value, bytes):
        return _bytes(0x3A, value)
    if isinstance(value, bool):
        return b"\x10\x01" if value else b"\x10\x00"
    if isinstance(value, int):
        return b"\x18" + _varint(value & 0xFFFF_FFFF_FFFF_FFFF)
    if isinstance(value, float):
        return b"\x21" + _double(value)
    return _bytes(0x2A, b"".join(_bytes(0x0A, _any(item)) for item in value))


def _bytes(tag: int, value: bytes) -> bytes:
    """A field of variable length; `tag` below 128."""
    return b"%c%b%b" % (tag, _varint(len(value)), value)


def _varint(value: int) -> bytes:
    if value < 0x80:
        return _SMALL[value]
    parts = bytearray()
    while value >= 0x80:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


_SMALL: Final = [bytes([value]) for value in range(0x80)]
