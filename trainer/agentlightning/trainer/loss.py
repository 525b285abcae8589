"""Losses: pure functions of tensors, one value per sampled token.

ρ = exp(log π − log π_old) compares the policy with itself at the start of the update; w = exp(log π_old − log μ) corrects
for the difference between trainer and sampler (`mismatch`). Every log-ratio is clamped to ±20 before exp.

| kind | loss of a token, before w | source |
|---|---|---|
| `ppo` (default) | −min(ρA, clip(ρ, 1−ε_low, 1+ε_high)A); for A < 0 at most −cA | arXiv 1707.06347; ε_high: DAPO, 2503.14476; dual clip c: 1912.09729 |
| `reinforce` | −A·log π | Williams 1992 |
| `gspo` | as ppo without c, with ρ the geometric mean over the call's tokens | arXiv 2507.18071 (GSPO-token) |
| `cispo` | −sg[min(ρ, 1+ε_high)]·A·log π | arXiv 2506.13585 |

GSPO's sequence is the call, as `mismatch` says: a rollout that is several samples has one ratio per call, and the same
ones however its calls were merged.

Divergence from a reference (http://joschu.net/blog/kl-approx.html), with x = log π_ref − log π:
k1 = −x, k2 = x²/2, k3 = exp(x) − 1 − x.

On policy (ρ = 1) the gradients of all kinds are equal.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from agentlightning.trainer.mismatch import Correction, call_means, correct, log_ratio
from agentlightning.trainer.objective import DivergenceKind, LossKind, LossSettings

__all__ = [
    "LossKind",
    "LossSettings",
    "TokenLoss",
    "cispo",
    "divergence",
    "gspo",
    "ppo",
    "reinforce",
    "token_loss",
]


@dataclass(frozen=True, slots=True, eq=False)
class TokenLoss:
    """One value per token, (T,)."""

    loss: Tensor
    clipped: Tensor
    """True where the clip stopped the gradient."""
    correction: Correction


def token_loss(
    settings: LossSettings,
    *,
    logp: Tensor,
    logp_old: Tensor,
    logp_sampler: Tensor,
    advantages: Tensor,
    call: Tensor,
    logp_reference: Tensor | None = None,
    entropy: Tensor | None = None,
) -> TokenLoss:
    """The loss of each sampled token; `call` numbers the call that each belongs to, from 0."""
    log_rho = log_ratio(logp, logp_old)
    low, high = settings.clip
    match settings.kind:
        case "ppo":
            loss, clipped = ppo(log_rho, advantages, low, high, settings.dual_clip)
        case "reinforce":
            loss, clipped = reinforce(logp, advantages), torch.zeros_like(logp, dtype=torch.bool)
        case "gspo":
            loss, clipped = gspo(logp, log_rho, advantages, call, low, high)
        case "cispo":
            loss, clipped = cispo(logp, log_rho, advantages, high)
    correction = correct(
        logp_old,
        logp_sampler,
        call,
        cap=settings.tis_cap,
        sequence=settings.sequence_mask,
        geometric=settings.geometric_mask,
        veto=settings.veto,
    )
    loss = loss * correction.weight
    if settings.kl_beta and settings.kl_in == "loss":
        assert logp_reference is not None
        loss = loss + settings.kl_beta * divergence(settings.kl_kind, logp, logp_reference)
    if settings.entropy_bonus:
        assert entropy is not None
        loss = loss - settings.entropy_bonus * entropy
    return TokenLoss(torch.where(correction.left_out, loss.new_zeros(()), loss), clipped, correction)


def ppo(
    log_rho: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> tuple[Tensor, Tensor]:
    rho = log_rho.exp()
    clipped = rho.clamp(1 - clip_low, 1 + clip_high)
    objective = torch.minimum(rho * advantages, clipped * advantages)
    stopped = clipped * advantages < rho * advantages
    if dual_clip is not None:
        # A token that became far likelier although it was bad would otherwise dominate the step.
        floor = dual_clip * advantages
        stopped = stopped | ((advantages < 0) & (objective < floor))
        objective = torch.where(advantages < 0, torch.maximum(objective, floor), objective)
    return -objective, stopped


def reinforce(logp: Tensor, advantages: Tensor) -> Tensor:
    return -advantages * logp


def gspo(
    logp: Tensor, log_rho: Tensor, advantages: Tensor, call: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    # The paper's GSPO-token: each token carries its own share of the gradient, so that tokens of one call may have
    # different advantages and weights. With equal ones it is GSPO.
    mean = call_means(log_rho.detach(), call)
    return ppo(mean + logp - logp.detach(), advantages, clip_low, clip_high, None)


def cispo(logp: Tensor, log_rho: Tensor, advantages: Tensor, clip_high: float) -> tuple[Tensor, Tensor]:
    rho = log_rho.exp().detach()
    return -rho.clamp(max=1 + clip_high) * advantages * logp, rho > 1 + clip_high


def divergence(kind: DivergenceKind, logp: Tensor, logp_reference: Tensor) -> Tensor:
    """An estimate of KL(π ‖ π_ref) from tokens that π sampled."""
    x = log_ratio(logp_reference, logp)
    match kind:
        case "k1":
            return -x
        case "k2":
            return 0.5 * x.square()
        case "k3":
            return x.exp() - 1 - x
