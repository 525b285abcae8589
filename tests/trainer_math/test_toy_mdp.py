"""A decision process small enough to enumerate: the mean estimated gradient is the exact one."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from agentlightning.trainer.advantage import AdvantageSettings, Estimator, score
from agentlightning.trainer.aggregate import sample_weights
from agentlightning.trainer.credit import CreditSettings, Outcome
from agentlightning.trainer.loss import token_loss
from agentlightning.trainer.objective import LossKind, LossSettings
from agentlightning.trainer.samples import Call, build_samples

ACTIONS, SIZE, GROUPS = 3, 4, 1500
PROMPT, OBSERVATION = 10, 20


class Process:
    """Two calls of one token each; the second state is the first action.

    The planner's call earns `first`, the worker's `second`, and the rollout `last` at its end.
    """

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(4)
        draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
        self.theta1, self.theta2 = draw(ACTIONS), draw(ACTIONS, ACTIONS)
        self.first, self.second, self.last = draw(ACTIONS), draw(ACTIONS, ACTIONS), draw(ACTIONS, ACTIONS)

    def exact(self, credit: CreditSettings) -> tuple[Tensor, Tensor]:
        """What the mode promises to estimate, by enumeration."""
        theta1, theta2 = self.theta1.clone().requires_grad_(), self.theta2.clone().requires_grad_()
        p1, p2 = theta1.softmax(0), theta2.softmax(1)
        joint1, joint2 = p1[:, None] * p2.detach(), p1.detach()[:, None] * p2  # each call's part alone
        match credit.mode:
            case "final":
                objective = ((joint1 + joint2) * self.last).sum()
            case "last":
                objective = (joint2 * self.last).sum()
            case "per_agent":
                objective = (joint1 * self.first[:, None]).sum() + (joint2 * self.second).sum()
            case "per_call":
                later = self.second + self.last
                objective = (joint1 * (self.first[:, None] + credit.gamma * later)).sum() + (
                    joint2 * later
                ).sum()
        g1, g2 = torch.autograd.grad(objective, (theta1, theta2), allow_unused=True)
        return (torch.zeros(ACTIONS, dtype=torch.float64) if g1 is None else g1), g2

    def sample(self) -> tuple[list[Call], list[Outcome], dict[str, tuple[int, int]]]:
        generator = np.random.default_rng(11)
        p1, p2 = self.theta1.softmax(0).numpy(), self.theta2.softmax(1).numpy()
        calls, outcomes, actions = [], [], {}
        for g in range(GROUPS):
            for i in range(SIZE):
                a = int(generator.choice(ACTIONS, p=p1))
                b = int(generator.choice(ACTIONS, p=p2[a]))
                rollout = f"{g:05d}-{i}"
                actions[rollout] = (a, b)
                for seq, (agent, prompt, action, p, r) in enumerate(
                    [
                        ("planner", [PROMPT], a, p1[a], self.first[a]),
                        ("worker", [PROMPT, a, OBSERVATION], b, p2[a, b], self.second[a, b]),
                    ]
                ):
                    calls.append(
                        Call(
                            rollout_id=rollout,
                            call_id=f"{rollout}-{seq}",
                            group_id=f"{g:05d}",
                            seq=seq,
                            agent=agent,
                            prompt_ids=np.array(prompt, np.int32),
                            response_ids=np.array([action], np.int32),
                            logprobs=np.log(np.array([p], np.float32)),
                            reward=float(r),
                        )
                    )
                named = {"planner": float(self.first[a]), "worker": float(self.second[a, b])}
                outcomes.append(Outcome(rollout, f"{g:05d}", float(self.last[a, b]), named))
        return calls, outcomes, actions


@pytest.fixture(scope="module")
def process() -> Process:
    return Process()


@pytest.fixture(scope="module")
def episodes(process: Process) -> tuple[list[Call], list[Outcome], dict[str, tuple[int, int]]]:
    return process.sample()


@pytest.mark.parametrize(
    ("credit", "estimator", "kind"),
    [
        (CreditSettings("final"), "rloo", "ppo"),
        (CreditSettings("final"), "dr_grpo", "ppo"),
        (CreditSettings("final"), "reinforce", "reinforce"),
        (CreditSettings("last"), "rloo", "cispo"),
        (CreditSettings("per_call", gamma=0.5), "rloo", "ppo"),
        (CreditSettings("per_call"), "dr_grpo", "reinforce"),
        (CreditSettings("per_agent"), "rloo", "ppo"),
    ],
)
def test_the_mean_estimated_gradient_is_the_exact_one(
    process: Process,
    episodes: tuple[list[Call], list[Outcome], dict[str, tuple[int, int]]],
    credit: CreditSettings,
    estimator: Estimator,
    kind: LossKind,
) -> None:
    calls, outcomes, actions = episodes
    scored = score(build_samples(calls), outcomes, credit=credit, advantage=AdvantageSettings(estimator))
    assert len(scored.samples) == GROUPS * SIZE  # two calls that continue each other are one sample
    a, b = torch.tensor([actions[s.rollout_id] for s in scored.samples]).T
    # Each sampled token has its own logits, so that the gradient can be told apart by group.
    logits1 = process.theta1.expand(len(a), -1).clone().requires_grad_()
    logits2 = process.theta2[a].clone().requires_grad_()
    rows = torch.arange(len(a))
    logp = torch.stack([logits1.log_softmax(1)[rows, a], logits2.log_softmax(1)[rows, b]], 1).flatten()
    gather: Callable[[list[np.ndarray]], Tensor] = lambda arrays: torch.from_numpy(  # noqa: E731
        np.concatenate([x[s.mask] for s, x in zip(scored.samples, arrays, strict=True)]).astype(np.float64)
    )
    losses = token_loss(
        LossSettings(kind, tis_cap=None),
        logp=logp,
        logp_old=logp.detach(),
        logp_sampler=gather([s.logprobs for s in scored.samples]),
        advantages=gather(list(scored.advantages)),
        call=torch.arange(2 * len(a)),
    )
    weights = torch.from_numpy(sample_weights("rollout-mean", scored.samples)).repeat_interleave(2)
    g1, g2 = torch.autograd.grad((losses.loss * weights).sum(), (logits1, logits2))

    # Both calls have one token, so the weight of a token is 1 / (2 · rollouts). Dr.GRPO's own reward is in its baseline.
    shrink = (SIZE - 1) / SIZE if estimator == "dr_grpo" else 1.0
    scale = -2 * len(a) / shrink
    table = torch.zeros(len(a), ACTIONS, ACTIONS, dtype=torch.float64)
    table[rows, a] = g2
    per_rollout = scale * torch.cat([g1, table.flatten(1)], 1)
    per_group = per_rollout.view(GROUPS, SIZE, -1).mean(1)  # rollouts of a group are not independent
    exact = torch.cat([g.flatten() for g in process.exact(credit)])
    error = (per_group.mean(0) - exact).abs()
    interval = 4 * per_group.std(0) / GROUPS**0.5 + 1e-9
    assert (error <= interval).all(), (error / interval).max()
    assert exact.abs().max() > 3 * interval.max()  # the interval is narrow enough to mean something
