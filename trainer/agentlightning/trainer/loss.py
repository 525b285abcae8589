"""Losses: pure functions of tensors, one value per sampled token.

ρ = exp(log π − log π_old) compares the policy with itself at the start of the update; w = exp(log π_old − log μ) corrects
for the difference between trainer and sampler. Every log-ratio is clamped to ±20 before exp.

| kind | loss of a token, before w | source |
|---|---|---|
| `ppo` (default) | −min(ρA, clip(ρ, 1−ε_low, 1+ε_high)A); for A < 0 at most −cA | arXiv 1707.06347; ε_high: DAPO, 2503.14476; dual clip c: 1912.09729 |
| `reinforce` | −A·log π | Williams 1992 |
| `gspo` | as ppo without c, with ρ the geometric mean over the sample's tokens | arXiv 2507.18071 (its clip range is far smaller, about 3e-4) |
| `cispo` | −sg[min(ρ, 1+ε_high)]·A·log π | arXiv 2506.13585 |

Divergence from a reference (http://joschu.net/blog/kl-approx.html), with x = log π_ref − log π:
k1 = −x, k2 = x²/2, k3 = exp(x) − 1 − x.

On policy (ρ = 1) the gradients of all kinds are equal.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from agentlightning.proto.errors import ConfigError, nearest

__all__ = [
    "LossKind",
    "LossSettings",
    "TokenLoss",
    "cispo",
    "divergence",
    "gspo",
    "importance",
    "log_ratio",
    "ppo",
    "reinforce",
    "token_loss",
]

LossKind = Literal["ppo", "reinforce", "gspo", "cispo"]
DivergenceKind = Literal["k1", "k2", "k3"]

MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True)
class LossSettings:
    kind: LossKind = "ppo"
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = 3.0
    tis_cap: float | None = 2.0
    """Truncated importance sampling: w ← min(w, cap). None: no correction, w = 1."""
    veto: float | None = 1e-4
    """A sample with any w below this is left out whole."""
    kl_beta: float = 0.0
    kl_kind: DivergenceKind = "k3"
    kl_in: Literal["loss", "reward"] = "loss"
    entropy_bonus: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in get_args(LossKind):
            raise ConfigError(f"There is no loss {self.kind!r}.{nearest(self.kind, get_args(LossKind))}")
        if self.kl_kind not in get_args(DivergenceKind):
            raise ConfigError(
                f"There is no divergence {self.kl_kind!r}.{nearest(self.kl_kind, ('k1', 'k2', 'k3'))}"
            )
        if self.kl_in not in ("loss", "reward"):
            raise ConfigError(f"kl_in must be 'loss' or 'reward', not {self.kl_in!r}.")
        if self.kl_beta and self.kl_in == "loss" and self.kl_kind == "k1":
            raise ConfigError(
                "The gradient of k1 in the loss is 0 on average. Use k2 or k3, or set kl_in to 'reward'."
            )
        if not 0 <= self.clip_low < 1 or self.clip_high < 0:
            raise ConfigError("clip_low must lie in [0, 1) and clip_high must not be negative.")
        if self.dual_clip is not None and self.dual_clip <= 1 + self.clip_high:
            raise ConfigError("dual_clip must be greater than 1 + clip_high, or null.")
        if self.tis_cap is not None and self.tis_cap < 1:
            raise ConfigError(f"tis_cap must be at least 1 or null, not {self.tis_cap}.")
        if self.veto is not None and not 0 < self.veto < 1:
            raise ConfigError(f"veto must lie between 0 and 1 or be null, not {self.veto}.")
        if self.kl_beta < 0:
            raise ConfigError(f"kl_beta must not be negative, but is {self.kl_beta}.")


@dataclass(frozen=True, slots=True, eq=False)
class TokenLoss:
    """One value per token, (T,)."""

    loss: Tensor
    clipped: Tensor
    """True where the clip stopped the gradient."""
    truncated: Tensor
    """True where w was cut to the cap."""
    vetoed: Tensor
    """True on every token of a vetoed sample."""


def token_loss(
    settings: LossSettings,
    *,
    logp: Tensor,
    logp_old: Tensor,
    logp_sampler: Tensor,
    advantages: Tensor,
    sample: Tensor,
    logp_reference: Tensor | None = None,
    entropy: Tensor | None = None,
) -> TokenLoss:
    """The loss of each sampled token; `sample` numbers the sample that each belongs to, from 0."""
    log_rho = log_ratio(logp, logp_old)
    match settings.kind:
        case "ppo":
            loss, clipped = ppo(
                log_rho, advantages, settings.clip_low, settings.clip_high, settings.dual_clip
            )
        case "reinforce":
            loss, clipped = reinforce(logp, advantages), torch.zeros_like(logp, dtype=torch.bool)
        case "gspo":
            loss, clipped = gspo(logp, log_rho, advantages, sample, settings.clip_low, settings.clip_high)
        case "cispo":
            loss, clipped = cispo(logp, log_rho, advantages, settings.clip_high)
    weight, truncated, vetoed = importance(
        logp_old, logp_sampler, sample, cap=settings.tis_cap, veto=settings.veto
    )
    loss = loss * weight
    if settings.kl_beta and settings.kl_in == "loss":
        assert logp_reference is not None
        loss = loss + settings.kl_beta * divergence(settings.kl_kind, logp, logp_reference)
    if settings.entropy_bonus:
        assert entropy is not None
        loss = loss - settings.entropy_bonus * entropy
    return TokenLoss(torch.where(vetoed, loss.new_zeros(()), loss), clipped, truncated, vetoed)


def log_ratio(logp: Tensor, logp_old: Tensor) -> Tensor:
    return (logp - logp_old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


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
    logp: Tensor, log_rho: Tensor, advantages: Tensor, sample: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    samples = int(sample.max()) + 1 if sample.numel() else 0
    total = log_rho.new_zeros(samples).index_add(0, sample, log_rho.detach())
    count = log_rho.new_zeros(samples).index_add(0, sample, torch.ones_like(log_rho))
    mean = (total / count.clamp(min=1))[sample]
    # The paper's GSPO-token: each token carries its own share of the gradient, so that tokens of one sample may have
    # different advantages and weights. With equal ones it is GSPO.
    return ppo(mean + logp - logp.detach(), advantages, clip_low, clip_high, None)


def cispo(logp: Tensor, log_rho: Tensor, advantages: Tensor, clip_high: float) -> tuple[Tensor, Tensor]:
    rho = log_rho.exp().detach()
    return -rho.clamp(max=1 + clip_high) * advantages * logp, rho > 1 + clip_high


def importance(
    logp_old: Tensor, logp_sampler: Tensor, sample: Tensor, *, cap: float | None, veto: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """w per token, truncated at `cap`; where it was truncated; and the tokens of samples that are vetoed.

    Token-level truncation: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training".
    """
    weight = log_ratio(logp_old, logp_sampler).exp().detach()
    vetoed = torch.zeros_like(weight, dtype=torch.bool)
    if veto is not None and sample.numel():
        bad = torch.zeros(int(sample.max()) + 1, dtype=weight.dtype, device=weight.device)
        vetoed = bad.index_add(0, sample, (weight < veto).to(weight.dtype))[sample] > 0
    if cap is None:
        return torch.ones_like(weight), torch.zeros_like(vetoed), vetoed
    return weight.clamp(max=cap), weight > cap, vetoed


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
