from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from agentlightning.proto.errors import ConfigError
from agentlightning.trainer.advantage import AdvantageSettings, Outcome, Scored, score
from agentlightning.trainer.aggregate import sample_weights
from agentlightning.trainer.learner import Learner, LearnerSettings, LoraSettings, UpdateResult
from agentlightning.trainer.objective import LossSettings
from agentlightning.trainer.samples import Sample, SampleSet

Model = Callable[..., Any]
Batch = Callable[..., SampleSet]
PLAIN = LearnerSettings(lr=1e-2, dtype="float32", max_grad_norm=1e9)


def outcomes_of(sample_set: SampleSet) -> list[Outcome]:
    generator = np.random.default_rng(7)
    rollouts = {s.rollout_id: s.group_id for s in sample_set.samples}
    return [Outcome(r, g, float(generator.random())) for r, g in sorted(rollouts.items())]


def scored_batch(sample_set: SampleSet, **settings: Any) -> Scored:
    return score(sample_set, outcomes_of(sample_set), **settings)


def update(
    model: Any, settings: LearnerSettings, samples: Sequence[Sample], advantages: Sequence[np.ndarray]
) -> tuple[dict[str, Tensor], UpdateResult]:
    """The gradient that the optimiser was given, and what the update said."""
    learner = Learner(model, settings)
    taken: dict[str, Tensor] = {}

    def keep(*_: Any) -> None:
        taken.update({n: p.grad.clone() for n, p in learner.trainable.items() if p.grad is not None})

    learner.optimizer.register_step_pre_hook(keep)
    result = learner.update(samples, advantages)
    return taken, result


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor], rtol: float = 1e-5) -> None:
    assert left.keys() == right.keys()
    scale = max(float(g.abs().max()) for g in left.values())
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=rtol, atol=rtol * scale, msg=name)


@pytest.mark.parametrize("aggregate", ["rollout-mean", "token-mean", "sample-mean", "constant"])
@pytest.mark.parametrize("kind", ["ppo", "gspo"])
def test_the_size_of_micro_batches_changes_nothing(
    tiny_llama: Model, random_batch: Batch, kind: Any, aggregate: Any
) -> None:
    scored = scored_batch(random_batch(0))
    loss = LossSettings(kind, entropy_bonus=0.1)
    settings = replace(
        PLAIN, loss=loss, aggregate=aggregate, constant_length=9 if aggregate == "constant" else None
    )
    whole, all_at_once = update(tiny_llama(), settings, scored.samples, scored.advantages)
    for max_tokens in (1, 40):
        small = replace(settings, max_tokens=max_tokens)
        parts, result = update(tiny_llama(), small, scored.samples, scored.advantages)
        assert result.metrics["micro_batches"] > all_at_once.metrics["micro_batches"]
        assert_same(whole, parts)
        for name in ("loss", "grad_norm", "kl_sampler", "entropy", "tokens_trained"):
            assert result.metrics[name] == pytest.approx(all_at_once.metrics[name], rel=1e-4, abs=1e-6)


