"""Decoded spans of open attempts that memory does not hold, on disk: written once, read once.

The journal has them too, but as they came, many attempts in one record: to read a record again for each
of its attempts would be quadratic. Segments are files without a name: nothing is left behind by a
crash, and the space of a segment is free again when its last attempt is closed.
"""

import marshal
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from agentlightning.collector.span import Resource, Span
from agentlightning.collector.spool import fields_of, span_of

__all__ = ["Place", "Spill"]

SEGMENT_BYTES: Final = 64 << 20


class Place(NamedTuple):
    """Where some spans of an attempt are."""

    segment: int
    offset: int
    length: int


class Spill:
    """Append-only segments; what lies in them is counted, so that an empty one goes."""

    def __init__(self, folder: Path, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._files: dict[int, int] = {}  # segment → file descriptor
        self._live: dict[int, int] = {}  # segment → bytes that are needed
        self._current = -1
        self._end = 0

    @property
    def bytes(self) -> int:
        """What is needed of it."""
        return sum(self._live.values())

    @property
    def segments(self) -> int:
        return len(self._files)

    def write(self, spans: Sequence[Span]) -> Place:
        """Keep some spans. Raises OSError, and then they are not kept."""
        resources: dict[int, int] = {}
        contents: list[dict[str, Any]] = []
        items = []
        for span in spans:
            index = resources.get(id(span.resource))
            if index is None:
                index = resources[id(span.resource)] = len(contents)
                contents.append(span.resource.attributes)
            items.append((index, fields_of(span)))
        data = marshal.dumps((contents, items))
        if self._current < 0 or self._end >= self._segment_bytes:
            self._begin()
        written = 0
        while written < len(data):
            written += os.pwrite(self._files[self._current], data[written:], self._end + written)
        place = Place(self._current, self._end, len(data))
        self._end += len(data)
        self._live[self._current] += len(data)
        return place

    def read(self, place: Place) -> list[Span]:
        """The spans at a place."""
        data = os.pread(self._files[place.segment], place.length, place.offset)
        contents, items = marshal.loads(data)
        resources = [Resource(content) for content in contents]
        return [span_of(resources[index], fields) for index, fields in items]

    def release(self, place: Place) -> None:
        """What is there is no longer needed."""
        self._live[place.segment] -= place.length
        if self._live[place.segment] == 0 and place.segment != self._current:
            os.close(self._files.pop(place.segment))
            del self._live[place.segment]

    def _begin(self) -> None:
        with tempfile.TemporaryFile(dir=self._folder, prefix="agl-open-", buffering=0) as file:
            fd = os.dup(file.fileno())
        previous = self._current
        self._current, self._end = previous + 1, 0
        self._files[self._current], self._live[self._current] = fd, 0
        if previous >= 0 and self._live.get(previous) == 0:
            os.close(self._files.pop(previous))
            del self._live[previous]
