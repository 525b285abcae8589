"""Whatever shares a step, a prefix or a row: the tokens and log-probabilities are those of the model alone."""

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_harness import CONTEXT, Collector

from agentlightning.trainer.engine import scheduler as scheduler_module
from agentlightning.trainer.engine.attention import partial_attention, partial_attention_reference
from agentlightning.trainer.engine.runner import read_weights
from agentlightning.trainer.engine.sampling import Sampling
from agentlightning.trainer.engine.sequence import Emitted
from agentlightning.trainer.model import load_model

Start = Callable[..., Collector]
GREEDY = Sampling(temperature=0, max_tokens=40, ignore_eos=True)


def make_prompts(count: int, seed: int = 0, vocabulary: int = 330) -> list[list[int]]:
    """Prompts of many lengths that share a long beginning, a short one, or nothing; some twice."""
    draw = random.Random(seed)
    system = [draw.randrange(2, vocabulary) for _ in range(70)]
    prompts: list[list[int]] = []
    for i in range(count):
        own = [draw.randrange(2, vocabulary) for _ in range(draw.choice([1, 5, 20, 90]))]
        prompts.append([system + own, system[:7] + own, own, prompts[-1] if prompts else own][i % 4])
    return prompts


def ids(told: list[Emitted]) -> list[int]:
    return [emitted.token for emitted in told]


def reference_greedy(folder: Path, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    model = load_model(folder)
    out = []
    for prompt in prompts:
        generated: Any = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=-1,
        )
        out.append(generated[0, len(prompt) :].tolist())
    return out


