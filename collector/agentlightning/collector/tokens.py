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
_DOUBLE_HEAD: Final = np.array([_ELEMENT, 9, _DOUBLE], np.uint8)
_INT_SIZE: Final = 8  # at most: two tags (the inner is 0x18, int_value), a length, five bytes of varint
# numpy's unsigned words mix with nothing but themselves.
_U1, _U2, _U3, _U4, _U8, _U24 = (np.uint64(n) for n in (1, 2, 3, 4, 8, 24))
_HEAD: Final = np.uint64(0xFFFFFF)
_INT_HEAD: Final = np.uint64(0x18 << 16 | _ELEMENT)
_SEVENS: Final = tuple(np.uint64(0x7F << 7 * place) for place in range(5))
_KEPT: Final = np.array([0, 0, 0, *((1 << 8 * n) - 1 for n in range(1, 6))], np.uint64)
"""Of a word without its head: the bytes of a varint, by the place of the element's last byte."""
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
    return _pack_doubles(data) if floats else _pack_integers(data)


def _from_text(text: str) -> Any:
    try:
        if text.lstrip().startswith("["):
            return orjson.loads(text)
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("text") from None


def _pack_doubles(data: bytes) -> bytes | None:
    if len(data) % _DOUBLE_SIZE:
        return None
    rows = np.frombuffer(data, np.uint8).reshape(-1, _DOUBLE_SIZE)
    if (rows[:, :3] != _DOUBLE_HEAD).any():
        return None
    values = np.ndarray((len(rows),), "<f8", data, offset=3, strides=(_DOUBLE_SIZE,))
    with np.errstate(over="ignore"):  # beyond float32 is infinite
        return values.astype("<f4").tobytes()


def _pack_integers(data: bytes) -> bytes | None:
    size = len(data)
    padded = np.frombuffer(data + bytes(_INT_SIZE), np.uint8)
    # Of an element's bytes just four have their high bit clear: tag, length, tag, and the varint's last.
    ends = np.flatnonzero(padded[:size] < 0x80)
    if len(ends) == 0 or len(ends) % 4 or ends[-1] != size - 1:
        return None
    last = ends[3::4]
    first = np.empty_like(last)
    first[0] = 0
    np.add(last[:-1], 1, out=first[1:])
    place = last - first  # of the last byte: two heads and a length come before the varint
    longest = int(place.max())
    if longest >= _INT_SIZE or place.min() < 3:  # negative, or beyond int32: the slow path says so
        return None
    # Each element as one little-endian word: 0A, length, 18, and up to five bytes of varint.
    words = np.ndarray((size + 1,), "<u8", padded, strides=(1,))[first]
    heads = place.astype(np.uint64)
    heads -= _U1
    heads <<= _U8
    heads |= _INT_HEAD
    if ((words & _HEAD) != heads).any():
        return None
    words >>= _U24
    words &= _KEPT[place]
    values = words & _SEVENS[0]
    values |= (words >> _U1) & _SEVENS[1]
    values |= (words >> _U2) & _SEVENS[2]
    if longest > 5:
        values |= (words >> _U3) & _SEVENS[3]
    if longest > 6:
        values |= (words >> _U4) & _SEVENS[4]
        if (values > _MAX_INT).any():
            return None
    return values.astype("<i4").tobytes()


assert array.array("i").itemsize == WIDTH, "this platform's C int is not 32 bits wide"
