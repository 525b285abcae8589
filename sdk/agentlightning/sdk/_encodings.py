"""Packed answers, unpacked beside the client: what httpx offers to servers, it has a library for, and so have we."""

import importlib
import zlib
from collections.abc import Callable
from typing import Any, cast

__all__ = ["Decode", "decoder"]

Decode = Callable[[bytes], bytes]
"""Takes the next piece of a packed body; gives what it unpacks to, which may be nothing yet."""


def decoder(encoding: str) -> Decode | None:
    """For one answer in a `Content-Encoding`; None if nothing that is installed can read it."""
    match encoding:
        case "gzip" | "x-gzip":
            return zlib.decompressobj(zlib.MAX_WBITS | 16).decompress
        case "deflate":
            return _Deflate().decode
        case "br":
            for name in ("brotli", "brotlicffi"):
                if (module := _module(name)) is not None:
                    return cast(Decode, module.Decompressor().process)
        case "zstd":
            for name in ("compression.zstd", "backports.zstd"):
                if (module := _module(name)) is not None:
                    return cast(Decode, module.ZstdDecompressor().decompress)
            if (module := _module("zstandard")) is not None:
                return cast(Decode, module.ZstdDecompressor().decompressobj().decompress)
    return None


class _Deflate:
    """With zlib's header, as the standard wants it, or without, as some servers send it."""

    def __init__(self) -> None:
        self._inflate = zlib.decompressobj()
        self._first = True

    def decode(self, data: bytes) -> bytes:
        first, self._first = self._first, False
        try:
            return self._inflate.decompress(data)
        except zlib.error:
            if not first:
                raise
            self._inflate = zlib.decompressobj(-zlib.MAX_WBITS)
            return self._inflate.decompress(data)


def _module(name: str) -> Any:  # a library that may not be there, and has no types
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
