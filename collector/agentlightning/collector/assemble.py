"""The spans of one attempt, assembled: its calls in order, its rewards, its row.

Several spans may tell of one model call: the gateway's, an SDK's, a framework's around it. They join by
call id, else by nesting (with no agent or tool between), else by response id. The gateway's span is the
truth for tokens; the others say who called, and are what rewards are attached to.

The invariant: a pure function of the set of spans. Their order, and copies among them, change nothing
but the count of duplicates.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from agentlightning.collector import tokens
from agentlightning.collector.calls import (
    GATEWAY,
    Agent,
    Call,
    Evaluation,
    Role,
    Tool,
    evaluations,
    is_gateway_call,
    ledger_key,
    read_role,
)
from agentlightning.collector.otlp import Span, attributes_to_json
from agentlightning.proto import attributes as names
from agentlightning.proto.ids import call_id as derived_call_id
from agentlightning.proto.ids import rollout_span_id

__all__ = ["Assembled", "assemble", "calls_stored", "is_rollout_span"]

SpanKey = tuple[str, str]  # trace id, span id

_REMOTE: Final = 0x300
"""OTLP's flags that say: whether the parent is remote is known, and it is."""
_MAX_COUNT: Final = 2**31 - 1  # the column's type
_IDENTITY: Final = {
    "run_id": names.RUN_ID,
    "group_id": names.GROUP_ID,
    "task_id": names.TASK_ID,
    "split": names.SPLIT,
}


@dataclass(slots=True)
class Assembled:
    """An attempt as rows of the tables."""

    rollout_id: str
    attempt: int
    transitions: list[dict[str, Any]]
    """By column of TRANSITIONS, but token ids and log-probabilities packed."""
    rollout: dict[str, Any]
    """By column of ROLLOUTS."""
    spans: list[Span]
    """Each once, by start time."""
    counters: Counter[str] = field(default_factory=Counter)

    @property
    def run_id(self) -> str | None:
        return self.rollout["run_id"]

    @property
    def calls_stored(self) -> int:
        return self.rollout["calls_stored"]


@dataclass(slots=True, eq=False)
class _Joined:
    """One model call, and every span that tells of it."""

    truth: Call
    members: list[Span]
    rewards: dict[str, float] = field(default_factory=dict)
    call_id: str = ""
    path: list[str] = field(default_factory=list)


def assemble(
    rollout_id: str,
    attempt: int,
    spans: Iterable[Span],
    *,
    calls_expected: int | None = None,
    duplicate: int = 0,
    late: int = 0,
) -> Assembled:
    """Make the rows of an attempt from all of its spans, in any order.

    Args:
        calls_expected: what the seal said that the gateway's ledger has, if the rollout span does not.
        duplicate, late: what was counted before these spans were collected.
    """
    unique, copies = _unique(spans)
    forest = _Forest(rollout_id, attempt, unique)
    counters: Counter[str] = Counter()
    joined = _join(forest)
    joined.sort(key=lambda call: (call.truth.span.start_ns, call.truth.choice, *_key(call.truth.span)))
    responses = Counter(call.truth.response_id for call in joined)
    for call in joined:
        truth = call.truth
        nonce = truth.response_id if responses[truth.response_id] == 1 else None
        call.call_id = truth.call_id or derived_call_id(
            rollout_id, attempt, nonce or "".join(_key(truth.span))
        )
        call.path = _agent_path(call, forest)
        for reason in call.truth.unparsed:
            counters["unparsed"] += 1
            counters[f"unparsed.{reason}"] += 1
    rewards = _judge(forest, joined, counters)
    counters["orphan"] += forest.orphans
    counters["duplicate"] = duplicate + copies
    counters["late"] = late
    counters["dropped_attributes"] = sum(span.dropped_attributes for span in unique)

    identity = _identity(rollout_id, attempt, unique)
    transitions = [
        {**identity, **_transition(call, seq, done=seq == len(joined) - 1)} for seq, call in enumerate(joined)
    ]
    rollout = {
        **identity,
        **_outcome(rollout_id, attempt, unique),
        "reward": rewards.get(names.DEFAULT_REWARD),
        "rewards": sorted(rewards.items()),
        "calls_stored": _calls_stored(unique, joined),
    }
    if rollout["calls_expected"] is None:
        rollout["calls_expected"] = calls_expected
    for name in ("duplicate", "late", "orphan", "unparsed", "dropped_attributes"):
        rollout[name] = min(counters[name], _MAX_COUNT)
    return Assembled(rollout_id, attempt, transitions, rollout, unique, +counters)