def test_the_gradient_is_that_of_the_formula_without_packing(tiny_llama: Model, random_batch: Batch) -> None:
    scored = scored_batch(random_batch(1))
    taken, result = update(tiny_llama(), PLAIN, scored.samples, scored.advantages)
    model = tiny_llama()
    weights = sample_weights("rollout-mean", scored.samples)
    loss = torch.zeros((), dtype=torch.float64)
    for sample, advantages, weight in zip(scored.samples, scored.advantages, weights, strict=True):
        ids = torch.from_numpy(sample.token_ids.astype(np.int64))[None]
        logp = model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        mask, a, mu = (torch.from_numpy(x[1:]) for x in (sample.mask, advantages, sample.logprobs))
        w = (logp.detach() - mu).exp()
        vetoed = bool((w[mask] < 1e-4).any())
        loss = loss - weight * (0 if vetoed else 1) * (w.clamp(max=2) * a * logp)[mask].double().sum()
    loss.backward()
    assert_same(taken, {n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert result.stepped


def test_the_order_of_samples_changes_nothing(tiny_llama: Model, random_batch: Batch) -> None:
    scored = scored_batch(random_batch(2))
    order = np.random.default_rng(0).permutation(len(scored.samples))
    plain, _ = update(tiny_llama(), PLAIN, scored.samples, scored.advantages)
    permuted, _ = update(
        tiny_llama(), PLAIN, [scored.samples[i] for i in order], [scored.advantages[i] for i in order]
    )
    assert_same(plain, permuted)


@pytest.mark.parametrize("kind", ["ppo", "reinforce", "gspo", "cispo"])
@pytest.mark.parametrize("change", ["split", "duplicate"])
def test_splitting_or_duplicating_a_rollouts_samples_changes_no_gradient(
    tiny_llama: Model,
    random_batch: Batch,
    one_per_call: Callable[[Sample], list[Sample]],
    kind: Any,
    change: str,
) -> None:
    """With veto and masks at work, which are of calls: of samples or rollouts they would not pass this."""
    sample_set = random_batch(3)
    outcomes = outcomes_of(sample_set)
    plain = score(sample_set, outcomes)
    if change == "split":
        changed = [part for sample in sample_set.samples for part in one_per_call(sample)]
        assert len(changed) > len(sample_set.samples)
    else:
        first = sample_set.samples[0].rollout_id
        changed = [*sample_set.samples, *(s for s in sample_set.samples if s.rollout_id == first)]
    other = score(replace(sample_set, samples=tuple(changed)), outcomes)
    loss = LossSettings(kind, veto=0.05, sequence_mask=(0.1, 10.0), geometric_mask=(0.3, 3.0))
    settings = replace(PLAIN, loss=loss)
    expected, result = update(tiny_llama(), settings, plain.samples, plain.advantages)
    assert 0 < result.metrics["tokens_vetoed"] < result.metrics["tokens_trained"]
    assert 0 < result.metrics["tokens_masked"] < result.metrics["tokens_trained"]
    taken, _ = update(tiny_llama(), settings, other.samples, other.advantages)
    assert_same(expected, taken)


def test_what_stands_at_tokens_that_were_not_sampled_changes_no_bit(
    tiny_llama: Model, random_batch: Batch
) -> None:
    scored = scored_batch(random_batch(3))
    plain, _ = update(tiny_llama(), PLAIN, scored.samples, scored.advantages)
    samples = [replace(s, logprobs=np.where(s.mask, s.logprobs, np.float32(-9))) for s in scored.samples]
    advantages = [np.where(s.mask, a, np.float32(5)) for s, a in zip(samples, scored.advantages, strict=True)]
    other, _ = update(tiny_llama(), PLAIN, samples, advantages)
    assert all(torch.equal(plain[name], other[name]) for name in plain)


def test_peak_memory_is_told_by_phase(tiny_llama: Model, random_batch: Batch) -> None:
    scored = scored_batch(random_batch(3))
    learner = Learner(tiny_llama(), replace(PLAIN, epochs=2))
    metrics = learner.update(scored.samples, scored.advantages).metrics
    assert {name for name in metrics if name.startswith("peak_memory_")} == {
        "peak_memory_logprobs_mib",
        "peak_memory_backward_mib",
        "peak_memory_optimizer_mib",
    }
    with learner.memory.phase("nothing"):
        pass
    with learner.memory.phase("a lot"):
        np.ones(16 << 20)  # 128 MiB, given back at once
    peaks = learner.memory.take()
    assert peaks["a lot"] - peaks["nothing"] > 100
    assert learner.memory.take() == {}


def test_groups_without_variance_change_nothing_and_are_not_computed(
    tiny_llama: Model, random_batch: Batch
) -> None:
    sample_set = random_batch(4)
    rollouts = {s.rollout_id: s.group_id for s in sample_set.samples}
    flat = score(sample_set, [Outcome(r, g, 0.7) for r, g in rollouts.items()])
    model = tiny_llama()
    before = {name: p.clone() for name, p in model.named_parameters()}
    taken, result = update(model, PLAIN, flat.samples, flat.advantages)
    assert not taken
    assert not result.stepped
    assert result.metrics["loss"] == 0
    assert result.metrics["tokens_without_signal"] == sample_set.tokens_trained
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    # Even where they are computed, because of the entropy bonus, the advantages pull nowhere.
    bonus = replace(PLAIN, loss=LossSettings(entropy_bonus=1e-30))
    taken, _ = update(tiny_llama(), bonus, flat.samples, flat.advantages)
    assert max(float(g.abs().max()) for g in taken.values()) < 1e-25


def test_a_flat_group_weighs_in_the_denominator_all_the_same(tiny_llama: Model, random_batch: Batch) -> None:
    sample_set = random_batch(5, groups=2)
    rollouts = {s.rollout_id: s.group_id for s in sample_set.samples}
    outcomes = [Outcome(r, g, float(g == "g0" and r.endswith("1"))) for r, g in rollouts.items()]
    both = score(sample_set, outcomes)
    alone = [(s, a) for s, a in zip(both.samples, both.advantages, strict=True) if s.group_id == "g0"]
    with_flat, _ = update(tiny_llama(), PLAIN, both.samples, both.advantages)
    without, _ = update(tiny_llama(), PLAIN, *zip(*alone, strict=True))
    assert_same({n: 2 * g for n, g in with_flat.items()}, without)


@pytest.mark.parametrize("samples", [0, 1])
def test_a_batch_without_tokens_gives_a_finite_zero(
    tiny_llama: Model, one_sample: Callable[..., Sample], samples: int
) -> None:
    masked = [one_sample([1, 2, 3])] * samples
    for settings in (PLAIN, replace(PLAIN, minibatches=2, whiten=True, loss=LossSettings(entropy_bonus=0.1))):
        learner = Learner(tiny_llama(), settings)
        result = learner.update(masked, [np.zeros(3, np.float32)] * samples)
        assert not result.stepped
        assert all(np.isfinite(value) for value in result.metrics.values())
        assert (learner.step, learner.version) == (0, 0)


def test_several_steps_compare_with_the_policy_at_the_start(tiny_llama: Model, random_batch: Batch) -> None:
    scored = scored_batch(random_batch(6))
    learner = Learner(tiny_llama(), replace(PLAIN, minibatches=2, epochs=3, lr=3e-2))
    old = learner.logprobs(scored.samples)
    result = learner.update(scored.samples, scored.advantages)
    assert (learner.step, learner.version) == (6, 1)
    assert result.metrics["clip_fraction"] > 0
    assert result.metrics["kl_old"] != 0
    for a, b in zip(result.logprobs, old, strict=True):
        np.testing.assert_array_equal(a, b)


def test_recorded_logprobs_of_a_single_step_are_those_before_it(
    tiny_llama: Model, random_batch: Batch
) -> None:
    scored = scored_batch(random_batch(6))
    learner = Learner(tiny_llama(), PLAIN)
    old = learner.logprobs(scored.samples)
    result = learner.update(scored.samples, scored.advantages)
    for recorded, expected, sample in zip(result.logprobs, old, scored.samples, strict=True):
        assert recorded is not None
        np.testing.assert_allclose(recorded, expected, atol=1e-5)
        assert not recorded[~sample.mask].any()


@pytest.mark.parametrize("lora", [None, LoraSettings(rank=4)])
@pytest.mark.parametrize("kl_in", ["loss", "reward"])
def test_the_divergence_is_measured_from_where_training_began(
    tiny_llama: Model, random_batch: Batch, lora: LoraSettings | None, kl_in: Any
) -> None:
    scored = scored_batch(random_batch(7))
    kind: Any = "k3" if kl_in == "loss" else "k1"
    loss = LossSettings(kl_beta=0.5, kl_kind=kind, kl_in=kl_in)
    learner = Learner(tiny_llama(), replace(PLAIN, lora=lora, loss=loss))
    start = learner.logprobs(scored.samples)
    learner.update(scored.samples, scored.advantages)
    with learner.reference():
        for a, b in zip(learner.logprobs(scored.samples), start, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)
    moved = learner.logprobs(scored.samples)
    assert any(np.abs(a - b).max() > 1e-3 for a, b in zip(moved, start, strict=True))
    # Rewards that are all the same leave the penalty alone: it draws the policy back.
    flat = [np.zeros(len(s.token_ids), np.float32) for s in scored.samples]
    far = distance(moved, start)
    for _ in range(5):
        learner.update([replace(s, logprobs=lp) for s, lp in zip(scored.samples, moved, strict=True)], flat)
        moved = learner.logprobs(scored.samples)
    if kl_in == "loss":
        assert distance(moved, start) < far


def distance(left: Sequence[np.ndarray], right: Sequence[np.ndarray]) -> float:
    return float(sum(np.square(a - b).sum() for a, b in zip(left, right, strict=True)))


def test_reinforce_plus_plus_whitens_over_the_tokens_of_the_batch(
    tiny_llama: Model, random_batch: Batch
) -> None:
    scored = scored_batch(random_batch(8), advantage=AdvantageSettings("reinforce++"))
    tokens = np.concatenate([a[s.mask] for s, a in zip(scored.samples, scored.advantages, strict=True)])
    by_hand = [
        np.where(s.mask, (a - tokens.mean()) / tokens.std(), 0).astype(np.float32)
        for s, a in zip(scored.samples, scored.advantages, strict=True)
    ]
    whitened, _ = update(tiny_llama(), replace(PLAIN, whiten=True), scored.samples, scored.advantages)
    expected, _ = update(tiny_llama(), PLAIN, scored.samples, by_hand)
    assert_same(whitened, expected, rtol=1e-4)


def test_rewarded_answers_become_likelier(tiny_llama: Model, one_sample: Callable[..., Sample]) -> None:
    samples = [one_sample([1, 2, 10 + i], (2, 3), rollout=f"r{i}") for i in range(4)]
    learner = Learner(tiny_llama(), replace(PLAIN, loss=LossSettings(tis_cap=None, veto=None)))
    scored = score(SampleSet(tuple(samples)), [Outcome(f"r{i}", "g", float(i == 2)) for i in range(4)])
    before = [a[2] for a in learner.logprobs(samples)]
    for _ in range(5):
        learner.update(scored.samples, scored.advantages)
    after = [a[2] for a in learner.logprobs(samples)]
    assert [b > a for a, b in zip(before, after, strict=True)] == [False, False, True, False]


@pytest.mark.parametrize("lora", [None, LoraSettings(rank=4)])
def test_equal_seeds_give_equal_bits(
    tiny_llama: Model, random_batch: Batch, lora: LoraSettings | None
) -> None:
    scored = scored_batch(random_batch(9))
    runs = []
    for _ in range(2):
        learner = Learner(tiny_llama(), replace(PLAIN, lora=lora, minibatches=2, seed=5))
        torch.manual_seed(np.random.default_rng().integers(1 << 30).item())
        learner.update(scored.samples, scored.advantages)
        runs.append(learner.merged_state_dict())
    assert runs[0].keys() == runs[1].keys()
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])


