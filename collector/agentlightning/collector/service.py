"""The transition service: how a trainer learns that an attempt is whole, and reads it.

What is sealed is what a manifest holds; the service only watches manifests come, and asks the converter
for more of them by a durable record in the journal.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
import pyarrow as pa

from agentlightning.collector.access import Tokens
from agentlightning.collector.intake import Intake
from agentlightning.collector.journal import JournalUnavailable, Kind
from agentlightning.collector.receiver_grpc import Context, abort_unavailable, authorize
from agentlightning.proto import transitions_pb2 as pb
from agentlightning.proto.dataset import MANIFESTS, AttemptEntry, Dataset, Manifest
from agentlightning.proto.errors import DataError
from agentlightning.proto.schemas import TABLES
from agentlightning.proto.transitions_pb2_grpc import TransitionsServicer

__all__ = ["Commits", "Pending", "TransitionService", "batches", "pending_of"]

log = logging.getLogger(__name__)

BATCH_BYTES: Final = 1 << 20
"""Aim for one message; gRPC's default limit for a receiver is four times this."""
REFRESH_SECONDS: Final = 1.0
"""Manifests are looked for this often, should the converter's word for one have been lost."""

Key = tuple[str, int]  # rollout id, attempt


@dataclass(frozen=True, slots=True)
class Pending:
    """What the converter said of a seal that it cannot fulfil yet."""

    calls_expected: int
    calls_stored: int
    reason: str


