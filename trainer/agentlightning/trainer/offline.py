"""`agl train --offline`: learn from recorded rollouts, from Parquet alone.

No agent, gateway or engine runs. `policy-gradient` does what the online step did: the same groups give the same samples,
advantages and gradient; the log-probabilities on record correct for the age of the data (w = π_old/μ, where μ sampled and
π_old is the policy at the start of this step), in the first pass and in every later one. `sft` and `rft` imitate answers:
their loss is the mean negative log-likelihood of what the assistant said, by `algorithm.aggregation`.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from agentlightning.proto.dataset import Dataset, commit_manifest, open_dataset, write_files
from agentlightning.proto.errors import DataError
from agentlightning.trainer import checkpoint
from agentlightning.trainer.advantage import BASELINED
from agentlightning.trainer.config import TrainConfig
from agentlightning.trainer.console import Console
from agentlightning.trainer.conversation import COLUMNS
from agentlightning.trainer.figures import observe, step_figures
from agentlightning.trainer.launch import Layout
from agentlightning.trainer.learner import Learner, LearnerSettings, UpdateResult
from agentlightning.trainer.loop import build_learner
from agentlightning.trainer.metrics import Metrics
from agentlightning.trainer.model import is_our_template, load_model, load_tokenizer
from agentlightning.trainer.objective import LossSettings
from agentlightning.trainer.recipe import learner_settings, score_transitions
from agentlightning.trainer.recorded import Entry, Index, Selection, batches, read_index, recorded_steps
from agentlightning.trainer.report import write_report
from agentlightning.trainer.rollouts import Collected
from agentlightning.trainer.run import open_run
from agentlightning.trainer.samples import Sample, build_samples, read_calls, samples_table
from agentlightning.trainer.sinks import open_sinks
from agentlightning.trainer.transcript import Transcriber

__all__ = ["Prepared", "imitation_settings", "prepare_imitation", "prepare_policy_gradient", "train_offline"]

REMEDY = (
    "Policy gradients need the token ids and log-probabilities that the gateway records. For data without them set "
    "offline.method=sft or rft, which learn from text, or record anew through the gateway."
)


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """What one step learns from."""

    samples: tuple[Sample, ...]
    advantages: tuple[npt.NDArray[np.float32], ...]
    counters: Counter[str]
    groups: int
    informative: int
    """Groups that have anything to teach."""
    breaks: Counter[str]
    tokens_left_out: Counter[str]
    sources: Counter[str]
    """How many calls were learnt from their `ids` on record, and from `text`."""
    figures: dict[str, Any]
    """Of `step_figures`."""

    @property
    def trained(self) -> int:
        return sum(sample.trained for sample in self.samples)


Prepare = Callable[[Sequence[Entry]], Prepared]


def train_offline(
    config: TrainConfig, data: Path | str, *, resume: bool = False, log_level: str = "warning"
) -> int:
    """Train on a data set; writes `checkpoint/` and `metrics.jsonl` under the run's directory.

    Raises:
        ConfigError: the run exists already, or the configuration cannot be honoured.
        DataError: the data set cannot be read, or holds nothing that this method could learn from.
    """
    config.require("policy.model")
    logging.basicConfig(level=log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    dataset = open_dataset(data)
    index = _index(config, dataset)
    plan = _plan(config, dataset, index)
    prepare = _preparation(config, dataset)
    steps = min(config.train.steps, sum(1 for _ in plan()))
    _refuse_unusable(config, plan(), prepare)
    layout = Layout(config.directory)
    with (
        open_run(config, layout.root, resume=resume),
        open_sinks(config, layout.root) as sinks,
        Console() as console,
    ):
        left = ", ".join(f"{count} {reason}" for reason, count in index.left_out.items())
        console.say(
            f"{config.offline.method}: {len(index.entries)} rollouts in {len(index.groups)} groups, {steps} steps"
            + (f" (left out: {left})" if left else "")
        )
        learner = _learner(config)
        metrics = Metrics(layout.metrics)
        digest = _digest(config, dataset)
        newest = checkpoint.latest(layout.checkpoints)
        if newest is not None:
            checkpoint.load(newest, learner, config_digest=digest)
        metrics.rewind(learner.step)
        for listener in (*sinks, console.event):
            metrics.listen(listener)
        console.begin(steps, done=learner.step)
        try:
            for entries in islice(plan(), learner.step, steps):
                _step(config, layout, learner, metrics, prepare, entries, digest=digest, last=steps)
            learner.save_pretrained(layout.final, load_tokenizer(config.policy.model))
            metrics.add("end", step=learner.step, gateway={}, collector={})
        finally:
            write_report(config, layout, metrics, data=dataset.root)
        console.say(f"  report  {layout.report}")
        console.say(f"  model   {layout.final} (transformers loads it)")
    return 0


def _step(
    config: TrainConfig,
    layout: Layout,
    learner: Learner,
    metrics: Metrics,
    prepare: Prepare,
    entries: Sequence[Entry],
    *,
    digest: str,
    last: int,
) -> None:
    """One batch: read, learn, write down."""
    began = time.monotonic()
    prepared = prepare(entries)
    ready = time.monotonic()
    step = learner.step + 1
    result = learner.update(prepared.samples, prepared.advantages)
    learner.step = step  # a batch without gradient is a step all the same
    updated = time.monotonic()
    rewards = {entry.rollout_id: entry.reward for entry in entries if entry.reward is not None}
    if config.report.samples:
        _record_samples(layout.data, step, prepared, result, rewards)
    if step % config.checkpoint.every == 0 or step == last:
        checkpoint.save(
            layout.checkpoints,
            learner,
            cursor={"batches": step},
            config_digest=digest,
            keep=config.checkpoint.keep,
        )
    metrics.add(
        "step",
        step=step,
        version=learner.version,
        reward=sum(rewards.values()) / len(rewards) if rewards else None,
        rollouts=len(entries),
        groups={"sampled": prepared.groups, "informative": prepared.informative},
        seconds={
            "read": round(ready - began, 3),
            "update": round(updated - ready, 3),
            "checkpoint": round(time.monotonic() - updated, 3),
            "total": round(time.monotonic() - began, 3),
        },
        update=result.metrics,
        breaks=dict(prepared.breaks),
        tokens={"trained": prepared.trained, "left_out": dict(prepared.tokens_left_out)},
        calls=dict(prepared.sources),
        counters=dict(prepared.counters),
        **prepared.figures,
    )


def _record_samples(
    root: Path, step: int, prepared: Prepared, result: UpdateResult, rewards: dict[str, float]
) -> None:
    """The samples table of this run's own data set; once, also when a step is done again."""
    table = samples_table(
        prepared.samples,
        step=step,
        advantages=result.advantages,
        logprobs_new=result.logprobs,
        rewards=rewards,
    )
    files = write_files(root, f"step-{step:06d}", {"samples": table})
    known = {path.relative_to(root).as_posix() for path in Dataset(root).files("samples")}
    new = [file for file in files if file.path not in known]
    if new:
        commit_manifest(root, "trainer", new)


