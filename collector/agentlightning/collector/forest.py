"""The spans of one attempt by identity: what each is, what is around it, and which are one call.

Several spans may tell of one model call: the gateway's, an SDK's, a framework's around it. `same_call`
says which. The gateway's span is the truth for tokens, else the innermost; the others say who called,
fill what it lacks, and are what rewards are attached to.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Final

import orjson

from agentlightning.collector import tokens
from agentlightning.collector.calls import GATEWAY, Agent, Call, Role, Tool, evaluations, read_role
from agentlightning.collector.dialects import events
from agentlightning.collector.otlp_json import attributes_to_json
from agentlightning.collector.same_call import same_calls, sketch_of
from agentlightning.collector.span import Span
from agentlightning.proto.ids import rollout_span_id

__all__ = ["Forest", "Joined", "SpanKey", "agent_path", "distinct", "join", "key_of", "tellers"]

SpanKey = tuple[str, str]  # trace id, span id

_REMOTE: Final = 0x300
"""OTLP's flags that say: whether the parent is remote is known, and it is."""


_FILLED: Final = (
    "call_id",
    "response_id",
    "policy",
    "model",
    "request",
    "response",
    "sampling",
    "prompt_ids",
    "finish_reason",
)


@dataclass(slots=True, eq=False)
class Joined:
    """One model call, and every span that tells of it."""

    truth: Call
    members: list[Span]
    rewards: dict[str, float] = field(default_factory=dict)
    call_id: str = ""
    path: list[str] = field(default_factory=list)


class Forest:
    """Spans by identity, what each is, and what is around it."""

    def __init__(self, rollout_id: str, attempt: int, spans: list[Span]) -> None:
        self.spans = {key_of(span): span for span in spans if span.signal == "span"}
        self.roles: dict[SpanKey, Role] = {}
        records: dict[SpanKey, list[Span]] = defaultdict(list)
        for span in spans:
            if span.signal == "log" and events.is_content(span):
                records[key_of(span)].append(span)
        for key, span in self.spans.items():
            role = read_role(span, records.pop(key, ()))
            if role is not None:
                self.roles[key] = role
        for key, told in records.items():  # only the logs were exported
            stand_in = events.stand_in(told) if all(key) else None
            role = read_role(stand_in) if stand_in is not None else None
            if stand_in is not None and role is not None:
                self.spans[key], self.roles[key] = stand_in, role
        self.evaluations = [evaluation for span in spans for evaluation in evaluations(span)]
        root = rollout_span_id(rollout_id, attempt)  # known, even before its span has come
        self.orphans = sum(
            span.parent_span_id is not None
            and span.parent_span_id != root
            and (span.trace_id, span.parent_span_id) not in self.spans
            and span.flags & _REMOTE != _REMOTE
            for span in self.spans.values()
        )

    def ancestors(self, key: SpanKey) -> Iterable[SpanKey]:
        """The spans around a span, nearest first; ends at a parent that is not there."""
        seen = {key}
        span = self.spans.get(key)
        while span is not None and span.parent_span_id is not None:
            key = (span.trace_id, span.parent_span_id)
            if key in seen or key not in self.spans:  # a cycle is a bug of the emitter
                return
            seen.add(key)
            yield key
            span = self.spans[key]

    def outer_call(self, key: SpanKey) -> SpanKey | None:
        """The call span around a call span, if it tells of the same call."""
        for ancestor in self.ancestors(key):
            role = self.roles.get(ancestor)
            if isinstance(role, Call):
                return ancestor
            if isinstance(role, Agent | Tool):
                return None
        return None

    def agents(self, key: SpanKey) -> list[tuple[SpanKey, str]]:
        """The agents around a span, outermost first."""
        found = []
        for ancestor in self.ancestors(key):
            role = self.roles.get(ancestor)
            if isinstance(role, Agent):
                found.append((ancestor, role.name))
        return found[::-1]


def distinct(spans: Iterable[Span]) -> tuple[list[Span], int]:
    """Each span once, in an order of their own, and how many copies there were."""
    chosen: dict[tuple[str, ...], Span] = {}
    copies = 0
    for span in spans:
        key: tuple[str, ...] = (span.signal, span.trace_id, span.span_id)
        if span.signal == "log":  # records have no identity: equal ones are one
            key = (*key, span.name, str(span.start_ns), _canonical(span))
        other = chosen.get(key)
        if other is None:
            chosen[key] = span
        else:
            copies += 1
            if span is not other and _fullness(span) > _fullness(other):
                chosen[key] = span
    ordered = sorted(chosen.items(), key=lambda item: (item[1].start_ns, item[0]))
    return [span for _, span in ordered], copies


def _fullness(span: Span) -> tuple[int, int, str]:
    """Of two spans with one identity the fuller is kept, whichever came first."""
    return (span.end_ns, len(span.attributes), _canonical(span))


