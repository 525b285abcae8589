"""Run a user's reward function on recorded rollouts: in processes of its own, with a time limit each.

A function that hangs, crashes or returns nonsense costs its rollout alone, under a name: the worker is ended and another
started. Rollouts and results cross the process border as JSON.
"""

import importlib
import json
import math
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from agentlightning.proto.errors import ConfigError

__all__ = ["Judged", "RecordedRollout", "RewardFunction", "RewardWorkers"]

STARTING = 60.0
"""Seconds that importing the function may take, beside the limit of a rollout."""


@dataclass(frozen=True)
class RecordedRollout:
    """What a reward function is given."""

    rollout_id: str
    task: dict[str, Any]
    """`task_id`, `input`, and `reference` if the tasks were given."""
    messages: list[dict[str, Any]]
    """The last call's conversation, with its answer, as chat messages."""
    transitions: list[dict[str, Any]]
    """Every call in order: the columns of the table, `request` and `response` parsed."""
    reward: float | None
    """As it was recorded."""
    rewards: dict[str, float]
    state: str | None
    cause: str | None
    group_id: str | None = None
    run_id: str | None = None
    split: str | None = None
    attempt: int = 0


RewardFunction = Callable[[RecordedRollout], "float | Mapping[str, float]"]


@dataclass(frozen=True)
class Judged:
    """What came of one rollout."""

    rollout_id: str
    rewards: dict[str, float] = field(default_factory=dict)
    """By name; `reward` is the rollout's reward."""
    failure: str | None = None
    """Why there are none: `reward_timeout`, `reward_raised`, `reward_process_died`, `reward_not_finite`, `reward_no_number`."""
    detail: str = ""


@dataclass
class _Worker:
    process: SpawnProcess
    pipe: Connection
    rollout_id: str | None = None
    deadline: float = math.inf
    ready: bool = False


class RewardWorkers:
    """So many processes that have imported `module:function`. Use as a context manager.

    Raises ConfigError on entering if the function cannot be imported.
    """

    def __init__(self, target: str, *, count: int = 1, timeout_s: float = 60.0) -> None:
        module, separator, name = target.partition(":")
        if not (module and separator and name):
            raise ConfigError(f"{target!r} is no reward function: write module:function.")
        self._target = target
        self._timeout_s = timeout_s
        self._context = multiprocessing.get_context("spawn")
        self._workers: list[_Worker] = []
        self._count = count

    def __enter__(self) -> "RewardWorkers":
        first = self._start()
        if not first.pipe.poll(STARTING):
            self._end(first)
            raise ConfigError(f"Importing {self._target} took more than {STARTING:.0f} s.")
        try:
            answer = json.loads(first.pipe.recv_bytes())
        except EOFError:
            answer = {"failed": "the process that imports it died"}
        if "failed" in answer:
            self._end(first)
            raise ConfigError(f"The reward {self._target!r} cannot be loaded: {answer['failed']}.")
        first.ready = True
        self._workers = [first, *(self._start() for _ in range(self._count - 1))]
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            self._end(worker)
        self._workers = []

    def judge(self, rollouts: Iterable[RecordedRollout]) -> Iterator[Judged]:
        """Each rollout's judgement, as they come."""
        waiting = iter(rollouts)
        exhausted = False
        while True:
            for number, worker in enumerate(self._workers):
                if worker.rollout_id is None and not exhausted:
                    rollout = next(waiting, None)
                    if rollout is None:
                        exhausted = True
                    else:
                        yield from self._send(number, rollout)
            busy = [worker for worker in self._workers if worker.rollout_id is not None]
            if not busy:
                if exhausted:
                    return
                continue
            nearest = min(worker.deadline for worker in busy)
            readable = set(wait([worker.pipe for worker in busy], max(0.0, nearest - time.monotonic())))
            for number, worker in enumerate(self._workers):
                if worker.rollout_id is None:
                    continue
                if worker.pipe in readable:
                    yield from self._receive(number)
                elif time.monotonic() >= worker.deadline:
                    yield Judged(worker.rollout_id, failure="reward_timeout", detail=f"{self._timeout_s:g} s")
                    self._replace(number)

    def _send(self, number: int, rollout: RecordedRollout) -> Iterator[Judged]:
        worker = self._workers[number]
        worker.rollout_id = rollout.rollout_id
        worker.deadline = time.monotonic() + self._timeout_s + (0 if worker.ready else STARTING)
        try:
            worker.pipe.send_bytes(json.dumps(asdict(rollout)).encode())
        except OSError:
            yield Judged(rollout.rollout_id, failure="reward_process_died")
            self._replace(number)

    def _receive(self, number: int) -> Iterator[Judged]:
        worker = self._workers[number]
        assert worker.rollout_id is not None
        try:
            answer = json.loads(worker.pipe.recv_bytes())
        except (EOFError, OSError):
            yield Judged(worker.rollout_id, failure="reward_process_died")
            self._replace(number)
            return
        if "ready" in answer:
            worker.ready = True
            worker.deadline = time.monotonic() + self._timeout_s
            return
        if not worker.ready:  # it could be imported once, and cannot now
            yield Judged(worker.rollout_id, failure="reward_process_died", detail=answer["failed"])
            self._replace(number)
            return
        rollout_id, worker.rollout_id = worker.rollout_id, None
        yield Judged(rollout_id, answer.get("rewards", {}), answer.get("failed"), answer.get("detail", ""))

    def _start(self) -> _Worker:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs, self._target, os.getcwd()), daemon=True)
        process.start()
        theirs.close()
        return _Worker(process, ours)

    def _replace(self, number: int) -> None:
        self._end(self._workers[number])
        self._workers[number] = self._start()

    def _end(self, worker: _Worker) -> None:
        worker.pipe.close()
        worker.process.kill()
        worker.process.join()


def _serve(pipe: Connection, target: str, folder: str) -> None:
    """A worker's life: import, then judge what comes until the parent is gone."""
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as `python -m` has it: the user's module commonly lies there
    module, _, name = target.partition(":")
    try:
        function: RewardFunction = getattr(importlib.import_module(module), name)
    except Exception as error:  # noqa: BLE001 – whatever a user's module raises is theirs to read
        pipe.send_bytes(json.dumps({"failed": f"{type(error).__name__}: {error}"}).encode())
        return
    pipe.send_bytes(b'{"ready": true}')
    while True:
        try:
            rollout = RecordedRollout(**json.loads(pipe.recv_bytes()))
        except EOFError:
            return
        pipe.send_bytes(json.dumps(_judge(function, rollout)).encode())


def _judge(function: RewardFunction, rollout: RecordedRollout) -> dict[str, Any]:
    try:
        result = function(rollout)
    except Exception as error:  # noqa: BLE001 – one rollout's failure must not cost the others
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{os.path.basename(last.filename)}:{last.lineno}"
        return {"failed": "reward_raised", "detail": f"{type(error).__name__}: {error} ({where})"}
    named = dict(result) if isinstance(result, Mapping) else {"reward": result}
    rewards = {}
    for name, value in named.items():
        try:
            rewards[str(name)] = float(value)  # numpy's numbers too
        except (TypeError, ValueError):
            return {"failed": "reward_no_number", "detail": f"{name} is {type(value).__name__}"}
        if isinstance(value, str) or not math.isfinite(rewards[str(name)]):
            return {"failed": "reward_not_finite", "detail": f"{name} is {value!r}"}
    if not rewards:
        return {"failed": "reward_no_number", "detail": "an empty dict"}
    return {"rewards": rewards}
