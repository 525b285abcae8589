"""Which spans of stacked instrumentations tell of one model call.

The one mechanism, in this order: (1) a call's span inside another's, with no agent or tool between,
tells of the same call (`Forest.outer_call`); what follows compares the innermost. (2) Equal call ids,
or equal response ids of the provider, across scopes and traces. (3) Where one of two has no response
id: different scopes, one's time within the other's, the same model and the same last input message.

The invariant: a group never holds two spans of one scope, so concurrent calls with one prompt stay as
many as they were; and the outcome does not depend on the order of the spans.
"""

import functools
import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from agentlightning.collector.bodies import structured, text_of
from agentlightning.collector.roles import GATEWAY, Call

__all__ = ["Sketch", "same_calls", "sketch_of"]

SLACK_NS: Final = 5_000_000
"""A span's time may stick out of the other's: clocks are read at different moments, ends are back-dated."""


@dataclass(frozen=True, slots=True)
class Sketch:
    """What of a call's span is compared."""

    key: tuple[str, str]
    """Its identity: trace, span."""
    scope: str
    parent: str | None
    start_ns: int
    end_ns: int
    call_id: str | None
    response_id: str | None
    model: str | None
    question: Callable[[], bytes | None]
    """Gives a digest of the last input message; None if no content was captured. Asked for only if it decides."""
    gateway: bool = False


def sketch_of(call: Call) -> Sketch:
    """What is compared of a call."""
    span = call.span
    return Sketch(
        (span.trace_id, span.span_id),
        span.scope,
        span.parent_span_id,
        span.start_ns,
        span.end_ns,
        call.call_id,
        call.response_id,
        call.model,
        functools.cache(lambda: _question(call.request)),
        call.source == GATEWAY,
    )


def same_calls(sketches: Sequence[Sketch]) -> list[list[Sketch]]:
    """The calls: each sketch is in exactly one group, but the gateway's choices of one response stay apart."""
    ordered = sorted(sketches, key=lambda sketch: (sketch.start_ns, sketch.key))
    groups = _by_identity(ordered)
    scopes = sorted({sketch.scope for group in groups for sketch in group})
    for scope in scopes if len(scopes) > 1 else ():
        groups = _paired(groups, scope)
    return groups


def _by_identity(sketches: list[Sketch]) -> list[list[Sketch]]:
    """Equal call ids, and across emitters equal response ids."""
    told = Counter(
        (sketch.response_id, sketch.scope) for sketch in sketches if sketch.response_id and not sketch.gateway
    )
    # An engine that gives every answer one id must not make all calls one.
    repeated = {response for (response, _), count in told.items() if count > 1}
    groups: dict[tuple[str, ...], list[Sketch]] = defaultdict(list)
    gateways: dict[str, list[Sketch]] = defaultdict(list)
    for sketch in sketches:
        if sketch.gateway:
            groups["call", sketch.call_id or "".join(sketch.key)].append(sketch)
            if sketch.response_id:
                gateways[sketch.response_id].append(sketch)
    for sketch in sketches:
        if sketch.gateway:
            continue
        same = gateways.get(sketch.response_id or "", ())
        if sketch.call_id:
            groups["call", sketch.call_id].append(sketch)
        elif len(same) == 1:
            groups["call", same[0].call_id or "".join(same[0].key)].append(sketch)
        elif sketch.response_id and sketch.response_id not in repeated:
            groups["response", sketch.response_id].append(sketch)
        else:
            groups[sketch.key].append(sketch)
    return list(groups.values())


def _paired(groups: list[list[Sketch]], scope: str) -> list[list[Sketch]]:
    """Groups with a span of this scope, each joined to the group without one that tells of the same call.

    As many as possible find a partner (a maximum matching); of several the one that fits tightest.
    """
    inside = [index for index, group in enumerate(groups) if any(sketch.scope == scope for sketch in group)]
    outside = [index for index in range(len(groups)) if index not in set(inside)]
    begins = sorted((min(s.start_ns for s in groups[index]), index) for index in outside)
    longest = max((s.end_ns - s.start_ns for group in groups for s in group), default=0)
    candidates: dict[int, list[int]] = {}
    low = 0
    for index in sorted(inside, key=lambda index: min(s.start_ns for s in groups[index])):
        start, end = min(s.start_ns for s in groups[index]), max(s.end_ns for s in groups[index])
        while low < len(begins) and begins[low][0] < start - 2 * longest - SLACK_NS:
            low += 1
        found = []
        for begin, other in begins[low:]:
            if begin > end + SLACK_NS:
                break
            gap = _fit(groups[index], groups[other])
            if gap is not None:
                found.append((gap, other))
        candidates[index] = [other for _, other in sorted(found)]
    taken: dict[int, int] = {}

    def find(index: int, tried: set[int]) -> bool:
        for other in candidates[index]:
            if other not in tried:
                tried.add(other)
                if other not in taken or find(taken[other], tried):
                    taken[other] = index
                    return True
        return False

    for index in inside:
        find(index, set())
    partner = {index: other for other, index in taken.items()}
    return [
        [*group, *groups[partner[index]]] if index in partner else group
        for index, group in enumerate(groups)
        if index not in taken
    ]


def _fit(one: list[Sketch], other: list[Sketch]) -> tuple[bool, bool, int] | None:
    """How far two groups are from telling of one call at one time (less is nearer); None if they cannot."""
    if {sketch.scope for sketch in one} & {sketch.scope for sketch in other}:
        return None
    if _first(sketch.call_id for sketch in one) and _first(sketch.call_id for sketch in other):
        return None
    ids = [{sketch.response_id for sketch in group} - {None} for group in (one, other)]
    if ids[0] and ids[1]:
        return None  # both know their id, and it is not the same
    a, b = one[0], other[0]
    within = a.start_ns - SLACK_NS <= b.start_ns and b.end_ns <= a.end_ns + SLACK_NS
    around = b.start_ns - SLACK_NS <= a.start_ns and a.end_ns <= b.end_ns + SLACK_NS
    if not within and not around:
        return None
    gateway = any(sketch.gateway for sketch in (*one, *other))
    if not gateway and not _same_model(_first(s.model for s in one), _first(s.model for s in other)):
        return None
    asked, answered = _first(s.question() for s in one), _first(s.question() for s in other)
    same_trace = a.key[0] == b.key[0]
    if asked is not None and answered is not None:
        if asked != answered:
            return None
    elif not same_trace:
        return None  # without content only a trace holds them together
    related = a.parent == b.parent or a.key[1] == b.parent or b.key[1] == a.parent
    return (not same_trace, not related, abs(a.start_ns - b.start_ns) + abs(a.end_ns - b.end_ns))


def _same_model(one: str | None, other: str | None) -> bool:
    """Equal, or one a dated release of the other, or one is not told (an error's span may lack it)."""
    return one is None or other is None or one.startswith(other) or other.startswith(one)


def _first(values: Iterable[Any]) -> Any:
    return next((value for value in values if value is not None), None)


def _question(request: str | None) -> bytes | None:
    """Digest of the last thing that was said to the model."""
    body = structured(request)
    if not isinstance(body, dict):
        return None
    messages = body.get("messages", body.get("input"))
    last: Any = messages[-1] if isinstance(messages, list) and messages else messages
    if isinstance(last, dict):
        last = last.get("content", last.get("output"))
    elif last is None:
        last = body.get("prompt")
    if isinstance(last, list):
        last = "".join(
            text_of(part.get("text")) if isinstance(part, dict) else text_of(part) for part in last
        )
    if last is None:
        return None
    return hashlib.blake2b(text_of(last).encode(errors="replace"), digest_size=12).digest()
