"""`report.html`: one self-contained page about a run.

Drawn from `metrics.jsonl` and the data set alone, so it can be written again at any time, also after a
run that was interrupted.
"""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from agentlightning.proto.dataset import Dataset
from agentlightning.trainer.comparison import compare_evaluations
from agentlightning.trainer.config import TrainConfig
from agentlightning.trainer.conversation import COLUMNS, Message, exchanges, text_of
from agentlightning.trainer.launch import Layout
from agentlightning.trainer.metrics import Metrics
from agentlightning.trainer.model import load_tokenizer
from agentlightning.trainer.showcase import Shown, showcase
from agentlightning.trainer.telemetry import PHASES

__all__ = ["write_report"]

ROWS = 120
"""Steps in tables; of more, evenly spaced ones and the last."""
POINTS = 400
"""Steps in charts."""
SHOWN = 3
"""Trajectories before and after."""

SIGNALS = (
    ("entropy", ("update", "entropy"), "nats a sampled token; near 0 the policy explores no more"),
    (
        "KL to the sampler",
        ("update", "kl_sampler"),
        "how far trainer and sampler are apart, old data included",
    ),
    ("mean |log w|", ("update", "sampler_gap_mean"), "of trainer against sampler, per token"),
    (
        "effective sample size",
        ("update", "sampler_ess"),
        "share of the tokens that count, given their weights",
    ),
    ("clip fraction", ("update", "clip_fraction"), "tokens whose gradient the clip stopped"),
    ("gradient norm", ("update", "grad_norm"), "before it was scaled down"),
    ("groups with signal", ("groups", "informative"), "whose rewards differ; the others teach nothing"),
    ("staleness", ("staleness", "mean"), "mean age of the trained tokens, in weight versions"),
    ("tokens per rollout", ("behaviour", "length"), "sampled, in all calls"),
    ("tool calls per rollout", ("behaviour", "tool_calls"), ""),
    ("reward by length", ("behaviour", "reward_by_length"), "correlation within groups"),
    ("repeated answers", ("behaviour", "same_answer"), "share whose answer another task's rollout gave too"),
    ("truncated", ("behaviour", "truncated"), "share of rollouts with an answer cut short"),
)
"""Small charts: title, where the value is in a step's record, and what it means."""

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
    config: TrainConfig,
    layout: Layout,
    metrics: Metrics,
    *,
    restarts: Mapping[str, int] | None = None,
    data: Path | str | None = None,
) -> Path:
    """Write the page, whole or not at all, and return its path.

    Args:
        restarts: how often each component was started again.
        data: the data set that was trained on, if it is not the run's own.
    """
    steps, evaluations = metrics.of("step"), metrics.of("evaluate")
    ends = metrics.of("end")
    own, shown_steps = layout.data, _thinned(steps, ROWS)
    page = (
        _environment()
        .get_template("report.html.jinja")
        .render(
            name=config.run.name,
            model=config.policy.model,
            agent=config.agent.target,
            finished=bool(ends),
            steps=steps,
            shown_steps=shown_steps,
            evaluations=evaluations,
            offline=None if data is None else str(data),
            method=config.offline.method if data is not None else None,
            alarms=metrics.of("alarm"),
            gain=compare_evaluations(evaluations[0], evaluations[-1]) if len(evaluations) > 1 else None,
            signals=_signals(_thinned(steps, POINTS)),
            agents=_agents(steps),
            memory=_memory(steps),
            shown=_shown(config, data or own, own),
            curve=_curve(_thinned(steps, POINTS), evaluations),
            phases=_phases(shown_steps),
            phase_names=PHASES,
            counters=_counters(steps, evaluations, ends, restarts or {}),
            tokens=_tokens(steps),
            pairs=_pairs(own, evaluations),
            configuration=(layout.root / "config.yaml").read_text(),
        )
    )
    temporary = layout.report.with_suffix(".tmp")
    temporary.write_text(page)
    os.replace(temporary, layout.report)
    return layout.report


