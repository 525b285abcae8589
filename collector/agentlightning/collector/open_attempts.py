"""Attempts that are not in the data set yet: what is known of them, and when they are ready.

While memory allows their decoded spans stand here; beyond the limit those of the largest attempts go to
disk, and an attempt is a list of (segment, offset, length) until it is written.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from agentlightning.collector import assemble
from agentlightning.collector.calls import is_gateway_call, ledger_key
from agentlightning.collector.otlp import decode_logs, decode_traces
from agentlightning.collector.otlp_json import decode_logs_json, decode_traces_json, parse_json
from agentlightning.collector.records import Kind, Record
from agentlightning.collector.span import Span
from agentlightning.collector.spill import Place, Spill
from agentlightning.proto.attributes import CALLS_EXPECTED, ROLLOUT_SPAN_NAME

__all__ = ["Key", "OpenAttempt", "OpenAttempts", "Seal", "decode"]

log = logging.getLogger(__name__)

Key = tuple[str, int]  # rollout id, attempt

MEMORY_BYTES: Final = 6 << 20
"""Of bodies whose decoded spans are kept; they take about three times as much."""
QUIET_SECONDS: Final = 2.0
"""An attempt that looks complete is written without a seal after this time without news."""
LATE_SECONDS: Final = 1.0
"""Late spans of one attempt are collected this long before its next generation is written."""
ROLLOUT_SPAN_SECONDS: Final = 2.0
"""A seal whose calls are all in waits this long for the gateway's word on how the attempt ended."""


@dataclass(slots=True)
class Seal:
    """The trainer's wish to have an attempt."""

    calls_expected: int | None
    time: float
    """Unix time at which the receiver accepted it."""


@dataclass(slots=True, eq=False)
class OpenAttempt:
    """One attempt that has news."""

    key: Key
    low: int
    """Position of its first record: the journal must be kept from there."""
    generation: int = 0
    spans: list[Span] = field(default_factory=list)
    """Those in memory; before them come those on disk."""
    places: list[Place] = field(default_factory=list)
    held: int = 0
    """Bytes of the spans in memory, about."""
    size: int = 0
    """Bytes of all its spans, about."""
    count: int = 0
    """Spans so far."""
    last_seen: float = 0.0
    seal: Seal | None = None
    ledger: set[str] = field(default_factory=set)
    """Calls that the gateway's ledger counts too, those of earlier generations included."""
    through_gateway: bool = False
    is_trace: bool = False
    """The attempt is a trace that belongs to no rollout."""
    taken_in: list[Key] = field(default_factory=list)
    """Attempts of other traces that are in the data set, and become part of this one."""
    root: bool = False
    """A span that stands for the whole attempt is in."""
    missing: tuple[int, bool] = (-1, False)
    """`count` when parents were last looked for, and whether one was not there."""
    ended: bool = False
    """It has been said how the attempt ended."""
    calls_expected: int | None = None
    """From the gateway's rollout span."""
    stored_earlier: int = 0
    """Calls of the generation before."""
    earlier_noted: bool = True
    """What the generation before tells is in `ledger`."""
    stored: tuple[int, int] = (-1, 0)
    """`count` when calls were last counted, and how many there were."""
    reported: tuple[int, int] | None = None
    """What was last said about a seal that waits: calls expected, calls stored."""

    def add(self, span: Span, record: Record, share: int) -> None:
        """One more span, of a record."""
        self.last_seen = max(self.last_seen, record.time_ns / 1e9)
        self.count += 1
        self.size += share
        self.held += share
        self.spans.append(span)
        self.note(span)

    def note(self, span: Span) -> None:
        """Learn what decides when the attempt is ready."""
        if is_gateway_call(span):
            self.through_gateway = True
            key = ledger_key(span)
            if key is not None:
                self.ledger.add(key)
        if span.signal != "span":
            return
        if span.name == ROLLOUT_SPAN_NAME:
            self.root = True
            if assemble.is_rollout_span(span):
                self.ended = True
                expected = span.attributes.get(CALLS_EXPECTED)
                self.calls_expected = expected if isinstance(expected, int) else None
        elif span.trace_id == self.key[0]:
            self.is_trace = True
            self.root = self.root or span.parent_span_id is None