def prepare_policy_gradient(config: TrainConfig, dataset: Dataset, entries: Sequence[Entry]) -> Prepared:
    """Samples and advantages as the online step makes them."""
    transitions = dataset.table("transitions", attempts=[entry.key for entry in entries])
    outcomes = [entry.outcome for entry in entries]
    samples, scored = score_transitions(
        config, Collected(rows={}, outcomes=outcomes, transitions=transitions)
    )
    return Prepared(
        samples=scored.samples,
        advantages=scored.advantages,
        counters=+(Counter(samples.calls_left_out) + Counter(scored.refused_rollouts)),
        groups=len(scored.groups),
        informative=sum(not group.zero_variance for group in scored.groups),
        breaks=samples.breaks,
        tokens_left_out=scored.tokens_left_out,
        sources=Counter(ids=sum(len(sample.segments) for sample in scored.samples)),
        figures=step_figures(observe(transitions, outcomes)),
    )


def prepare_imitation(
    config: TrainConfig, dataset: Dataset, transcriber: Transcriber, entries: Sequence[Entry]
) -> Prepared:
    """Every answer of the rollouts with weight 1 on each of its tokens."""
    transitions = dataset.table("transitions", attempts=[entry.key for entry in entries])
    calls, sources, left_out = transcriber.calls(
        read_calls(transitions), transitions.select([*COLUMNS]).to_pylist()
    )
    merged = build_samples(calls, agents=config.algorithm.agents)
    groups = {entry.group_id for entry in entries}
    taught = {sample.rollout_id for sample in merged.samples}
    return Prepared(
        samples=merged.samples,
        advantages=tuple(sample.mask.astype(np.float32) for sample in merged.samples),
        counters=+(left_out + merged.calls_left_out),
        groups=len(groups),
        informative=len({entry.group_id for entry in entries if entry.rollout_id in taught}),
        breaks=merged.breaks,
        tokens_left_out=merged.tokens_left_out,
        sources=sources,
        figures=step_figures(observe(transitions, [entry.outcome for entry in entries])),
    )