def calls_stored(spans: Iterable[Span]) -> int:
    """How many calls of an attempt are stored, counted as the gateway's ledger counts them.

    That is: gateway spans without an error, by call id. Where no gateway has recorded anything: the
    calls without an error that SDK spans tell of.
    """
    unique, _ = _unique(spans)
    return _calls_stored(unique, None)


def is_rollout_span(span: Span) -> bool:
    """Whether this is the span that the gateway writes when an attempt has ended."""
    return span.name == names.ROLLOUT_SPAN_NAME and names.ROLLOUT_STATE in span.attributes


class _Forest:
    """Spans by identity, what each is, and what is around it."""

    def __init__(self, rollout_id: str, attempt: int, spans: list[Span]) -> None:
        self.spans = {_key(span): span for span in spans if span.signal == "span"}
        self.roles: dict[SpanKey, Role] = {}
        for key, span in self.spans.items():
            role = read_role(span)
            if role is not None:
                self.roles[key] = role
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


def _unique(spans: Iterable[Span]) -> tuple[list[Span], int]:
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


def _join(forest: _Forest) -> list[_Joined]:
    """The calls of the attempt: each span that tells of one is a member of at least one."""
    calls = {key: role for key, role in forest.roles.items() if isinstance(role, Call)}
    outer = {key: forest.outer_call(key) for key in calls}
    has_inner = set(outer.values())

    joined: list[_Joined] = []
    by_call_id: dict[str, list[_Joined]] = defaultdict(list)
    by_response_id: dict[str, list[_Joined]] = defaultdict(list)
    for group in _groups([call for call in calls.values() if call.source == GATEWAY], by_response=False):
        made = _Joined(group[0], [call.span for call in group])
        joined.append(made)
        for call in group:
            if call.call_id:
                by_call_id[call.call_id].append(made)
            if call.response_id:
                by_response_id[call.response_id].append(made)

    leaves = [call for key, call in calls.items() if call.source != GATEWAY and key not in has_inner]
    for group in _groups(leaves, by_response=True):
        same = [made for call in group for made in by_call_id.get(call.call_id or "", ())]
        same = same or [made for call in group for made in by_response_id.get(call.response_id or "", ())]
        members = [call.span for call in group]
        if same:
            for made in same:
                made.members.extend(members)
        else:
            joined.append(_Joined(group[0], members))

    for made in joined:
        for member in list(made.members):
            around = outer.get(_key(member))
            while around is not None:
                made.members.append(forest.spans[around])
                around = outer.get(around)
        # A member may be reached in two ways.
        made.members = [span for _, span in sorted({_key(span): span for span in made.members}.items())]
    return joined


def _groups(calls: list[Call], *, by_response: bool) -> list[list[Call]]:
    """Calls that are one, best teller first: equal call ids, and across emitters equal response ids."""
    groups: dict[tuple[str, ...], list[Call]] = defaultdict(list)
    tellers: Counter[tuple[str | None, str]] = Counter()
    if by_response:
        tellers.update((call.response_id, call.span.scope) for call in calls)
        # An engine that gives every answer one id must not make all calls one.
        repeated = {response for (response, _), count in tellers.items() if count > 1}
    for call in calls:
        if call.call_id:
            key: tuple[str, ...] = ("call", call.call_id)
        elif by_response and call.response_id and call.response_id not in repeated:
            key = ("response", call.response_id)
        else:
            key = _key(call.span)
        groups[key].append(call)
    for group in groups.values():
        group.sort(key=_teller)
    return list(groups.values())


def _teller(call: Call) -> tuple[Any, ...]:
    """Sort key: success, then the most tokens, then content, then the innermost (latest begun)."""
    return (
        call.error is not None,
        -tokens.count(call.response_ids),
        call.response is None,
        -call.span.start_ns,
        *_key(call.span),
    )


