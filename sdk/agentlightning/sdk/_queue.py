"""A bounded queue of ended spans and the thread that sends them.

The one idea: a span leaves the queue when the collector has acknowledged or finally refused it, and
not before; everything else (a collector that restarts, a full network, a wrong token) is waited out.
Invariants:
1. `put` neither blocks nor raises; a full queue drops the span and counts it.
2. Spans that training needs have a lane of their own, so that chatty telemetry cannot crowd them out.
3. `flush` says the truth: True only if every span put before it, since the last flush, was acknowledged.
4. A forked child begins empty: its parent's spans are its parent's to send.
"""

import enum
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Protocol

from agentlightning.sdk._losses import count, forget

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

__all__ = ["Outcome", "Sink", "SpanQueue"]

_LINGER = 0.2
"""Seconds that a span waits for company."""
_BACKOFF = (0.2, 5.0)
"""Seconds between attempts: the first, and the most. Short, since a collector on this machine restarts in one or two."""
_BATCH_SPANS = 512
_BATCH_BYTES = 4 << 20
"""Well under the 64 MiB that a collector takes in one request; one larger span goes alone."""


class Outcome(enum.Enum):
    DELIVERED = "acknowledged by the collector"
    REFUSED = "will never be accepted: malformed, too large"
    RETRY = "not now: unreachable, overloaded, not authorised"


class Sink(Protocol):
    """Where batches go."""

    def __call__(self, spans: Sequence["ReadableSpan"]) -> tuple[Outcome, int]:
        """Deliver a batch; how many spans of a delivered one were rejected. Never raises."""

    def renew(self) -> None:
        """Give up connections: the process has been forked."""


@dataclass(slots=True)
class _Item:
    number: int
    size: int
    span: "ReadableSpan"


class _Lane:
    """First in, first out; bounded by spans and bytes. What is being sent stays in it until that is settled."""

    def __init__(self, spans: int, size: int) -> None:
        self.limit = spans, size
        self.items: deque[_Item] = deque()
        self.size = 0

    def full(self, size: int) -> bool:
        return len(self.items) >= self.limit[0] or (bool(self.items) and self.size + size > self.limit[1])

    def append(self, item: _Item) -> None:
        self.items.append(item)
        self.size += item.size

    def drop_first(self, number: int) -> None:
        for _ in range(number):
            self.size -= self.items.popleft().size


