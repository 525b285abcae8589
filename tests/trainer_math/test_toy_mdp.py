"""A decision process small enough to enumerate: the mean estimated gradient is the exact one."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from agentlightning.trainer.advantage import AdvantageSettings, Estimator, score
from agentlightning.trainer.aggregate import sample_weights
from agentlightning.trainer.credit import CreditSettings, Outcome
from agentlightning.trainer.loss import token_loss
from agentlightning.trainer.objective import LossKind, LossSettings
from agentlightning.trainer.returns import gae
from agentlightning.trainer.samples import Call, Sample, SampleSet, build_samples

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
def episodes(process: Process) -> "Episodes":
    calls, outcomes, actions = process.sample()
    return build_samples(calls), outcomes, actions


Episodes = tuple[SampleSet, list[Outcome], dict[str, tuple[int, int]]]


def estimated(
    process: Process,
    samples: tuple[Sample, ...],
    advantages: Sequence[np.ndarray],
    actions: dict[str, tuple[int, int]],
    kind: LossKind,
) -> Tensor:
    """The gradient that each group's rollouts ask for, (GROUPS, 3 + 9), scaled so that its mean estimates the objective's."""
    assert len(samples) == GROUPS * SIZE  # two calls that continue each other are one sample
    a, b = torch.tensor([actions[s.rollout_id] for s in samples]).T
    # Each sampled token has its own logits, so that the gradient can be told apart by group.
    logits1 = process.theta1.expand(len(a), -1).clone().requires_grad_()
    logits2 = process.theta2[a].clone().requires_grad_()
    rows = torch.arange(len(a))
    logp = torch.stack([logits1.log_softmax(1)[rows, a], logits2.log_softmax(1)[rows, b]], 1).flatten()
    gather: Callable[[Sequence[np.ndarray]], Tensor] = lambda arrays: torch.from_numpy(  # noqa: E731
        np.concatenate([x[s.mask] for s, x in zip(samples, arrays, strict=True)]).astype(np.float64)
    )
    losses = token_loss(
        LossSettings(kind, tis_cap=None),
        logp=logp,
        logp_old=logp.detach(),
        logp_sampler=gather([s.logprobs for s in samples]),
        advantages=gather(advantages),
        call=torch.arange(2 * len(a)),
    )
    weights = torch.from_numpy(sample_weights("rollout-mean", samples)).repeat_interleave(2)
    g1, g2 = torch.autograd.grad((losses.loss * weights).sum(), (logits1, logits2))
    table = torch.zeros(len(a), ACTIONS, ACTIONS, dtype=torch.float64)
    table[rows, a] = g2
    # Both calls have one token, so the weight of a token is 1 / (2 · rollouts).
    per_rollout = -2 * len(a) * torch.cat([g1, table.flatten(1)], 1)
    return per_rollout.view(GROUPS, SIZE, -1).mean(1)  # rollouts of a group are not independent


def assert_unbiased(per_group: Tensor, exact: tuple[Tensor, Tensor]) -> None:
    target = torch.cat([g.flatten() for g in exact])
    error = (per_group.mean(0) - target).abs()
    interval = 4 * per_group.std(0) / GROUPS**0.5 + 1e-4  # the last for states too rare to be seen twice
    assert (error <= interval).all(), (error / interval).max()
    assert target.abs().max() > 3 * interval.max()  # the interval is narrow enough to mean something


@pytest.mark.parametrize(
    ("credit", "estimator", "kind"),
    [
        (CreditSettings("final"), "rloo", "ppo"),
        (CreditSettings("final"), "dr_grpo", "ppo"),
        (CreditSettings("final"), "reinforce", "reinforce"),
        (CreditSettings("final"), "rloo", "gspo"),
        (CreditSettings("last"), "rloo", "cispo"),
        (CreditSettings("per_call", gamma=0.5), "rloo", "ppo"),
        (CreditSettings("per_call"), "dr_grpo", "reinforce"),
        (CreditSettings("per_agent"), "rloo", "ppo"),
    ],
)
def test_the_mean_estimated_gradient_is_the_exact_one(
    process: Process, episodes: Episodes, credit: CreditSettings, estimator: Estimator, kind: LossKind
) -> None:
    samples, outcomes, actions = episodes
    scored = score(samples, outcomes, credit=credit, advantage=AdvantageSettings(estimator))
    per_group = estimated(process, scored.samples, scored.advantages, actions, kind)
    # Dr.GRPO's own reward is in its baseline.
    shrink = (SIZE - 1) / SIZE if estimator == "dr_grpo" else 1.0
    assert_unbiased(per_group / shrink, process.exact(credit))


@pytest.mark.parametrize(
    ("credit", "lam"),
    [(CreditSettings("final"), 0.0), (CreditSettings("final"), 1.0), (CreditSettings("per_call"), 0.5)],
)
def test_with_true_values_the_mean_gradient_of_gae_is_the_exact_one(
    process: Process, episodes: Episodes, credit: CreditSettings, lam: float
) -> None:
    samples, outcomes, actions = episodes
    scored = score(samples, outcomes, credit=credit, advantage=AdvantageSettings("gae"))
    p1, p2 = process.theta1.softmax(0), process.theta2.softmax(1)
    own = credit.mode == "per_call"
    later = (p2 * (process.last + own * process.second)).sum(1)
    start = (p1 * (later + own * process.first)).sum()
    values = []
    for sample in scored.samples:
        value = np.zeros(len(sample.token_ids), np.float32)
        value[sample.mask] = [start, later[actions[sample.rollout_id][0]]]
        values.append(value)
    advantages, _ = gae(scored.samples, scored.advantages, values, lam=lam)
    assert_unbiased(estimated(process, scored.samples, advantages, actions, "ppo"), process.exact(credit))


def others_in_the_state(process: Process) -> Tensor:
    """By the first action: of the gradient after it, how much a baseline over the rollouts of a group that took it keeps.

    With M of n rollouts there, all but one of them count: E[(M − 1)⁺] / E[M].
    """
    n, p = SIZE, process.theta1.softmax(0)
    return (n * p - 1 + (1 - p) ** n) / (n * p)


@pytest.mark.parametrize(("omega", "gamma"), [(1.0, 1.0), (0.5, 0.5)])
def test_the_mean_gradient_of_gigpo_is_that_of_both_its_parts(
    process: Process, episodes: Episodes, omega: float, gamma: float
) -> None:
    samples, outcomes, actions = episodes
    settings = AdvantageSettings("gigpo", omega=omega, gamma=gamma)
    scored = score(samples, outcomes, advantage=settings)
    shrink = (SIZE - 1) / SIZE
    whole1, whole2 = process.exact(CreditSettings("final"))
    state1, state2 = process.exact(CreditSettings("per_call", gamma=gamma))
    kept = others_in_the_state(process)[:, None]
    exact = (shrink * (whole1 + omega * state1), shrink * whole2 + omega * kept * state2)
    assert_unbiased(estimated(process, scored.samples, scored.advantages, actions, "ppo"), exact)


def test_the_mean_gradient_of_trees_is_the_exact_one_less_what_the_baselines_keep(
    process: Process, episodes: Episodes
) -> None:
    samples, outcomes, actions = episodes
    scored = score(samples, outcomes, advantage=AdvantageSettings("tree"))
    whole1, whole2 = process.exact(CreditSettings("final"))
    exact = ((SIZE - 1) / SIZE * whole1, others_in_the_state(process)[:, None] * whole2)
    assert_unbiased(estimated(process, scored.samples, scored.advantages, actions, "ppo"), exact)
