"""Spans on disk by attempt, so that a dump larger than memory can be put in order.

Written once as they come, read back attempt by attempt. A file without a name: nothing is left behind.
"""

import marshal
import tempfile
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from agentlightning.collector.otlp_json import attributes_dump
from agentlightning.collector.span import Event, Link, Resource, Span

__all__ = ["Key", "Spool", "fields_of", "span_of"]

Key = tuple[str, int]  # rollout id, attempt


class Spool:
    """Spans by attempt; in memory are their places, eight bytes each, and the resources."""

    def __init__(self, folder: Path | None = None) -> None:
        self._file = tempfile.TemporaryFile(dir=folder, prefix="agl-convert-")  # noqa: SIM115 - closed below
        self._places: dict[Key, array[int]] = defaultdict(lambda: array("Q"))
        self._sizes: dict[Key, int] = defaultdict(int)
        self._traces: dict[Key, bool] = {}
        self._homes: dict[str, Key] = {}
        self._spanless: set[Key] = set()
        self._end = 0
        self._resources: list[Resource] = []
        self._by_identity: dict[int, tuple[Resource, int]] = {}
        self._by_content: dict[bytes, int] = {}

    def __enter__(self) -> "Spool":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __iter__(self) -> Iterator[Key]:
        return iter(sorted(self._places))

    def __len__(self) -> int:
        return len(self._places)

    def size(self, key: Key) -> int:
        """Bytes of an attempt's spans, about."""
        return self._sizes[key]

    def is_trace(self, key: Key) -> bool:
        """Whether an attempt is a trace that belongs to no rollout."""
        return self._traces[key]

    def home(self, key: Key) -> Key | None:
        """For log records that name no rollout: the attempt that the spans of their trace belong to."""
        return self._homes.get(key[0]) if self._traces[key] and key in self._spanless else None

    def add(self, span: Span) -> None:
        """Keep a span."""
        data = marshal.dumps(self._fields(span))
        is_trace = span.trace_id == span.rollout_id and span.attempt == 0
        self._traces[span.key] = is_trace or self._traces.get(span.key, False)
        if span.signal == "span":
            if not is_trace:
                self._homes[span.trace_id] = span.key
            self._spanless.discard(span.key)
        elif span.key not in self._places:
            self._spanless.add(span.key)
        places = self._places[span.key]
        places.append(self._end)
        self._sizes[span.key] += len(data)
        self._file.write(len(data).to_bytes(8, "little"))
        self._file.write(data)
        self._end += 8 + len(data)

    def load(self, keys: Iterable[Key]) -> list[Span]:
        """The spans of some attempts, in the order in which they came."""
        places = sorted(place for key in keys for place in self._places[key])
        spans = []
        for place in places:
            self._file.seek(place)
            size = int.from_bytes(self._file.read(8), "little")
            spans.append(self._span(marshal.loads(self._file.read(size))))
        return spans

    def merge(self, key: Key, into: Key) -> None:
        """One attempt's spans become another's."""
        self._places[into].extend(self._places.pop(key))
        self._sizes[into] += self._sizes.pop(key)

    def _fields(self, span: Span) -> tuple[Any, ...]:
        return (self._resource(span.resource), *fields_of(span))

    def _span(self, fields: tuple[Any, ...]) -> Span:
        return span_of(self._resources[fields[0]], fields[1:])

    def _resource(self, resource: Resource) -> int:
        known = self._by_identity.get(id(resource))
        if known is not None and known[0] is resource:
            return known[1]
        content = attributes_dump(resource.attributes)
        index = self._by_content.setdefault(content, len(self._resources))
        if index == len(self._resources):
            self._resources.append(resource)
        if len(self._by_identity) > 4096:
            self._by_identity.clear()
        self._by_identity[id(resource)] = (resource, index)
        return index


def fields_of(span: Span) -> tuple[Any, ...]:
    """A span without its resource, as values that marshal writes."""
    return (
        *(getattr(span, name) for name in _PLAIN),
        [(event.name, event.time_ns, event.attributes, event.dropped_attributes) for event in span.events],
        [
            (
                link.trace_id,
                link.span_id,
                link.attributes,
                link.trace_state,
                link.flags,
                link.dropped_attributes,
            )
            for link in span.links
        ],
    )


def span_of(resource: Resource, fields: tuple[Any, ...]) -> Span:
    """The reverse."""
    *plain, events, links = fields
    return Span(
        resource=resource,
        events=[Event(*event) for event in events],
        links=[Link(*link) for link in links],
        **dict(zip(_PLAIN, plain, strict=True)),
    )


_PLAIN = tuple(name for name in Span.__dataclass_fields__ if name not in ("resource", "events", "links"))