class SpanQueue:
    """Holds ended spans until `send` has delivered them from a thread of its own."""

    def __init__(self, sink: Sink, *, at_start: Callable[[], None]) -> None:
        self._sink = sink
        self._at_start = at_start  # called in each process that queues something, before its thread begins
        self._reset()
        if hasattr(os, "register_at_fork"):
            reference = weakref.WeakMethod(self._after_fork)
            os.register_at_fork(after_in_child=lambda: (method := reference()) and method())

    def _reset(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._vital = _Lane(8192, 128 << 20)
        self._other = _Lane(8192, 32 << 20)
        self._number = 0
        self._lost = 0
        self._lost_reported = 0
        self._waiting = 0  # flushes in progress
        self._closed = False
        self._batch_limit = _BATCH_SPANS
        self._thread: threading.Thread | None = None

    def _after_fork(self) -> None:
        closed = self._closed
        self._reset()
        self._closed = closed
        self._sink.renew()
        forget()

    @property
    def pending(self) -> int:
        """Spans not yet settled."""
        return len(self._vital.items) + len(self._other.items)

    def put(self, span: "ReadableSpan", *, vital: bool) -> None:
        """Queue a span, or drop and count it if the queue is full or closed."""
        size = _size(span)
        with self._changed:
            lane = self._vital if vital else self._other
            if self._closed or lane.full(size):
                self._lost += 1
                count("spans_after_shutdown" if self._closed else "spans_queue_full")
                return
            self._number += 1
            lane.append(_Item(self._number, size, span))
            if self._thread is None:
                self._at_start()
                self._thread = threading.Thread(target=self._work, name="agentlightning-export", daemon=True)
                self._thread.start()
            if self.pending in (
                1,
                self._batch_limit,
            ):  # the worker sleeps until the first, lingers until the batch
                self._changed.notify_all()

    def flush(self, timeout: float) -> bool:
        """Wait until all that was queued before is settled; True if since the last flush nothing was lost."""
        with self._changed:
            target = self._number
            self._waiting += 1
            self._changed.notify_all()
            try:
                settled = self._changed.wait_for(lambda: self._settled(target), max(0.0, timeout))
            finally:
                self._waiting -= 1
            lost = self._lost - self._lost_reported
            self._lost_reported = self._lost
            return settled and not lost

    def close(self, timeout: float) -> int:
        """Flush within `timeout`, then stop for good. Returns how many spans were left behind."""
        self.flush(timeout)
        with self._changed:
            self._closed = True
            left = self.pending
            for lane in (self._vital, self._other):
                lane.drop_first(len(lane.items))
            self._lost += left
            if left:
                count("spans_not_delivered", left)
            self._changed.notify_all()
        return left

    def _settled(self, target: int) -> bool:
        heads = (lane.items[0].number for lane in (self._vital, self._other) if lane.items)
        return all(number > target for number in heads)

    def _work(self) -> None:
        from opentelemetry.context import _SUPPRESS_INSTRUMENTATION_KEY, attach, set_value

        attach(set_value(_SUPPRESS_INSTRUMENTATION_KEY, True))  # our own HTTP requests are nobody's spans
        condition = self._changed
        backoff = 0.0
        while True:
            with condition:
                condition.wait_for(lambda: self.pending or self._closed)
                self._linger(condition, backoff or _LINGER, failing=backoff > 0)
                vital, other = self._take()
                if not vital and not other:
                    if self._closed:
                        return
                    continue
            outcome, rejected = self._sink([item.span for item in (*vital, *other)])
            with condition:
                if self._closed:
                    return  # `close` has counted what was left
                backoff = self._settle(outcome, len(vital), len(other), backoff)
                self._lost += rejected
                condition.notify_all()

    def _linger(self, condition: threading.Condition, seconds: float, *, failing: bool) -> None:
        """Wait for a fuller batch, or before the next attempt; a flush hurries it."""
        flushes = self._waiting
        condition.wait_for(
            lambda: (
                self._closed
                or (not failing and (self._waiting > 0 or self.pending >= self._batch_limit))
                or (failing and self._waiting > flushes)
            ),
            seconds,
        )

    def _take(self) -> tuple[list[_Item], list[_Item]]:
        """The next batch; its items stay in their lanes."""
        taken: list[list[_Item]] = []
        room, size = self._batch_limit, 0
        for lane in (self._vital, self._other):
            chosen: list[_Item] = []
            for item in islice(lane.items, room):
                if size and size + item.size > _BATCH_BYTES:
                    room = 0
                    break
                chosen.append(item)
                size += item.size
            room = max(0, room - len(chosen))
            taken.append(chosen)
        return taken[0], taken[1]

    def _settle(self, outcome: Outcome, vital: int, other: int, backoff: float) -> float:
        """Act on what became of a batch. Returns the wait before the next attempt."""
        number = vital + other
        if outcome is Outcome.RETRY:
            count("export_attempts_failed")
            first, most = _BACKOFF
            return min(most, backoff * 2) if backoff else first
        if outcome is Outcome.REFUSED and number > 1:
            self._batch_limit = max(1, number // 2)  # halve until the span at fault is alone
            return 0.0
        self._vital.drop_first(vital)
        self._other.drop_first(other)
        if outcome is Outcome.DELIVERED:
            count("spans_delivered", number)
            self._batch_limit = min(_BATCH_SPANS, self._batch_limit * 2)
        else:
            self._lost += number
            count("spans_refused", number)
        return 0.0


def _size(span: "ReadableSpan") -> int:
    """About how many bytes a span takes; enough to bound memory."""
    size = 512
    for value in (span.attributes or {}).values():
        size += (
            len(value)
            if isinstance(value, str | bytes)
            else 16 * len(value)
            if isinstance(value, tuple)
            else 16
        )
    return size + 512 * len(span.events)
