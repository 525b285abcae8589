from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.proto.errors import ConfigError
from agentlightning.trainer import checkpoint
from agentlightning.trainer.advantage import AdvantageSettings, CreditSettings, Outcome, score
from agentlightning.trainer.learner import Learner, LearnerSettings
from agentlightning.trainer.objective import LossSettings
from agentlightning.trainer.returns import carry_back, gae
from agentlightning.trainer.samples import Call, Sample, SampleSet, build_samples
from agentlightning.trainer.value import ValueSettings, value_loss

Model = Callable[..., Any]
Batch = Callable[..., SampleSet]
PPO = LearnerSettings(lr=1e-2, dtype="float32", max_grad_norm=1e9, whiten=True, value=ValueSettings())


def random_values(samples: tuple[Sample, ...], seed: int) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [np.where(s.mask, generator.normal(size=len(s.mask)), 0).astype(np.float32) for s in samples]


def test_with_lambda_one_advantages_are_returns_minus_values(random_batch: Batch) -> None:
    samples = random_batch(0).samples
    rewards, values = random_values(samples, 1), random_values(samples, 2)
    advantages, returns = gae(samples, rewards, values, gamma=0.9)
    for sample, a, g, v, expected in zip(
        samples, advantages, returns, values, carry_back(samples, rewards, gamma=0.9), strict=True
    ):
        np.testing.assert_allclose(a, expected - v, atol=1e-5)
        np.testing.assert_allclose(g, expected, atol=1e-5)
        assert not a[~sample.mask].any()


@given(gamma=st.floats(0, 1), lam=st.floats(0, 1), seed=st.integers(0, 99))
def test_gae_is_the_sum_of_discounted_errors(gamma: float, lam: float, seed: int) -> None:
    generator = np.random.default_rng(seed)
    r, v = generator.normal(size=(2, 6))
    delta = r + gamma * np.append(v[1:], 0) - v
    expected = [sum((gamma * lam) ** k * delta[t + k] for k in range(6 - t)) for t in range(6)]
    tokens = np.arange(7, dtype=np.int32)
    call = Call("r", "c", prompt_ids=tokens[:1], response_ids=tokens[1:], logprobs=np.zeros(6, np.float32))
    (sample,) = build_samples([call]).samples
    pad = lambda x: np.append(0, x).astype(np.float32)  # noqa: E731
    (advantages,), (returns,) = gae([sample], [pad(r)], [pad(v)], gamma=gamma, lam=lam)
    np.testing.assert_allclose(advantages[1:], expected, atol=1e-4)
    np.testing.assert_allclose(returns[1:], advantages[1:] + v, atol=1e-4)


def test_the_next_state_is_that_of_the_next_sampled_token_whatever_sample_holds_it(
    one_sample: Callable[..., Sample],
) -> None:
    merged = one_sample([1, 2, 3, 4, 5, 6], (1, 3), (5, 6))
    first, second = (
        one_sample([1, 2, 3], (1, 3)),
        one_sample([1, 2, 3, 4, 5, 6], (5, 6), index=1, first_seq=1),
    )
    value = np.array([0, 1, 2, 50, 60, 4], np.float32)  # those of observation tokens must not matter
    reward = np.array([0, 0, 0, 70, 80, 9], np.float32)
    (whole,), _ = gae([merged], [reward], [value], gamma=0.5, lam=0.5)
    (a, b), _ = gae(
        [first, second],
        [reward[:3], reward],
        [value[:3], np.where(second.mask, value, 0)],
        gamma=0.5,
        lam=0.5,
    )
    # δ: 0.5·2 − 1 = 0;  0.5·4 − 2 = 0;  9 − 4 = 5
    assert whole.tolist() == [0, 5 / 16, 5 / 4, 0, 0, 5]
    assert a.tolist() == whole[:3].tolist()
    assert b.tolist() == [0, 0, 0, 0, 0, 5]


def test_rewards_fall_where_they_were_earned(one_call: Callable[..., Call]) -> None:
    calls = [
        one_call([1], [2, 3], seq=0, reward=0.5),
        one_call([8], [9], seq=1, agent="judge", reward=0.25),
        one_call([1, 2, 3, 4], [5, 6], seq=2),
    ]
    samples = build_samples(calls, agents=[""])
    for mode, expected in (("final", [0, 0, 0, 0, 0, 2]), ("per_call", [0, 0, 0.75, 0, 0, 2])):
        scored = score(
            samples,
            [Outcome("r", "g", 2.0)],
            credit=CreditSettings(mode),  # type: ignore[arg-type]
            advantage=AdvantageSettings("gae"),
        )
        assert scored.advantages[0].tolist() == expected
        assert not scored.groups[0].zero_variance  # a group of one teaches: values are its baseline


def test_a_value_that_has_moved_far_enough_is_no_longer_drawn_on() -> None:
    old, target = torch.zeros(4), torch.tensor([1.0, 1.0, -1.0, 0.1])
    values = torch.tensor([0.1, 0.5, -0.5, 0.3], requires_grad=True)
    losses = value_loss(values, old, target, 0.2)
    losses.sum().backward()
    assert values.grad is not None
    assert (values.grad != 0).tolist() == [
        True,
        False,
        False,
        True,
    ]  # the last went past its target: it is drawn back
    assert losses[1].item() == pytest.approx(0.5 * 0.8**2)
    unclipped = value_loss(values, old, target, None)
    torch.testing.assert_close(unclipped, 0.5 * (values - target) ** 2)


