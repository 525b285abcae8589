"""Every way to learn makes a policy better that samples by itself: two calls, each to be answered by the prompt's number."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from agentlightning.trainer.advantage import AdvantageSettings, CreditSettings, Outcome, score
from agentlightning.trainer.learner import Learner, LearnerSettings
from agentlightning.trainer.objective import LossSettings
from agentlightning.trainer.samples import Call, build_samples
from agentlightning.trainer.value import ValueSettings

TASKS, SIZE, CHOICES = 3, 12, 8
OBSERVATION = 30


@torch.no_grad()
def answer(
    model: Any, prompts: torch.Tensor, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """One sampled token for each prompt, of the first CHOICES only, and its log-probability in the whole vocabulary."""
    logp = model(input_ids=prompts, use_cache=False).logits[:, -1].log_softmax(-1)
    chosen = torch.multinomial(logp[:, :CHOICES].exp(), 1, generator=generator)
    return chosen, logp.gather(1, chosen)


def play(learner: Learner, generator: torch.Generator) -> tuple[list[Call], list[Outcome]]:
    learner.model.eval()
    task = torch.arange(TASKS).repeat_interleave(SIZE)
    first_prompt = (20 + task)[:, None]
    first, logp1 = answer(learner.model, first_prompt, generator)
    second_prompt = torch.cat([first_prompt, first, torch.full_like(first, OBSERVATION)], 1)
    second, logp2 = answer(learner.model, second_prompt, generator)
    calls, outcomes = [], []
    for row, number in enumerate(task.tolist()):
        rollout = f"{number}-{row:03d}"
        right = [float(first[row] == number), float(second[row] == number)]
        turns = ((first_prompt, first, logp1), (second_prompt, second, logp2))
        for seq, (prompt, said, logp) in enumerate(turns):
            calls.append(
                Call(
                    rollout,
                    f"{rollout}-{seq}",
                    seq=seq,
                    group_id=str(number),
                    prompt_ids=prompt[row].numpy().astype(np.int32),
                    response_ids=said[row].numpy().astype(np.int32),
                    logprobs=logp[row].numpy(),
                    reward=right[seq],
                )
            )
        outcomes.append(Outcome(rollout, str(number), sum(right) / 2))
    return calls, outcomes


@pytest.mark.parametrize(
    ("estimator", "credit", "loss"),
    [
        ("dr_grpo", "final", LossSettings()),
        ("grpo", "final", LossSettings("cispo")),
        ("rloo", "per_call", LossSettings("reinforce")),
        ("reinforce++", "final", LossSettings(kl_beta=0.01, kl_kind="k1", kl_in="reward")),
        ("reinforce++-baseline", "final", LossSettings("gspo")),
        ("gae", "per_call", LossSettings()),
        ("gigpo", "final", LossSettings(kl_beta=0.001)),
        ("tree", "final", LossSettings()),
    ],
)
def test_the_policy_gets_better(
    tiny_llama: Callable[..., Any], estimator: Any, credit: Any, loss: LossSettings
) -> None:
    settings = LearnerSettings(
        lr=5e-3,
        dtype="float32",
        whiten=estimator in ("gae", "reinforce++"),
        value=ValueSettings(lr=0.02) if estimator == "gae" else None,
        minibatches=1 if loss.kind == "reinforce" else 2,
        loss=loss,
    )
    learner = Learner(tiny_llama(), settings)
    generator = torch.Generator().manual_seed(0)
    rewards = []
    for _ in range(40):
        calls, outcomes = play(learner, generator)
        rewards.append(np.mean([outcome.reward for outcome in outcomes if outcome.reward is not None]))
        scored = score(
            build_samples(calls),
            outcomes,
            credit=CreditSettings(credit),
            advantage=AdvantageSettings(estimator),
        )
        learner.update(scored.samples, scored.advantages)
    assert np.mean(rewards[:3]) < 0.35
    assert np.mean(rewards[-5:]) > np.mean(rewards[:3]) + 0.3, np.round(rewards, 2)
