from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from agentlightning.proto.errors import ConfigError
from agentlightning.trainer import pack as packing
from agentlightning.trainer import tree_attention
from agentlightning.trainer.pack import check_depth, check_model, forward, pack, plan
from agentlightning.trainer.samples import Sample, SampleSet

Model = Callable[..., Any]
Batch = Callable[..., SampleSet]


def padded_logprobs(model: Any, samples: list[Sample]) -> list[Tensor]:
    """The plain way: one padded row per sample, all logits."""
    longest = max(len(s.token_ids) for s in samples)
    ids = torch.zeros(len(samples), longest, dtype=torch.int64)
    seen = torch.zeros(len(samples), longest, dtype=torch.int64)
    for i, sample in enumerate(samples):
        ids[i, : len(sample.token_ids)] = torch.from_numpy(sample.token_ids.astype(np.int64))
        seen[i, : len(sample.token_ids)] = 1
    logits = model(input_ids=ids, attention_mask=seen, use_cache=False).logits.float()
    logp = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    return [logp[i, np.nonzero(s.mask)[0] - 1] for i, s in enumerate(samples)]


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("max_tokens", "block_rows"), [(1, 128), (20, 5), (60, 128), (100_000, 1), (100_000, 7), (100_000, 128)]
)
def test_packed_equals_padded_in_values_and_gradients(
    tiny_llama: Model, random_batch: Batch, max_tokens: int, block_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(tree_attention.ROWS, "cpu", block_rows)
    samples = list(random_batch(1).samples)
    model = tiny_llama()
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(s.trained, generator=generator) for s in samples]
    expected = padded_logprobs(model, samples)
    torch.stack([(w * logp).sum() for w, logp in zip(weights, expected, strict=True)]).sum().backward()
    plain = gradients(model)
    model.zero_grad()
    for numbers in plan(samples, max_tokens):
        packed = pack(samples, numbers)
        logp, *_ = forward(model, packed)
        total = logp.new_zeros(())
        for k, i in enumerate(numbers):
            rows = np.nonzero(packed.sample == k)[0]
            rows = rows[np.argsort(packed.position[rows])]
            torch.testing.assert_close(logp[rows], expected[i].detach(), rtol=1e-5, atol=1e-5)
            total = total + (weights[i] * logp[rows]).sum()
        total.backward()
    for name, gradient in gradients(model).items():
        largest = float(plain[name].abs().max())
        torch.testing.assert_close(gradient, plain[name], rtol=1e-5, atol=1e-5 * largest, msg=name)


def test_blocks_hold_the_rows_and_their_ancestors_alone() -> None:
    generator = np.random.default_rng(0)
    parent = [-1] + [int(generator.integers(max(0, i - 4), i)) for i in range(1, 300)]
    # Renumbered in depth-first order.
    children: dict[int, list[int]] = {}
    for i, p in enumerate(parent):
        children.setdefault(p, []).append(i)
    ancestors: list[set[int]] = []
    end = np.zeros(300, np.int64)

    def visit(node: int, above: set[int]) -> None:
        number = len(ancestors)
        ancestors.append(above | {number})
        for child in children.get(node, []):
            visit(child, ancestors[number])
        end[number] = len(ancestors)

    visit(0, set())
    for block in tree_attention.blocks_of(end, torch.device("cpu")):
        for i, row in enumerate(range(block.start, block.stop)):
            assert set(block.columns[~block.hidden[i]].tolist()) == ancestors[row]
        needed = set().union(*(ancestors[row] for row in range(block.start, block.stop)))
        assert set(block.columns.tolist()) == needed


def test_what_samples_share_is_computed_once(one_sample: Callable[..., Sample]) -> None:
    samples = [
        one_sample([1, 2, 3, 7, 8], (3, 5)),
        one_sample([1, 2, 3, 7, 9], (3, 5)),
        one_sample([1, 2, 4, 7], (3, 4), group="h"),
        one_sample([1, 2, 3, 7, 8], (3, 5)),  # sampled twice
    ]
    packed = pack(samples, [0, 1, 2, 3])
    assert packed.input_ids.tolist() == [1, 2, 3, 7, 4]
    assert packed.depth.tolist() == [0, 1, 2, 3, 2]
    assert packed.end.tolist() == [5, 5, 4, 4, 5]
    assert packed.rows.tolist() == [2, 3, 4]  # one row of logits for all that read there


def test_only_nodes_before_sampled_tokens_are_read(random_batch: Batch) -> None:
    samples = list(random_batch(2).samples)
    for numbers in plan(samples, 50):
        packed = pack(samples, numbers)
        read = {(packed.samples[k], int(t)) for k, t in zip(packed.sample, packed.position, strict=True)}
        assert read == {(i, int(t)) for i in numbers for t in np.nonzero(samples[i].mask)[0]}
        for k, t, target, row in zip(packed.sample, packed.position, packed.targets, packed.row, strict=True):
            sample = samples[packed.samples[k]]
            assert target == sample.token_ids[t]
            assert packed.depth[packed.rows[row]] == t - 1
            assert packed.input_ids[packed.rows[row]] == sample.token_ids[t - 1]


