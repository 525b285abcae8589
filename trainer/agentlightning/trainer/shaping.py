"""Over-long shaping: a soft price on length, before rewards are compared.

DAPO's soft over-long punishment (arXiv 2503.14476, eq. 13), per rollout: with L the sampled tokens of the whole rollout,
all its calls together,

    0 while L ≤ max − buffer,   then falling in a line to −penalty at L = max,   −penalty beyond.

So a rollout pays the same whether its calls were merged into one sample or not. The recorded reward is not changed.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from agentlightning.proto.errors import ConfigError
from agentlightning.trainer.credit import Outcome
from agentlightning.trainer.samples import SampleSet

__all__ = ["OverlongSettings", "overlong", "shape"]


@dataclass(frozen=True, slots=True)
class OverlongSettings:
    max_tokens: int
    """Sampled tokens of a rollout from where on it pays in full."""
    buffer: int
    """Tokens before that over which the price rises."""
    penalty: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.buffer <= self.max_tokens:
            raise ConfigError(
                f"The over-long buffer must lie between 1 and max_tokens ({self.max_tokens}), not {self.buffer}."
            )
        if not self.penalty > 0:
            raise ConfigError(f"The over-long penalty must be greater than 0, not {self.penalty}.")


def overlong(settings: OverlongSettings, tokens: int) -> float:
    """What is added to the reward of a rollout with so many sampled tokens: 0 or less."""
    excess = tokens - (settings.max_tokens - settings.buffer)
    return -settings.penalty * min(1.0, max(0.0, excess / settings.buffer))


def shape(
    settings: OverlongSettings, sample_set: SampleSet, outcomes: Iterable[Outcome]
) -> Iterator[Outcome]:
    """The outcomes, their rewards less the price of their rollouts' lengths."""
    tokens: Counter[str] = Counter()
    for sample in sample_set.samples:
        tokens[sample.rollout_id] += sample.trained
    for outcome in outcomes:
        price = overlong(settings, tokens[outcome.rollout_id])
        if price and outcome.reward is not None:
            outcome = replace(outcome, reward=outcome.reward + price)
        yield outcome
