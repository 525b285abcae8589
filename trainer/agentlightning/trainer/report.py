"""`report.html`: one self-contained page about a run.

Drawn from `metrics.jsonl` and the data set alone, so it can be written again at any time, also after a
run that was interrupted.
"""

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from agentlightning.proto.dataset import Dataset
from agentlightning.trainer.config import TrainConfig
from agentlightning.trainer.launch import Layout
from agentlightning.trainer.metrics import Metrics

__all__ = ["write_report"]

SHOWN = 3
"""Trajectories before and after."""
PHASES = ("rollouts", "read", "merge", "update", "checkpoint", "publish")

EXPLAINED = {
    "duplicate": "spans that arrived more than once; kept once",
    "late": "spans that arrived after their attempt was sealed; a new generation of it was written",
    "orphan": "spans whose parent never arrived",
    "unparsed": "fields that could not be read; the rest of the row was kept",
    "dropped_attributes": "attributes that an SDK dropped before sending",
    "incomplete_rollout": "rollouts of which a call was missing; not trained",
    "no_calls": "rollouts that succeeded without calling the model",
    "retried_attempts": "attempts that were repeated after an infrastructure failure",
    "no_reward": "rollouts without a reward; not trained",
    "reward_not_finite": "rewards that were NaN or infinite; refused",
    "call_error": "calls that ended in an error; not trained",
    "no_token_ids": "calls without token ids; not trained",
}


@dataclass(frozen=True)
class Turn:
    role: str
    text: str


@dataclass(frozen=True)
class Trajectory:
    rollout_id: str
    reward: float | None
    turns: list[Turn]
    earlier: int
    """Messages before the last user message that are not shown."""


def write_report(
    config: TrainConfig, layout: Layout, metrics: Metrics, *, restarts: Mapping[str, int]
) -> Path:
    """Write the page, whole or not at all, and return its path."""
    steps, evaluations = metrics.of("step"), metrics.of("evaluate")
    ends = metrics.of("end")
    page = (
        _environment()
        .get_template("report.html.jinja")
        .render(
            name=config.run.name,
            model=config.policy.model,
            agent=config.agent.target,
            finished=bool(ends),
            steps=steps,
            evaluations=evaluations,
            curve=_curve(steps, evaluations),
            phases=_phases(steps),
            phase_names=PHASES,
            counters=_counters(steps, evaluations, ends, restarts),
            tokens=_tokens(steps),
            pairs=_pairs(layout.data, evaluations),
            configuration=(layout.root / "config.yaml").read_text(),
        )
    )
    temporary = layout.report.with_suffix(".tmp")
    temporary.write_text(page)
    os.replace(temporary, layout.report)
    return layout.report


