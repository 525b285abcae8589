"""`agl train --offline`: learn from recorded rollouts, from Parquet alone.

No agent, gateway or engine runs. Rollouts are taken group by group in the order of the record, so many
groups a step as online; the log-probabilities on record correct for the age of the data.
"""

import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from agentlightning.proto.dataset import Dataset, open_dataset
from agentlightning.proto.errors import DataError
from agentlightning.trainer import checkpoint
from agentlightning.trainer.advantage import Outcome
from agentlightning.trainer.config import TrainConfig
from agentlightning.trainer.console import Console
from agentlightning.trainer.launch import Layout
from agentlightning.trainer.loop import build_learner
from agentlightning.trainer.metrics import Metrics
from agentlightning.trainer.model import load_tokenizer
from agentlightning.trainer.recipe import score_transitions
from agentlightning.trainer.rollouts import Collected
from agentlightning.trainer.run import open_run

__all__ = ["recorded_groups", "train_offline"]


def train_offline(
    config: TrainConfig, data: Path, *, resume: bool = False, log_level: str = "warning"
) -> int:
    """Train on a data set; writes `checkpoint/` and `metrics.jsonl` under the run's directory.

    Raises:
        ConfigError: the run exists already, or the configuration cannot be honoured.
        DataError: the data set cannot be read, or holds nothing that could be trained on.
    """
    config.require("policy.model")
    logging.basicConfig(level=log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    dataset = open_dataset(data)
    groups = recorded_groups(dataset)
    if not groups:
        raise DataError(f"{data} holds no training rollouts that ended with a reward.")
    layout = Layout(config.directory)
    with open_run(config, layout.root, resume=resume), Console() as console:
        per_step = config.train.groups_per_step
        steps = min(config.train.steps, -(-len(groups) // per_step))
        console.say(
            f"{sum(map(len, groups))} rollouts in {len(groups)} groups: {steps} steps of {per_step} groups."
        )
        learner = build_learner(config)
        metrics = Metrics(layout.metrics)
        digest = checkpoint.config_digest(config.model_dump(mode="json", include={"policy", "algorithm"}))
        newest = checkpoint.latest(layout.checkpoints)
        if newest is not None:
            checkpoint.load(newest, learner, config_digest=digest)
        metrics.rewind(learner.step)
        console.begin(steps, done=learner.step)
        while learner.step < steps:
            step = learner.step + 1
            began = time.monotonic()
            outcomes = [
                outcome for group in groups[per_step * (step - 1) : per_step * step] for outcome in group
            ]
            collected = _collected(dataset, outcomes)
            read = time.monotonic()
            samples, scored = score_transitions(config, collected)
            if not samples.tokens_trained and collected.transitions.num_rows:
                reasons = ", ".join(f"{count} {reason}" for reason, count in samples.calls_left_out.items())
                raise DataError(
                    f"No call of step {step} can be trained ({reasons or 'no sampled tokens'}): "
                    "policy gradients need token ids and log-probabilities, as the gateway records them."
                )
            merged = time.monotonic()
            result = learner.update(scored.samples, scored.advantages)
            learner.step = step
            updated = time.monotonic()
            checkpoint.save(
                layout.checkpoints,
                learner,
                cursor={"groups": per_step * step},
                config_digest=digest,
                keep=config.checkpoint.keep,
            )
            rewards = [outcome.reward for outcome in outcomes if outcome.reward is not None]
            counters = Counter(samples.calls_left_out) + Counter(scored.refused_rollouts)
            record = metrics.add(
                "step",
                step=step,
                version=learner.version,
                reward=sum(rewards) / len(rewards) if rewards else None,
                rollouts=len(rewards),
                groups={
                    "sampled": len(scored.groups),
                    "informative": sum(not group.zero_variance for group in scored.groups),
                },
                seconds={
                    "rollouts": 0.0,
                    "read": read - began,
                    "merge": merged - read,
                    "update": updated - merged,
                    "publish": 0.0,
                    "checkpoint": time.monotonic() - updated,
                    "total": time.monotonic() - began,
                },
                update=result.metrics,
                counters=dict(counters),
            )
            console.step(record)
        learner.save_pretrained(layout.final, load_tokenizer(config.policy.model))
        metrics.add("end", step=learner.step)
        console.say(f"The trained model is in {layout.final} (transformers loads it).")
    return 0


def recorded_groups(dataset: Dataset) -> list[list[Outcome]]:
    """Training rollouts by group, newest attempt of each, in the order of their ids."""
    columns = ["rollout_id", "group_id", "attempt", "split", "state", "cause", "reward", "rewards"]
    newest: dict[str, dict[str, Any]] = {}
    for row in dataset.table("rollouts", columns=columns).to_pylist():
        if row["split"] == "val" or row["reward"] is None:
            continue
        known = newest.get(row["rollout_id"])
        if known is None or row["attempt"] > known["attempt"]:
            newest[row["rollout_id"]] = row
    groups: dict[str, list[Outcome]] = {}
    for rollout_id in sorted(newest):
        row = newest[rollout_id]
        group_id = row["group_id"] or rollout_id
        groups.setdefault(group_id, []).append(
            Outcome(
                rollout_id=rollout_id,
                group_id=group_id,
                reward=row["reward"],
                rewards=dict(row["rewards"] or ()),
                state=row["state"] or "succeeded",
                cause=row["cause"],
            )
        )
    return [groups[group_id] for group_id in sorted(groups)]


def _collected(dataset: Dataset, outcomes: Sequence[Outcome]) -> Collected:
    attempts = list(_newest_attempts(dataset, {outcome.rollout_id for outcome in outcomes}))
    transitions: pa.Table = dataset.table("transitions", attempts=attempts)
    return Collected(rows={}, outcomes=list(outcomes), transitions=transitions)


def _newest_attempts(dataset: Dataset, rollout_ids: set[str]) -> Iterator[tuple[str, int]]:
    newest: dict[str, int] = {}
    for rollout_id, attempt in dataset.attempts:
        if rollout_id in rollout_ids:
            newest[rollout_id] = max(attempt, newest.get(rollout_id, 0))
    yield from newest.items()
