"""The transition service: how a trainer learns that an attempt is whole, and reads it.

What is sealed is what a manifest holds; the service only watches manifests come, and asks the converter
for more of them by a durable record in the journal.
"""

import asyncio
import bisect
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import grpc

from agentlightning.collector.access import Tokens
from agentlightning.collector.intake import Intake
from agentlightning.collector.journal import JournalUnavailable, Kind
from agentlightning.collector.receiver_grpc import Context, abort_unavailable, authorize
from agentlightning.proto import transitions_pb2 as pb
from agentlightning.proto.errors import DataError
from agentlightning.proto.manifests import MANIFESTS, AttemptEntry, Follower, History, Manifest
from agentlightning.proto.stores import Location, Store
from agentlightning.proto.transitions_pb2_grpc import TransitionsServicer

if TYPE_CHECKING:
    from agentlightning.collector.fetch import Fetcher

__all__ = ["Commits", "Pending", "TransitionService", "pending_of"]

log = logging.getLogger(__name__)

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

    def __init__(self, root: Location, journal_id: str) -> None:
        if isinstance(root, Path):
            (root / MANIFESTS).mkdir(parents=True, exist_ok=True)
        self._follower = Follower(root)
        self.pending: dict[Key, Pending] = {}
        self.closing = False
        self._journal_id = journal_id
        self._changed = asyncio.Event()
        self._error = ""
        self._order: list[tuple[int, int, Key]] = []  # of every generation: manifest, place
        self._taken: History | None = None
        self._take()

    @property
    def store(self) -> Store:
        return self._follower.store

    @property
    def history(self) -> History:
        """What the manifests add up to."""
        return self._follower.history

    @property
    def low(self) -> int:
        """What the converter still needs of our journal begins here."""
        return self.history.journals.get(self._journal_id, {}).get("low", 0)

    def refresh(self) -> None:
        """Read the manifests that have come, and wake who waits for them."""
        last = self.history.last
        try:
            self._follower.refresh()
            self._error = ""
        except (DataError, OSError) as error:
            if self._error != str(error):  # it is tried again every second
                self._error = str(error)
                log.error("%s Nothing that was committed after it is seen until it is repaired.", error)
        if self.history.last > last:
            self._take(last)
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
        entry = self.history.entries.get(key)
        if entry is None or (calls_expected is not None and entry.calls_stored < calls_expected):
            return None
        return entry

    def sealed(self, entry: AttemptEntry) -> pb.SealedAttempt:
        return pb.SealedAttempt(
            rollout_id=entry.rollout_id,
            attempt=entry.attempt,
            calls_stored=entry.calls_stored,
            generation=entry.generation,
            manifest=entry.since,
            run_id=entry.run_id or "",
            cursor=_cursor(entry.since, entry.place),
            truncated=entry.truncated,
        )

    def after(self, cursor: int) -> Iterator[AttemptEntry]:
        """Attempts whose newest generation was sealed behind `cursor`, in order; what comes meanwhile too."""
        since, place = divmod(cursor, _PLACES)
        order = self._order  # it grows, and is replaced when the history is read anew
        index = bisect.bisect_left(order, (since, place, ("", -1)))
        while index < len(order):
            since, place, key = order[index]
            entry = self.history.entries.get(key)
            if entry is not None and (entry.since, entry.place) == (since, place):
                yield entry
            index += 1

    def _take(self, last: int = 0) -> None:
        """Learn of the manifests behind `last`; of all if the history has been read anew."""
        history = self.history
        if history is not self._taken:
            self._taken = history
            self._order = sorted((entry.since, entry.place, key) for key, entry in history.entries.items())
            for key in history.entries:
                self.pending.pop(key, None)
            return
        for manifest in history.manifests[_after(history.manifests, last) :]:
            for place, entry in enumerate(manifest.attempts):
                self.pending.pop(entry.key, None)
                if entry.since == 0:  # not merely moved
                    self._order.append((manifest.number, place, entry.key))

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
        self._fetcher: Fetcher | None = None

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
            sealed=[commits.sealed(commits.history.entries[key]) for key in wanted if key not in missing],
            incomplete=[self._incomplete(key, expected) for key, expected in missing.items()],
        )

    async def Fetch(self, request: pb.FetchRequest, context: Context) -> AsyncIterator[pb.ArrowBatch]:
        await authorize(context, self._tokens, self._intake)
        loop = asyncio.get_running_loop()
        fetcher = await loop.run_in_executor(self._reader, self._make_fetcher)
        if problem := fetcher.problem(request.table, request.columns):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, problem)
        parts = fetcher.batches(
            request.table,
            [(a.rollout_id, a.attempt) for a in request.attempts] or None,
            request.run_id if request.HasField("run_id") else None,
            list(request.columns) or None,
        )
        while True:
            try:
                part = await loop.run_in_executor(self._reader, next, parts, None)
            except DataError as error:
                await context.abort(grpc.StatusCode.DATA_LOSS, str(error))
            if part is None:
                return
            yield pb.ArrowBatch(ipc_stream=part)

    def _make_fetcher(self) -> "Fetcher":
        if self._fetcher is None:
            from agentlightning.collector.fetch import Fetcher  # loads Arrow

            self._fetcher = Fetcher(self._commits.store)
        return self._fetcher

    async def Follow(self, request: pb.FollowRequest, context: Context) -> AsyncIterator[pb.SealedAttempt]:
        await authorize(context, self._tokens, self._intake)
        cursor = request.cursor
        run_id = request.run_id if request.HasField("run_id") else None
        while not self._commits.closing:
            for entry in self._commits.after(cursor):
                sealed = self._commits.sealed(entry)
                cursor = sealed.cursor
                if run_id is None or entry.run_id == run_id:
                    yield sealed
            await self._commits.wait(REFRESH_SECONDS)
        await abort_unavailable(context, "The collector is shutting down; follow again from your cursor.")

    async def Stats(self, request: pb.StatsRequest, context: Context) -> pb.StatsResponse:
        await authorize(context, self._tokens, self._intake)
        return pb.StatsResponse(counters={**self._commits.history.counters, **self._counters()})

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
        entry = self._commits.history.entries.get(key)
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
            unconverted=pending is None and entry is None,
        )


_PLACES: Final = 1 << 32


def _cursor(since: int, place: int) -> int:
    return since * _PLACES + place + 1


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
