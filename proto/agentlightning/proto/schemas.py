"""Arrow schemas of the data set's tables, and how they are written to Parquet.

The schema's version is in the file metadata. A reader accepts every older version: a column is added,
never re-used.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from agentlightning.proto.manifests import SCHEMA_VERSION

__all__ = [
    "ROLLOUTS",
    "SAMPLES",
    "SCHEMA_VERSION",
    "SPANS",
    "TABLES",
    "TRANSITIONS",
    "conform",
    "parquet_writer",
    "write_parquet",
]

VERSION_KEY: Final = b"agentlightning.schema_version"

_TIME = pa.timestamp("us", tz="UTC")
_TIME_NS = pa.timestamp("ns", tz="UTC")
_IDENTITY = [
    pa.field("run_id", pa.string()),
    pa.field("group_id", pa.string()),
    pa.field("task_id", pa.string()),
    pa.field("rollout_id", pa.string(), nullable=False),
    pa.field("split", pa.string()),
    pa.field("attempt", pa.int32(), nullable=False),
]

TRANSITIONS: Final = pa.schema(
    [
        *_IDENTITY,
        pa.field("seq", pa.int32(), nullable=False),  # order in the attempt, by request time
        pa.field("call_id", pa.string(), nullable=False),
        pa.field("span_id", pa.string(), nullable=False),  # hex, as in OTLP
        pa.field("parent_span_id", pa.string()),
        pa.field("trace_id", pa.string(), nullable=False),
        pa.field("agent", pa.string()),  # nearest agent or graph node; null if none
        pa.field("agent_path", pa.list_(pa.string())),  # outermost first
        pa.field("policy", pa.string()),
        pa.field("model", pa.string()),
        pa.field("model_version", pa.int64()),  # null if the engine did not say
        pa.field("model_versions", pa.list_(pa.int64())),  # [start, version, …] if it changed inside
        pa.field("request", pa.string()),  # JSON as on the wire
        pa.field("response", pa.string()),
        pa.field("sampling", pa.string()),  # JSON: temperature, top_p, top_k, seed, max_tokens, …
        pa.field("prompt_token_ids", pa.list_(pa.int32())),  # null, not empty, if unknown
        pa.field("response_token_ids", pa.list_(pa.int32())),
        pa.field("response_logprobs", pa.list_(pa.float32())),  # parallel to response_token_ids, or null
        pa.field("token_source", pa.string(), nullable=False),  # engine | none
        pa.field("finish_reason", pa.string()),
        pa.field("error", pa.string()),  # null on success
        pa.field("reward", pa.float64()),  # judged on this very call; null if none
        pa.field("rewards", pa.map_(pa.string(), pa.float64())),  # every named evaluation of this call
        pa.field("done", pa.bool_(), nullable=False),  # last call of the attempt
        pa.field("start_time", _TIME, nullable=False),
        pa.field("duration_ms", pa.float64(), nullable=False),
        pa.field("source", pa.string(), nullable=False),  # gateway | sdk
    ]
)
"""One row per call."""

ROLLOUTS: Final = pa.schema(
    [
        *_IDENTITY,
        pa.field("input", pa.string()),  # task input, JSON
        pa.field("state", pa.string()),  # null: nobody has said how the attempt ended
        pa.field("cause", pa.string()),
        pa.field("error", pa.string()),
        pa.field("reward", pa.float64()),  # the evaluation named `reward` of the rollout as a whole
        pa.field("rewards", pa.map_(pa.string(), pa.float64())),
        pa.field("start_time", _TIME),
        pa.field("end_time", _TIME),
        pa.field("calls_expected", pa.int32()),  # the gateway's ledger; null without a gateway
        pa.field("calls_stored", pa.int32(), nullable=False),
        # Fidelity counters of this attempt.
        pa.field("duplicate", pa.int32(), nullable=False),
        pa.field("late", pa.int32(), nullable=False),
        pa.field("orphan", pa.int32(), nullable=False),
        pa.field("unparsed", pa.int32(), nullable=False),
        pa.field("dropped_attributes", pa.int32(), nullable=False),
    ]
)
"""One row per attempt."""

SPANS: Final = pa.schema(
    [
        pa.field("rollout_id", pa.string()),
        pa.field("attempt", pa.int32()),
        pa.field("trace_id", pa.string(), nullable=False),
        pa.field("span_id", pa.string(), nullable=False),
        pa.field("parent_span_id", pa.string()),
        pa.field("trace_state", pa.string()),
        pa.field("flags", pa.int64()),
        pa.field("name", pa.string()),
        pa.field("kind", pa.int32()),
        pa.field("start_time", _TIME_NS),
        pa.field("end_time", _TIME_NS),
        pa.field("status_code", pa.int32()),
        pa.field("status_message", pa.string()),
        pa.field("scope", pa.string()),
        pa.field("scope_version", pa.string()),
        # OTLP/JSON lists of key and value, so that every type (bytes as base64) comes back as it was.
        pa.field("resource", pa.string()),
        pa.field("attributes", pa.string()),
        # Keys whose values stand in the call's row of transitions (same attempt and span), and nowhere else.
        pa.field("in_transitions", pa.list_(pa.string())),
        pa.field("events", pa.string()),
        pa.field("links", pa.string()),
        pa.field("dropped_attributes_count", pa.int64()),
        pa.field("dropped_events_count", pa.int64()),
        pa.field("signal", pa.string(), nullable=False),  # span | log: an evaluation may come as a log record
    ]
)
"""Everything as received: what transitions can be derived from again."""

SAMPLES: Final = pa.schema(
    [
        *_IDENTITY,
        pa.field("step", pa.int64(), nullable=False),  # the trainer's step that used the sample
        pa.field("sample", pa.int32(), nullable=False),  # index within the attempt
        pa.field("policy", pa.string()),
        pa.field("call_ids", pa.list_(pa.string()), nullable=False),
        pa.field("reason", pa.string(), nullable=False),  # why the chain began: first, edited, branch, …
        pa.field("token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("mask", pa.list_(pa.bool_()), nullable=False),  # true: sampled, and trained
        pa.field("logprobs", pa.list_(pa.float32())),  # of the sampler, 0 where mask is false
        pa.field("logprobs_new", pa.list_(pa.float32())),  # of the trainer at the start of the update
        pa.field("advantages", pa.list_(pa.float32())),
        pa.field("versions", pa.list_(pa.int64())),  # weight version per token, -1 where mask is false
        pa.field("reward", pa.float64()),
    ]
)
"""The rows that the optimiser saw."""

TABLES: Final = {"transitions": TRANSITIONS, "rollouts": ROLLOUTS, "spans": SPANS, "samples": SAMPLES}

# Measured: byte-stream-split without dictionary, zstd 1, halves the size of pyarrow's defaults.
_NUMERIC_LISTS = {
    "transitions": ("prompt_token_ids", "response_token_ids", "response_logprobs"),
    "samples": ("token_ids", "logprobs", "logprobs_new", "advantages"),
    "rollouts": (),
    "spans": (),
}

# A dictionary of texts that never repeat costs time and gains nothing.
_UNIQUE_TEXTS: Final = {"call_id", "span_id", "request", "response", "attributes", "input"}


def write_parquet(table: str, rows: pa.Table, path: str | Path | IO[bytes]) -> None:
    """Write rows of one of TABLES to `path` (a path or a file object), with the schema's version."""
    with parquet_writer(table, path) as write:
        write(rows)


