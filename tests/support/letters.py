"""An agent of two calls, with the openai package alone: its reward is how many letters it wrote."""

import os
from typing import Any

from openai import OpenAI


def tasks(seed: int, count: int) -> list[dict[str, Any]]:
    return [
        {"task_id": f"t{n}", "input": {"word": f"word{n}"}, "reference": {"n": n}}
        for n in range(min(count, 16))
    ]


def open_client() -> OpenAI:
    return OpenAI(max_retries=8)


def say(client: OpenAI, messages: list[dict[str, Any]], text: str) -> str:
    """One more turn of a conversation."""
    messages.append({"role": "user", "content": text})
    answer = client.chat.completions.create(
        model=os.environ["OPENAI_MODEL"],
        messages=messages,  # type: ignore[arg-type]
    )
    said = answer.choices[0].message.content or ""
    messages.append({"role": "assistant", "content": said})
    return said


def solve(word: str) -> str:
    client, messages = open_client(), []
    return say(client, messages, f"Say {word}.") + say(client, messages, "Again.")


def evaluate(task: dict[str, Any], output: Any) -> float:
    text = str(output)
    return sum(character.isascii() and character.isalpha() for character in text) / max(len(text), 1)
