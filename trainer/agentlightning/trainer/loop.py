"""The training loop: groups in, one update, new weights out, repeat.

Time order of a step: groups (see `supply` and `stream`) → seal → fetch from Parquet → merge into samples → credit and
advantage → update → samples table → checkpoint → publish. Synchronous, nothing is sampled during the update.
Asynchronous, the gateway is held and the engine paused from the update to the publish: sampling and update share the
hardware one after the other, while agents go on with what is not the model's work, and their answers with the new
weights. A crash anywhere resumes from the last checkpoint; rollouts are found again by their ids, so nothing is
sampled or trained twice.
"""

import asyncio
import contextlib
import functools
import logging
import random
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NoReturn

import numpy as np
import torch

from agentlightning.proto import dataset
from agentlightning.proto.errors import LightningError
from agentlightning.trainer import checkpoint
from agentlightning.trainer.clients import EngineClient, GatewayClient, TransitionClient
from agentlightning.trainer.comparison import task_rewards
from agentlightning.trainer.config import SamplingConfig, TrainConfig
from agentlightning.trainer.console import Console
from agentlightning.trainer.interval import mean_interval
from agentlightning.trainer.launch import Layout, Services
from agentlightning.trainer.learner import Learner, UpdateResult
from agentlightning.trainer.metrics import Metrics
from agentlightning.trainer.model import choose_dtype, load_model, load_tokenizer, resolve_model
from agentlightning.trainer.plans import Plans
from agentlightning.trainer.probe import probe_texts
from agentlightning.trainer.publish import Publisher
from agentlightning.trainer.recipe import learner_settings, score_transitions
from agentlightning.trainer.rollouts import Collector, Group
from agentlightning.trainer.samples import samples_table
from agentlightning.trainer.stream import StreamSupply
from agentlightning.trainer.supply import StepBatch, StepSupply, Supply
from agentlightning.trainer.survey import Survey
from agentlightning.trainer.tasks import Task
from agentlightning.trainer.watchdog import Watchdog

__all__ = ["Trainer", "build_learner"]

logger = logging.getLogger(__name__)


def build_learner(config: TrainConfig) -> Learner:
    """Load the policy's model and make it ready to learn."""
    # Deprecations between transformers and peft: nothing that a user of ours could act on.
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers|peft")
    return Learner(load_model(config.policy.model), learner_settings(config))


def digest(config: TrainConfig) -> str:
    """What must not change between a checkpoint and its continuation."""
    return checkpoint.config_digest(
        {
            "policy": config.policy.model_dump(mode="json", exclude={"sampling", "val_sampling", "name"}),
            "run": {"name": config.run.name, "seed": config.run.seed},
            "tasks": config.tasks.model_dump(mode="json"),
            "loop": config.loop.kind,
        }
    )


