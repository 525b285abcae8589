"""From logits to tokens, and the log-probabilities of the distribution that was really sampled.

What the grammar forbids, then biases and penalties, temperature, top-k, top-p, in float32. The draw inverts the cumulative distribution at one uniform number
per token, from a generator of the sequence's own: what else is in the batch cannot change which numbers it gets.
Temperature 0 is greedy, and reports log-probabilities at temperature 1.
"""

import math
import os
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from agentlightning.trainer.engine.grammar import Constraint

__all__ = ["Draw", "Sampled", "Sampling", "sample"]

CANDIDATES = 1024
"""Tokens that are sorted for top-p. A whole vocabulary is sorted only where these do not hold enough probability."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample one answer."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: all."""
    seed: int | None = None
    max_tokens: int = 16
    stop: tuple[str, ...] = ()
    top_logprobs: int = 0
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    """Taken off the logit of each token that the answer holds already."""
    frequency_penalty: float = 0.0
    """The same, as often as it holds it."""
    biases: tuple[tuple[int, float], ...] = ()
    """Added to the logits of tokens: (token, bias)."""


@dataclass(slots=True)
class Draw:
    """What one row needs to be sampled."""

    sampling: Sampling
    random: random.Random
    constraint: Constraint | None = None
    counts: Counter[int] = field(default_factory=Counter)
    """Tokens of the answer so far, where a penalty asks for them."""

    @classmethod
    def of(cls, sampling: Sampling, choice: int = 0, constraint: Constraint | None = None) -> "Draw":
        seed = int.from_bytes(os.urandom(8), "little") if sampling.seed is None else sampling.seed
        return cls(
            sampling, random.Random(f"{seed}/{choice}"), constraint.copy() if constraint is not None else None
        )

    def accept(self, token: int) -> None:
        """Go on by the token that was drawn."""
        if self.sampling.presence_penalty or self.sampling.frequency_penalty:
            self.counts[token] += 1
        if self.constraint is not None:
            self.constraint.accept(token)


@dataclass(frozen=True, slots=True)
class Sampled:
    token: int
    logprob: float
    """NaN if the model's logits are not finite."""
    top: list[tuple[int, float]]
    """The most likely tokens and their log-probabilities, if asked for."""


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[Sampled]:
    """One token for each row of `logits` (rows, vocabulary)."""
    z = logits.float()
    if z.data_ptr() == logits.data_ptr():
        z = z.clone()
    settings = [draw.sampling for draw in draws]
    for row, draw in enumerate(draws):
        _adjust(z[row], draw)
    if any(s.temperature not in (0.0, 1.0) for s in settings):
        z /= torch.tensor([[s.temperature or 1.0] for s in settings], device=z.device)
    for row, s in enumerate(settings):
        if s.temperature and s.top_k and s.top_k < z.shape[1]:
            kept = z[row].topk(s.top_k)
            z[row].fill_(-torch.inf)[kept.indices] = kept.values
    nucleus = [row for row, s in enumerate(settings) if s.temperature and s.top_p < 1]
    if nucleus:
        p = torch.tensor([settings[row].top_p for row in nucleus], device=z.device)
        z[nucleus] = _top_p(z[nucleus], p)

    probability = z.softmax(-1)
    chosen = _draw(probability, draws)
    logprobs = probability.gather(1, chosen[:, None])[:, 0].log().tolist()
    return [
        Sampled(token, logprobs[row], _top(probability[row], s.top_logprobs) if s.top_logprobs else [])
        for row, (token, s) in enumerate(zip(chosen.tolist(), settings, strict=True))
    ]


def _adjust(z: Tensor, draw: Draw) -> None:
    """Biases, penalties and the grammar's verdict on one row (vocabulary,), in place."""
    s = draw.sampling
    if s.biases:
        tokens, biases = zip(*s.biases, strict=True)
        z[list(tokens)] += torch.tensor(biases, device=z.device)
    if draw.counts:
        penalties = [s.presence_penalty + s.frequency_penalty * count for count in draw.counts.values()]
        z[list(draw.counts)] -= torch.tensor(penalties, device=z.device)
    if draw.constraint is not None:
        z.masked_fill_(draw.constraint.forbidden().to(z.device), -torch.inf)


def _draw(probability: Tensor, draws: Sequence[Draw]) -> Tensor:
    """The token where the cumulative distribution passes the row's number; the most likely one where it is greedy."""
    greedy = torch.tensor([draw.sampling.temperature == 0 for draw in draws], device=probability.device)
    if bool(greedy.all()):
        return probability.argmax(-1)
    cumulative = probability.cumsum(-1)
    uniform = torch.tensor(
        [[draw.random.random()] for draw in draws], dtype=torch.float32, device=probability.device
    )
    chosen = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)[:, 0]
    chosen.clamp_(max=probability.shape[1] - 1)
    # Rounding can point one past the last token that has any probability.
    most_likely = greedy | ~(probability.gather(1, chosen[:, None])[:, 0] > 0)
    if bool(most_likely.any()):
        chosen[most_likely] = probability[most_likely].argmax(-1)
    return chosen


def _top_p(z: Tensor, top_p: Tensor) -> Tensor:
    """Keep the fewest most likely tokens that together have at least `top_p`; the others get −inf."""
    lse = z.logsumexp(-1, keepdim=True)
    values, indices = z.topk(min(CANDIDATES, z.shape[1]), dim=-1)
    if bool(((values - lse).exp().sum(-1) < top_p).any()):
        values, indices = z.sort(dim=-1, descending=True)
    probability = (values - lse).exp()
    before = probability.cumsum(-1) - probability
    values = values.masked_fill(before >= top_p[:, None], -torch.inf)
    return torch.full_like(z, -torch.inf).scatter_(1, indices, values)


def _top(probability: Tensor, count: int) -> list[tuple[int, float]]:
    top = probability.topk(min(count, len(probability)))
    # What top-k or top-p took out has probability 0 and no logarithm that JSON can carry.
    return [
        (t, p) for t, p in zip(top.indices.tolist(), top.values.log().tolist(), strict=True) if p > -math.inf
    ]
