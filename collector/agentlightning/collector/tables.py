"""Assembled attempts as Arrow tables, and spans back from them.

Token ids stay packed until here: a column of lists is made of one buffer and its offsets, without an
object per token. What is large stands once: a span whose tokens and bodies are its call's says which
(`in_transitions`), and is whole again with the row of transitions beside it.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import orjson
import pyarrow as pa

from agentlightning.collector.assemble import Assembled
from agentlightning.collector.otlp_json import (
    attributes_dump,
    attributes_from_json,
    event_from_json,
    event_to_json,
    link_from_json,
    link_to_json,
)
from agentlightning.collector.span import Resource, Span
from agentlightning.proto import attributes as names
from agentlightning.proto.schemas import ROLLOUTS, SPANS, TRANSITIONS

__all__ = ["CALL_COLUMNS", "spans_from_table", "tables"]

SpanKey = tuple[str, int, str, str]  # rollout id, attempt, trace id, span id

_SHARED: Final = {
    names.PROMPT_TOKEN_IDS: "prompt_token_ids",
    names.RESPONSE_TOKEN_IDS: "response_token_ids",
    names.RESPONSE_LOGPROBS: "response_logprobs",
    names.REQUEST: "request",
    names.RESPONSE: "response",
}
"""Attributes that are a column of transitions too."""
CALL_COLUMNS: Final = ("rollout_id", "attempt", "seq", "trace_id", "span_id", *_SHARED.values())
"""Of transitions, what `spans_from_table` needs."""

_PACKED: Final = {
    "prompt_token_ids": np.dtype("<i4"),
    "response_token_ids": np.dtype("<i4"),
    "response_logprobs": np.dtype("<f4"),
}


def tables(attempts: Sequence[Assembled]) -> dict[str, pa.Table]:
    """The rows of some attempts, by table."""
    return {
        "transitions": _rows(TRANSITIONS, [row for attempt in attempts for row in attempt.transitions]),
        "rollouts": _rows(ROLLOUTS, [attempt.rollout for attempt in attempts]),
        "spans": _rows(
            SPANS,
            [row for attempt in attempts for row in _span_rows(attempt)],
        ),
    }


def spans_from_table(table: pa.Table, calls: pa.Table | None, counters: Counter[str]) -> Iterable[Span]:
    """Spans as they were when the table's rows were made; the attempt is the one that the row names.

    Args:
        calls: CALL_COLUMNS of their attempts' transitions. What should be there and is not costs the
            attribute, and is counted `without_transition`.
    """
    shared = _Shared(calls, counters) if calls is not None else None
    resources: dict[str | None, Resource] = {}
    for batch in table.to_batches(max_chunksize=4096):
        columns = {name: batch.column(name) for name in SPANS.names}
        times = [columns[name].cast(pa.int64()).to_pylist() for name in ("start_time", "end_time")]
        values = {
            name: column.to_pylist()
            for name, column in columns.items()
            if name not in ("start_time", "end_time")
        }
        for index in range(len(batch)):
            row = {name: column[index] for name, column in values.items()}
            resource = resources.get(row["resource"])
            own = attributes_from_json(_load(row["attributes"], counters), counters)
            if row["in_transitions"]:
                key = (row["rollout_id"], row["attempt"], row["trace_id"], row["span_id"])
                for name in row["in_transitions"]:
                    own[name] = shared.value(key, name) if shared is not None else None
                    if own[name] is None:
                        counters["without_transition"] += 1
            if resource is None:
                attributes = attributes_from_json(_load(row["resource"], counters), counters)
                resource = resources[row["resource"]] = Resource(attributes)
            yield Span(
                row["signal"],
                row["trace_id"],
                row["span_id"],
                row["parent_span_id"],
                row["name"] or "",
                times[0][index] or 0,
                times[1][index] or 0,
                own,
                resource,
                row["scope"] or "",
                row["scope_version"] or "",
                row["kind"] or 0,
                row["trace_state"] or "",
                row["flags"] or 0,
                row["status_code"] or 0,
                row["status_message"] or "",
                [event_from_json(item, counters) for item in _load(row["events"], counters)],
                [link_from_json(item, counters) for item in _load(row["links"], counters)],
                row["dropped_attributes_count"] or 0,
                row["dropped_events_count"] or 0,
                row["rollout_id"] or row["trace_id"],
                row["attempt"] or 0,
            )


def _rows(schema: pa.Schema, rows: list[dict[str, Any]]) -> pa.Table:
    columns = []
    for name, field in zip(schema.names, schema, strict=True):  # a field gives its name anew each time
        columns.append(_column(name, field, [row[name] for row in rows]))
    return pa.table(columns, schema=schema)


def _column(name: str, field: pa.Field, values: list[Any]) -> pa.Array:
    if name in _PACKED:
        return _packed_column(field, values)
    if pa.types.is_timestamp(field.type):
        if field.type.unit == "us":
            values = [None if value is None else value // 1000 for value in values]
        return pa.array(values, pa.int64()).cast(field.type)
    return pa.array(values, field.type)


def _packed_column(field: pa.Field, values: list[bytes | None]) -> pa.Array:
    dtype = _PACKED[field.name]
    lengths = np.fromiter(
        (0 if value is None else len(value) // 4 for value in values), np.int64, len(values)
    )
    offsets = np.zeros(len(values) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    if offsets[-1] > np.iinfo(np.int32).max:
        raise OverflowError("One commit cannot hold more than 2³¹ tokens.")
    elements = np.frombuffer(b"".join(value for value in values if value is not None), dtype)
    mask = np.fromiter((value is None for value in values), np.bool_, len(values))
    return pa.ListArray.from_arrays(
        pa.array(offsets, pa.int32()),
        pa.array(elements, field.type.value_type),
        type=field.type,
        mask=pa.array(mask),
    )


class _Shared:
    """What spans have in transitions."""

    def __init__(self, calls: pa.Table, counters: Counter[str]) -> None:
        keys = [calls.column(name).to_pylist() for name in ("rollout_id", "attempt", "trace_id", "span_id")]
        order = calls.column("seq").to_pylist()
        self._rows: dict[SpanKey, int] = {}
        for row in sorted(range(len(calls)), key=order.__getitem__):
            key: Any = tuple(column[row] for column in keys)
            self._rows.setdefault(key, row)
        self._columns = {name: calls.column(column).combine_chunks() for name, column in _SHARED.items()}

    def value(self, key: SpanKey, name: str) -> Any:
        """An attribute's value; None if it is not there."""
        row = self._rows.get(key)
        if row is None or name not in self._columns:
            return None
        scalar = self._columns[name][row]
        if not scalar.is_valid:
            return None
        if _SHARED[name] in _PACKED:
            return scalar.values.to_numpy(zero_copy_only=False).astype(_PACKED[_SHARED[name]]).tobytes()
        return scalar.as_py()