def _canonical(span: Span) -> str:
    """Everything that rows are made of, so that no two different spans are equal."""
    content = [
        attributes_to_json(span.attributes),
        attributes_to_json(span.resource.attributes),
        [span.parent_span_id, span.start_ns, span.name, span.scope, span.scope_version, span.kind],
        [span.status_code, span.status_message, span.flags, span.trace_state, span.dropped_attributes],
        [[event.name, event.time_ns, attributes_to_json(event.attributes)] for event in span.events],
        [[link.trace_id, link.span_id, attributes_to_json(link.attributes)] for link in span.links],
    ]
    return orjson.dumps(content, option=orjson.OPT_SORT_KEYS).decode()


def join(forest: Forest) -> list[Joined]:
    """The calls of the attempt: each span that tells of one is a member of at least one."""
    calls = {key: role for key, role in forest.roles.items() if isinstance(role, Call)}
    telling, outer = tellers(forest)
    joined: list[Joined] = []
    by_response_id: dict[str, list[Joined]] = defaultdict(list)
    later: list[list[Call]] = []
    for group in _groups(telling):
        told = sorted((telling[key] for key in group), key=_teller) if len(group) > 1 else [telling[group[0]]]
        if told[0].source != GATEWAY and told[0].response_id:
            later.append(told)
            continue
        joined.append(Joined(told[0], [call.span for call in told]))
        if told[0].source == GATEWAY:
            for response in {call.response_id for call in told if call.response_id}:
                by_response_id[response].append(joined[-1])
    for told in later:
        # Several choices of one response are several calls of the gateway's, and one of the SDK's.
        same = [made for call in told for made in by_response_id.get(call.response_id or "", ())]
        for made in same:
            made.members.extend(call.span for call in told)
        if not same:
            joined.append(Joined(told[0], [call.span for call in told]))

    for made in joined:
        for member in list(made.members):
            around = outer.get(key_of(member))
            while around is not None:
                made.members.append(forest.spans[around])
                around = outer.get(around)
        if len(made.members) > 1:  # one may be reached in two ways
            made.members = [span for _, span in sorted({key_of(span): span for span in made.members}.items())]
        if made.truth.source != GATEWAY:
            tellings = [calls[key_of(span)] for span in made.members]
            made.truth = _filled(made.truth, sorted(tellings, key=_teller))
    return joined


def _groups(telling: dict[SpanKey, Call]) -> list[list[SpanKey]]:
    """The spans of each call."""
    calls = {call.call_id for call in telling.values() if call.source == GATEWAY and call.call_id}
    if len(calls) == len(telling):  # the gateway alone tells: a call id is a call
        return [[key] for key in sorted(telling, key=lambda key: (telling[key].span.start_ns, key))]
    sketches = [sketch_of(call) for call in telling.values()]
    return [[sketch.key for sketch in group] for group in same_calls(sketches)]


def tellers(forest: Forest) -> tuple[dict[SpanKey, Call], dict[SpanKey, SpanKey | None]]:
    """The calls as the innermost spans tell them, and for every call's span the one around it of the same."""
    calls = {key: role for key, role in forest.roles.items() if isinstance(role, Call)}
    outer = {key: forest.outer_call(key) for key in calls}
    has_inner = set(outer.values())
    telling = {key: call for key, call in calls.items() if call.source == GATEWAY or key not in has_inner}
    return telling, outer


def _filled(truth: Call, tellings: list[Call]) -> Call:
    """The call, with what its own span lacks and another that tells of it has."""
    found = replace(truth)
    for other in tellings:
        for name in _FILLED:
            if not getattr(found, name) and getattr(other, name):
                setattr(found, name, getattr(other, name))
        if found.response_ids is None and other.response_ids is not None:
            found.prompt_ids = found.prompt_ids or other.prompt_ids
            found.response_ids, found.logprobs = other.response_ids, other.logprobs
    return found


def _teller(call: Call) -> tuple[Any, ...]:
    """Sort key: the gateway, success, the most tokens, content, then the innermost (latest begun)."""
    return (
        call.source != GATEWAY,
        call.error is not None,
        -tokens.count(call.response_ids),
        call.response is None,
        -call.span.start_ns,
        *key_of(call.span),
    )


def agent_path(call: Joined, forest: Forest) -> list[str]:
    """The agents around a call, outermost first: as stamped by the SDK, else the fullest that nesting shows."""
    stamped: list[list[str]] = []
    nested: list[list[str]] = []
    for member in call.members:
        role = forest.roles.get(key_of(member))
        if not isinstance(role, Call):
            continue
        if role.agent_path:
            stamped.append(role.agent_path)
        path: list[str] = []
        for _, name in forest.agents(key_of(member)):
            if not path or path[-1] != name:  # some frameworks open two layers for one agent
                path.append(name)
        if role.agent and (not path or path[-1] != role.agent):
            path.append(role.agent)
        nested.append(path)
    return max(stamped or nested, key=lambda path: (len(path), path), default=[])


def key_of(span: Span) -> SpanKey:
    """A span's identity."""
    return (span.trace_id, span.span_id)