def _agent_path(call: _Joined, forest: _Forest) -> list[str]:
    """The agents around a call, outermost first: as stamped by the SDK, else the fullest that nesting shows."""
    stamped: list[list[str]] = []
    nested: list[list[str]] = []
    for member in call.members:
        role = forest.roles.get(_key(member))
        if not isinstance(role, Call):
            continue
        if role.agent_path:
            stamped.append(role.agent_path)
        path: list[str] = []
        for _, name in forest.agents(_key(member)):
            if not path or path[-1] != name:  # some frameworks open two layers for one agent
                path.append(name)
        if role.agent and (not path or path[-1] != role.agent):
            path.append(role.agent)
        nested.append(path)
    return max(stamped or nested, key=lambda path: (len(path), path), default=[])


def _judge(forest: _Forest, joined: list[_Joined], counters: Counter[str]) -> dict[str, float]:
    """Attach every evaluation to its call, or return it as the rollout's.

    The reward of an agent that did only a part of the work is the rollout's under the agent's name.
    """
    by_member: dict[SpanKey, _Joined] = {}
    by_call_id: dict[str, _Joined] = {}
    by_response_id: dict[str, _Joined] = {}
    for call in joined:  # in order: a span that tells of several calls judges the last of them
        by_call_id[call.call_id] = call
        for member in call.members:
            by_member[_key(member)] = call
            role = forest.roles.get(_key(member))
            if isinstance(role, Call) and role.response_id:
                by_response_id[role.response_id] = call
    rollout: dict[str, float] = {}
    given: set[tuple[int, str]] = set()
    for evaluation in sorted(forest.evaluations, key=lambda e: (e.time_ns, e.origin)):
        if evaluation.value is None:
            counters["reward_without_value"] += 1
            continue
        if not math.isfinite(evaluation.value):
            counters["reward_not_finite"] += 1
            continue
        judged, known = _judged_call(evaluation, forest, by_member, by_call_id, by_response_id)
        name = evaluation.name
        if judged is not None:
            target = judged.rewards
        elif known:
            target = rollout
            agent = _judged_part(evaluation, forest, joined)
            if agent is not None:
                name = agent if name == names.DEFAULT_REWARD else f"{agent}/{name}"
        else:  # it names a call that is not here
            counters["orphan"] += 1
            continue
        if (id(target), name) in given:
            counters["reward_replaced"] += 1  # the latest judgement counts
        given.add((id(target), name))
        target[name] = evaluation.value
    return rollout


def _judged_call(
    evaluation: Evaluation,
    forest: _Forest,
    by_member: dict[SpanKey, _Joined],
    by_call_id: dict[str, _Joined],
    by_response_id: dict[str, _Joined],
) -> tuple[_Joined | None, bool]:
    """The call that is judged, if it is one; and whether what is judged is known at all."""
    if evaluation.call_id is not None:
        call = by_call_id.get(evaluation.call_id)
        return call, call is not None
    start = (evaluation.trace_id, evaluation.span_id or "")
    direct = by_member.get(start)
    if direct is not None and _key(direct.truth.span) == start:
        return direct, True  # of several choices with one response id, this one
    if evaluation.response_id is not None and evaluation.response_id in by_response_id:
        return by_response_id[evaluation.response_id], True
    if evaluation.span_id is not None:
        for key in (start, *forest.ancestors(start)):
            if key in by_member:
                return by_member[key], True
            if isinstance(forest.roles.get(key), Agent | Tool):
                break
    return None, evaluation.response_id is None


def _judged_part(evaluation: Evaluation, forest: _Forest, joined: list[_Joined]) -> str | None:
    """Name of the agent whose work is judged; None if that is the whole attempt."""
    if evaluation.span_id is None:
        return None
    start = (evaluation.trace_id, evaluation.span_id)
    role = forest.roles.get(start)
    around = [*forest.agents(start), *([(start, role.name)] if isinstance(role, Agent) else [])]
    if not around:
        return None
    agent, name = around[-1]
    for call in joined:
        agents = {key for member in call.members for key, _ in forest.agents(_key(member))}
        if agents and agent not in agents:
            return name  # another agent has called too
    return None


