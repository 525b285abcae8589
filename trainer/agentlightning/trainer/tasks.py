"""Tasks: what a run's rollouts are given.

A task is `{"task_id": str, "input": {…}, "reference": {…}}`. The agent sees `input` alone; `reference`
goes to the evaluator.
"""

import importlib
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentlightning.proto.errors import ConfigError, DataError
from agentlightning.proto.ids import check_id

__all__ = ["Task", "load_tasks", "task_order"]

GENERATED = 4096
"""How many tasks a generating function is asked for."""


@dataclass(frozen=True)
class Task:
    task_id: str
    input: dict[str, Any]
    reference: dict[str, Any] | None


def load_tasks(source: str, *, seed: int, count: int = GENERATED) -> list[Task]:
    """Read tasks from a JSON-lines file, or call `module:function(seed=…, count=…)`.

    Raises:
        ConfigError: there is no such file, module or function.
        DataError: a row is not a task; names the row.
    """
    rows = list(_rows(source, seed, count))
    tasks = [_task(row, f"{source}, row {number}") for number, row in enumerate(rows, 1)]
    if not tasks:
        raise DataError(f"{source} holds no tasks.")
    seen: set[str] = set()
    for task in tasks:
        if task.task_id in seen:
            raise DataError(f"{source} names task {task.task_id!r} twice.")
        seen.add(task.task_id)
    return tasks


def task_order(tasks: list[Task], *, seed: int) -> Iterator[Task]:
    """All tasks again and again, each pass in its own order; depends on the seed alone."""
    passes = 0
    while True:
        order = list(tasks)
        random.Random(f"{seed}/{passes}").shuffle(order)
        yield from order
        passes += 1


def _rows(source: str, seed: int, count: int) -> Iterator[Any]:
    module, separator, function = source.partition(":")
    if separator and not Path(source).exists():
        try:
            generate = getattr(importlib.import_module(module), function)
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"The tasks {source!r} cannot be loaded: {error}.") from None
        yield from generate(seed=seed, count=count)
        return
    try:
        lines = Path(source).read_text().splitlines()
    except OSError as error:
        raise ConfigError(f"The tasks file {source} cannot be read: {error.strerror}.") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield json.loads(line)
            except ValueError as error:
                raise DataError(f"{source}, line {number} is not JSON: {error}.") from None


def _task(row: Any, where: str) -> Task:
    if not isinstance(row, dict) or not isinstance(row.get("input"), dict) or "task_id" not in row:
        raise DataError(f"{where}: a task is an object with `task_id`, `input` (an object) and `reference`.")
    if unknown := set(row) - {"task_id", "input", "reference"}:
        raise DataError(f"{where}: unknown field {sorted(unknown)[0]!r}; put it into `input` or `reference`.")
    try:
        task_id = check_id(str(row["task_id"]), "task_id")
    except ValueError as error:
        raise DataError(f"{where}: {error}") from None
    return Task(task_id, row["input"], row.get("reference"))
