"""The quickstart's tasks and reward."""

import re

import pytest

from agentlightning.examples.calculator.reward import evaluate
from agentlightning.examples.calculator.tasks import held_out, train


@pytest.mark.parametrize("side", [train, held_out])
def test_the_same_seed_gives_the_same_tasks_and_another_seed_others(side):
    assert side(3, 50) == side(3, 50)
    assert side(3, 50)[:20] == side(3, 20)
    assert side(3, 50) != side(4, 50)


def test_every_task_is_different_and_none_is_on_both_sides_whatever_the_seeds():
    trained = {task["input"]["question"] for seed in range(4) for task in train(seed, 4096)}
    held = [task["input"]["question"] for seed in range(4) for task in held_out(seed, 500)]
    assert trained.isdisjoint(held)
    for rows in (train(0, 4096), held_out(0, 4096)):
        assert (
            len({row["task_id"] for row in rows}) == len({row["input"]["question"] for row in rows}) == 4096
        )


def test_the_reference_is_what_the_story_says():
    operations = {"more": lambda a, b: a + b, "left": lambda a, b: a - b, "are in": lambda a, b: a * b}
    for task in train(0, 300):
        question = task["input"]["question"]
        (operation,) = [work for word, work in operations.items() if word in question]
        a, b = (int(number) for number in re.findall(r"\d+", question))
        assert task["reference"] == {"answer": operation(a, b)}
        assert set(task) == {"task_id", "input", "reference"}


@pytest.mark.parametrize(
    ("output", "reward"),
    [
        ("42", 1.0),
        (" 42\n", 1.0),
        ("42.0", 1.0),
        ("41", 0.0),
        ("-42", 0.0),
        ("The answer is 42", 0.0),
        ("42 42", 0.0),
        ("٤٢", 0.0),
        ("9" * 5000, 0.0),
        ("nan", 0.0),
        ("", 0.0),
        (None, 0.0),
        (42, 0.0),
        ({"answer": 42}, 0.0),
    ],
)
def test_only_the_right_number_alone_is_rewarded(output, reward):
    assert evaluate({"reference": {"answer": 42}}, output) == reward