class OpenAttempts:
    """All of them, within a limit of memory."""

    def __init__(
        self, spill: Spill, idle_timeout: float, earlier: Callable[[Sequence[Key]], dict[Key, list[Span]]]
    ) -> None:
        """
        Args:
            earlier: gives the spans that the data set has of some attempts.
        """
        self.by_key: dict[Key, OpenAttempt] = {}
        self._spill = spill
        self._idle_timeout = idle_timeout
        self._earlier = earlier
        self._held = 0
        self._began = time.time()

    def __len__(self) -> int:
        return len(self.by_key)

    def __iter__(self) -> Iterator[OpenAttempt]:
        return iter(self.by_key.values())

    def low(self, default: int, without: Iterable[OpenAttempt] = ()) -> int:
        """The lowest position that is still needed."""
        closing = {attempt.key for attempt in without}
        return min((attempt.low for attempt in self if attempt.key not in closing), default=default)

    def add(self, attempt: OpenAttempt, span: Span, record: Record, share: int) -> None:
        """Give a span to its attempt."""
        attempt.add(span, record, share)
        self._held += share
        if self._held > MEMORY_BYTES:
            self._spill_largest()

    def absorb(self, attempt: OpenAttempt, into: OpenAttempt) -> None:
        """The spans of one attempt become another's."""
        del self.by_key[attempt.key]
        into.places += attempt.places
        into.spans += attempt.spans
        into.low = min(into.low, attempt.low)
        into.held += attempt.held
        into.size += attempt.size
        into.count += attempt.count
        into.last_seen = max(into.last_seen, attempt.last_seen)
        into.ledger |= attempt.ledger
        into.through_gateway |= attempt.through_gateway
        into.taken_in += attempt.taken_in
        into.seal = into.seal or attempt.seal

    def close(self, attempt: OpenAttempt) -> None:
        """It is in the data set."""
        self._held -= attempt.held
        for place in attempt.places:
            self._spill.release(place)
        del self.by_key[attempt.key]

    def load(self, attempt: OpenAttempt) -> list[Span]:
        """An attempt's spans, in the order in which they came."""
        return [*(span for place in attempt.places for span in self._spill.read(place)), *attempt.spans]

    def stored(self, attempt: OpenAttempt) -> int:
        """Its calls, counted as the gateway's ledger counts them."""
        if not attempt.earlier_noted:
            for span in self._earlier([attempt.key]).get(attempt.key, ()):
                attempt.note(span)
            attempt.earlier_noted = True
        if attempt.through_gateway:
            return len(attempt.ledger)
        if attempt.stored[0] != attempt.count:
            stored = attempt.stored_earlier + assemble.calls_stored(self.load(attempt))
            attempt.stored = (attempt.count, stored)
        return attempt.stored[1]

    def ready(self, now: float, *, caught_up: bool) -> Iterator[tuple[OpenAttempt, bool]]:
        """The attempts to write now, and whether each is truncated: nobody has said that it is whole.

        Args:
            caught_up: everything that is committed has been read; else quiet may be an illusion.
        """
        for attempt in list(self):
            # While nobody listened, nobody was quiet.
            quiet = now - max(attempt.last_seen, self._began) if caught_up else -1.0
            if self._is_ready(attempt, now, quiet):
                yield attempt, False
            elif quiet >= self._idle_timeout:
                yield attempt, attempt.generation == 0

    def _is_ready(self, attempt: OpenAttempt, now: float, quiet: float) -> bool:
        if attempt.seal is not None:
            expected = attempt.seal.calls_expected
            if expected is None:
                return True
            told = attempt.ended or attempt.generation > 0 or now - attempt.seal.time >= ROLLOUT_SPAN_SECONDS
            return told and self.stored(attempt) >= expected
        if attempt.generation > 0:
            return quiet >= LATE_SECONDS
        if quiet < QUIET_SECONDS:
            return False
        if attempt.ended:
            return attempt.calls_expected is None or self.stored(attempt) >= attempt.calls_expected
        if attempt.through_gateway and not attempt.is_trace:
            return False  # the gateway will say how it ended
        return attempt.root and not self._misses_parents(attempt)

    def _misses_parents(self, attempt: OpenAttempt) -> bool:
        """Whether a span's parent has not come. Asked when all is quiet, so it is looked for only then."""
        if attempt.missing[0] != attempt.count:
            known: set[tuple[str, str]] = set()
            parents: set[tuple[str, str]] = set()
            for span in self.load(attempt):
                if span.signal == "span":
                    known.add((span.trace_id, span.span_id))
                    if span.parent_span_id is not None:
                        parents.add((span.trace_id, span.parent_span_id))
            attempt.missing = (attempt.count, not parents <= known)
        return attempt.missing[1]

    def _spill_largest(self) -> None:
        kept = sorted((a for a in self if a.spans), key=lambda attempt: attempt.held, reverse=True)
        for attempt in kept:
            if self._held <= MEMORY_BYTES // 2:
                return
            try:
                attempt.places.append(self._spill.write(attempt.spans))
            except OSError as error:
                # A full disk: the journal takes nothing more either, so memory does not grow for long.
                log.warning("Spans of open attempts stay in memory: %s.", error)
                return
            self._held -= attempt.held
            attempt.held = 0
            attempt.spans = []


def decode(record: Record, counters: Counter[str]) -> list[Span]:
    """The spans of a journal record. Raises ValueError if it holds none that can be read."""
    body = record.body
    match record.kind:
        case Kind.TRACES:
            return decode_traces(body, counters)
        case Kind.LOGS:
            return decode_logs(body, counters)
        case Kind.TRACES_JSON:
            return decode_traces_json(parse_json(body), counters)
        case Kind.LOGS_JSON:
            return decode_logs_json(parse_json(body), counters)
    return []
