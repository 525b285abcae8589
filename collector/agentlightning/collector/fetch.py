"""Rows of the data set as Arrow IPC streams, file by file: memory holds one file, whatever is asked for.

Arrow is loaded with this module: a receiver needs it when somebody fetches, and not before.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import pyarrow as pa

from agentlightning.proto.dataset import Dataset
from agentlightning.proto.schemas import TABLES
from agentlightning.proto.stores import Store

__all__ = ["Fetcher"]

BATCH_BYTES: Final = 1 << 20
"""Aim for one message; gRPC's default limit for a receiver is four times this."""

Key = tuple[str, int]  # rollout id, attempt


class Fetcher:
    """A view of the data set of its own, for one thread."""

    def __init__(self, store: Store) -> None:
        self._dataset = Dataset(store)

    def problem(self, table: str, columns: Iterable[str]) -> str:
        """What is wrong with a request, in a sentence; empty if nothing is."""
        schema = TABLES.get(table)
        if schema is None:
            return f"There is no table {table!r}: the data set has {', '.join(TABLES)}."
        unknown = [name for name in columns if name not in schema.names]
        if unknown:
            return f"Table {table} has no column {unknown[0]!r}: it has {', '.join(schema.names)}."
        return ""

    def batches(
        self, table: str, attempts: Sequence[Key] | None, run_id: str | None, columns: Sequence[str] | None
    ) -> Iterator[bytes]:
        """The rows; at least one batch, with the columns. Raises DataError."""
        self._dataset.refresh()
        sent = False
        for piece in self._dataset.pieces(table, attempts=attempts, run_id=run_id, columns=columns):
            if len(piece):
                sent = True
                yield from _streams(piece)
        if not sent:
            yield from _streams(piece)


def _streams(table: pa.Table, size: int = BATCH_BYTES) -> Iterator[bytes]:
    """IPC streams of about `size` bytes, each whole in itself; at least one."""
    rows = max(1, int(size * len(table) / max(1, table.nbytes)))
    for first in range(0, max(1, len(table)), rows):
        part = table.slice(first, rows).combine_chunks()
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            if len(part):
                writer.write_table(part)
            else:
                writer.write_batch(pa.RecordBatch.from_pylist([], schema=table.schema))
        yield sink.getvalue().to_pybytes()
