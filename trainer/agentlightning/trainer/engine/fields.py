"""The fields of a chat completion request: what becomes of each, and typed access to them.

Every field is honoured, or refused with its name: nothing is ignored in silence. `FIELDS` is the whole table.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from agentlightning.trainer.engine.errors import RequestError

__all__ = ["FIELDS", "Fields", "Only"]

HONOURED = "honoured"
NO_EFFECT = "accepted: it says something about the request and nothing about the answer"


@dataclass(frozen=True, slots=True)
class Only:
    """A field that is honoured for these values, and refused for others."""

    values: tuple[object, ...]


FIELDS: dict[str, object] = {
    "model": HONOURED,
    "messages": HONOURED,
    "max_tokens": HONOURED,
    "max_completion_tokens": HONOURED,
    "temperature": HONOURED,
    "top_p": HONOURED,
    "top_k": HONOURED,
    "seed": HONOURED,
    "stop": HONOURED,
    "n": HONOURED,
    "logprobs": HONOURED,
    "top_logprobs": HONOURED,
    "stream": HONOURED,
    "stream_options": HONOURED,
    "tools": HONOURED,
    "tool_choice": HONOURED,
    "parallel_tool_calls": HONOURED,
    "response_format": HONOURED,
    "presence_penalty": HONOURED,
    "frequency_penalty": HONOURED,
    "logit_bias": HONOURED,
    "return_token_ids": HONOURED,
    "ignore_eos": HONOURED,
    "user": NO_EFFECT,
    "safety_identifier": NO_EFFECT,
    "prompt_cache_key": NO_EFFECT,
    "prompt_cache_retention": NO_EFFECT,
    "metadata": NO_EFFECT,
    "store": NO_EFFECT,
    "service_tier": NO_EFFECT,
    "reasoning_effort": "accepted: the model thinks as it was trained to",
    "repetition_penalty": Only((1,)),
    "min_p": Only((0,)),
    "modalities": Only((["text"],)),
}
"""What becomes of each request field. One that is not here is refused as unknown. `null` means absent, always."""


class Fields:
    """Typed access to a body of which every field is known to be honoured."""

    def __init__(self, body: dict[str, Any]) -> None:
        for name, value in body.items():
            rule = FIELDS.get(name)
            if rule is None:
                raise RequestError(f"The field {name} is not known to this engine.", param=name)
            if isinstance(rule, Only) and not any(
                (type(value) is not bool and value == v) or value is v for v in rule.values
            ):
                honoured = " or ".join(json.dumps(v) for v in rule.values)
                raise RequestError(
                    f"The field {name} is honoured as {honoured} only; the embedded engine cannot do "
                    f"{json.dumps(value)[:200]}.",
                    code="unsupported_value",
                    param=name,
                )
        self._body = body

    def any(self, name: str) -> Any:
        """A field whose shape its reader checks."""
        return self._body.get(name)

    def _get(self, name: str, kind: str, fits: Callable[[Any], bool]) -> Any:
        value = self._body.get(name)
        if value is not None and not fits(value):
            raise RequestError(f"The field {name} must be {kind}, not {json.dumps(value)[:200]}.", param=name)
        return value

    def text(self, name: str) -> str | None:
        value: str | None = self._get(name, "a string", lambda v: isinstance(v, str))
        return value

    def boolean(self, name: str) -> bool:
        return bool(self._get(name, "true or false", lambda v: isinstance(v, bool)))

    def items(self, name: str) -> list[Any]:
        return self._get(name, "a list", lambda v: isinstance(v, list)) or []

    def mapping(self, name: str) -> dict[str, Any]:
        return self._get(name, "an object", lambda v: isinstance(v, dict)) or {}

    def integer(self, name: str, low: int | None, high: int | None = None) -> int | None:
        bounds = "" if low is None else f" of at least {low}" if high is None else f" from {low} to {high}"
        value: int | None = self._get(
            name,
            f"an integer{bounds}",
            lambda v: type(v) is int and (low is None or v >= low) and (high is None or v <= high),
        )
        return value

    def biases(self, vocabulary: int) -> tuple[tuple[int, float], ...]:
        value = self._get(
            "logit_bias",
            f"an object of numbers from -100 to 100 by token id, from 0 to {vocabulary - 1}",
            lambda v: (
                isinstance(v, dict)
                and all(name.isdecimal() and int(name) < vocabulary for name in v)
                and all(type(n) in (int, float) and -100 <= n <= 100 for n in v.values())
            ),
        )
        return tuple((int(name), float(number)) for name, number in (value or {}).items())

    def number(self, name: str, low: float, high: float, default: float) -> float:
        value = self._get(
            name,
            f"a number from {low:g} to {high:g}",
            lambda v: type(v) in (int, float) and math.isfinite(v) and low <= v <= high,
        )
        return default if value is None else float(value)

    def stops(self) -> tuple[str, ...]:
        value = self._get(
            "stop",
            "a string or a list of at most 16 strings, none of them empty",
            lambda v: (
                (isinstance(v, str) and v != "")
                or (isinstance(v, list) and len(v) <= 16 and all(isinstance(s, str) and s for s in v))
            ),
        )
        return (value,) if isinstance(value, str) else tuple(value or ())
