"""A run from start to report: its directory, its components, its trainer, and what is said at the end."""

import asyncio
import contextlib
import functools
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import yaml

from agentlightning.proto.errors import ConfigError, LightningError
from agentlightning.proto.process import lock_directory
from agentlightning.trainer.comparison import compare_evaluations
from agentlightning.trainer.config import TrainConfig
from agentlightning.trainer.console import Console
from agentlightning.trainer.interval import Interval
from agentlightning.trainer.launch import READY_TIMEOUT, Layout, launch, start_agents
from agentlightning.trainer.loop import Trainer, build_learner
from agentlightning.trainer.metrics import Metrics
from agentlightning.trainer.model import resolve_model
from agentlightning.trainer.report import write_report
from agentlightning.trainer.sinks import open_sinks
from agentlightning.trainer.supervisor import Supervisor
from agentlightning.trainer.tasks import Task, load_tasks

__all__ = ["open_run", "train"]


def train(config: TrainConfig, *, resume: bool, log_level: str = "warning", advice: str = "") -> int:
    """Run a configuration from start to report.

    Args:
        resume: go on with the run of that name.
        advice: printed at the end: what to try next.

    Returns the exit code: 1 if the run stopped for a reason that was printed.
    Raises ConfigError before anything is started.
    """
    config.require("policy.model", "tasks.train", *(["agent.target"] if config.controller.start else []))
    tasks = load_tasks(config.tasks.train, seed=config.run.seed)
    held_out = _held_out(config)
    layout = Layout(config.directory)
    began = time.monotonic()
    if not Path(config.policy.model).is_dir():
        print(f"model {config.policy.model} (converted once, in half a minute, and then kept)", flush=True)
    resolve_model(config.policy.model)  # before two processes want it
    with (
        open_run(config, layout.root, resume=resume),
        open_sinks(config, layout.root) as sinks,
        Console() as console,
        sigterm_interrupts(),
    ):
        logging.basicConfig(level=log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
        console.say(f"run {config.run.name}: state, data and results in {layout.root}/")
        supervisor = Supervisor()
        trainer = None
        try:
            services = launch(config, layout, supervisor, say=console.say)
            learner = build_learner(config)
            trainer = Trainer(
                config,
                layout,
                services,
                learner,
                tasks=tasks,
                held_out=held_out,
                console=console,
                check=supervisor.check,
                start_agents=lambda: start_agents(config, layout, supervisor, services, say=console.say),
                restart=supervisor.restart,
                starting=lambda: supervisor.starting(patience=READY_TIMEOUT),
                abandon=functools.partial(abandon, console, supervisor),
            )
            for sink in sinks:
                trainer.metrics.listen(sink)
            trainer.restore()
            trainer.metrics.listen(console.event)
            asyncio.run(trainer.run())
        except KeyboardInterrupt:
            console.say("Stopped. The same command with --resume goes on from the last checkpoint.")
            raise
        except LightningError as error:
            console.say(f"The run stopped: {error}")
            console.say("The same command with --resume goes on from the last checkpoint.")
            return 1
        finally:
            supervisor.stop()
            if trainer is not None:
                write_report(config, layout, trainer.metrics, restarts=supervisor.restarts())
        conclude(trainer.metrics, layout, console, seconds=time.monotonic() - began)
        if advice:
            console.say(advice)
    return 0


def abandon(console: Console, supervisor: Supervisor, sentence: str) -> NoReturn:
    """End this process although one of its threads does not."""
    console.say(f"The run stopped: {sentence}")
    console.say("The same command with --resume goes on from the last checkpoint.")
    supervisor.stop()
    sys.stdout.flush()
    os._exit(1)


@contextlib.contextmanager
def open_run(config: TrainConfig, root: Path, *, resume: bool) -> Iterator[None]:
    """Take a run's directory for this process, and write its resolved configuration."""
    exists = (root / "config.yaml").exists()
    if exists and not resume:
        raise ConfigError(
            f"{root} holds a run already: go on with it by --resume, or choose another name by run.name=NAME."
        )
    if resume and not exists:
        raise ConfigError(f"There is no run to resume at {root}.")
    with lock_directory(root, "The run"):
        (root / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
        yield


def _held_out(config: TrainConfig) -> list[Task]:
    count = config.evaluate.tasks
    if not count:
        return []
    if config.tasks.val is None:
        raise ConfigError("evaluate.tasks needs held-out tasks: set `tasks.val`, or evaluate.tasks=0.")
    return load_tasks(config.tasks.val, seed=config.run.seed, count=count)[:count]


def conclude(metrics: Metrics, layout: Layout, console: Console, *, seconds: float) -> None:
    """Say what came of the run, and where it lies."""
    console.say("")
    evaluations = metrics.of("evaluate")
    if len(evaluations) > 1:
        before, after = (
            Interval(event["mean"], event["low"], event["high"], event["n"])
            for event in (evaluations[0], evaluations[-1])
        )
        console.say(f"Held-out reward, mean and 95 % interval:  before {before}   after {after}")
        gain = compare_evaluations(evaluations[0], evaluations[-1])
        if gain is not None:
            console.say(f"Change over the same {gain.n} tasks: {gain}. {_verdict(gain)}")
    console.say(f"Done in {seconds:.0f} s.")
    console.say(f"  report       {layout.report}")
    console.say(f"  model        {layout.final} (transformers loads it)")
    console.say(f"  transitions  {layout.data} (agl inspect {layout.root})")


def _verdict(gain: Interval) -> str:
    if gain.low > 0:
        return "The agent has learnt."
    if gain.high < 0:
        return "The agent has become worse."
    return "No clear gain: more steps, or more held-out tasks?"


@contextlib.contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """SIGTERM ends a run as Ctrl-C does."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
