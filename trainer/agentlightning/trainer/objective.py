"""Settings of the loss, checked: what `loss` and `mismatch` compute. Without torch, so that a configuration is refused at once."""

from dataclasses import dataclass
from typing import Literal, get_args

from agentlightning.proto.errors import ConfigError, nearest

__all__ = ["Bounds", "DivergenceKind", "LossKind", "LossSettings"]

Bounds = tuple[float, float]
LossKind = Literal["ppo", "reinforce", "gspo", "cispo"]
DivergenceKind = Literal["k1", "k2", "k3"]

CLIP: dict[str, Bounds] = {"ppo": (0.2, 0.28), "gspo": (3e-4, 4e-4), "cispo": (0.2, 0.28)}
"""ε_low and ε_high where the settings name none. A mean over a call varies far less than a token's ratio."""


@dataclass(frozen=True, slots=True)
class LossSettings:
    kind: LossKind = "ppo"
    clip_low: float | None = None
    """None: by kind, as in CLIP."""
    clip_high: float | None = None
    dual_clip: float | None = 3.0
    """Of ppo."""
    tis_cap: float | None = 2.0
    """Truncated importance sampling: w ← min(w, cap). None: no correction, w = 1."""
    sequence_mask: Bounds | None = None
    """A call whose product of w lies outside is left out."""
    geometric_mask: Bounds | None = None
    """A call whose geometric mean of w lies outside is left out."""
    veto: float | None = 1e-4
    """A call with any w below this is left out."""
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
        if self.kl_beta < 0:
            raise ConfigError(f"kl_beta must not be negative, but is {self.kl_beta}.")
        if self.kl_beta and self.kl_in == "loss" and self.kl_kind == "k1":
            raise ConfigError(
                "The gradient of k1 in the loss is 0 on average. Use k2 or k3, or set kl_in to 'reward'."
            )
        if self.kind == "reinforce" and (self.clip_low is not None or self.clip_high is not None):
            raise ConfigError(
                "Loss 'reinforce' has no ratio to clip: leave clip_low and clip_high out, or use 'ppo'."
            )
        if self.kind == "cispo" and self.clip_low is not None:
            raise ConfigError("Loss 'cispo' clips weights above only: leave clip_low out.")
        if self.kind != "ppo" and self.dual_clip not in (None, 3.0):
            raise ConfigError(f"dual_clip belongs to the loss 'ppo', not to {self.kind!r}.")
        if not self.kl_beta and (self.kl_kind, self.kl_in) != ("k3", "loss"):
            raise ConfigError(
                "kl_kind and kl_in say nothing as long as kl_beta is 0: set it, or leave them out."
            )
        low, high = self.clip
        if not 0 <= low < 1 or high < 0:
            raise ConfigError("clip_low must lie in [0, 1) and clip_high must not be negative.")
        if self.kind == "ppo" and self.dual_clip is not None and self.dual_clip <= 1 + high:
            raise ConfigError("dual_clip must be greater than 1 + clip_high, or null.")
        if self.tis_cap is not None and self.tis_cap < 1:
            raise ConfigError(f"tis_cap must be at least 1 or null, not {self.tis_cap}.")
        for name in ("sequence_mask", "geometric_mask"):
            bounds = getattr(self, name)
            if bounds is not None and not 0 <= bounds[0] < 1 < bounds[1]:
                raise ConfigError(f"{name} must be two bounds around 1, such as [0.5, 2], or null.")
        if self.veto is not None and not 0 < self.veto < 1:
            raise ConfigError(f"veto must lie between 0 and 1 or be null, not {self.veto}.")

    @property
    def clip(self) -> Bounds:
        """ε_low and ε_high."""
        low, high = CLIP.get(self.kind, (0.0, 0.0))
        return (
            low if self.clip_low is None else self.clip_low,
            high if self.clip_high is None else self.clip_high,
        )