class Commits:
    """The data set as manifests come, for the event loop."""

    def __init__(self, root: Path, journal_id: str) -> None:
        (root / MANIFESTS).mkdir(parents=True, exist_ok=True)
        self.dataset = Dataset(root)
        self.low = 0
        """What the converter still needs of our journal begins here."""
        self.pending: dict[Key, Pending] = {}
        self.closing = False
        self._journal_id = journal_id
        self._changed = asyncio.Event()
        self._error = ""
        self._take(self.dataset.manifests)

    def refresh(self) -> None:
        """Read the manifests that have come, and wake who waits for them."""
        manifests = self.dataset.manifests
        last = manifests[-1].number if manifests else 0
        if manifests and not (self.dataset.root / MANIFESTS / f"{last + 1:08d}.json").exists():
            return  # cheaper than listing the folder, once a second and for every commit
        try:
            self.dataset.refresh()
            self._error = ""
        except DataError as error:
            if self._error != str(error):  # it is tried again every second
                self._error = str(error)
                log.error("%s Nothing that was committed after it is seen until it is repaired.", error)
        if manifests and manifests[-1].number > last:
            self._take(manifests[_after(manifests, last) :])
            self._wake()

    def close(self) -> None:
        """Wake all waiters for the last time."""
        self.closing = True
        self._wake()

    async def wait(self, timeout: float) -> None:
        """Until something changes, or the time is over."""
        changed = self._changed
        try:
            async with asyncio.timeout(timeout):
                await changed.wait()
        except TimeoutError:
            pass

    def entry(self, key: Key, calls_expected: int | None) -> AttemptEntry | None:
        """The attempt as the data set holds it, if that is all of it."""
        entry = self.dataset.attempts.get(key)
        if entry is None or (calls_expected is not None and entry.calls_stored < calls_expected):
            return None
        return entry

    def sealed(self, entry: AttemptEntry) -> pb.SealedAttempt:
        return pb.SealedAttempt(
            rollout_id=entry.rollout_id,
            attempt=entry.attempt,
            calls_stored=entry.calls_stored,
            generation=entry.generation,
            manifest=self.dataset.manifest_of(entry.rollout_id, entry.attempt) or 0,
            run_id=entry.run_id or "",
        )

    def after(self, cursor: int) -> Iterator[tuple[Manifest, AttemptEntry]]:
        """Attempts whose newest generation stands in a manifest behind `cursor`, in order."""
        manifests = self.dataset.manifests
        for manifest in manifests[_after(manifests, cursor) :]:
            for entry in manifest.attempts:
                if self.dataset.manifest_of(entry.rollout_id, entry.attempt) == manifest.number:
                    yield manifest, entry

    def _take(self, manifests: Sequence[Manifest]) -> None:
        for manifest in manifests:
            if manifest.journal.get("id") == self._journal_id:
                self.low = max(self.low, int(manifest.journal["low"]))
            for entry in manifest.attempts:
                self.pending.pop((entry.rollout_id, entry.attempt), None)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class TransitionService(TransitionsServicer):
    """Seal, Fetch, Follow, Stats."""

    def __init__(
        self,
        commits: Commits,
        intake: Intake,
        *,
        tokens: Tokens | None = None,
        counters: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        self._commits = commits
        self._intake = intake
        self._tokens = tokens
        self._counters = counters
        # One thread and its own view of the data set: reading a large table must not stop the event loop.
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fetch")
        self._readers_dataset: Dataset | None = None

    async def Seal(self, request: pb.SealRequest, context: Context) -> pb.SealResponse:
        await authorize(context, self._tokens, self._intake)
        wanted: dict[Key, int | None] = {}
        for attempt in request.attempts:
            if not attempt.rollout_id or attempt.attempt < 0:
                await context.abort(
                    grpc.StatusCode.INVALID_ARGUMENT, "An attempt needs a rollout id and a number from 0."
                )
            expected = attempt.calls_expected if attempt.HasField("calls_expected") else None
            wanted[attempt.rollout_id, attempt.attempt] = expected
        deadline = asyncio.get_running_loop().time() + max(0.0, request.timeout_s)
        commits = self._commits
        commits.refresh()
        missing = {key: n for key, n in wanted.items() if commits.entry(key, n) is None}
        if missing:
            await self._record_seal(missing, context)
        while missing:
            remaining = deadline - asyncio.get_running_loop().time()
            if remaining <= 0:
                break
            await commits.wait(min(remaining, REFRESH_SECONDS))
            if commits.closing:
                await abort_unavailable(context, "The collector is shutting down; seal again later.")
            missing = {key: n for key, n in missing.items() if commits.entry(key, n) is None}
        return pb.SealResponse(
            sealed=[commits.sealed(commits.dataset.attempts[key]) for key in wanted if key not in missing],
            incomplete=[self._incomplete(key, expected) for key, expected in missing.items()],
        )

    async def Fetch(self, request: pb.FetchRequest, context: Context) -> AsyncIterator[pb.ArrowBatch]:
        await authorize(context, self._tokens, self._intake)
        schema = TABLES.get(request.table)
        if schema is None:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"There is no table {request.table!r}: the data set has {', '.join(TABLES)}.",
            )
        unknown = [name for name in request.columns if name not in schema.names]
        if unknown:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"Table {request.table} has no column {unknown[0]!r}: it has {', '.join(schema.names)}.",
            )
        loop = asyncio.get_running_loop()
        try:
            table = await loop.run_in_executor(self._reader, self._read, request)
        except DataError as error:
            await context.abort(grpc.StatusCode.DATA_LOSS, str(error))
        parts = batches(table)
        while (part := await loop.run_in_executor(self._reader, next, parts, None)) is not None:
            yield pb.ArrowBatch(ipc_stream=part)

    async def Follow(self, request: pb.FollowRequest, context: Context) -> AsyncIterator[pb.SealedAttempt]:
        await authorize(context, self._tokens, self._intake)
        cursor = request.cursor
        run_id = request.run_id if request.HasField("run_id") else None
        while not self._commits.closing:
            # A list: while one attempt is being sent, new manifests may come.
            for manifest, entry in list(self._commits.after(cursor)):
                cursor = manifest.number
                if run_id is None or entry.run_id == run_id:
                    yield self._commits.sealed(entry)
            await self._commits.wait(REFRESH_SECONDS)
        await abort_unavailable(context, "The collector is shutting down; follow again from your cursor.")

    async def Stats(self, request: pb.StatsRequest, context: Context) -> pb.StatsResponse:
        await authorize(context, self._tokens, self._intake)
        return pb.StatsResponse(counters={**self._commits.dataset.counters(), **self._counters()})

    async def _record_seal(self, attempts: Mapping[Key, int | None], context: Context) -> None:
        body = json.dumps(
            {
                "attempts": [
                    {"rollout_id": rollout_id, "attempt": attempt, "calls_expected": expected}
                    for (rollout_id, attempt), expected in attempts.items()
                ]
            }
        )
        for key in attempts:
            self._commits.pending.pop(key, None)  # it will be said again of the new seal
        try:
            await self._intake.journal.append(Kind.SEAL, body.encode())
        except JournalUnavailable as error:
            await abort_unavailable(context, str(error))

    def _incomplete(self, key: Key, expected: int | None) -> pb.IncompleteAttempt:
        rollout_id, attempt = key
        pending = self._commits.pending.get(key)
        entry = self._commits.dataset.attempts.get(key)
        if pending is not None:
            stored, reason = pending.calls_stored, pending.reason
        elif entry is not None:
            stored = entry.calls_stored
            reason = f"{stored} of {expected} expected calls are stored."
        else:
            stored, reason = 0, "The converter has not come to it yet."
        return pb.IncompleteAttempt(
            rollout_id=rollout_id,
            attempt=attempt,
            calls_expected=expected or 0,
            calls_stored=stored,
            reason=reason,
        )

    def _read(self, request: pb.FetchRequest) -> pa.Table:
        if self._readers_dataset is None:
            self._readers_dataset = Dataset(self._commits.dataset.root)
        self._readers_dataset.refresh()
        return self._readers_dataset.table(
            request.table,
            attempts=[(a.rollout_id, a.attempt) for a in request.attempts] or None,
            run_id=request.run_id if request.HasField("run_id") else None,
            columns=list(request.columns) or None,
        )


def batches(table: pa.Table, size: int = BATCH_BYTES) -> Iterator[bytes]:
    """A table as Arrow IPC streams of about `size` bytes, each whole in itself; at least one."""
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


def _after(manifests: Sequence[Manifest], cursor: int) -> int:
    """Index of the first manifest behind `cursor`."""
    index = len(manifests)
    while index and manifests[index - 1].number > cursor:
        index -= 1
    return index


def pending_of(message: Mapping[str, Any]) -> dict[Key, Pending]:
    """The attempts of a converter's `pending` message."""
    return {
        (entry["rollout_id"], entry["attempt"]): Pending(
            entry["calls_expected"] or 0, entry["calls_stored"], entry["reason"]
        )
        for entry in message["attempts"]
    }
