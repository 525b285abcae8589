"""The section `algorithm` of the configuration: every choice that there is, and which of them go together.

What each computes is in `credit`, `advantage`, `objective`, `value` and `shaping`, which check their own settings; so a
combination that makes no sense is refused here, before anything starts, in their words.
"""

from typing import Literal, Self

from pydantic import Field, model_validator

from agentlightning.proto.errors import ConfigError
from agentlightning.trainer.advantage import AdvantageSettings, check_credit
from agentlightning.trainer.aggregate import check_aggregate
from agentlightning.trainer.credit import CreditSettings
from agentlightning.trainer.objective import LossSettings
from agentlightning.trainer.section import Section
from agentlightning.trainer.shaping import OverlongSettings

__all__ = ["AlgorithmConfig", "LossConfig", "OverlongConfig", "ValueConfig"]


class LossConfig(Section):
    kind: Literal["ppo", "reinforce", "gspo", "cispo"] = "ppo"
    """Clipped surrogate, plain REINFORCE, ratio per call, or clipped weights."""
    clip_low: float | None = None
    """The ratio is clipped at 1 − this; null: 0.2, and 3e-4 with gspo."""
    clip_high: float | None = None
    """The ratio is clipped at 1 + this; null: 0.28, and 4e-4 with gspo."""
    dual_clip: float | None = 3.0
    """With ppo: bound of the ratio where the advantage is negative; null switches it off."""
    tis_cap: float | None = 2.0
    """Truncated importance sampling of each token against the sampler; null switches it off."""
    sequence_mask: tuple[float, float] | None = None
    """Two bounds: a call whose ratio to the sampler, over all its tokens, lies outside is left out, and counted."""
    geometric_mask: tuple[float, float] | None = None
    """The same for the geometric mean of its tokens' ratios."""
    veto: float | None = 1e-4
    """A call with any token whose ratio to the sampler is below this is left out, and counted."""
    kl_beta: float = 0.0
    """Weight of the divergence from the model that training began from."""
    kl_kind: Literal["k1", "k2", "k3"] = "k3"
    """Its estimate: log π/π_ref, half its square, or the unbiased one that is never negative."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where it goes: the loss of each token, or the reward from each token on."""
    entropy_bonus: float = 0.0
    """Weight of the entropy of each token's distribution."""

    @property
    def settings(self) -> LossSettings:
        return LossSettings(**self.model_dump())


class ValueConfig(Section):
    learning_rate: float = Field(default=1e-3, gt=0)
    """Of the value head."""
    coefficient: float = Field(default=0.1, ge=0)
    """Weight of the value loss in the gradient of the policy's own parameters; 0: only the head learns values."""
    clip: float | None = Field(default=0.2, gt=0)
    """A value moves at most so far within an update; null switches it off."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount from one sampled token to the next."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """λ of generalised advantage estimation: 1 trusts returns, 0 trusts values."""


class OverlongConfig(Section):
    max_tokens: int = Field(ge=1)
    """Sampled tokens of a rollout from where on it pays in full."""
    buffer: int = Field(ge=1)
    """Tokens before that over which the price rises."""
    penalty: float = Field(default=1.0, gt=0)
    """Taken from the reward."""

    @property
    def settings(self) -> OverlongSettings:
        return OverlongSettings(**self.model_dump())


class AlgorithmConfig(Section):
    credit: Literal["final", "last", "per_call", "per_agent"] = "final"
    """How a reward is given to the calls of its rollout."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount from call to call, with credit=per_call or advantage=gigpo."""
    advantage: Literal[
        "dr_grpo", "grpo", "rloo", "reinforce", "reinforce++", "reinforce++-baseline", "gae", "gigpo", "tree"
    ] = "dr_grpo"
    """Over the rollouts of a group; `gae` (PPO) learns a baseline instead."""
    omega: float = Field(default=1.0, ge=0)
    """With gigpo: weight of the comparison by state."""
    anchor: Literal["prompt", "observation"] = "prompt"
    """With gigpo: two states are the same if the model saw the same prompt, or the same since its last answer."""
    value: ValueConfig | None = None
    """With gae: the value head; null: its defaults."""
    aggregation: Literal["rollout-mean", "token-mean", "sample-mean", "constant"] = "rollout-mean"
    """What the sum over sampled tokens is divided by."""
    constant_length: int | None = None
    """Tokens, with aggregation=constant."""
    scored_causes: tuple[Literal["agent_error", "timeout", "context_overflow"], ...] = ()
    """Failures of the policy that count as rollouts with reward 0; infrastructure failures never do."""
    overlong: OverlongConfig | None = None
    """A soft price on the length of rollouts (DAPO)."""
    agents: tuple[str, ...] | None = None
    """Train only calls of these agents: names or patterns (`plan*`; an empty name is calls of no agent); null: all."""
    loss: LossConfig = LossConfig()

    @property
    def credit_settings(self) -> CreditSettings:
        return CreditSettings(self.credit, self.gamma if self.credit == "per_call" else 1.0)

    @property
    def advantage_settings(self) -> AdvantageSettings:
        return AdvantageSettings(
            self.advantage,
            self.scored_causes,
            self.omega,
            self.anchor,
            self.gamma if self.advantage == "gigpo" else 1.0,
        )

    @model_validator(mode="after")
    def _sensible(self) -> Self:
        if self.gamma != 1.0 and self.credit != "per_call" and self.advantage != "gigpo":
            raise ValueError("gamma discounts over calls: it needs credit=per_call or advantage=gigpo")
        if self.value is not None and self.advantage != "gae":
            raise ValueError(f"value belongs to advantage=gae, not to {self.advantage}")
        if self.advantage == "reinforce++" and self.loss.kl_beta and self.loss.kl_kind != "k1":
            raise ValueError(
                "reinforce++ takes k1 from the reward: set loss.kl_kind=k1 and loss.kl_in=reward"
            )
        try:
            check_credit(self.credit_settings, self.advantage_settings)
            check_aggregate(self.aggregation, self.constant_length)
            _ = self.loss.settings, self.overlong and self.overlong.settings
        except ConfigError as error:
            raise ValueError(str(error).rstrip(".")) from None
        return self