def token_rewards(sample_set: SampleSet) -> tuple[tuple[Sample, ...], tuple[np.ndarray, ...]]:
    rollouts = sorted({(s.rollout_id, s.group_id) for s in sample_set.samples})
    generator = np.random.default_rng(3)
    outcomes = [Outcome(r, g, float(generator.random())) for r, g in rollouts]
    scored = score(sample_set, outcomes, advantage=AdvantageSettings("gae"))
    return scored.samples, scored.advantages


def gradients(model: Any, settings: LearnerSettings, samples: Any, rewards: Any) -> dict[str, torch.Tensor]:
    learner = Learner(model, settings)
    taken: dict[str, torch.Tensor] = {}
    learner.optimizer.register_step_pre_hook(
        lambda *_: taken.update(
            {n: p.grad.clone() for n, p in learner.trainable.items() if p.grad is not None}
        )
    )
    learner.update(samples, rewards)
    return taken


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    scale = max(float(g.abs().max()) for g in left.values())
    return all(torch.allclose(left[n], right[n], rtol=1e-5, atol=1e-5 * scale) for n in left)


def test_the_heads_gradient_reaches_the_policy_only_as_far_as_it_may(
    tiny_llama: Model, random_batch: Batch
) -> None:
    samples, rewards = token_rewards(random_batch(1))
    # Values of 0 and λ = 1: what the policy gets is the whitened return.
    returns = carry_back(samples, rewards)
    plain = gradients(tiny_llama(), replace(PPO, value=None), samples, returns)
    alone = gradients(tiny_llama(), replace(PPO, value=ValueSettings(coefficient=0.0)), samples, rewards)
    assert same(plain, alone)
    assert set(alone) - set(plain) == {"value_head.weight", "value_head.bias"}
    assert alone["value_head.weight"].any()
    # The head is 0 at first, so nothing flows through it; a step later it does.
    learner = Learner(tiny_llama(), replace(PPO, value=ValueSettings(coefficient=0.5)))
    learner.update(samples, rewards)
    batch = learner._prepare(samples, rewards)
    assert batch.values_old is not None
    assert any(v.any() for v in batch.values_old)


def test_micro_batches_change_nothing_with_a_value_head(tiny_llama: Model, random_batch: Batch) -> None:
    samples, rewards = token_rewards(random_batch(2))
    settings = replace(PPO, loss=LossSettings(kl_beta=0.1, kl_in="reward", kl_kind="k1"))
    whole = gradients(tiny_llama(), settings, samples, rewards)
    assert same(whole, gradients(tiny_llama(), replace(settings, max_tokens=20), samples, rewards))


def test_values_learn_the_returns(tiny_llama: Model, random_batch: Batch) -> None:
    samples, rewards = token_rewards(random_batch(3, groups=8, size=1))
    settings = replace(PPO, lr=1e-6, value=ValueSettings(lr=0.1, coefficient=0.0, clip=None), epochs=10)
    learner = Learner(tiny_llama(), settings)
    first = learner.update(samples, rewards).metrics
    for _ in range(9):
        last = learner.update(samples, rewards).metrics
    assert first["value_explained_variance"] == pytest.approx(0, abs=1e-9)
    assert last["value_explained_variance"] > 0.5
    assert last["value_loss"] < first["value_loss"] / 2


def test_returns_are_taken_before_whitening(tiny_llama: Model, random_batch: Batch) -> None:
    samples, rewards = token_rewards(random_batch(4))
    learner = Learner(tiny_llama(), PPO)
    batch = learner._prepare(samples, rewards)
    assert batch.returns is not None
    for got, expected in zip(batch.returns, carry_back(samples, rewards), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-6)
    tokens = np.concatenate([a[s.mask] for s, a in zip(samples, batch.advantages, strict=True)])
    assert tokens.mean() == pytest.approx(0, abs=1e-5)
    assert tokens.std() == pytest.approx(1, abs=1e-3)


def test_the_head_is_in_the_checkpoint_and_not_in_the_published_weights(
    tiny_llama: Model, random_batch: Batch, tmp_path: Path
) -> None:
    samples, rewards = token_rewards(random_batch(5))
    learner = Learner(tiny_llama(), PPO)
    learner.update(samples, rewards)
    path = checkpoint.save(tmp_path, learner, cursor=1, config_digest="d")
    learner.update(samples, rewards)
    fresh = Learner(tiny_llama(), PPO)
    checkpoint.load(path, fresh)
    fresh.update(samples, rewards)
    assert all(torch.equal(p, fresh.trainable[name]) for name, p in learner.trainable.items())
    assert learner.trainable["value_head.weight"].any()
    assert not any("value" in name for name in learner.merged_state_dict())
    with pytest.raises(ConfigError, match="another model"):
        checkpoint.load(path, Learner(tiny_llama(), replace(PPO, value=None)))


def test_settings_of_values_that_make_no_sense_are_refused() -> None:
    for settings in ({"lr": 0.0}, {"clip": 0.0}, {"gamma": 1.5}, {"coefficient": -1.0}):
        with pytest.raises(ConfigError):
            ValueSettings(**settings)
