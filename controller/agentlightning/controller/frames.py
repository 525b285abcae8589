"""Messages between the controller and a launcher: JSON objects, each after its length in four bytes."""

import json
import struct
from typing import Any

__all__ = ["HEADER", "Unpacker", "pack"]

HEADER = struct.Struct("<I")


def pack(message: dict[str, Any]) -> bytes:
    """A message as it goes over the socket."""
    # NaN passes: an evaluator may return one, and it is the gateway that counts and refuses it.
    body = json.dumps(message).encode()
    return HEADER.pack(len(body)) + body


class Unpacker:
    """Turns the bytes of a stream, cut anywhere, back into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """The messages that `data` completes."""
        self._buffer += data
        messages = []
        while len(self._buffer) >= HEADER.size:
            (length,) = HEADER.unpack_from(self._buffer)
            end = HEADER.size + length
            if len(self._buffer) < end:
                break
            messages.append(json.loads(self._buffer[HEADER.size : end]))
            del self._buffer[:end]
        return messages