def _identity(rollout_id: str, attempt: int, spans: list[Span]) -> dict[str, Any]:
    """Run, group, task and split: the gateway's word before an agent's."""
    identity: dict[str, Any] = {"rollout_id": rollout_id, "attempt": attempt}
    found: dict[str, set[tuple[bool, str]]] = {column: set() for column in _IDENTITY}
    for span in spans:
        for column, name in _IDENTITY.items():
            value = span.attributes.get(name)
            stamped = value is not None
            if not stamped:
                value = span.resource.attributes.get(name)
            if isinstance(value, str) and value:
                found[column].add((not stamped, value))
    for column, values in found.items():
        identity[column] = min(values)[1] if values else None
    return identity


def _outcome(rollout_id: str, attempt: int, spans: list[Span]) -> dict[str, Any]:
    """How the attempt ended, as the gateway's rollout span says; all null if there is none."""
    ended = [span for span in spans if is_rollout_span(span)]
    expected_id = rollout_span_id(rollout_id, attempt)
    last = max(ended, key=lambda span: (span.span_id == expected_id, span.end_ns, _key(span)), default=None)
    attributes = last.attributes if last is not None else {}
    starts = [span.start_ns for span in spans if span.start_ns and span.signal == "span"]
    ends = [span.end_ns for span in spans if span.end_ns and span.signal == "span"]
    expected = attributes.get(names.CALLS_EXPECTED)
    task_input = attributes.get(names.TASK_INPUT)
    if task_input is None:  # a root span of the SDK may have it
        inputs = [span.attributes[names.TASK_INPUT] for span in spans if names.TASK_INPUT in span.attributes]
        task_input = next((value for value in inputs if isinstance(value, str)), None)
    return {
        "input": task_input if isinstance(task_input, str) else None,
        "state": _text(attributes.get(names.ROLLOUT_STATE)),
        "cause": _text(attributes.get(names.ROLLOUT_CAUSE)),
        "error": _text(attributes.get(names.ROLLOUT_ERROR)),
        "start_time": (last.start_ns if last is not None and last.start_ns else min(starts, default=None)),
        "end_time": (last.end_ns if last is not None and last.end_ns else max(ends, default=None)),
        "calls_expected": expected if isinstance(expected, int) and 0 <= expected < 2**31 else None,
    }


def _calls_stored(unique: list[Span], joined: list[_Joined] | None) -> int:
    keys = {key for span in unique if span.signal == "span" and (key := ledger_key(span)) is not None}
    if keys or any(is_gateway_call(span) for span in unique):
        return len(keys)
    if joined is None:
        joined = _join(_Forest("", 0, unique))
    return sum(call.truth.error is None for call in joined)


def _transition(call: _Joined, seq: int, *, done: bool) -> dict[str, Any]:
    truth, span = call.truth, call.truth.span
    engine = truth.prompt_ids is not None or truth.response_ids is not None
    return {
        "seq": seq,
        "call_id": call.call_id,
        "span_id": span.span_id,
        "parent_span_id": span.parent_span_id,
        "trace_id": span.trace_id,
        "agent": call.path[-1] if call.path else None,
        "agent_path": call.path,
        "policy": truth.policy,
        "model": truth.model,
        "model_version": truth.model_version,
        "model_versions": truth.model_versions,
        "request": truth.request,
        "response": truth.response,
        "sampling": orjson.dumps(truth.sampling, default=repr).decode(),
        "prompt_token_ids": truth.prompt_ids,
        "response_token_ids": truth.response_ids,
        "response_logprobs": truth.logprobs,
        "token_source": "engine" if engine else "none",
        "finish_reason": truth.finish_reason,
        "error": truth.error,
        "reward": call.rewards.get(names.DEFAULT_REWARD),
        "rewards": sorted(call.rewards.items()),
        "done": done,
        "start_time": span.start_ns,
        "duration_ms": max(0, span.end_ns - span.start_ns) / 1e6,
        "source": truth.source,
    }


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _key(span: Span) -> SpanKey:
    return (span.trace_id, span.span_id)
