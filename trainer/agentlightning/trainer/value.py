"""The value head of PPO: what the rollout will still earn, told from the hidden state in which a token is sampled.

One linear layer on the policy's last hidden states, in fp32, 0 at the start: the first update is REINFORCE with returns.
Its gradient goes on into the policy's own parameters with a weight, or, at 0, stops at the head. The loss is clipped as in
PPO2 (Schulman et al. 2017): a value that moved further than `clip` from where the update began is no longer drawn on.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from agentlightning.proto.errors import ConfigError

__all__ = ["ValueHead", "ValueSettings", "value_loss"]


@dataclass(frozen=True, slots=True)
class ValueSettings:
    lr: float = 1e-3
    coefficient: float = 0.1
    """Weight of the value loss in the gradient of the policy's parameters; 0: only the head learns."""
    clip: float | None = 0.2
    gamma: float = 1.0
    """Discount per sampled token."""
    lam: float = 1.0

    def __post_init__(self) -> None:
        if not self.lr > 0 or self.coefficient < 0:
            raise ConfigError("The value head's lr must be greater than 0 and its coefficient not negative.")
        if self.clip is not None and not self.clip > 0:
            raise ConfigError(f"The value clip must be greater than 0 or null, not {self.clip}.")
        if not (0 <= self.gamma <= 1 and 0 <= self.lam <= 1):
            raise ConfigError("The value's gamma and lam must lie between 0 and 1.")


class ValueHead(torch.nn.Module):
    def __init__(self, hidden_size: int, device: torch.device) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(hidden_size, device=device))
        self.bias = torch.nn.Parameter(torch.zeros((), device=device))

    def forward(self, hidden: Tensor) -> Tensor:
        """(R, D) → (R,). Written out, so that autocast cannot round it to 16 bits."""
        return (hidden.float() * self.weight).sum(-1) + self.bias


def value_loss(values: Tensor, values_old: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """½·max((V − R)², (V_old + clip(V − V_old, ±clip) − R)²) of each token."""
    error = (values - returns).square()
    if clip is not None:
        near = values_old + (values - values_old).clamp(-clip, clip)
        error = torch.maximum(error, (near - returns).square())
    return 0.5 * error