def _span_rows(attempt: Assembled) -> Iterable[dict[str, Any]]:
    calls: dict[tuple[str, str], Mapping[str, Any]] = {}
    for row in attempt.transitions:
        calls.setdefault((row["trace_id"], row["span_id"]), row)
    for span in attempt.spans:
        call = calls.get((span.trace_id, span.span_id)) if span.signal == "span" else None
        elsewhere = []
        if call is not None:
            for name, column in _SHARED.items():
                value = span.attributes.get(name)
                if value is not None and value is call[column]:  # the very object: not what it was made of
                    elsewhere.append(name)
        yield _span_row(span, attempt.rollout_id, attempt.attempt, elsewhere)


def _span_row(span: Span, rollout_id: str, attempt: int, elsewhere: list[str]) -> dict[str, Any]:
    if span.resource.json is None:
        span.resource.json = attributes_dump(span.resource.attributes)
    return {
        "rollout_id": rollout_id,
        "attempt": attempt,
        "trace_id": span.trace_id,
        "span_id": span.span_id,
        "parent_span_id": span.parent_span_id,
        "trace_state": span.trace_state or None,
        "flags": span.flags,
        "name": span.name,
        "kind": span.kind,
        "start_time": span.start_ns,
        "end_time": span.end_ns,
        "status_code": span.status_code,
        "status_message": span.status_message or None,
        "scope": span.scope,
        "scope_version": span.scope_version or None,
        "resource": span.resource.json,
        "attributes": attributes_dump(span.attributes, elsewhere),  # text columns take UTF-8 as it is
        "in_transitions": elsewhere or None,
        "events": orjson.dumps([event_to_json(event) for event in span.events]) if span.events else None,
        "links": orjson.dumps([link_to_json(link) for link in span.links]) if span.links else None,
        "dropped_attributes_count": span.dropped_attributes,
        "dropped_events_count": span.dropped_events,
        "signal": span.signal,
    }


def _load(text: str | None, counters: Counter[str]) -> list[Any]:
    if text is None:
        return []
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        value = None
    if not isinstance(value, list):
        counters["unparsed_attribute"] += 1
        return []
    return value
