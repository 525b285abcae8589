"""Mismatch between the policy that sampled (μ, as the engine reported it) and the trainer's at the start of the update.

w_t = exp(log π_old − log μ) of each token. Four corrections, each off where its setting is None:

| correction | what it does | source |
|---|---|---|
| truncation (`cap`) | w ← min(w, cap), token by token | Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training" |
| `sequence` | leaves a call out whose Π w_t lies outside [low, high] | Liu et al. 2025, "When speed kills stability" |
| `geometric` | leaves a call out whose (Π w_t)^(1/T) lies outside [low, high] | the same |
| `veto` | leaves a call out that has any w_t below the bound | the same |

**The unit is the call**: the tokens that the sampler drew in one go. A call is the action of the decision process, so its
w is an action's importance weight; it always lies whole in one sample, so neither merging, splitting, packing nor
micro-batches can change a result; and the product over a rollout of dozens of calls would leave out every long rollout.
What is left out stays in the denominators: leaving a call out never makes the others weigh more.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from agentlightning.trainer.objective import Bounds

__all__ = ["MAX_LOG_RATIO", "Correction", "call_means", "call_sums", "correct", "log_ratio"]

MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True, eq=False)
class Correction:
    """All (T,)."""

    weight: Tensor
    """What the loss of each token is multiplied by, in (0, cap]."""
    truncated: Tensor
    """True where w was cut to the cap."""
    vetoed: Tensor
    """True on every token of a call that the veto leaves out."""
    masked: Tensor
    """True on every token of a call outside the sequence or geometric bounds."""

    @property
    def left_out(self) -> Tensor:
        return self.vetoed | self.masked


def log_ratio(logp: Tensor, logp_old: Tensor) -> Tensor:
    return (logp - logp_old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


@torch.no_grad()
def correct(
    logp_old: Tensor,
    logp_sampler: Tensor,
    call: Tensor,
    *,
    cap: float | None = 2.0,
    sequence: Bounds | None = None,
    geometric: Bounds | None = None,
    veto: float | None = 1e-4,
) -> Correction:
    """The correction of each token; `call` numbers the call that each belongs to, from 0."""
    log_w = log_ratio(logp_old, logp_sampler)
    weight = log_w.exp()
    nowhere = torch.zeros_like(weight, dtype=torch.bool)
    vetoed = masked = nowhere
    if veto is not None:
        vetoed = call_sums((weight < veto).to(weight.dtype), call) > 0
    if sequence is not None:
        masked = _outside(call_sums(log_w, call), sequence)
    if geometric is not None:
        masked = masked | _outside(call_means(log_w, call), geometric)
    if cap is None:
        return Correction(torch.ones_like(weight), nowhere, vetoed, masked)
    return Correction(weight.clamp(max=cap), weight > cap, vetoed, masked)


def call_sums(values: Tensor, call: Tensor) -> Tensor:
    """For each token the sum over its call."""
    calls = int(call.max()) + 1 if call.numel() else 0
    return values.new_zeros(calls).index_add(0, call, values)[call]


def call_means(values: Tensor, call: Tensor) -> Tensor:
    """For each token the mean over its call."""
    return call_sums(values, call) / call_sums(torch.ones_like(values), call)


def _outside(log_w: Tensor, bounds: Bounds) -> Tensor:
    ratio = log_w.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return (ratio < bounds[0]) | (ratio > bounds[1])
