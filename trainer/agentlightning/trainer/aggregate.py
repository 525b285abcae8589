"""Aggregation: how much each sampled token weighs in the loss.

Weights are computed once per optimiser step over the whole batch and passed to the loss, which is then a plain weighted
sum: neither micro-batches nor gradient accumulation can change it.

| mode | weight of a token |
|---|---|
| `rollout-mean` (default) | 1 / (sampled tokens of its whole rollout, all its samples) / number of rollouts |
| `token-mean` | 1 / sampled tokens of the whole batch (DAPO, arXiv 2503.14476) |
| `sample-mean` | 1 / sampled tokens of its sample / number of samples (GRPO, arXiv 2402.03300) |
| `constant` | 1 / (configured length · number of samples) (Dr.GRPO, arXiv 2503.20783) |
"""

from collections import Counter
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from agentlightning.proto.errors import ConfigError, nearest
from agentlightning.trainer.samples import Sample

__all__ = ["Aggregate", "check_aggregate", "sample_weights"]

Aggregate = Literal["rollout-mean", "token-mean", "sample-mean", "constant"]


def check_aggregate(mode: str, constant_length: int | None) -> None:
    """Raise a ConfigError unless the settings can be honoured."""
    if mode not in get_args(Aggregate):
        raise ConfigError(f"There is no aggregation mode {mode!r}.{nearest(mode, get_args(Aggregate))}")
    if (mode == "constant") != (constant_length is not None):
        raise ConfigError(
            "Aggregation mode 'constant' needs constant_length, and only that mode may have it."
        )
    if constant_length is not None and constant_length < 1:
        raise ConfigError(f"constant_length must be at least 1, not {constant_length}.")


def sample_weights(
    mode: Aggregate, samples: Sequence[Sample], *, constant_length: int | None = None
) -> npt.NDArray[np.float64]:
    """The weight of every sampled token of each sample; 0 for samples without any."""
    tokens = np.array([sample.trained for sample in samples], np.float64)
    trained = tokens > 0
    match mode:
        case "rollout-mean":
            per_rollout: Counter[str] = Counter()
            for sample in samples:
                per_rollout[sample.rollout_id] += sample.trained
            rollouts = sum(count > 0 for count in per_rollout.values())
            denominators = np.array([per_rollout[s.rollout_id] for s in samples], np.float64) * rollouts
        case "token-mean":
            denominators = np.full(len(tokens), tokens.sum())
        case "sample-mean":
            denominators = tokens * trained.sum()
        case "constant":
            assert constant_length is not None
            denominators = np.full(len(tokens), float(constant_length) * trained.sum())
    return np.divide(1.0, denominators, out=np.zeros(len(tokens)), where=trained)