class Trainer:
    """One run."""

    def __init__(
        self,
        config: TrainConfig,
        layout: Layout,
        services: Services,
        learner: Learner,
        *,
        tasks: list[Task],
        held_out: list[Task],
        console: Console,
        check: Callable[[], None],
        start_agents: Callable[[], None],
        restart: Callable[[str], bool],
        starting: Callable[[], Sequence[str]],
        abandon: Callable[[str], NoReturn],
    ) -> None:
        """
        Args:
            check: raises if a component is gone for good.
            restart: starts a component again; False if it is not ours.
            starting: the components that do not serve yet.
            abandon: ends the process, whatever its threads do.
        """
        self.config = config
        self.layout = layout
        self.learner = learner
        self.metrics = Metrics(layout.metrics)
        self._console = console
        self._services = services
        self._check = check
        self._start_agents = start_agents
        self._restart = restart
        self._starting = starting
        self._abandon = abandon
        self._tasks = tasks
        self._held_out = held_out
        self._cursor: dict[str, Any] | None = None
        """Of the checkpoint to go on from."""

    def restore(self) -> bool:
        """Continue from the newest checkpoint, if there is one."""
        newest = checkpoint.latest(self.layout.checkpoints)
        if newest is None:
            random.seed(self.config.run.seed)
            np.random.seed(
                self.config.run.seed
            )  # the generators that a checkpoint restores; torch's is the learner's
            self.metrics.rewind(0)
            return False
        cursor = checkpoint.load(newest, self.learner, config_digest=digest(self.config))
        self._cursor = cursor["supply"]
        self.metrics.rewind(self.learner.step)
        if cursor["record"]["step"] not in [event["step"] for event in self.metrics.of("step")]:
            self.metrics.add(**cursor["record"])  # killed between the checkpoint and the end of its step
        # The samples of that step were on disk before the checkpoint; their manifest may not be.
        self._commit_samples(self.learner.step)
        return True

    async def run(self) -> None:
        """Train until the configured number of steps. Raises LightningError."""
        services, policy = self._services, self.config.policy
        gateway = GatewayClient(services.gateway, tokens=services.gateway_tokens)
        engine = EngineClient(services.engine, token=services.engine_token)
        transitions = TransitionClient(services.collector_grpc, token=services.collector_token)
        try:
            sampling = _sampling(policy.sampling, self.config.run.seed)
            val_sampling = _sampling(policy.val_sampling or policy.sampling, self.config.run.seed)
            await gateway.set_policy(policy.name, policy.model, {"train": sampling, "val": val_sampling})
            token_file = str(services.engine_token_file) if services.engine_token_file else None
            await gateway.register_engine(
                f"{self.config.run.name}-engine", policy.name, services.engine, policy.name, token_file
            )
            collector = Collector(
                gateway,
                transitions,
                run_id=self.config.run.name,
                policy=policy.name,
                max_attempts=self.config.agent.max_attempts,
                rights=("reward",) if self._may_reward() else (),
                deadline_s=self.config.train.rollout_deadline_s,
                seal_timeout_s=self.config.train.seal_timeout_s,
                check=self._check,
            )
            publisher = Publisher(
                self.layout,
                gateway,
                engine,
                policy=policy.name,
                base=resolve_model(policy.model),
                dtype=await self._served_dtype(engine),
                probes=probe_texts(load_tokenizer(policy.model)),
                drain_s=self.config.loop.drain_s,
            )
            try:
                await self._watched(collector, publisher, gateway, engine, transitions)
            finally:
                await collector.close()
            self._finish(await gateway.stats(self.config.run.name), await transitions.stats())
        finally:
            for client in (gateway, engine, transitions):
                await client.close()

    async def _watched(
        self,
        collector: Collector,
        publisher: Publisher,
        gateway: GatewayClient,
        engine: EngineClient,
        transitions: TransitionClient,
    ) -> None:
        """All steps, and beside them the watchdog."""
        stall_s = self.config.watchdog.stall_s
        survey = Survey(
            gateway,
            engine,
            transitions,
            collector,
            policy=self.config.policy.name,
            timeout_s=min(10.0, stall_s / 3),
            agent_timeout_s=self.config.agent.timeout_s,
        )
        watchdog = Watchdog(
            stall_s=stall_s,
            look=survey.look,
            computed=lambda: self.learner.computed,
            restart=self._restart,
            starting=self._starting,
            release=publisher.free,
            say=self._console.say,
            record=self.metrics.add,
            abandon=self._abandon,
        )
        work = asyncio.create_task(self._steps(collector, publisher, watchdog))
        watch = asyncio.create_task(watchdog.run())
        try:
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
            if watch.done():
                watch.result()  # raises what it ended with
            await work
        finally:
            for task in (work, watch):
                task.cancel()
            await asyncio.gather(work, watch, return_exceptions=True)

    def _may_reward(self) -> bool:
        agent = self.config.agent
        return agent.evaluator is None if agent.may_reward is None else agent.may_reward

    async def _served_dtype(self, engine: EngineClient) -> torch.dtype:
        health = await engine.health()
        name = str(health.get("dtype", "")).removeprefix("torch.")
        return getattr(torch, name) if name in ("float32", "bfloat16", "float16") else choose_dtype()[0]

    async def _steps(self, collector: Collector, publisher: Publisher, watchdog: Watchdog) -> None:
        train = self.config.train
        with watchdog.stage("The comparison of engine and trainer", "own"):
            verdict = await publisher.begin(self.learner)
        self._console.say(verdict.sentence[:1].upper() + verdict.sentence[1:])
        await asyncio.to_thread(self._start_agents)
        supply = self._supply(collector)
        if self._cursor is not None:
            supply.restore(self._cursor)
        await self._evaluate(collector, watchdog)
        self._console.begin(train.steps, done=self.learner.step)
        while self.learner.step < train.steps:
            await self._step(supply, publisher, watchdog)
            every = self.config.evaluate.every
            if every and self.learner.step % every == 0 and self.learner.step < train.steps:
                await self._evaluate(collector, watchdog)
        await supply.close()
        await self._evaluate(collector, watchdog)

    def _supply(self, collector: Collector) -> Supply:
        config, train = self.config, self.config.train
        score = functools.partial(score_transitions, config)
        sampling = _sampling(config.policy.sampling, config.run.seed)
        if config.loop.kind == "sync":
            return StepSupply(
                collector,
                self._tasks,
                score,
                train,
                run_id=config.run.name,
                seed=config.run.seed,
                sampling=sampling,
                announce=self._console.rollouts,
                on_finish=self._console.rollout,
            )
        flow = collector.flow(
            split="train",
            sampling=sampling,
            replace_rounds=train.refill_rounds,
            on_finish=self._console.rollout,
        )
        return StreamSupply(
            flow,
            self._tasks,
            score,
            train,
            Plans(self.layout.plans),
            run_id=config.run.name,
            seed=config.run.seed,
            concurrency=config.agent.concurrency,
            staleness=config.loop.staleness,
            announce=self._console.rollouts,
        )

    async def _step(self, supply: Supply, publisher: Publisher, watchdog: Watchdog) -> None:
        began = time.monotonic()
        step, version = self.learner.step + 1, self.learner.version
        with watchdog.stage(f"Step {step}, sampling,", "rollouts"):
            batch = await supply.next(step, version)
        seconds = dict(batch.seconds)
        published = None
        async with contextlib.AsyncExitStack() as stack:
            if self.config.loop.kind == "async":
                clock = time.monotonic()
                with watchdog.stage(f"Step {step}, stopping the engine,", "engine"):
                    await stack.enter_async_context(publisher.standstill())
                seconds["drain"] = time.monotonic() - clock
            with watchdog.stage(f"Step {step}, its update,", "own"):
                record, stepped = await self._update(supply, step, version, batch, seconds)
                clock = time.monotonic()
                prepared = await publisher.prepare(self.learner) if stepped else None
            if prepared is not None:
                with watchdog.stage(f"The publish of version {self.learner.version}", "engine"):
                    if self.config.loop.kind == "sync":
                        await stack.enter_async_context(publisher.standstill())
                    published = await publisher.swap(self.learner, prepared)
        seconds["publish"] = time.monotonic() - clock
        seconds["total"] = time.monotonic() - began
        record |= {
            "seconds": _rounded(seconds),
            "probe": asdict(published.verdict) if published else None,
            "held_seconds": round(publisher.held_seconds, 3) if published else 0.0,
        }
        self.metrics.add(**record)

    async def _update(
        self, supply: Supply, step: int, version: int, batch: StepBatch, seconds: dict[str, float]
    ) -> tuple[dict[str, Any], bool]:
        """Train and save. Returns the step's record as far as it is known, and whether the weights changed."""
        clock = time.monotonic()
        result = await asyncio.to_thread(self.learner.update, batch.scored.samples, batch.scored.advantages)
        self.learner.step = step  # a batch without gradient is a step all the same
        seconds["update"] = time.monotonic() - clock
        record = {
            "event": "step",
            "step": step,
            "version": self.learner.version,
            "reward": _mean(batch.rewards.values()),
            "rollouts": len(batch.rewards),
            "groups": {"sampled": batch.sampled_groups, "informative": batch.informative_groups},
            "staleness": batch.staleness(version),
            "carried_over": batch.carried_over,
            "update": result.metrics,
            "breaks": dict(batch.samples.breaks),
            "tokens": {
                "trained": sum(sample.trained for sample in batch.scored.samples),
                "left_out": dict(batch.samples.tokens_left_out + batch.scored.tokens_left_out),
            },
            "counters": dict(batch.counters),
            **batch.figures,
            "probe": None,
            "held_seconds": 0.0,
        }
        clock = time.monotonic()
        so_far = {**seconds, "checkpoint": 0.0, "publish": 0.0, "total": sum(seconds.values())}
        cursor = {"supply": supply.state(), "record": {**record, "seconds": _rounded(so_far)}}
        await asyncio.to_thread(self._save, step, batch, result, cursor)
        seconds["checkpoint"] = time.monotonic() - clock
        return record, result.stepped

    def _save(self, step: int, batch: StepBatch, result: UpdateResult, cursor: Mapping[str, Any]) -> None:
        scored = batch.scored
        if self.config.report.samples:
            table = samples_table(
                scored.samples,
                step=step,
                advantages=result.advantages,
                logprobs_new=result.logprobs,
                rewards=batch.rewards,
            )
            dataset.write_files(self.layout.data, _samples_name(step), {"samples": table})
        if step % self.config.checkpoint.every == 0 or step == self.config.train.steps:
            checkpoint.save(
                self.layout.checkpoints,
                self.learner,
                cursor=cursor,
                config_digest=digest(self.config),
                keep=self.config.checkpoint.keep,
            )
            Plans(self.layout.plans).forget(checkpoint.oldest(self.layout.checkpoints))
        self._commit_samples(step)

    def _commit_samples(self, step: int) -> None:
        """Make a step's samples visible; once, however often it is called."""
        relative = f"samples/{_samples_name(step)}.parquet"
        path = self.layout.data / relative
        if not path.exists():
            return
        named = {
            entry.path: entry
            for manifest in dataset.Dataset(self.layout.data).manifests
            for entry in manifest.files
        }
        entry = dataset.describe_file(self.layout.data, "samples", relative)
        if relative in named:
            if named[relative].sha256 != entry.sha256:
                raise LightningError(
                    f"Step {step} was trained on other samples than {path} names: the run cannot be continued. "
                    "Start a new one."
                )
            return
        dataset.commit_manifest(self.layout.data, "trainer", [entry])

    async def _evaluate(self, collector: Collector, watchdog: Watchdog) -> None:
        step = self.learner.step
        if not self._held_out or self.metrics.evaluation(step) is not None:
            return
        self._console.rollouts("held-out tasks", len(self._held_out))
        groups = [
            Group(f"{self.config.run.name}.val{step:05d}.{number:03d}", task, 1)
            for number, task in enumerate(self._held_out)
        ]
        policy = self.config.policy
        clock = time.monotonic()
        with watchdog.stage("The evaluation", "rollouts"):
            collected = await collector.run(
                groups,
                split="val",
                sampling=_sampling(policy.val_sampling or policy.sampling, self.config.run.seed),
                replace_rounds=self.config.train.refill_rounds,
                priority=1,  # training rollouts may be queued already, and weights stand still meanwhile
                on_finish=self._console.rollout,
            )
        interval = mean_interval(collected.rewards())
        record = self.metrics.add(
            "evaluate",
            step=step,
            version=self.learner.version,
            **asdict(interval),
            seconds=round(time.monotonic() - clock, 3),
            counters=dict(collected.counters),
            rollouts=[group.rollout_ids[0] for group in groups],
            rewards=task_rewards(collected.outcomes, [group.group_id for group in groups]),
        )
        self._console.evaluation(record)

    def _finish(self, gateway: dict[str, int], collector: dict[str, int]) -> None:
        tokenizer = load_tokenizer(self.config.policy.model)
        self.learner.save_pretrained(self.layout.final, tokenizer)
        self.metrics.add("end", step=self.learner.step, gateway=gateway, collector=collector)


def _samples_name(step: int) -> str:
    return f"step-{step:06d}"


def _sampling(settings: SamplingConfig, seed: int) -> dict[str, Any]:
    values = settings.model_dump()
    if not values["top_k"]:
        del values["top_k"]
    return {**values, "seed": seed}


def _mean(values: Any) -> float | None:
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else None


def _rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in seconds.items()}
