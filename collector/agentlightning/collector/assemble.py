"""The spans of one attempt, assembled: its calls in order, its rewards, its row.

The invariant: a pure function of the set of spans. Their order, and copies among them, change nothing
but the count of duplicates.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from agentlightning.collector.calls import is_gateway_call, ledger_key
from agentlightning.collector.forest import Forest, Joined, agent_path, distinct, join, key_of
from agentlightning.collector.rewards import judge
from agentlightning.collector.span import MAX_INT32, Span
from agentlightning.proto import attributes as names
from agentlightning.proto.ids import call_id as derived_call_id
from agentlightning.proto.ids import rollout_span_id

__all__ = ["Assembled", "assemble", "calls_stored", "is_rollout_span"]

UNANSWERED: Final = "unanswered"
"""The error of a call that was recorded, but whose answer the agent never got: the gateway was killed between the two, or
did not hear that it was recorded."""
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
    unique, copies = distinct(spans)
    forest = Forest(rollout_id, attempt, unique)
    counters: Counter[str] = Counter()
    joined = join(forest)
    joined.sort(key=lambda call: (call.truth.span.start_ns, call.truth.choice, *key_of(call.truth.span)))
    responses = Counter(call.truth.response_id for call in joined)
    for call in joined:
        truth = call.truth
        nonce = truth.response_id if responses[truth.response_id] == 1 else None
        call.call_id = truth.call_id or derived_call_id(
            rollout_id, attempt, nonce or "".join(key_of(truth.span))
        )
        call.path = agent_path(call, forest)
        for reason in call.truth.unparsed:
            counters["unparsed"] += 1
            counters[f"unparsed.{reason}"] += 1
    rewards = judge(forest, joined, counters)
    counters["orphan"] += forest.orphans
    counters["duplicate"] = duplicate + copies
    counters["late"] = late
    if any(span.trace_id == rollout_id for span in unique):  # the attempt is a trace, or several
        counters["without_rollout"] = len(unique)
    answered = _answered(rollout_id, attempt, unique)
    for call in joined:
        recorded = call.truth.error is None and is_gateway_call(call.truth.span)
        if answered is not None and recorded and call.truth.call_id not in answered:
            call.truth.error = UNANSWERED
            counters["unanswered"] += 1
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
        "calls_stored": _calls_stored(unique, joined) - counters["unanswered"],
    }
    if rollout["calls_expected"] is None:
        rollout["calls_expected"] = calls_expected
    for name in ("duplicate", "late", "orphan", "unparsed", "dropped_attributes"):
        rollout[name] = min(counters[name], MAX_INT32)
    return Assembled(rollout_id, attempt, transitions, rollout, unique, +counters)


def calls_stored(spans: Iterable[Span]) -> int:
    """How many calls of an attempt are stored, counted as the gateway's ledger counts them.

    That is: gateway spans without an error, by call id. Where no gateway has recorded anything: the
    calls without an error that SDK spans tell of.
    """
    unique, _ = distinct(spans)
    return _calls_stored(unique, None)


def is_rollout_span(span: Span) -> bool:
    """Whether this is the span that the gateway writes when an attempt has ended."""
    return span.name == names.ROLLOUT_SPAN_NAME and names.ROLLOUT_STATE in span.attributes


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


def _answered(rollout_id: str, attempt: int, spans: list[Span]) -> frozenset[str] | None:
    """The calls whose answers the agent got, by the gateway's ledger; None if it does not say."""
    last = _rollout_span(rollout_id, attempt, spans)
    found = None if last is None else last.attributes.get(names.CALLS_ANSWERED)
    return frozenset(map(str, found)) if isinstance(found, list | tuple) else None


def _rollout_span(rollout_id: str, attempt: int, spans: list[Span]) -> Span | None:
    ended = [span for span in spans if is_rollout_span(span)]
    expected_id = rollout_span_id(rollout_id, attempt)
    return max(ended, key=lambda span: (span.span_id == expected_id, span.end_ns, key_of(span)), default=None)


def _outcome(rollout_id: str, attempt: int, spans: list[Span]) -> dict[str, Any]:
    """How the attempt ended, as the gateway's rollout span says; all null if there is none."""
    last = _rollout_span(rollout_id, attempt, spans)
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


def _calls_stored(unique: list[Span], joined: list[Joined] | None) -> int:
    keys = {key for span in unique if span.signal == "span" and (key := ledger_key(span)) is not None}
    if keys or any(is_gateway_call(span) for span in unique):
        return len(keys)
    if joined is None:
        joined = join(Forest("", 0, unique))
    return sum(call.truth.error is None for call in joined)


def _transition(call: Joined, seq: int, *, done: bool) -> dict[str, Any]:
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