def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,  # agents' texts stand in this page
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _curve(steps: Sequence[dict[str, Any]], evaluations: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Points of the reward curve in a 720 × 260 drawing."""
    left, right, top, bottom = 44.0, 706.0, 14.0, 226.0
    last = max([record["step"] for record in [*steps, *evaluations]], default=1) or 1
    values = [record["reward"] for record in steps if record["reward"] is not None]
    values += [record[key] for record in evaluations for key in ("low", "high")]
    low, high = min([0.0, *values]), max([1.0, *values])

    def x(step: float) -> float:
        return round(left + (right - left) * step / last, 1)

    def y(value: float) -> float:
        return round(bottom - (bottom - top) * (value - low) / (high - low), 1)

    ticks = [low + (high - low) * part / 4 for part in range(5)]
    return {
        "train": [
            {"x": x(r["step"]), "y": y(r["reward"]), "step": r["step"], "value": r["reward"]}
            for r in steps
            if r["reward"] is not None
        ],
        "held_out": [
            {**r, "x": x(r["step"]), "y": y(r["mean"]), "y_low": y(r["low"]), "y_high": y(r["high"])}
            for r in evaluations
        ],
        "y_ticks": [{"y": y(value), "label": f"{value:.2f}"} for value in ticks],
        "x_ticks": [{"x": x(step), "label": step} for step in range(0, last + 1, max(1, last // 8))],
    }


def _phases(steps: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One bar per step, its phases as percentages of the longest step."""
    longest = max((record["seconds"]["total"] for record in steps), default=0.0) or 1.0
    bars = []
    for record in steps:
        seconds = record["seconds"]
        parts = [
            {
                "name": name,
                "seconds": seconds.get(name, 0.0),
                "percent": 100 * seconds.get(name, 0.0) / longest,
            }
            for name in PHASES
        ]
        bars.append({"step": record["step"], "total": seconds["total"], "parts": parts})
    return bars


def _counters(
    steps: Sequence[dict[str, Any]],
    evaluations: Sequence[dict[str, Any]],
    ends: Sequence[dict[str, Any]],
    restarts: Mapping[str, int],
) -> list[dict[str, Any]]:
    """Every fidelity counter, also those that are zero: silence must mean that nothing happened."""
    totals = Counter[str](dict.fromkeys(EXPLAINED, 0))
    for record in [*steps, *evaluations]:
        totals.update(record["counters"])
    for record in ends:
        for source in ("gateway", "collector"):
            totals.update({f"{source}: {name}": count for name, count in record[source].items()})
    totals.update({f"restarted: {name}": count for name, count in restarts.items()})
    return [
        {"name": name, "count": count, "meaning": EXPLAINED.get(name, "")}
        for name, count in sorted(totals.items())
    ]


def _tokens(steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    left_out, breaks = Counter[str](), Counter[str]()
    for record in steps:
        left_out.update(record["tokens"]["left_out"])
        breaks.update(record["breaks"])
    trained = sum(record["tokens"]["trained"] for record in steps)
    return {"trained": trained, "left_out": dict(left_out), "breaks": dict(breaks)}


def _pairs(data: Path, evaluations: Sequence[dict[str, Any]]) -> list[tuple[Trajectory, Trajectory]]:
    """The same held-out tasks before and after; those first whose reward rose."""
    if len(evaluations) < 2 or not (data / "manifests").is_dir():
        return []
    dataset = Dataset(data)
    newest: dict[str, int] = {}
    for rollout_id, attempt in dataset.attempts:
        newest[rollout_id] = max(attempt, newest.get(rollout_id, 0))
    first, last = evaluations[0]["rollouts"], evaluations[-1]["rollouts"]
    keys = [(rollout_id, newest[rollout_id]) for rollout_id in [*first, *last] if rollout_id in newest]
    rewards = {
        row["rollout_id"]: row["reward"]
        for row in dataset.table(
            "rollouts", attempts=keys, columns=["rollout_id", "attempt", "reward"]
        ).to_pylist()
    }
    pairs = [
        (before, after) for before, after in zip(first, last, strict=False) if {before, after} <= set(rewards)
    ]
    pairs.sort(key=lambda pair: (rewards[pair[0]] or 0.0) - (rewards[pair[1]] or 0.0))
    chosen = pairs[:SHOWN]
    wanted = [(rollout_id, newest[rollout_id]) for pair in chosen for rollout_id in pair]
    columns = ["rollout_id", "attempt", "seq", "request", "response"]
    rows = dataset.table("transitions", attempts=wanted, columns=columns).to_pylist()
    last_call = {row["rollout_id"]: row for row in sorted(rows, key=lambda row: row["seq"])}
    return [
        (_trajectory(before, rewards, last_call), _trajectory(after, rewards, last_call))
        for before, after in chosen
        if before in last_call and after in last_call
    ]


def _trajectory(
    rollout_id: str, rewards: Mapping[str, float | None], last_call: Mapping[str, Mapping[str, Any]]
) -> Trajectory:
    """The conversation as the last call saw it, and its answer."""
    row = last_call[rollout_id]
    messages = _messages(row["request"], "messages")
    for choice in _messages(row["response"], "choices"):
        messages.append(choice.get("message") or {})
    users = [number for number, message in enumerate(messages) if message.get("role") == "user"]
    start = users[-1] if users else 0
    return Trajectory(rollout_id, rewards[rollout_id], [_turn(m) for m in messages[start:]], start)


def _messages(body: str | None, key: str) -> list[dict[str, Any]]:
    try:
        found = json.loads(body or "{}").get(key) or []
    except (ValueError, AttributeError):
        return []
    return [item for item in found if isinstance(item, dict)]


def _turn(message: Mapping[str, Any]) -> Turn:
    content = message.get("content")
    if isinstance(content, list):
        content = " ".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    calls = [
        f"{call['function'].get('name')}({call['function'].get('arguments')})"
        for call in message.get("tool_calls") or ()
        if isinstance(call.get("function"), dict)
    ]
    return Turn(str(message.get("role", "assistant")), "\n".join([*([content] if content else []), *calls]))
