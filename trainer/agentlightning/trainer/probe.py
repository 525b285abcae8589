"""The probe: do trainer and engine give the same tokens the same log-probabilities?

Asked at step 0 and after each publish. The trainer computes with the weights that it published, merged and rounded to
the served dtype, so that what is left is arithmetic; a stale weight, a wrong merge or a stale cache shows at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from agentlightning.trainer.learner import Learner

__all__ = ["TOLERANCE", "Verdict", "compare", "probe_sequences", "trainer_logprobs"]

TOLERANCE: dict[torch.dtype, tuple[float, float]] = {
    torch.float32: (1e-3, 2e-2),
    torch.bfloat16: (3e-2, 1.0),
}
"""Greatest mean and greatest single |Δ| per dtype. Measured, bf16 against fp32: mean 0.02, max 0.15."""


@dataclass(frozen=True, slots=True)
class Verdict:
    ok: bool
    mean: float
    max: float
    tokens: int
    sentence: str


def probe_sequences(
    vocab_size: int, *, count: int = 4, length: int = 48, seed: int = 0, texts: Sequence[Sequence[int]] = ()
) -> list[list[int]]:
    """Fixed token sequences: `texts` as they are, then random ones."""
    generator = np.random.default_rng(seed)
    drawn = [generator.integers(0, vocab_size, length).tolist() for _ in range(count)]
    return [list(text) for text in texts if len(text) > 1] + drawn


@torch.no_grad()
def trainer_logprobs(
    learner: Learner, sequences: Sequence[Sequence[int]], dtype: torch.dtype, *, temperature: float = 1.0
) -> list[list[float | None]]:
    """Log-probability of each token given those before it, as the engine's `/score` answers: the first is None."""
    result: list[list[float | None]] = []
    with learner.serving(dtype) as model:
        for sequence in sequences:
            ids = torch.tensor([list(sequence)], device=learner.device)
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float() / temperature
            logp = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
            result.append([None, *logp.tolist()])
    return result


def compare(
    ours: Sequence[Sequence[float | None]], theirs: Sequence[Sequence[float | None]], dtype: torch.dtype
) -> Verdict:
    """A verdict on two answers about the same sequences."""
    if [len(row) for row in ours] != [len(row) for row in theirs]:
        return Verdict(
            False, float("nan"), float("nan"), 0, "The engine scored other sequences than it was asked for."
        )
    pairs = [(a, b) for x, y in zip(ours, theirs, strict=True) for a, b in zip(x[1:], y[1:], strict=True)]
    if not pairs or any(a is None or b is None for a, b in pairs):
        return Verdict(
            False, float("nan"), float("nan"), 0, "The engine gave no log-probabilities for the probe."
        )
    gaps = np.abs(np.array(pairs, np.float64) @ [1.0, -1.0])
    mean, most = float(gaps.mean()), float(gaps.max())
    mean_limit, max_limit = TOLERANCE[dtype]
    ok = bool(mean <= mean_limit and most <= max_limit)  # false for NaN
    served = str(dtype).removeprefix("torch.")
    numbers = f"mean |Δ| {mean:.2g} (limit {mean_limit:g}), max {most:.2g} (limit {max_limit:g})"
    if ok:
        sentence = f"Engine and trainer agree on {len(pairs)} probe tokens in {served}: {numbers}."
    else:
        sentence = (
            f"Engine and trainer disagree on {len(pairs)} probe tokens in {served}: {numbers}. The engine does not "
            "serve the weights that were published, or computes them differently."
        )
    return Verdict(ok, mean, most, len(pairs), sentence)
