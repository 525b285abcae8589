"""An agent that does to its surroundings what its task says; its output tells what it was answered."""

import json
import math
import os
import urllib.error
import urllib.request
from typing import Any

from openai import OpenAI

TROUBLES = ["fine", "crash", "silent", "nan", "malformed", "wrong_key", "unknown_model", "oversized"]


def tasks(seed: int, count: int) -> list[dict[str, Any]]:
    return [
        {"task_id": f"{n}-{name}", "input": {"trouble": name}, "reference": None}
        for n, name in enumerate(TROUBLES)
    ]


def solve(trouble: str) -> dict[str, Any]:
    if trouble == "crash":
        raise RuntimeError("the agent has a bug")
    if trouble == "silent":
        return {"trouble": trouble}
    answered = None
    if trouble == "malformed":
        answered = post(b'{"model": ')
    elif trouble == "wrong_key":
        answered = post(body(), key="alr_forged.signature")
    elif trouble == "unknown_model":
        answered = post(body(model="gpt-9"))
    elif trouble == "oversized":
        answered = post(body(padding="x" * (17 << 20)))
    completion = OpenAI(max_retries=8).chat.completions.create(
        model=os.environ["OPENAI_MODEL"], messages=[{"role": "user", "content": trouble}]
    )
    return {"trouble": trouble, "answered": answered, "text": completion.choices[0].message.content}


def evaluate(task: dict[str, Any], output: Any) -> float:
    if output["trouble"] == "nan":
        return math.nan
    return len(output.get("text") or "") / 100


def body(**fields: Any) -> bytes:
    request = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": "hello"}]}
    return json.dumps({**request, **fields}).encode()


def post(data: bytes, *, key: str | None = None) -> list[Any]:
    """Status and error code of a raw request."""
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        data,
        {
            "content-type": "application/json",
            "authorization": f"Bearer {key or os.environ['OPENAI_API_KEY']}",
        },
    )
    try:
        with urllib.request.urlopen(request) as response:
            return [response.status, None]
    except urllib.error.HTTPError as error:
        return [error.code, json.loads(error.read())["error"]["code"]]