def test_an_advantage_on_one_token_reaches_the_logits_before_it_alone(
    tiny_llama: Model, random_batch: Batch
) -> None:
    samples = list(random_batch(3).samples)
    model = tiny_llama()
    captured: list[Tensor] = []

    def keep(module: Any, arguments: Any, output: Tensor) -> None:
        output.retain_grad()
        captured.append(output)

    model.lm_head.register_forward_hook(keep)
    packed = pack(samples, list(range(len(samples))))
    for chosen in (0, len(packed.row) // 2, len(packed.row) - 1):
        captured.clear()
        logp, *_ = forward(model, packed)
        logp[chosen].backward()
        gradient = captured[0].grad
        assert gradient is not None
        assert torch.nonzero(gradient.abs().sum(1))[:, 0].tolist() == [packed.row[chosen]]
        # Up for the token that was sampled, down for every other.
        positive = torch.nonzero(gradient[packed.row[chosen]] > 0)[:, 0].tolist()
        assert positive == [packed.targets[chosen]]


def test_tokens_that_were_not_sampled_get_no_gradient(
    tiny_llama: Model, one_sample: Callable[..., Sample]
) -> None:
    # Token 30 occurs only as an observation: as a target its output row gets no pull towards it.
    sample = one_sample([1, 2, 3, 30, 4, 5], (2, 3), (4, 6))
    model = tiny_llama()
    logp, *_ = forward(model, pack([sample], [0]))
    assert len(logp) == 3
    logp.sum().backward()
    # The gradient of an output row is Σ (target − p)·h: for a token that is never a target all terms are −p·h.
    with torch.no_grad():
        hidden = model.get_decoder()(input_ids=torch.tensor([[1, 2, 3, 30, 4, 5]])).last_hidden_state[0]
        p = model.lm_head(hidden).softmax(-1)[:, 30]
        expected = -(p[[1, 3, 4], None] * hidden[[1, 3, 4]]).sum(0)
    torch.testing.assert_close(model.lm_head.weight.grad[30], expected, rtol=1e-4, atol=1e-5)


def test_each_segment_is_read_at_its_own_temperature(
    tiny_llama: Model, one_sample: Callable[..., Sample]
) -> None:
    cold, warm = (
        one_sample([1, 2, 3, 4], (2, 4), temperature=0.5),
        one_sample([1, 2, 3, 4], (2, 4), rollout="s"),
    )
    model = tiny_llama()
    packed = pack([cold, warm], [0, 1])
    assert packed.rows.tolist() == [1, 1, 2, 2]
    logp, *_ = forward(model, packed)
    logits = model(input_ids=torch.tensor([[1, 2, 3, 4]])).logits[0]
    for k, temperature in enumerate((0.5, 1.0)):
        expected = (logits[[1, 2]] / temperature).log_softmax(-1)[[0, 1], [3, 4]]
        torch.testing.assert_close(logp[packed.sample == k], expected)


def test_logits_in_chunks_change_nothing(
    tiny_llama: Model, random_batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = list(random_batch(4).samples)
    model = tiny_llama()
    packed = pack(samples, list(range(len(samples))))
    whole, spread, _ = forward(model, packed, entropy=True)
    whole.sum().backward()
    before = gradients(model)
    model.zero_grad()
    monkeypatch.setattr(packing, "OUTPUT_ROWS", 7)
    chunked, spread_too, _ = forward(model, packed, entropy=True)
    chunked.sum().backward()
    torch.testing.assert_close(chunked, whole)
    assert spread is not None
    torch.testing.assert_close(spread_too, spread)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, before[name], rtol=1e-4, atol=1e-5)


def test_entropy_is_that_of_the_whole_distribution(
    tiny_llama: Model, one_sample: Callable[..., Sample]
) -> None:
    model = tiny_llama()
    _, spread, _ = forward(model, pack([one_sample([1, 2, 3], (2, 3))], [0]), entropy=True)
    logits = model(input_ids=torch.tensor([[1, 2]])).logits[0, -1]
    torch.testing.assert_close(spread, torch.distributions.Categorical(logits=logits).entropy()[None])


@pytest.mark.parametrize("max_tokens", [1, 13, 40, 1000])
def test_plans_hold_every_sample_once_within_the_budget(random_batch: Batch, max_tokens: int) -> None:
    samples = list(random_batch(5, groups=6).samples)
    batches = plan(samples, max_tokens)
    assert sorted(i for numbers in batches for i in numbers) == list(range(len(samples)))
    for numbers in batches:
        assert len(numbers) == 1 or len(pack(samples, numbers).input_ids) <= max_tokens


def test_a_group_that_fits_is_not_torn_apart(one_sample: Callable[..., Sample]) -> None:
    samples = [
        one_sample([g, *range(10, 18), 20 + i, i], (9, 11), rollout=f"{g}{i}", group=str(g))
        for i in range(4)
        for g in range(5)
    ]
    for numbers in plan(samples, 30):  # a group is a tree of 9 + 4 nodes
        groups = [samples[i].group_id for i in numbers]
        assert all(groups.count(g) == 4 for g in groups)
        assert len(numbers) == 8 or numbers[0] in (4, 9, 14, 19)


def test_samples_without_trained_tokens_are_not_planned(one_sample: Callable[..., Sample]) -> None:
    assert plan([one_sample([1, 2, 3])], 10) == []
    assert plan([], 10) == []


def test_models_that_cannot_be_packed_are_refused(
    tiny_llama: Model, one_sample: Callable[..., Sample]
) -> None:
    model = tiny_llama()
    check_model(model)
    deep = pack([one_sample([1] * 300, (299, 300))], [0])
    with pytest.raises(ConfigError, match="longer than the 256"):
        check_depth(model, deep)
    model.config._attn_implementation = "eager"
    with pytest.raises(ConfigError, match="sdpa"):
        check_model(model)


def test_a_model_that_transforms_its_logits_is_refused(tiny_llama: Model) -> None:
    model = tiny_llama()
    plain = model.forward

    def scaled(**arguments: Any) -> Any:
        output = plain(**arguments)
        output.logits = output.logits * 2
        return output

    model.forward = scaled
    with pytest.raises(ConfigError, match="transform their logits"):
        check_model(model)
