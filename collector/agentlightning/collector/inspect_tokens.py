"""A rollout token by token, for the terminal: text, mask, log-probabilities, advantage, version, why a chain broke."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentlightning.proto.dataset import Dataset
from agentlightning.proto.errors import ConfigError
from agentlightning.proto.token_view import BREAKS, pieces, sample_rows, stretches

__all__ = ["Decode", "find_tokenizer", "newest_attempt", "token_document", "token_text"]

Decode = Callable[[Sequence[int]], str]

CONTEXT = 160
"""Characters of context that are shown, unless in full."""


def find_tokenizer(dataset: Dataset, given: Path | None) -> Decode | None:
    """What turns ids to text: the tokenizer.json that was given, or that of the run around the data set; None if there is none.

    Raises:
        ConfigError: the one that was given cannot be used.
    """
    folders = [] if given is None else [given]
    if given is None and isinstance(dataset.root, Path):
        folders = [dataset.root.parent / "tokenizer", dataset.root.parent / "checkpoint"]
    files = [folder if folder.is_file() else folder / "tokenizer.json" for folder in folders]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        if given is not None:
            raise ConfigError(
                f"There is no tokenizer at {given}: give a tokenizer.json, or a folder with one."
            )
        return None
    try:
        tokenizer = importlib.import_module("tokenizers").Tokenizer.from_file(str(file))
    except ImportError:
        if given is not None:
            raise ConfigError(
                "--tokenizer needs the package tokenizers. Run: pip install tokenizers"
            ) from None
        return None

    def decode(ids: Sequence[int]) -> str:
        text: str = tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    return decode


def newest_attempt(dataset: Dataset, rollout_id: str) -> int | None:
    """Of a rollout that the data set holds, be it in the samples table alone, as that of an offline run; else None."""
    attempts = [attempt for name, attempt in dataset.attempts if name == rollout_id]
    if not attempts:
        samples = dataset.table("samples", columns=["rollout_id", "attempt"]).to_pylist()
        attempts = [row["attempt"] for row in samples if row["rollout_id"] == rollout_id]
    return max(attempts, default=None)


def token_document(
    dataset: Dataset, rollout_id: str, attempt: int, decode: Decode | None
) -> list[dict[str, Any]]:
    """The samples of an attempt, as the newest step used them, with one list per column; of one that was not trained its
    calls, in the same form and with `step` null."""
    return [
        {
            "step": row["step"],
            "sample": row["sample"],
            "reason": row["reason"],
            "why": BREAKS.get(row["reason"]),
            "calls": row["call_ids"],
            "token_ids": row["token_ids"],
            "text": None if decode is None else pieces(decode, row["token_ids"]),
            "mask": row["mask"],
            "logprobs": row["logprobs"],
            "logprobs_new": row["logprobs_new"],
            "advantages": row["advantages"],
            "versions": row["versions"],
        }
        for row in sample_rows(dataset, rollout_id, attempt)
    ]


def token_text(samples: Sequence[Mapping[str, Any]], *, full: bool) -> str:
    """The samples as a table, one line a sampled token; stretches of context are one line each."""
    lines = []
    for sample in samples:
        trained = sum(sample["mask"])
        if sample["step"] is None:
            lines.append(f"\ncall {sample['sample']}, not trained: {trained} tokens sampled")
        else:
            lines.append(
                f"\nsample {sample['sample']} of step {sample['step']}: {sample['reason']} ({sample['why']}); "
                f"{len(sample['calls'])} calls, {trained} tokens trained, {len(sample['mask']) - trained} context"
            )
        lines.append(
            f"{'place':>7} {'id':>7}  {'sampler':>8} {'trainer':>8} {'advantage':>9} {'version':>7}  text"
        )
        for stretch in stretches(sample["mask"]):
            if stretch.sampled:
                lines += [_line(sample, place) for place in range(stretch.start, stretch.end)]
            else:
                lines.append(_context(sample, stretch.start, stretch.end, full))
    return "\n".join(lines).lstrip("\n") or "No tokens on record."


def _line(sample: Mapping[str, Any], place: int) -> str:
    numbers = [
        "–" if sample[name] is None else f"{sample[name][place]:.3f}"
        for name in ("logprobs", "logprobs_new", "advantages")
    ]
    version = sample["versions"][place] if sample["versions"] else -1
    text = "" if sample["text"] is None else f'"{_visible(sample["text"][place])}"'
    return (
        f"{place:>7} {sample['token_ids'][place]:>7}  {numbers[0]:>8} {numbers[1]:>8} {numbers[2]:>9} "
        f"{'–' if version < 0 else version:>7}  {text}"
    )


def _context(sample: Mapping[str, Any], start: int, end: int, full: bool) -> str:
    if sample["text"] is None:
        shown = " ".join(map(str, sample["token_ids"][start:end]))
    else:
        shown = _visible("".join(sample["text"][start:end]))
    if not full and len(shown) > CONTEXT:
        shown = f"{shown[: CONTEXT // 2]} … {shown[-CONTEXT // 2 :]}"
    return f"{start:>7}   context, {end - start} tokens: {shown}"


def _visible(text: str) -> str:
    """On one line, without control characters: a token may hold anything."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
