"""How a sample is shown token by token: each token's own text, stretches of context and of answers, and break reasons."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentlightning.proto.dataset import Dataset

__all__ = ["BREAKS", "Stretch", "pieces", "sample_rows", "stretches"]

BREAKS = {
    "first": "the first call of the attempt",
    "retokenised": "the same text came back with other token ids",
    "edited": "the history was changed or summarised",
    "branch": "it shares a beginning with a chain that had gone on already",
    "agent": "another agent's first call",
}
"""Why a chain of calls began, in words."""

REPLACEMENT = "\ufffd"


@dataclass(frozen=True, slots=True)
class Stretch:
    """Tokens `[start, end)` that are all sampled and trained, or all context."""

    sampled: bool
    start: int
    end: int


def sample_rows(
    dataset: Dataset, rollout_id: str, attempt: int, *, samples_from: Dataset | None = None
) -> list[dict[str, Any]]:
    """The samples of an attempt in order, as the newest step that used it has them.

    An attempt that was not trained has its calls instead, in the same form: `step` and `advantages` are None, and `reason` is
    `call`.

    Args:
        samples_from: the data set that holds the samples, if it is another one.
    """
    key = (rollout_id, attempt)
    rows: list[dict[str, Any]] = (samples_from or dataset).table("samples", attempts=[key]).to_pylist()
    if rows:
        newest = max(row["step"] for row in rows)
        return sorted((row for row in rows if row["step"] == newest), key=lambda row: row["sample"])
    calls = dataset.table("transitions", attempts=[key]).to_pylist()
    return [
        _untrained(call) for call in sorted(calls, key=lambda call: call["seq"]) if call["response_token_ids"]
    ]


def pieces(decode: Callable[[Sequence[int]], str], ids: Sequence[int]) -> list[str]:
    """Each token's part of the text. Joined they are the text; of a character of several tokens the last one has it."""
    texts = []
    context = read = 0  # decoded from `context` on: some tokenizers write a token by its neighbours
    for number in range(len(ids)):
        known, text = decode(ids[context:read]), decode(ids[context : number + 1])
        if text.endswith(REPLACEMENT) and number + 1 < len(ids) and number - read < 3:
            texts.append("")
            continue
        texts.append(text[len(known) :])
        context, read = read, number + 1
    return texts


def stretches(mask: Sequence[bool]) -> Iterator[Stretch]:
    """The runs of equal values of a sample's mask."""
    start = 0
    for place in range(1, len(mask) + 1):
        if place == len(mask) or bool(mask[place]) != bool(mask[start]):
            yield Stretch(bool(mask[start]), start, place)
            start = place


def _untrained(call: Mapping[str, Any]) -> dict[str, Any]:
    prompt, response = call["prompt_token_ids"] or [], call["response_token_ids"]
    logprobs, version = call["response_logprobs"], call["model_version"]
    return {
        "step": None,
        "sample": call["seq"],
        "reason": "call",
        "call_ids": [call["call_id"]],
        "token_ids": [*prompt, *response],
        "mask": [False] * len(prompt) + [True] * len(response),
        "logprobs": None if logprobs is None else [0.0] * len(prompt) + logprobs,
        "logprobs_new": None,
        "advantages": None,
        "versions": [-1] * len(prompt) + [-1 if version is None else version] * len(response),
    }
