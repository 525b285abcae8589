"""Some rollouts for the report, token by token: the best, the worst, failures, broken chains, and some at random.

Bounded: so many rollouts, so many tokens; what is not shown is said.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentlightning.proto.dataset import Dataset
from agentlightning.proto.token_view import BREAKS, pieces, sample_rows, stretches

__all__ = ["Shown", "ShownSample", "ShownStretch", "ShownToken", "choose", "showcase"]

Decode = Callable[[Sequence[int]], str]

TOKENS = 6000
"""Sampled tokens that are shown in all."""
TOKENS_OF_ONE = 1200
DISAGREE = 0.5
"""Nats between the log-probabilities of sampler and trainer from which a token is marked."""
CONTEXT = 600
"""Characters of a stretch of context: its beginning and its end."""


@dataclass(frozen=True, slots=True)
class ShownToken:
    text: str
    sampler: float | None
    """Log-probability, of the sampler; None where nobody said."""
    trainer: float | None
    """… of the trainer at the start of the update; None if it was not computed."""
    advantage: float | None
    version: int | None
    shade: str
    """`p1` … `p4`: how far above 0 the advantage is, `n1` … `n4` below, `z` at 0. `d`: sampler and trainer disagree. `v`: the
    first token of other weights."""


@dataclass(frozen=True, slots=True)
class ShownStretch:
    sampled: bool
    text: str = ""
    """Of context."""
    left_out: int = 0
    """Characters of context, or tokens, that are not shown."""
    tokens: tuple[ShownToken, ...] = ()


@dataclass(frozen=True, slots=True)
class ShownSample:
    index: int
    step: int | None
    """None: the call was not trained, and is shown as it is on record."""
    reason: str
    why: str
    agents: tuple[str, ...]
    versions: tuple[int, ...]
    trained: int
    context: int
    stretches: tuple[ShownStretch, ...]


@dataclass(frozen=True, slots=True)
class Shown:
    kind: str
    """Why it was chosen."""
    rollout_id: str
    attempt: int
    task_id: str | None
    reward: float | None
    outcome: str
    error: str | None
    samples: tuple[ShownSample, ...] = field(default=())


def choose(
    rollouts: Sequence[Mapping[str, Any]], samples: Sequence[Mapping[str, Any]], count: int, *, seed: int = 0
) -> list[tuple[str, Mapping[str, Any]]]:
    """At most `count` rows of the rollouts table, each with why: `best`, `worst`, `failed`, `broken chain`, `random`.

    Best and worst are of the newest step that the samples (rollout_id, step, reason) name; the others of all steps.
    """
    trained = {row["rollout_id"] for row in samples}
    newest = max((row["step"] for row in samples), default=None)
    last = {row["rollout_id"] for row in samples if row["step"] == newest}
    broken = {row["rollout_id"] for row in samples if row["reason"] not in ("first", "agent")}
    judged = sorted(
        (row for row in rollouts if row["rollout_id"] in last and row["reward"] is not None),
        key=lambda row: (row["reward"], row["rollout_id"]),
    )
    failed = [row for row in rollouts if row["state"] == "failed"]
    others = sorted(
        (row for row in rollouts if row["rollout_id"] in trained), key=lambda row: row["rollout_id"]
    )
    random.Random(seed).shuffle(others)
    each = max(1, count // 4)
    wishes = [("best", row) for row in reversed(judged[-each:])]
    wishes += [("worst", row) for row in judged[:each]]
    wishes += [("failed", row) for row in failed[-each:]]
    wishes += [("broken chain", row) for row in others if row["rollout_id"] in broken][:each]
    wishes += [("random", row) for row in others]
    chosen: dict[tuple[str, int], tuple[str, Mapping[str, Any]]] = {}
    for kind, row in wishes:
        if len(chosen) < count:
            chosen.setdefault((row["rollout_id"], row["attempt"]), (kind, row))
    return list(chosen.values())


def showcase(
    dataset: Dataset, samples_from: Dataset, decode: Decode, count: int, *, seed: int = 0
) -> list[Shown]:
    """The chosen rollouts as they are shown.

    Args:
        dataset: where transitions and rollouts are.
        samples_from: where the samples table is; offline another one.
    """
    names = ["rollout_id", "attempt", "task_id", "state", "cause", "error", "reward"]
    rollouts = dataset.table("rollouts", columns=names).to_pylist()
    index = samples_from.table("samples", columns=["rollout_id", "step", "reason"]).to_pylist()
    shown, budget = [], TOKENS
    for kind, row in choose(rollouts, index, count, seed=seed):
        key = row["rollout_id"], row["attempt"]
        agents = {
            call["call_id"]: call["agent"]
            for call in dataset.table("transitions", attempts=[key], columns=["call_id", "agent"]).to_pylist()
        }
        views = []
        for sample in sample_rows(dataset, *key, samples_from=samples_from):
            view, used = _sample(sample, agents, decode, min(budget, TOKENS_OF_ONE))
            views.append(view)
            budget -= used
        outcome = row["state"] or "unknown"
        shown.append(
            Shown(
                kind=kind,
                rollout_id=row["rollout_id"],
                attempt=row["attempt"],
                task_id=row["task_id"],
                reward=row["reward"],
                outcome=outcome if row["cause"] is None else f"{outcome}: {row['cause']}",
                error=row["error"],
                samples=tuple(views),
            )
        )
    return shown


def _sample(
    row: Mapping[str, Any], agents: Mapping[str, str | None], decode: Decode, budget: int
) -> tuple[ShownSample, int]:
    texts = pieces(decode, row["token_ids"])
    reach = max((abs(a) for a in row["advantages"] or ()), default=0.0)
    parts, used = [], 0
    for stretch in stretches(row["mask"]):
        if not stretch.sampled:
            text = "".join(texts[stretch.start : stretch.end])
            cut = max(0, len(text) - CONTEXT)
            if cut:
                text = f"{text[: CONTEXT // 2]} … {text[-CONTEXT // 2 :]}"
            parts.append(ShownStretch(False, text=text, left_out=cut))
            continue
        end = min(stretch.end, stretch.start + max(0, budget - used))
        tokens = tuple(_token(row, texts, place, reach) for place in range(stretch.start, end))
        used += len(tokens)
        parts.append(ShownStretch(True, tokens=tokens, left_out=stretch.end - end))
    named = dict.fromkeys(agents.get(call_id) or "no agent named" for call_id in row["call_ids"])
    trained = sum(row["mask"])
    versions = sorted({v for v in row["versions"] or () if v >= 0})
    sample = ShownSample(
        index=row["sample"],
        step=row["step"],
        reason=row["reason"],
        why=BREAKS.get(row["reason"], "as it is on record: it was not trained"),
        agents=tuple(named),
        versions=tuple(versions),
        trained=trained,
        context=len(row["mask"]) - trained,
        stretches=tuple(parts),
    )
    return sample, used


def _token(row: Mapping[str, Any], texts: Sequence[str], place: int, reach: float) -> ShownToken:
    sampler, trainer, advantage = (
        None if row[name] is None else row[name][place] for name in ("logprobs", "logprobs_new", "advantages")
    )
    versions = row["versions"] or [-1] * len(texts)
    marks = [_shade(advantage, reach)]
    if sampler is not None and trainer is not None and abs(sampler - trainer) > DISAGREE:
        marks.append("d")
    if place and row["mask"][place - 1] and versions[place] != versions[place - 1]:
        marks.append("v")
    version = versions[place]
    return ShownToken(
        texts[place], sampler, trainer, advantage, None if version < 0 else version, " ".join(marks)
    )


def _shade(advantage: float | None, reach: float) -> str:
    if not advantage or not reach:
        return "z"
    level = min(4, 1 + int(4 * abs(advantage) / reach * 0.999))
    return f"{'p' if advantage > 0 else 'n'}{level}"
