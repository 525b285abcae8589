"""The converter's work: it tails the journal, and writes each attempt to the data set when it is whole.

The one idea: a manifest says how far the journal was read (`high`), and from where it must be read
again after a crash (`low`, the first record of an attempt that is not written yet). An attempt that a
manifest holds contains all of its spans below that manifest's `high`. So reading again from `low` gives
every span to its attempt exactly once, whenever the process was killed.
"""

import logging
import math
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import orjson

from agentlightning.collector.assemble import Assembled, assemble
from agentlightning.collector.joins import Joins
from agentlightning.collector.open_attempts import Key, OpenAttempt, OpenAttempts, Seal, decode
from agentlightning.collector.records import JournalReader, Kind, Record
from agentlightning.collector.span import Span
from agentlightning.collector.spill import Spill
from agentlightning.collector.tables import CALL_COLUMNS, spans_from_table, tables
from agentlightning.proto.dataset import (
    MANIFESTS,
    AttemptEntry,
    Dataset,
    commit_manifest,
    write_files,
)
from agentlightning.proto.stores import Location

__all__ = ["Converter"]

log = logging.getLogger(__name__)

WRITER: Final = "collector"
READ_BYTES: Final = 2 << 20
"""Read this much before looking what is ready."""
COMMIT_BYTES: Final = 4 << 20
"""Of bodies in one commit: bounds memory when much is ready at once."""
TRIM_BYTES: Final = 64 << 20
"""A commit without attempts is made when the journal could be cut by this much."""
_LEFTOVER: Final = re.compile(r"[a-z]+/c([0-9a-f]{8})-(\d{8})-[0-9a-f]{16}\.parquet")
_FIDELITY: Final = ("duplicate", "late", "orphan", "unparsed", "dropped_attributes")


