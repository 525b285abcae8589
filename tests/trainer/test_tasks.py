import json
from itertools import islice
from pathlib import Path

import pytest

from agentlightning.proto.errors import ConfigError, DataError
from agentlightning.trainer.tasks import Task, load_tasks, task_order


def rows(path: Path, *lines: object) -> str:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return str(path)


def test_a_file_of_tasks_is_read_in_order(tmp_path: Path) -> None:
    source = rows(
        tmp_path / "t.jsonl",
        {"task_id": "a", "input": {"q": 1}, "reference": {"x": 2}},
        "",
        {"task_id": "b", "input": {}},
    )
    assert load_tasks(source, seed=0) == [Task("a", {"q": 1}, {"x": 2}), Task("b", {}, None)]


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        (["{"], "line 1 is not JSON"),
        ([{"input": {}}], "row 1: a task is an object"),
        ([{"task_id": "a", "input": "q"}], "row 1: a task is an object"),
        ([{"task_id": "a", "input": {}, "answer": 3}], "unknown field 'answer'"),
        ([{"task_id": "a b", "input": {}}], "not a valid identifier"),
        ([{"task_id": "a", "input": {}}, {"task_id": "a", "input": {}}], "names task 'a' twice"),
        ([], "holds no tasks"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, lines: list[object], sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        load_tasks(rows(tmp_path / "t.jsonl", *lines), seed=0)


def test_a_source_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_tasks(str(tmp_path / "none.jsonl"), seed=0)
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_tasks("no.such.module:tasks", seed=0)


def test_each_pass_holds_every_task_once_and_the_seed_decides_the_order() -> None:
    tasks = [Task(str(number), {}, None) for number in range(7)]
    first = list(islice(task_order(tasks, seed=3), 14))
    assert sorted(task.task_id for task in first[:7]) == sorted(task.task_id for task in first[7:])
    assert first == list(islice(task_order(tasks, seed=3), 14))
    assert first != list(islice(task_order(tasks, seed=4), 14))
