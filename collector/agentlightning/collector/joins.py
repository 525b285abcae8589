"""In the running collector: spans and log records that name no rollout find the attempt that they belong to.

Two ways. A log record goes to the rollout that the spans of its trace name, whichever comes first. And traces of no
rollout that tell of the same model calls (see `linking`) become one attempt, whichever is written first: one that
had been written already is written again with the others, and its own attempt becomes empty.

A manifest names the traces that its attempts took in (`journal["traces"]` and `journal["logs"]`), so that what is
read again after a crash goes where it went.
"""

import re
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, Final

from agentlightning.collector.linking import TraceLinks
from agentlightning.collector.open_attempts import Key, OpenAttempt, OpenAttempts
from agentlightning.collector.span import Span

__all__ = ["Joins"]

Ready = tuple[OpenAttempt, bool]
"""An attempt to write, and whether nobody has said that it is whole."""
RELEARNED: Final = 256
"""Traces in the data set that a new process looks at again: others may still come that belong to them."""
REMEMBERED: Final = 65536
"""Traces of which it is known whose they are."""

_TRACE: Final = re.compile(r"[0-9a-f]{32}")


class Joins:
    """Who belongs to whom."""

    def __init__(self) -> None:
        self._links = TraceLinks(recent=4096)
        self._traces: dict[str, Key] = {}
        """By trace of no rollout: the attempt of another one that it has become part of."""
        self._logs: dict[str, Key] = {}
        """By trace: the attempt that has log records of it which name no rollout."""
        self._taken: defaultdict[Key, set[str]] = defaultdict(set)
        """By attempt: the traces of both."""
        self._homes: OrderedDict[str, Key] = OrderedDict()
        """By trace: the attempt that its newest span names."""
        self._learned: dict[Key, tuple[int, int]] = {}
        """By open attempt: its generation, and how many of its spans have been learned."""
        self._unread: deque[Key] = deque(maxlen=RELEARNED)
        """Traces that were written before this process began: learned when they may matter."""

    def recover(self, joins: Mapping[str, Mapping[str, Any]], written: Iterable[Key]) -> None:
        """Learn what the manifests of this journal say, and which attempts there are, the newest last."""
        for mine, name in ((self._traces, "traces"), (self._logs, "logs")):
            for trace, (rollout_id, attempt) in joins.get(name, {}).items():
                mine[trace] = (rollout_id, attempt)
                self._taken[rollout_id, attempt].add(trace)
        self._unread.extend(key for key in written if _TRACE.fullmatch(key[0]) and not key[1])

    def home(self, span: Span) -> Key:
        """The attempt that a span or log record belongs to."""
        if span.rollout_id != span.trace_id or span.attempt:
            if span.signal == "span" and self._homes.get(span.trace_id) != span.key:
                self._homes[span.trace_id] = span.key
                if len(self._homes) > REMEMBERED:
                    self._homes.popitem(last=False)
            return span.key
        if span.signal != "span":
            known = self._homes.get(span.trace_id) or self._logs.get(span.trace_id)
            if known is not None:
                self._note_logs(span.trace_id, known)
                return known
        return self._traces.get(span.trace_id, span.key)

    def logs_of(self, span: Span, attempt: OpenAttempt, attempts: OpenAttempts) -> None:
        """Log records that came before a span said whose their trace is go where they belong."""
        if span.trace_id == attempt.key[0] or span.signal != "span":
            return
        waiting = attempts.by_key.get((span.trace_id, 0))
        if waiting is not None and not waiting.is_trace and waiting.seal is None:
            attempts.absorb(waiting, attempt)
            self._note_logs(span.trace_id, attempt.key)

    def together(
        self,
        ready: Sequence[Ready],
        attempts: OpenAttempts,
        written: Container[Key],
        attempt_of: Callable[[Key, int, float], OpenAttempt],
        earlier: Callable[[Sequence[Key]], Mapping[Key, list[Span]]],
    ) -> list[Ready]:
        """What is ready, traces that tell of the same calls as one attempt once all of them are.

        Args:
            written: attempts that are in the data set.
            attempt_of: the open attempt of a key, made if need be from a position and a time.
            earlier: the spans of attempts that are in the data set.
        """
        traces = [attempt for attempt in attempts if attempt.is_trace]
        news = [one for one in traces if self._learned.get(one.key) != (one.generation, one.count)]
        before = [one.key for one in news if one.key in written]
        known = earlier([*self._unread, *before]) if self._unread or before else {}
        for key in self._unread:
            self._learn(known.get(key, ()))
        self._unread.clear()
        for one in news:
            self._learn([*known.get(one.key, ()), *attempts.load(one)])
        self._learned = {one.key: (one.generation, one.count) for one in traces}
        cut = {attempt.key: truncated for attempt, truncated in ready}
        for head, others in self._groups():
            present = [attempts.by_key[key] for key in _keys(head, *others) if key in attempts.by_key]
            waiting = any(one.key not in cut for one in present)
            truncated = [cut.pop(one.key, False) for one in present]
            if waiting or not present:
                continue
            into = attempt_of((head, 0), min(one.low for one in present), present[0].last_seen)
            into.is_trace = True
            if head in self._traces:  # it had been part of another, but began before it
                self._traces[head] = into.key
                self._taken[into.key].add(head)
            for trace in others:
                self._take_in(trace, into, attempts, written)
            cut[into.key] = any(truncated)
        return [(attempts.by_key[key], truncated) for key, truncated in cut.items()]

    def of(self, keys: Iterable[Key]) -> dict[str, dict[str, list[Any]]]:
        """What a manifest with these attempts says of joins."""
        taken = sorted(trace for key in keys for trace in self._taken.get(key, ()))
        said = {
            name: {trace: list(mine[trace]) for trace in taken if trace in mine}
            for mine, name in ((self._traces, "traces"), (self._logs, "logs"))
        }
        return {name: found for name, found in said.items() if found}

    def _note_logs(self, trace: str, key: Key) -> None:
        self._logs[trace] = key
        self._taken[key].add(trace)

    def _learn(self, spans: Iterable[Span]) -> None:
        by_trace: defaultdict[str, list[Span]] = defaultdict(list)
        for span in spans:
            by_trace[span.trace_id].append(span)
        for trace, own in by_trace.items():
            self._links.add(trace, own)

    def _groups(self) -> list[tuple[str, list[str]]]:
        """Traces that tell of the same calls: the one whose calls began first, and the others."""
        members: defaultdict[str, set[str]] = defaultdict(set)
        for trace, head in self._links.heads().items():
            members[head] |= {trace}
        for head, others in list(members.items()):
            known = self._traces.get(head, (head, 0))[0]
            if known != head and known not in others:  # taken in by one that is no more remembered
                members[known] |= members.pop(head) | {head}
        return [(head, sorted(others)) for head, others in sorted(members.items())]

    def _take_in(
        self, trace: str, into: OpenAttempt, attempts: OpenAttempts, written: Container[Key]
    ) -> None:
        """Another trace becomes part of an attempt, be it open, written or both, with all that was part of it."""
        key = (trace, 0)
        other = attempts.by_key.get(key)
        if other is not None:
            attempts.absorb(other, into)
        if self._traces.get(trace, key) == key and key in written:
            into.taken_in.append(key)
        for part in {trace, *self._taken.pop(key, ())} - {into.key[0]}:
            self._traces[part] = into.key
            self._taken[into.key].add(part)


def _keys(*traces: str) -> list[Key]:
    return [(trace, 0) for trace in traces]