def test_gradient_checkpointing_changes_no_gradient(tiny_llama: Model, random_batch: Batch) -> None:
    scored = scored_batch(random_batch(10))
    plain, _ = update(tiny_llama(), PLAIN, scored.samples, scored.advantages)
    saved, _ = update(
        tiny_llama(), replace(PLAIN, gradient_checkpointing=True), scored.samples, scored.advantages
    )
    assert_same(plain, saved)


def test_bf16_computes_about_the_same_gradient_and_keeps_fp32_weights(
    tiny_llama: Model, random_batch: Batch
) -> None:
    scored = scored_batch(random_batch(11))
    plain, _ = update(tiny_llama(), PLAIN, scored.samples, scored.advantages)
    rounded, _ = update(tiny_llama(), replace(PLAIN, dtype="bfloat16"), scored.samples, scored.advantages)
    a, b = (torch.cat([g.flatten() for g in taken.values()]) for taken in (plain, rounded))
    assert torch.cosine_similarity(a, b, dim=0) > 0.98
    assert all(g.dtype == torch.float32 for g in rounded.values())


def test_a_gradient_that_is_not_finite_is_left_out_and_counted(
    tiny_llama: Model, one_sample: Callable[..., Sample]
) -> None:
    learner = Learner(tiny_llama(), PLAIN)
    before = learner.merged_state_dict()
    result = learner.update([one_sample([1, 2, 3], (2, 3))], [np.array([0, 0, np.inf], np.float32)])
    assert (result.stepped, result.metrics["steps_not_finite"]) == (False, 1)
    assert all(torch.equal(before[name], value) for name, value in learner.merged_state_dict().items())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("lora", [None, LoraSettings(rank=4)])
def test_saved_weights_load_as_a_plain_model_that_says_the_same(
    tiny_llama: Model, random_batch: Batch, tmp_path: Path, lora: LoraSettings | None, tied: bool
) -> None:
    scored = scored_batch(random_batch(12))
    learner = Learner(tiny_llama(tied=tied), replace(PLAIN, lora=lora))
    for _ in range(2):
        learner.update(scored.samples, scored.advantages)
    before = {name: p.clone() for name, p in learner.model.named_parameters()}
    learner.save_pretrained(tmp_path / "final")
    assert all(torch.equal(p, before[name]) for name, p in learner.model.named_parameters())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "final", local_files_only=True)
    assert loaded.config.tie_word_embeddings is tied
    ids = torch.arange(1, 20)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, learner.model(ids).logits, rtol=1e-4, atol=1e-4)


def test_weights_that_are_not_fp32_are_refused(tiny_llama: Model) -> None:
    with pytest.raises(ConfigError, match="bfloat16"):
        Learner(tiny_llama().to(torch.bfloat16), PLAIN)
    with pytest.raises(ConfigError, match="constant_length"):
        LearnerSettings(aggregate="constant")
    with pytest.raises(ConfigError, match="minibatches"):
        LearnerSettings(minibatches=0)
