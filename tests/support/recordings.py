"""Data sets written by hand, as the collector would have: some rollouts of some calls."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from agentlightning.proto.dataset import AttemptEntry, commit_manifest, write_files
from agentlightning.proto.schemas import ROLLOUTS, SPANS, TRANSITIONS

TIME = 1_790_000_000_000_000  # µs


@dataclass
class Spoken:
    """One call: what was said, and the tokens of it if the engine told."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    answer: dict[str, Any] = field(default_factory=dict)
    tools: list[dict[str, Any]] = field(default_factory=list)
    prompt: Sequence[int] | None = None
    response: Sequence[int] | None = None
    logprobs: Sequence[float] | None = None
    agent: str | None = None
    version: int | None = 0
    policy: str | None = "tiny"
    error: str | None = None


@dataclass
class Told:
    """One rollout."""

    rollout_id: str
    calls: list[Spoken]
    reward: float | None = 0.0
    group: str | None = "g"
    task: str | None = "t"
    split: str | None = "train"
    state: str = "succeeded"
    cause: str | None = None
    attempt: int = 0
    input: Any = None
    expected: int | None = None


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def write_recording(folder: Path, rollouts: Iterable[Told], *, run: str = "run", files: int = 1) -> Path:
    """Write a data set at `folder`, its rollouts spread over so many commits."""
    rollouts = list(rollouts)
    for number in range(files):
        part = rollouts[number::files]
        transitions = [_call(r, seq, call, run) for r in part for seq, call in enumerate(r.calls)]
        tables = {
            "transitions": _table(TRANSITIONS, transitions),
            "rollouts": _table(ROLLOUTS, [_rollout(r, run) for r in part]),
            "spans": _table(SPANS, [_span(r) for r in part]),
        }
        entries = [AttemptEntry(r.rollout_id, r.attempt, run, len(r.calls)) for r in part]
        commit_manifest(folder, "collector", write_files(folder, f"part-{number}", tables), attempts=entries)
    return folder


def _identity(rollout: Told, run: str) -> dict[str, Any]:
    return {
        "run_id": run,
        "group_id": rollout.group,
        "task_id": rollout.task,
        "rollout_id": rollout.rollout_id,
        "split": rollout.split,
        "attempt": rollout.attempt,
    }


def _call(rollout: Told, seq: int, call: Spoken, run: str) -> dict[str, Any]:
    request = {"model": "tiny", "messages": call.messages} | ({"tools": call.tools} if call.tools else {})
    response = {"choices": [{"index": 0, "message": call.answer, "finish_reason": "stop"}]}
    return {
        **_identity(rollout, run),
        "seq": seq,
        "call_id": f"{rollout.rollout_id}-{rollout.attempt}-{seq}",
        "span_id": f"{seq:016x}",
        "trace_id": f"{abs(hash(rollout.rollout_id)) % 16**32:032x}",
        "agent": call.agent,
        "policy": call.policy,
        "model_version": call.version,
        "request": json.dumps(request) if call.messages else None,
        "response": json.dumps(response) if call.answer else None,
        "sampling": json.dumps({"temperature": 1.0}),
        "prompt_token_ids": call.prompt,
        "response_token_ids": call.response,
        "response_logprobs": call.logprobs,
        "token_source": "engine" if call.response is not None else "none",
        "finish_reason": "stop",
        "error": call.error,
        "done": seq == len(rollout.calls) - 1,
        "start_time": TIME + seq,
        "duration_ms": 1.0,
        "source": "gateway",
    }


def _rollout(rollout: Told, run: str) -> dict[str, Any]:
    rewards = {} if rollout.reward is None else {"reward": rollout.reward}
    return {
        **_identity(rollout, run),
        "input": json.dumps(rollout.input),
        "state": rollout.state,
        "cause": rollout.cause,
        "reward": rollout.reward,
        "rewards": list(rewards.items()),
        "start_time": TIME,
        "end_time": TIME + 1000,
        "calls_expected": len(rollout.calls) if rollout.expected is None else rollout.expected,
        "calls_stored": len(rollout.calls),
        **dict.fromkeys(("duplicate", "late", "orphan", "unparsed", "dropped_attributes"), 0),
    }


def _span(rollout: Told) -> dict[str, Any]:
    return {
        "rollout_id": rollout.rollout_id,
        "attempt": rollout.attempt,
        "trace_id": "a" * 32,
        "span_id": "b" * 16,
        "name": "agentlightning.rollout",
        "resource": "[]",
        "attributes": "[]",
        "signal": "span",
    }


def _table(schema: pa.Schema, rows: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(rows, schema=schema)
