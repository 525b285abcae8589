"""Arithmetic word problems with a checkable answer, the same for the same seed.

Three kinds of story, for addition, subtraction and multiplication, in turn; the numbers are too large to guess, so the
calculator has to be used. Train and held-out problems never share a question, whatever the seeds: each question's
digest decides its side.
"""

import hashlib
import random
from collections.abc import Callable
from typing import Any

__all__ = ["held_out", "train"]

NAMES = ["Ann", "Ben", "Carla", "David", "Emma", "Farid", "Grace", "Hugo", "Ines", "Jonas", "Kim", "Lena"]
THINGS = ["apples", "books", "cards", "coins", "eggs", "marbles", "pens", "shells", "stamps", "tickets"]
HOLDERS = [("box", "boxes"), ("bag", "bags"), ("basket", "baskets"), ("crate", "crates"), ("jar", "jars")]


def train(seed: int, count: int) -> list[dict[str, Any]]:
    """`count` problems to learn from: rows of `task_id`, `input` and `reference`."""
    return _tasks(f"train/{seed}", count, keep=lambda digest: digest % 4 != 0)


def held_out(seed: int, count: int) -> list[dict[str, Any]]:
    """`count` problems from the quarter that is never trained on."""
    return _tasks(f"held out/{seed}", count, keep=lambda digest: digest % 4 == 0)


def _tasks(seed: str, count: int, *, keep: Callable[[int], bool]) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    tasks: dict[str, dict[str, Any]] = {}
    while len(tasks) < count:
        story = STORIES[len(tasks) % len(STORIES)]
        question, answer = story(rng, rng.choice(NAMES), rng.choice(THINGS))
        digest = hashlib.sha256(question.encode()).hexdigest()
        if keep(int(digest[:8], 16)):
            task_id = f"calc-{digest[:12]}"
            tasks[task_id] = {
                "task_id": task_id,
                "input": {"question": question},
                "reference": {"answer": answer},
            }
    return list(tasks.values())


def _gain(rng: random.Random, name: str, things: str) -> tuple[str, int]:
    a, b, verb = rng.randint(12, 99), rng.randint(12, 99), rng.choice(["buys", "finds", "gets"])
    return f"{name} has {a} {things} and {verb} {b} more. How many {things} does {name} have now?", a + b


def _loss(rng: random.Random, name: str, things: str) -> tuple[str, int]:
    b, left, verb = rng.randint(11, 60), rng.randint(11, 60), rng.choice(["gives away", "loses", "sells"])
    return f"{name} has {b + left} {things} and {verb} {b}. How many {things} are left?", left


def _packs(rng: random.Random, name: str, things: str) -> tuple[str, int]:
    a, b, (one, many) = rng.randint(6, 29), rng.randint(6, 29), rng.choice(HOLDERS)
    start = rng.choice([f"A {one} holds {a} {things}.", f"{name} packs {a} {things} into each {one}."])
    return f"{start} How many {things} are in {b} {many}?", a * b


STORIES: list[Callable[[random.Random, str, str], tuple[str, int]]] = [_gain, _loss, _packs]
