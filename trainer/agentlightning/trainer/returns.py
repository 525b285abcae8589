"""Returns over the sampled tokens of a rollout, in the order in which they were sampled.

The steps of a rollout are its sampled tokens: from the last token of a call they go on to the first of the next one, over
the observation in between and from sample to sample. So a rollout has one sequence of steps, however its calls were merged.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from agentlightning.trainer.samples import Sample

__all__ = ["carry_back", "gae", "last_tokens", "whiten"]

TokenFloats = npt.NDArray[np.float32]
Place = tuple[int, int, int]  # number of the sample, start, end


def carry_back(
    samples: Sequence[Sample], token_rewards: Sequence[TokenFloats], *, gamma: float = 1.0
) -> list[TokenFloats]:
    """Returns of token rewards: what each sampled token and those sampled after it in its rollout earned."""
    returns = [np.zeros(len(sample.token_ids), np.float32) for sample in samples]
    for calls in _trajectories(samples):
        carried = 0.0
        for copies in reversed(calls):
            i, start, end = copies[0]
            for t in range(end - 1, start - 1, -1):
                carried = float(token_rewards[i][t]) + gamma * carried
                returns[i][t] = carried
            _copy(returns, copies)
    return returns


def gae(
    samples: Sequence[Sample],
    token_rewards: Sequence[TokenFloats],
    values: Sequence[TokenFloats],
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> tuple[list[TokenFloats], list[TokenFloats]]:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv 1506.02438) over sampled tokens.

    δ_t = R_t + γV_{t'} − V_t and A_t = δ_t + γλA_{t'}, with t' the next sampled token of the rollout; V after the last
    is 0. `values[i][t]` is V of the state in which token t was sampled.

    Returns advantages, and the returns A + V that the values should have been; both 0 where nothing was sampled.
    """
    advantages = [np.zeros(len(sample.token_ids), np.float32) for sample in samples]
    returns = [np.zeros(len(sample.token_ids), np.float32) for sample in samples]
    for calls in _trajectories(samples):
        advantage, following = 0.0, 0.0
        for copies in reversed(calls):
            i, start, end = copies[0]
            for t in range(end - 1, start - 1, -1):
                value = float(values[i][t])
                delta = float(token_rewards[i][t]) + gamma * following - value
                advantage = delta + gamma * lam * advantage
                following = value
                advantages[i][t], returns[i][t] = advantage, advantage + value
            _copy(advantages, copies)
            _copy(returns, copies)
    return advantages, returns


def last_tokens(samples: Sequence[Sample]) -> Iterator[Place]:
    """Every copy of the last call of each rollout."""
    for calls in _trajectories(samples):
        yield from calls[-1]


def whiten(samples: Sequence[Sample], advantages: Sequence[TokenFloats]) -> list[TokenFloats]:
    """Mean 0 and deviation 1 over all sampled tokens of the batch; all 0 if they are all the same."""
    if not samples:
        return []
    values = np.sort(
        np.concatenate([a[s.mask] for s, a in zip(samples, advantages, strict=True)]).astype(np.float64)
    )
    if not values.size or values[0] == values[-1]:
        return [np.zeros_like(a) for a in advantages]
    mean, deviation = values.mean(), values.std() + 1e-8
    whitened = [((a - mean) / deviation).astype(np.float32) for a in advantages]
    return [np.where(s.mask, a, np.float32(0)) for s, a in zip(samples, whitened, strict=True)]


def _trajectories(samples: Sequence[Sample]) -> Iterator[list[list[Place]]]:
    """Of each rollout its calls in order; of each call where its tokens are (more than once if a sample is repeated)."""
    rollouts: dict[str, dict[tuple[int, str], list[Place]]] = {}
    for i, sample in enumerate(samples):
        for segment in sample.segments:
            calls = rollouts.setdefault(sample.rollout_id, {})
            calls.setdefault((segment.seq, segment.call_id), []).append((i, segment.start, segment.end))
    for calls in rollouts.values():
        yield [calls[key] for key in sorted(calls)]


def _copy(arrays: list[TokenFloats], copies: list[Place]) -> None:
    i, start, end = copies[0]
    for j, first, last in copies[1:]:
        arrays[j][first:last] = arrays[i][start:end]