def imitation_settings(settings: LearnerSettings) -> LearnerSettings:
    """Those of a learner whose loss is the negative log-likelihood: nothing to correct, nothing to clip."""
    return replace(
        settings, loss=LossSettings(kind="reinforce", tis_cap=None, veto=None), whiten=False, value=None
    )


def _index(config: TrainConfig, dataset: Dataset) -> Index:
    offline = config.offline
    index = read_index(
        dataset,
        Selection(
            runs=offline.runs,
            splits=offline.splits,
            min_reward=offline.min_reward,
            best_of_group=offline.best_of_group,
        ),
    )
    if not index.groups:
        left = ", ".join(f"{count} {reason}" for reason, count in index.left_out.items())
        raise DataError(f"{dataset.root} holds no rollouts to learn from (left out: {left or 'none'}).")
    alone = all(len(group) == 1 for group in index.groups)
    if offline.method == "policy-gradient" and config.algorithm.advantage in BASELINED and alone:
        raise DataError(
            f"No two rollouts of {dataset.root} are of one group or task, so {config.algorithm.advantage} has nothing "
            "to compare: set algorithm.advantage=reinforce, or offline.method=sft or rft."
        )
    return index


def _plan(config: TrainConfig, dataset: Dataset, index: Index) -> Callable[[], Iterator[list[Entry]]]:
    steps = None
    if config.offline.batches == "recorded":
        steps = recorded_steps(dataset, index.groups)
        unknown = sum(group[0].group_id not in steps for group in index.groups)
        if unknown:
            raise DataError(
                f"offline.batches=recorded needs the samples table, which says nothing of {unknown} of "
                f"{len(index.groups)} groups: set offline.batches=groups."
            )
    return lambda: batches(
        index.groups,
        groups_per_batch=config.train.groups_per_step,
        passes=config.offline.passes,
        seed=config.run.seed,
        steps=steps,
    )


def _preparation(config: TrainConfig, dataset: Dataset) -> Prepare:
    if config.offline.method == "policy-gradient":
        return lambda entries: prepare_policy_gradient(config, dataset, entries)
    tokenizer = load_tokenizer(config.policy.model)
    transcriber = Transcriber(
        tokenizer,
        policy=config.policy.name,
        verbatim_arguments=is_our_template(tokenizer),
        longest=config.engine.max_model_len,
    )
    return lambda entries: prepare_imitation(config, dataset, transcriber, entries)


def _refuse_unusable(config: TrainConfig, plan: Iterator[list[Entry]], prepare: Prepare) -> None:
    """Before a model is loaded: is there anything to learn from? Reads until it has found some."""
    reasons = Counter[str]()
    for entries in plan:
        prepared = prepare(entries)
        if prepared.trained:
            return
        reasons.update(prepared.counters)
    why = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common()) or "no calls"
    remedy = REMEDY if config.offline.method == "policy-gradient" else "`agl inspect` shows what it holds."
    raise DataError(f"No call on record can be trained by {config.offline.method} ({why}). {remedy}")


def _learner(config: TrainConfig) -> Learner:
    if config.offline.method == "policy-gradient":
        return build_learner(config)
    return Learner(load_model(config.policy.model), imitation_settings(learner_settings(config)))


def _digest(config: TrainConfig, dataset: Dataset) -> str:
    """What must not change between a checkpoint and its continuation."""
    root = dataset.root
    shared: dict[str, Any] = config.model_dump(mode="json", include={"policy", "algorithm", "offline"})
    return checkpoint.config_digest(
        {
            **shared,
            "seed": config.run.seed,
            "groups": config.train.groups_per_step,
            "data": str(root.resolve() if isinstance(root, Path) else root),
        }
    )
