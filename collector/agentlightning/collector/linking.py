"""Traces that belong to no rollout, but tell of the same model calls: one attempt together.

Some instrumentations do not put their spans into the context, so what another one records of the same
call begins a trace of its own. A rollout's spans are together anyway, whatever their traces.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

from agentlightning.collector.forest import Forest, tellers
from agentlightning.collector.same_call import Sketch, same_calls, sketch_of
from agentlightning.collector.span import Span

__all__ = ["TraceLinks"]


class TraceLinks:
    """Collects what traces tell, a few words per call; then says which belong together.

    Args:
        recent: remember so many traces, the newest; 0: all of them.
    """

    def __init__(self, recent: int = 0) -> None:
        self._recent = recent
        self._by_trace: OrderedDict[str, dict[tuple[str, str], Sketch]] = OrderedDict()
        self._words: dict[str | None, str | None] = {None: None}

    def add(self, trace: str, spans: Iterable[Span]) -> None:
        """Learn of a trace; all of its spans at once."""
        forest = Forest(trace, 0, [span for span in spans if span.trace_id == trace])
        told = {}
        for call in tellers(forest)[0].values():
            sketch = sketch_of(call)
            told[sketch.key] = replace(
                sketch,
                scope=self._once(sketch.scope) or "",
                model=self._once(sketch.model),
                question=partial(_itself, sketch.question()),  # without the call
            )
        self._by_trace[trace] = told
        self._by_trace.move_to_end(trace)
        if self._recent and len(self._by_trace) > self._recent:
            self._by_trace.popitem(last=False)

    def heads(self) -> dict[str, str]:
        """For every trace that belongs to another: the one that it belongs to, whose calls began first."""
        parent: dict[str, str] = {}

        def root(trace: str) -> str:
            while parent.get(trace, trace) != trace:
                trace = parent[trace]
            return trace

        sketches = [sketch for told in self._by_trace.values() for sketch in told.values()]
        if len({sketch.scope for sketch in sketches}) < 2:
            return {}  # one instrumentation tells of each call once
        began: dict[str, int] = {}
        for sketch in sketches:
            trace = sketch.key[0]
            began[trace] = min(sketch.start_ns, began.get(trace, sketch.start_ns))
        for group in same_calls(sketches):
            roots = {root(sketch.key[0]) for sketch in group}
            head = min(roots, key=lambda trace: (began[trace], trace))
            for trace in roots:
                parent[trace] = head
        return {trace: root(trace) for trace in parent if root(trace) != trace}

    def _once(self, word: str | None) -> str | None:
        return self._words.setdefault(word, word)


def _itself(digest: bytes | None) -> bytes | None:
    return digest