class Receiver(Protocol):
    """Who is told what has been done; `supervise.Link` is one."""

    def send(self, message: dict[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True)
class _Written:
    """An attempt in the data set."""

    generation: int
    high: float
    """All of its spans below this position are in it; infinite for one that retention has taken away."""
    calls_stored: int


@dataclass(slots=True)
class _Made:
    """An attempt that is about to be written."""

    attempt: OpenAttempt
    rows: Assembled
    counters: Counter[str]
    """What it adds to the data set's."""
    truncated: bool = False


class Converter:
    """The work of the process, without its life: `step` again and again."""

    def __init__(
        self,
        data: Location,
        reader: JournalReader,
        link: Receiver,
        *,
        idle_timeout: float = 300.0,
        scratch: Path | None = None,
    ) -> None:
        """Go on where the data set says.

        Args:
            idle_timeout: seconds after which an attempt without news is written as it is.
            scratch: where spans of open attempts go that memory does not hold; default beside the journal.
        """
        if isinstance(data, Path):
            (data / MANIFESTS).mkdir(parents=True, exist_ok=True)
        self.dataset = Dataset(data)
        self.position = 0
        """How far the journal has been read."""
        self.totals: Counter[str] = Counter()
        """Counters since the process began."""
        self._reader = reader
        self._link = link
        self._joins = Joins()
        self._open = OpenAttempts(Spill(scratch or reader.folder), idle_timeout, self._earlier)
        self._written: dict[Key, _Written] = {}
        self._counted = 0
        """Below this position, what was counted is in a manifest."""
        self._low = 0
        self._commit = 0
        self._counters: Counter[str] = Counter()
        """Not in a manifest yet."""
        self._recover()

    @property
    def caught_up(self) -> bool:
        """Whether everything that is committed has been read."""
        return self.position >= self._reader.committed()

    @property
    def open_attempts(self) -> int:
        return len(self._open)

    def step(self, now: float | None = None) -> bool:
        """Read some, write some of what is ready; whether there may be more to do at once."""
        began = self.position
        self._read()
        ready = list(self._open.ready(time.time() if now is None else now, caught_up=self.caught_up))
        if any(attempt.is_trace for attempt, _ in ready):
            ready = self._joins.together(ready, self._open, self._written, self._attempt, self._earlier)
        if ready:
            self._write(ready)
        elif self._open.low(self.position) - self._low >= TRIM_BYTES:
            self._put([])
        self._report_pending()
        return bool(ready) or self.position > began

    def progress(self) -> dict[str, Any]:
        """What the receiver shows."""
        return {
            "type": "progress",
            "read": self.position,
            "open_attempts": len(self._open),
            "counters": dict(self.totals + self._counters),
        }

    # ---- reading ----

    def _recover(self) -> None:
        """Go on where the newest manifest of this journal says."""
        history = self.dataset.history
        journal = history.journals.get(self._reader.id)
        if journal is not None:
            self._low, self._counted, self._commit = journal["low"], journal["high"], journal["commit"]
        for entry in history.entries.values():
            name, high = history.highs.get(entry.since, ("", 0))
            self._remember(entry, high if name == self._reader.id else 0)
        newest = sorted(history.entries.values(), key=lambda entry: (entry.since, entry.place))
        self._joins.recover(history.joins.get(self._reader.id, {}), [entry.key for entry in newest])
        for key in history.expired:
            self._written[key] = _Written(0, math.inf, 0)
        self.position = self._low
        store = self.dataset.store
        for table in ("transitions", "rollouts", "spans"):
            for listed in store.list(table):
                match = _LEFTOVER.fullmatch(listed.name)
                if match and match[1] == self._reader.id[:8] and int(match[2]) > self._commit:
                    store.delete([listed.name])  # of a commit that did not come to its manifest

    def _remember(self, entry: AttemptEntry, high: int) -> None:
        self._written[entry.key] = _Written(entry.generation, high, entry.calls_stored)

    def _read(self) -> None:
        budget = READ_BYTES
        for record in self._reader.read_from(self.position):
            self._take(record)
            self.position = record.end
            budget -= len(record.body)
            if budget <= 0:
                break

    def _take(self, record: Record) -> None:
        # What was counted once is not counted again when it is read again.
        counters = self._counters if record.position >= self._counted else Counter()
        if record.kind == Kind.QUARANTINED:
            counters["journal_quarantined"] += 1
            return
        if record.kind == Kind.SEAL:
            self._take_seals(record, counters)
            return
        try:
            spans = decode(record, counters)
        except ValueError as error:
            counters["undecodable"] += 1
            log.error("The journal's record at %d is left out: %s.", record.position, error)
            return
        share = len(record.body) // max(1, len(spans))
        counters["records"] += 1
        counters["spans"] += len(spans)
        for span in spans:
            if not span.rollout_id:  # a log record outside of every rollout and trace
                counters["unattributed"] += 1
                continue
            key = self._joins.home(span)
            written = self._written.get(key)
            if written is not None and written.high == math.inf:
                counters["expired"] += 1  # retention has taken its attempt away
            elif written is None or record.position >= written.high:
                attempt = self._attempt(key, record.position, record.time_ns / 1e9)
                self._open.add(attempt, span, record, share)
                self._joins.logs_of(span, attempt, self._open)

    def _attempt(self, key: Key, position: int, time_s: float) -> OpenAttempt:
        attempt = self._open.by_key.get(key)
        if attempt is None:
            written = self._written.get(key)
            attempt = OpenAttempt(key, position, last_seen=time_s)
            if written is not None:
                attempt.generation = written.generation + 1
                attempt.stored_earlier = written.calls_stored
                attempt.earlier_noted = False
            self._open.by_key[key] = attempt
        return attempt

    def _take_seals(self, record: Record, counters: Counter[str]) -> None:
        try:
            wanted = [
                ((str(item["rollout_id"]), int(item["attempt"])), item.get("calls_expected"))
                for item in orjson.loads(record.body)["attempts"]
            ]
        except (ValueError, KeyError, TypeError) as error:
            counters["undecodable"] += 1
            log.error("The seal at %d is left out: %r.", record.position, error)
            return
        for key, expected in wanted:
            written = self._written.get(key)
            satisfied = written is not None and (
                written.high == math.inf or expected is None or written.calls_stored >= expected
            )
            if key not in self._open.by_key and satisfied:
                continue
            attempt = self._attempt(key, record.position, record.time_ns / 1e9)
            attempt.seal = Seal(expected, record.time_ns / 1e9)
            attempt.reported = None

    # ---- writing ----

    def _write(self, ready: Sequence[tuple[OpenAttempt, bool]]) -> None:
        """Commit attempts, as many as fit in memory: the next step writes the rest."""
        batch: list[tuple[OpenAttempt, bool]] = []
        size = 0
        for attempt, truncated in ready:
            batch.append((attempt, truncated))
            size += attempt.size
            if size >= COMMIT_BYTES:
                break
        late = [attempt.key for attempt, _ in batch if attempt.generation > 0]
        taken = [key for attempt, _ in batch for key in attempt.taken_in]
        earlier = self._earlier([*late, *taken]) if late or taken else {}
        rows = self._rollout_rows(late) if late else {}
        making: list[_Made] = []
        for attempt, truncated in batch:
            key = attempt.key
            others = [assemble(*other, earlier.get(other, [])) for other in attempt.taken_in]
            spans = [*self._open.load(attempt), *(span for other in others for span in other.spans)]
            made = self._assemble(attempt, spans, earlier.get(key, []), rows.get(key, {}))
            if made is None:
                self._open.close(attempt)
                continue
            for other in others:  # they are counted already
                made.counters.subtract(other.counters)
                made.counters["calls"] -= len(other.transitions)
            made.truncated = truncated
            if truncated:
                made.counters["truncated"] += 1
                log.warning("Attempt %s/%d was idle for too long; it is written as it is.", *attempt.key)
            making.append(made)
        if making:
            self._put(making)

    def _assemble(
        self, attempt: OpenAttempt, spans: list[Span], earlier: list[Span], row: dict[str, Any]
    ) -> _Made | None:
        """The attempt's rows; None if there is nothing to write.

        Args:
            earlier, row: of a late one's generation before, its spans and its row of rollouts.
        """
        rollout_id, number = attempt.key
        expected = attempt.seal.calls_expected if attempt.seal is not None else None
        if attempt.generation > 0:
            return self._next_generation(attempt, spans, expected, earlier, row)
        if not spans and expected:
            log.warning("A seal of %s/%d expected %d calls; none ever came.", rollout_id, number, expected)
            self._counters["seal_abandoned"] += 1
            return None
        rows = assemble(rollout_id, number, spans, calls_expected=expected)
        counters = Counter(rows.counters)
        counters["calls"] += len(rows.transitions)
        return _Made(attempt, rows, counters)

    def _next_generation(
        self,
        attempt: OpenAttempt,
        news: list[Span],
        expected: int | None,
        earlier: list[Span],
        row: dict[str, Any],
    ) -> _Made | None:
        """Late spans and what was there, written again as one."""
        rollout_id, number = attempt.key
        before = assemble(rollout_id, number, earlier)
        merged = assemble(rollout_id, number, [*before.spans, *news])
        late = len(merged.spans) - len(before.spans)
        copies = len(news) - late
        if late == 0:
            self._counters["duplicate"] += copies
            return None
        duplicate_before, late_before = int(row.get("duplicate") or 0), int(row.get("late") or 0)
        rows = assemble(
            rollout_id,
            number,
            merged.spans,
            calls_expected=row.get("calls_expected") if expected is None else expected,
            duplicate=duplicate_before + copies,
            late=late_before + late,
        )
        log.info("%d late spans make generation %d of %s/%d.", late, attempt.generation, rollout_id, number)
        counters = Counter(rows.counters)
        counters.subtract(before.counters)
        counters.subtract({"duplicate": duplicate_before, "late": late_before})
        counters["generations"] += 1
        counters["calls"] += len(rows.transitions) - len(before.transitions)
        return _Made(attempt, rows, counters)

    def _put(self, batch: Sequence[_Made]) -> None:
        """One commit: files, then the manifest that makes them exist. Nothing changes here if it fails."""
        low = self._open.low(self.position, without=[made.attempt for made in batch])
        counters = Counter(self._counters)
        for made in batch:
            counters.update(made.counters)
        entries = [self._entry(made) for made in batch]
        # What has become part of another attempt is no more on its own.
        entries += [
            AttemptEntry(*key, None, 0, self._generation(key, 0))
            for made in batch
            for key in made.attempt.taken_in
        ]
        journal = {
            "id": self._reader.id,
            "low": low,
            "high": self.position,
            "commit": self._commit + 1,
            "counters": {name: count for name, count in sorted(counters.items()) if count},
            **self._joins.of(made.attempt.key for made in batch),
        }
        name = f"c{self._reader.id[:8]}-{self._commit + 1:08d}-{self.position:016x}"
        store = self.dataset.store
        files = write_files(store, name, tables([made.rows for made in batch])) if batch else ()
        manifest = commit_manifest(
            store, WRITER, files, attempts=entries, journal=journal, after=self.dataset.history.last
        )
        self._commit, self._low, self._counted = self._commit + 1, low, self.position
        self.totals.update(counters)
        self._counters.clear()
        for made in batch:
            self._open.close(made.attempt)
        for entry in entries:
            self._remember(entry, self.position)
        self._link.send({"type": "commit", "manifest": manifest.number})
        self.dataset.refresh()

    def _entry(self, made: _Made) -> AttemptEntry:
        rows = made.rows
        generation = self._generation((rows.rollout_id, rows.attempt), made.attempt.generation)
        return AttemptEntry(
            rows.rollout_id,
            rows.attempt,
            rows.run_id,
            rows.calls_stored,
            generation,
            truncated=made.truncated,
        )

    def _generation(self, key: Key, least: int) -> int:
        """The next one: another writer may have been there."""
        known = self.dataset.history.entries.get(key)
        return least if known is None else max(least, known.generation + 1)

    def _earlier(self, keys: Sequence[Key]) -> dict[Key, list[Span]]:
        """The spans of some attempts that the data set holds."""
        self.dataset.refresh()
        found: dict[Key, list[Span]] = defaultdict(list)
        table = self.dataset.table("spans", attempts=keys)
        calls = self.dataset.table("transitions", attempts=keys, columns=CALL_COLUMNS)
        for span in spans_from_table(table, calls, Counter()):
            found[span.key].append(span)
        return found

    def _rollout_rows(self, keys: Iterable[Key]) -> dict[Key, dict[str, Any]]:
        columns = ["rollout_id", "attempt", *_FIDELITY, "calls_expected"]
        rows = self.dataset.table("rollouts", attempts=keys, columns=columns).to_pylist()
        return {(row["rollout_id"], row["attempt"]): row for row in rows}

    def _report_pending(self) -> None:
        """Say once what a seal waits for, and again when its numbers change."""
        pending = []
        for attempt in self._open:
            if attempt.seal is None or attempt.seal.calls_expected is None:
                continue
            expected, stored = attempt.seal.calls_expected, self._open.stored(attempt)
            if attempt.reported == (expected, stored):
                continue
            attempt.reported = (expected, stored)
            if stored < expected:
                reason = f"{expected - stored} of {expected} calls have not arrived."
            else:
                reason = "The gateway has not said yet how the attempt ended."
            pending.append(
                {
                    "rollout_id": attempt.key[0],
                    "attempt": attempt.key[1],
                    "calls_expected": expected,
                    "calls_stored": stored,
                    "reason": reason,
                }
            )
        if pending:
            self._link.send({"type": "pending", "attempts": pending})
