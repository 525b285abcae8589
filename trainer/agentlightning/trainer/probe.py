"""The probe: do trainer and engine give the same tokens the same log-probabilities?

Asked at step 0 and after each publish. The trainer computes in float32 with the weights that it published, rounded to
the served dtype, so that what is left is the engine's arithmetic. How much of that is normal, the trainer measures
itself: it computes once more in the served dtype. (Measured for SmolLM2 in bfloat16: mean |Δ| 0.04 on text, 0.08 on
random tokens; a fixed limit would be too narrow for one model and too wide for another.)

An update is often smaller than this noise, so a stale engine could pass. Therefore the engine's answers are also laid
on the line from the version before (0) to this one (1), over all tokens at once, where the noise averages out.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from agentlightning.trainer.learner import Learner

__all__ = ["Expectation", "Verdict", "compare", "expect", "probe_texts"]

FLOOR = {torch.float32: 1e-3, torch.bfloat16: 1e-2}
"""Mean |Δ| that is always allowed."""
NOISE_FACTOR = 2.5
"""Mean |Δ| that is allowed, in multiples of the trainer's own rounding noise."""
SHARP = 0.15
"""Standard error of the position between two versions beyond which it proves nothing."""

TEXTS = (
    "The quick brown fox jumps over the lazy dog. It was the best of times, it was the worst of times.",
    "Tom has 12 apples and buys 31 more. How many apples does Tom have now? He has 12 + 31 = 43 apples.",
    "def add(first, second):\n    return first + second\n\nprint(add(2, 3))  # 5\n",
    '{"name": "search", "arguments": {"query": "weather in Paris", "limit": 3}}',
    "Water boils at 100 degrees Celsius at sea level; on a mountain it boils at a lower temperature.",
)

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Expectation:
    """What an engine that serves the learner's weights should answer."""

    logprobs: Floats
    """Of every token but the first of each sequence, all in one row."""
    lengths: tuple[int, ...]
    noise: float
    """Mean |Δ| between the served dtype's arithmetic and float32."""
    deviation: float
    """Its root mean square."""
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Verdict:
    ok: bool
    mean: float
    """Mean |Δ| in nats per token."""
    max: float
    tokens: int
    position: float | None
    """Between the version before (0) and this one (1); None where it cannot be told."""
    sentence: str


def probe_texts(tokenizer: Any) -> list[list[int]]:
    """Token ids of a few fixed texts: what a model has been trained on, where its rounding noise is smallest."""
    return [
        ids for text in TEXTS if len(ids := list(tokenizer(text, add_special_tokens=False)["input_ids"])) > 1
    ]


def expect(
    learner: Learner,
    sequences: Sequence[Sequence[int]],
    state: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
) -> Expectation:
    """What an engine that serves `state`, the learner's weights rounded to `dtype`, should answer."""
    exact = _logprobs(learner, sequences, {name: value.float() for name, value in state.items()})
    if dtype == torch.float32:
        gap = np.zeros_like(exact)
    else:
        gap = _logprobs(learner, sequences, state) - exact
    noise, deviation = (
        (float(np.abs(gap).mean()), float(np.sqrt((gap**2).mean()))) if gap.size else (0.0, 0.0)
    )
    return Expectation(exact, tuple(map(len, sequences)), noise, deviation, dtype)


def compare(
    expected: Expectation, answer: Sequence[Sequence[float | None]], *, previous: Expectation | None = None
) -> Verdict:
    """A verdict on an engine's `/score` answer: the first of each sequence is None.

    Args:
        previous: what the version before was expected to answer, to the same sequences.
    """
    if tuple(map(len, answer)) != expected.lengths:
        return _refuse("The engine scored other sequences than it was asked for.")
    values = [value for row in answer for value in row[1:]]
    if not values or any(value is None for value in values):
        return _refuse("The engine gave no log-probabilities for the probe.")
    theirs = np.array(values, np.float64)
    gaps = np.abs(theirs - expected.logprobs)
    mean, most = float(gaps.mean()), float(gaps.max())
    limit = max(FLOOR[expected.dtype], NOISE_FACTOR * expected.noise)
    position = None if previous is None else _position(theirs, previous, expected)
    served = str(expected.dtype).removeprefix("torch.")
    numbers = f"mean |Δ| {mean:.2g} (limit {limit:.2g}), max {most:.2g}"
    if not mean <= limit:  # also where it is NaN
        return Verdict(
            False,
            mean,
            most,
            len(values),
            position,
            f"engine and trainer disagree on {len(values)} probe tokens in {served}: {numbers}. The engine does not "
            "serve the weights that were published, or computes them differently.",
        )
    if position is not None and not 0.5 <= position <= 1.5:
        return Verdict(
            False,
            mean,
            most,
            len(values),
            position,
            f"engine and trainer disagree: the engine's answers stand at {position:.2f} between the version before (0) "
            "and the one that was published (1). It still serves old weights, or cached results of them.",
        )
    where = "" if position is None else f", at {position:.2f} from the version before (0) to this one (1)"
    return Verdict(
        True,
        mean,
        most,
        len(values),
        position,
        f"engine and trainer agree on {len(values)} probe tokens in {served}: {numbers}{where}.",
    )


def _position(theirs: Floats, previous: Expectation, expected: Expectation) -> float | None:
    """Least-squares coordinate on the line between two versions; None if noise hides it."""
    step = expected.logprobs - previous.logprobs
    length = float(step @ step)
    noise = max(expected.deviation, 1e-6)
    if length == 0.0 or noise / math.sqrt(length) > SHARP:
        return None
    return float((theirs - previous.logprobs) @ step) / length


@torch.no_grad()
def _logprobs(
    learner: Learner, sequences: Sequence[Sequence[int]], state: Mapping[str, torch.Tensor]
) -> Floats:
    """All sequences in one pass. Padding stands on the right, where causal attention never looks."""
    ids = torch.zeros(len(sequences), max(map(len, sequences), default=0), dtype=torch.long)
    for row, sequence in zip(ids, sequences, strict=True):
        row[: len(sequence)] = torch.tensor(list(sequence))
    ids = ids.to(learner.device)
    with learner.serving(state) as model:
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    table = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0].cpu().double().numpy()
    return np.concatenate([row[: len(s) - 1] for row, s in zip(table, sequences, strict=True)])


def _refuse(sentence: str) -> Verdict:
    return Verdict(False, math.nan, math.nan, 0, None, sentence)