@contextlib.contextmanager
def parquet_writer(table: str, path: Any) -> Iterator[Callable[[pa.Table], None]]:
    """The same piece by piece: each call of what is given is a row group. `path` may be an Arrow stream too."""
    schema = TABLES[table]
    split = [f"{name}.list.element" for name in _NUMERIC_LISTS[table]]
    apart = {*split, *_UNIQUE_TEXTS}
    with pq.ParquetWriter(
        path,
        schema.with_metadata({VERSION_KEY: str(SCHEMA_VERSION).encode()}),
        compression="zstd",
        compression_level=1,
        use_dictionary=[name for name in _leaf_names(schema) if name not in apart],
        column_encoding=dict.fromkeys(split, "BYTE_STREAM_SPLIT") or None,
        write_page_checksum=True,
    ) as writer:

        def write(rows: pa.Table) -> None:
            writer.write_table(rows if rows.schema.equals(schema) else rows.cast(schema))

        yield write


def conform(table: str, rows: pa.Table) -> pa.Table:
    """Bring rows of any older schema version to the current one: columns that it lacked are null."""
    schema = TABLES[table]
    columns = []
    for field in schema:
        if field.name in rows.column_names:
            columns.append(rows.column(field.name).cast(field.type))
        else:
            columns.append(pa.nulls(len(rows), field.type))
    return pa.table(columns, schema=pa.schema([field.with_nullable(True) for field in schema]))


def _leaf_names(schema: pa.Schema) -> list[str]:
    """Parquet's names of the string leaves: dictionary encoding pays for those only."""
    names = []
    for field in schema:
        if pa.types.is_string(field.type):
            names.append(field.name)
        elif pa.types.is_list(field.type) and pa.types.is_string(field.type.value_type):
            names.append(f"{field.name}.list.element")
        elif pa.types.is_map(field.type):
            names.append(f"{field.name}.key_value.key")
    return names
