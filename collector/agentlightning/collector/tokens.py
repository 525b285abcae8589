"""Token ids and log-probabilities, in whatever form they came, as packed bytes.

Packed (little-endian int32, float32) is what the data set is built from. Accepted: the packed bytes,
base64 of them, a list of numbers, a JSON array. Arrays on the wire are packed without an object per
token: thirty times faster than reading them one by one.
"""

import array
import base64
import binascii
from typing import Any, Final

import numpy as np
import orjson

from agentlightning.proto.attributes import PROMPT_TOKEN_IDS, RESPONSE_LOGPROBS, RESPONSE_TOKEN_IDS
from agentlightning.proto.packed import pack_floats, pack_ids

__all__ = ["TOKEN_ATTRIBUTES", "count", "pack", "pack_array"]

TOKEN_ATTRIBUTES: Final = {PROMPT_TOKEN_IDS: False, RESPONSE_TOKEN_IDS: False, RESPONSE_LOGPROBS: True}
"""The attributes that hold tokens, and whether their elements are floats."""

WIDTH: Final = 4
"""Bytes per element."""

# The wire form of one element of an OTLP array: tag and length of an AnyValue, then its own field.
_ELEMENT: Final = 0x0A  # ArrayValue.values
_DOUBLE: Final = 0x21  # AnyValue.double_value, eight bytes
_DOUBLE_SIZE: Final = 11
_INT_SIZE: Final = 8  # at most: two tags (the inner is 0x18, int_value), a length, five bytes of varint
# numpy's unsigned words mix with nothing but themselves.
_UINT_SIZE, _U2, _U8, _U24 = (np.uint64(n) for n in (_INT_SIZE, 2, 8, 24))
_HEADS: Final = np.uint64(0xFF00FF)
_INT_HEADS: Final = np.uint64(0x18 << 16 | _ELEMENT)
_BYTE: Final = np.uint64(0xFF)
_SEVEN_BITS: Final = np.uint64(0x7F)
_ALL: Final = np.uint64(2**64 - 1)
_MAX_INT: Final = np.uint64(2**31 - 1)


def count(packed: bytes | None) -> int:
    """How many elements there are."""
    return 0 if packed is None else len(packed) // WIDTH


def pack(value: Any, *, floats: bool) -> bytes | None:
    """An attribute's value as packed bytes; None if it is absent. Raises ValueError with the reason in a word."""
    if value is None:
        return None
    if isinstance(value, str):
        value = _from_text(value)
    if isinstance(value, bytes):
        if len(value) % WIDTH:
            raise ValueError("length")
        return value
    if not isinstance(value, list):
        raise ValueError("type")
    try:
        if floats:
            return pack_floats(value)
        return pack_ids(value)
    except TypeError:
        raise ValueError("type") from None
    except OverflowError:
        raise ValueError("range") from None


def pack_array(data: bytes, *, floats: bool) -> bytes | None:
    """The bytes of an OTLP `ArrayValue` of numbers, packed; None if it holds anything else."""
    if not data:
        return b""
    raw = np.frombuffer(data, np.uint8)
    return _pack_doubles(raw) if floats else _pack_integers(raw)


def _from_text(text: str) -> Any:
    try:
        if text.lstrip().startswith("["):
            return orjson.loads(text)
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("text") from None


def _pack_doubles(raw: "np.ndarray[Any, np.dtype[np.uint8]]") -> bytes | None:
    if len(raw) % _DOUBLE_SIZE:
        return None
    rows = raw.reshape(-1, _DOUBLE_SIZE)
    if (rows[:, 0] != _ELEMENT).any() or (rows[:, 1] != 9).any() or (rows[:, 2] != _DOUBLE).any():
        return None
    with np.errstate(over="ignore"):  # beyond float32 is infinite
        return np.ascontiguousarray(rows[:, 3:]).view("<f8").ravel().astype("<f4").tobytes()


def _pack_integers(raw: "np.ndarray[Any, np.dtype[np.uint8]]") -> bytes | None:
    # Of an element's bytes just four have their high bit clear: tag, length, tag, and the varint's last.
    ends = np.flatnonzero(raw < 0x80)
    if len(ends) == 0 or len(ends) % 4 or ends[-1] != len(raw) - 1:
        return None
    last = ends[3::4]
    first = np.concatenate(([0], last[:-1] + 1))
    size = (last - first + 1).astype(np.uint64)
    if size.max() > _INT_SIZE:  # negative, or beyond int32: the slow path says so
        return None
    # Each element as one little-endian word: 0A, length, 18, and up to five bytes of varint.
    padded = np.concatenate((raw, np.zeros(_INT_SIZE, np.uint8)))
    words = np.lib.stride_tricks.sliding_window_view(padded, _INT_SIZE)[first].view("<u8").ravel()
    if ((words & _HEADS) != _INT_HEADS).any() or (((words >> _U8) & _BYTE) + _U2 != size).any():
        return None
    varint = (words & (_ALL >> ((_UINT_SIZE - size) * _U8))) >> _U24
    values = varint & _SEVEN_BITS
    for place in range(1, int(size.max()) - 3):
        values |= ((varint >> np.uint64(8 * place)) & _SEVEN_BITS) << np.uint64(7 * place)
    if (values > _MAX_INT).any():
        return None
    return values.astype("<i4").tobytes()


assert array.array("i").itemsize == WIDTH, "this platform's C int is not 32 bits wide"