def full_logprobs(model: Any, prompt: list[int], answer: list[int], sampling: Sampling) -> list[float]:
    """By one fresh forward over everything, and a plain reading of temperature, top-k and top-p."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + answer[:-1]])).logits[0, len(prompt) - 1 :].float()
    out = []
    for row, token in zip(logits, answer, strict=True):
        row = row / (sampling.temperature or 1.0)
        if sampling.temperature and sampling.top_k:
            row = row.masked_fill(row < row.topk(sampling.top_k).values[-1], -torch.inf)
        if sampling.temperature and sampling.top_p < 1:
            order = row.argsort(descending=True)
            p = row[order].softmax(0)
            row = row.index_fill(0, order[p.cumsum(0) - p >= sampling.top_p], -torch.inf)
        out.append(float(row.log_softmax(0)[token]))
    return out


def test_batched_equals_sequential_equals_transformers_generate(start: Start, tiny_folder: Path) -> None:
    prompts = make_prompts(24)
    expected = reference_greedy(tiny_folder, prompts, 40)
    together = [ids(told) for told in start().run(prompts, GREEDY)]
    alone_engine = start()
    alone = [ids(alone_engine.run([prompt], GREEDY)[0]) for prompt in prompts]
    assert together == expected
    assert alone == expected


@pytest.mark.parametrize("limits", [{"prefill_tokens": 7}, {"max_batch": 3}, {"prefix_tokens": 60}])
def test_chunks_small_batches_and_a_forgetful_tree_change_nothing(
    start: Start, limits: dict[str, int]
) -> None:
    prompts = make_prompts(24)
    expected = [ids(told) for told in start().run(prompts, GREEDY)]
    engine = start(**limits)
    assert [ids(told) for told in engine.run(prompts, GREEDY)] == expected
    assert engine.scheduler.runner.tree.size <= limits.get("prefix_tokens", 4096)


@pytest.mark.parametrize("shared_work", [0, 10**9])
def test_reading_a_prefix_where_it_is_equals_copying_it(
    start: Start, shared_work: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = make_prompts(24, seed=3)
    expected = [ids(told) for told in start().run(prompts, GREEDY)]
    monkeypatch.setattr(scheduler_module, "SHARED_WORK", shared_work)
    assert [ids(told) for told in start().run(prompts, GREEDY)] == expected


def test_a_prefix_hit_equals_a_miss(start: Start) -> None:
    engine = start()
    prompt = make_prompts(1)[0]
    sampling = Sampling(temperature=1, seed=5, max_tokens=30, ignore_eos=True)
    miss, hit = engine.run([prompt], sampling)[0], engine.run([prompt], sampling)[0]
    assert ids(hit) == ids(miss)
    assert [e.logprob for e in hit] == pytest.approx([e.logprob for e in miss], abs=1e-5)
    second_call = [*prompt, *ids(hit), 17, 18]
    engine.run([second_call], GREEDY)
    # The second prompt and all of the third but what the tail alone knew: the last token, and the two new ones.
    assert engine.scheduler.counts["cached_tokens"] == len(prompt) - 1 + len(second_call) - 3


def test_a_shared_prompt_is_computed_once(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start()
    read: list[int] = []
    forward = engine.scheduler.runner.forward

    def counting(segments: Any) -> torch.Tensor:
        read.extend(len(segment.tokens) for segment in segments)
        return forward(segments)

    monkeypatch.setattr(engine.scheduler.runner, "forward", counting)
    system = make_prompts(1)[0][:70]
    groups = [[*system, *(300 + i - k for k in range(20))] for i in range(4) for _ in range(8)]
    engine.run(groups, Sampling(temperature=1, seed=1, max_tokens=3, ignore_eos=True))
    assert sum(read) == 70 + 4 * 19


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1, seed=1),
        Sampling(temperature=0.7, top_k=9, seed=2),
        Sampling(temperature=1.3, top_p=0.8, seed=3),
        Sampling(temperature=0.9, top_k=40, top_p=0.5, seed=4),
        Sampling(temperature=0),
    ],
)
def test_logprobs_are_those_of_the_distribution_sampled(
    start: Start, tiny_folder: Path, sampling: Sampling
) -> None:
    prompts = make_prompts(8)
    settings = Sampling(
        sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed, max_tokens=25, ignore_eos=True
    )
    model = load_model(tiny_folder)
    for prompt, told in zip(prompts, start().run(prompts, settings), strict=True):
        expected = full_logprobs(model, prompt, ids(told), settings)
        assert [e.logprob for e in told] == pytest.approx(expected, abs=1e-4)


def test_a_seed_gives_the_same_answer_alone_and_in_a_crowd(start: Start) -> None:
    prompts = make_prompts(16)
    seeded = [Sampling(seed=seed, max_tokens=20) for seed in range(16)]
    engine = start()
    crowd = [ids(told) for told in engine.run(prompts, seeded)]
    alone = [ids(engine.run([p], [s])[0]) for p, s in zip(prompts, seeded, strict=True)]
    assert crowd == alone
    same_prompt = [ids(told) for told in engine.run([prompts[0]] * 16, seeded)]
    assert len({tuple(answer) for answer in same_prompt}) > 1


def test_an_answer_outgrows_its_row_beside_short_ones(start: Start, tiny_folder: Path) -> None:
    prompts = make_prompts(6, seed=2)
    limits = [3, 200, 31, 32, 33, 100]
    told = start().run(prompts, [Sampling(temperature=0, max_tokens=n, ignore_eos=True) for n in limits])
    expected = reference_greedy(tiny_folder, prompts, 200)
    assert [ids(t) for t in told] == [e[:n] for e, n in zip(expected, limits, strict=True)]


def test_an_answer_may_fill_the_context(start: Start, tiny_folder: Path) -> None:
    prompt = make_prompts(1)[0]
    told = start().run([prompt], Sampling(temperature=0, max_tokens=CONTEXT - len(prompt), ignore_eos=True))[
        0
    ]
    assert ids(told) == reference_greedy(tiny_folder, [prompt], CONTEXT - len(prompt))[0]
    assert told[-1].finish == "length"


def test_weights_swapped_in_flight_are_recorded_and_exact_on_both_sides(
    start: Start, tiny_folder: Path, other_folder: Path
) -> None:
    engine = start()
    prompts = make_prompts(5)
    sampling = Sampling(seed=9, max_tokens=60, ignore_eos=True)
    sequences = engine.begin(prompts, [sampling] * 5)
    engine.wait(lambda: all(len(engine.told(s)) >= 10 for s in sequences))
    new = read_weights(other_folder, engine.scheduler.runner.model)
    engine.scheduler.call(lambda: engine.scheduler.load(new, 7)).result(30)
    engine.wait(lambda: all(engine.told(s)[-1].finish for s in sequences))
    models = {0: load_model(tiny_folder), 7: load_model(other_folder)}
    for prompt, sequence in zip(prompts, sequences, strict=True):
        told = engine.told(sequence)
        versions = [e.version for e in told]
        assert versions == sorted(versions)
        assert set(versions) == {0, 7}
        both = {v: full_logprobs(model, prompt, ids(told), sampling) for v, model in models.items()}
        expected = [both[version][i] for i, version in enumerate(versions)]
        assert [e.logprob for e in told] == pytest.approx(expected, abs=1e-4)


def test_a_prefix_of_old_weights_is_not_used_for_new_ones(
    start: Start, tiny_folder: Path, other_folder: Path
) -> None:
    engine = start()
    prompts = make_prompts(8)
    engine.run(prompts, GREEDY)
    new = read_weights(other_folder, engine.scheduler.runner.model)
    engine.scheduler.call(lambda: engine.scheduler.load(new, 1)).result(30)
    assert [ids(told) for told in engine.run(prompts, GREEDY)] == reference_greedy(other_folder, prompts, 40)


def test_score_equals_a_full_forward(start: Start, tiny_folder: Path) -> None:
    engine = start()
    tokens = (make_prompts(8)[-2] * 40)[:400]  # more than one chunk
    scored = engine.scheduler.call(lambda: engine.scheduler.runner.score(tokens, 0.7)).result(30)
    expected = full_logprobs(load_model(tiny_folder), tokens[:1], tokens[1:], Sampling(temperature=0.7))
    assert scored == pytest.approx(expected, abs=1e-4)


def test_bfloat16_serves_and_stays_near_float32(tiny_folder: Path, tokenizer: Any) -> None:
    from agentlightning.trainer.engine.runner import Runner

    tokens = make_prompts(8)[0]
    scores = {
        dtype: Runner(load_model(tiny_folder, dtype=dtype), prefix_tokens=64).score(tokens)
        for dtype in (torch.float32, torch.bfloat16)
    }
    assert scores[torch.bfloat16] == pytest.approx(scores[torch.float32], abs=0.3)
    assert not math.isnan(sum(scores[torch.bfloat16]))


@pytest.mark.parametrize("causal", [True, False])
def test_the_kernel_and_plain_torch_agree_on_partial_attention(causal: bool) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 9, 32), torch.randn(2, 2, 9, 32), torch.randn(2, 2, 9, 32)
    mask = None if causal else torch.zeros(2, 1, 1, 9).masked_fill(torch.rand(2, 1, 1, 9) < 0.4, -torch.inf)
    fast = partial_attention(q, k, v, 0.2, mask=mask, causal=causal)
    plain = partial_attention_reference(q, k, v, 0.2, mask=mask, causal=causal)
    torch.testing.assert_close(fast, plain, atol=1e-5, rtol=1e-5)