def _thinned(steps: Sequence[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    every = -(-len(steps) // most)
    return list(steps[-1::-every][::-1]) if steps else []


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
    values += [bound for record in steps for bound in record.get("reward_interval", ())]
    low, high = min([0.0, *values]), max([1.0, *values])

    def x(step: float) -> float:
        return round(left + (right - left) * step / last, 1)

    def y(value: float) -> float:
        return round(bottom - (bottom - top) * (value - low) / (high - low), 1)

    ticks = [low + (high - low) * part / 4 for part in range(5)]
    bounded = [record for record in steps if "reward_interval" in record]
    upper = [f"{x(r['step'])},{y(r['reward_interval'][1])}" for r in bounded]
    lower = [f"{x(r['step'])},{y(r['reward_interval'][0])}" for r in reversed(bounded)]
    return {
        "band": " ".join(upper + lower),
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
    last_call: dict[str, list[dict[str, Any]]] = {}
    for row in dataset.table("transitions", attempts=wanted, columns=[*COLUMNS]).to_pylist():
        last_call.setdefault(row["rollout_id"], []).append(row)
    return [
        (_trajectory(before, rewards, last_call[before]), _trajectory(after, rewards, last_call[after]))
        for before, after in chosen
        if before in last_call and after in last_call
    ]


def _trajectory(
    rollout_id: str, rewards: Mapping[str, float | None], calls: Sequence[Mapping[str, Any]]
) -> Trajectory:
    """The conversation as the last call saw it, and its answer."""
    said = exchanges(calls)
    messages: Sequence[Message] = said[-1].whole if said else ()
    users = [number for number, message in enumerate(messages) if message["role"] == "user"]
    start = users[-1] if users else 0
    turns = [Turn(message["role"], text_of(message)) for message in messages[start:]]
    return Trajectory(rollout_id, rewards[rollout_id], turns, start)


def _signals(steps: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Small charts of what has at least two values, in drawings of 220 × 48."""
    signals = []
    for title, (section, name), meaning in SIGNALS:
        points = [
            (record["step"], record.get(section, {}).get(name))
            for record in steps
            if record.get(section, {}).get(name) is not None
        ]
        if len(points) < 2:
            continue
        values = [value for _, value in points]
        low, high = min(values), max(values)
        first, last = points[0][0], points[-1][0]
        drawn = [
            (
                round(2 + 216 * (step - first) / max(last - first, 1), 1),
                round(44 - 40 * (value - low) / ((high - low) or 1.0), 1),
            )
            for step, value in points
        ]
        signals.append(
            {
                "title": title,
                "meaning": meaning,
                "points": " ".join(f"{x},{y}" for x, y in drawn),
                "first": values[0],
                "last": values[-1],
                "low": low,
                "high": high,
            }
        )
    return signals


def _memory(steps: Sequence[dict[str, Any]]) -> list[tuple[str, float]]:
    """The most memory that each phase of an update has needed, in MiB."""
    peaks: dict[str, float] = {}
    for record in steps:
        for name, value in record["update"].items():
            if (phase := name.removeprefix("peak_memory_").removesuffix("_mib")) != name:
                peaks[phase] = max(value, peaks.get(phase, 0.0))
    return list(peaks.items())


def _agents(steps: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Reward by agent in the first and the last step that it was in."""
    names = sorted({name for record in steps for name in record.get("agents", {})})
    rows = []
    for name in names:
        seen = [record["agents"][name] for record in steps if name in record.get("agents", {})]
        rows.append({"name": name, "first": seen[0], "last": seen[-1]})
    return rows if len(rows) > 1 else []


def _shown(config: TrainConfig, data: Path | str, samples_from: Path) -> list[Shown]:
    dataset = Dataset(data)
    if not config.report.rollouts or not dataset.attempts:
        return []
    tokenizer = load_tokenizer(config.policy.model)
    tokenizer.save_pretrained(config.directory / "tokenizer")  # so that `agl inspect --tokens` shows text

    def decode(ids: Sequence[int]) -> str:
        text: str = tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)
        return text

    return showcase(dataset, Dataset(samples_from), decode, config.report.rollouts, seed=config.run.seed)
