"""An agent of two calls, with the openai package alone: its reward is how many letters it wrote."""

import os
from typing import Any

from openai import OpenAI


def tasks(seed: int, count: int) -> list[dict[str, Any]]:
    return [
        {"task_id": f"t{n}", "input": {"word": f"word{n}"}, "reference": {"n": n}}
        for n in range(min(count, 16))
    ]


def solve(word: str) -> str:
    client = OpenAI(max_retries=8)
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"Say {word}."}]
    said = []
    for _ in range(2):
        answer = client.chat.completions.create(
            model=os.environ["OPENAI_MODEL"],
            messages=messages,  # type: ignore[arg-type]
        )
        text = answer.choices[0].message.content or ""
        said.append(text)
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Again."}]
    return "".join(said)


def evaluate(task: dict[str, Any], output: Any) -> float:
    text = str(output)
    return sum(character.isascii() and character.isalpha() for character in text) / max(len(text), 1)
