"""The draw follows the distribution, and the settings mean what OpenAI and vLLM mean by them."""

import math

import pytest
import torch

from agentlightning.trainer.engine import sampling as module
from agentlightning.trainer.engine.sampling import Draw, Sampling, sample

LOGITS = torch.log(torch.tensor([[0.5, 0.25, 0.15, 0.1, 0.0]]))


def frequencies(settings: Sampling, count: int = 4000) -> list[float]:
    draws = [
        Draw.of(Sampling(settings.temperature, settings.top_p, settings.top_k, seed=i)) for i in range(count)
    ]
    drawn = sample(LOGITS.expand(count, -1), draws)
    return [sum(d.token == token for d in drawn) / count for token in range(5)]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (Sampling(), [0.5, 0.25, 0.15, 0.1, 0]),
        (Sampling(temperature=0.5), [p / 0.345 for p in (0.25, 0.0625, 0.0225, 0.01, 0)]),
        (Sampling(top_k=2), [2 / 3, 1 / 3, 0, 0, 0]),
        (Sampling(top_p=0.76), [0.5 / 0.9, 0.25 / 0.9, 0.15 / 0.9, 0, 0]),
        (Sampling(top_p=0.5), [1, 0, 0, 0, 0]),
        (Sampling(temperature=0), [1, 0, 0, 0, 0]),
    ],
)
def test_tokens_come_as_often_as_they_are_likely(settings: Sampling, expected: list[float]) -> None:
    assert frequencies(settings) == pytest.approx(expected, abs=0.03)


def test_greedy_reports_the_logprob_at_temperature_one() -> None:
    (drawn,) = sample(LOGITS, [Draw.of(Sampling(temperature=0, top_k=1, top_p=0.1))])
    assert drawn.token == 0
    assert drawn.logprob == pytest.approx(math.log(0.5))


def test_top_logprobs_are_of_the_sampled_distribution() -> None:
    (drawn,) = sample(LOGITS, [Draw.of(Sampling(top_k=2, seed=1, top_logprobs=2))])
    assert [token for token, _ in drawn.top] == [0, 1]
    assert [logprob for _, logprob in drawn.top] == pytest.approx([math.log(2 / 3), math.log(1 / 3)])


def test_top_p_is_exact_where_few_candidates_do_not_hold_it(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 200)
    p = torch.tensor([0.3, 0.9, 0.999])
    expected = module._top_p(logits.clone(), p)
    monkeypatch.setattr(module, "CANDIDATES", 4)
    torch.testing.assert_close(module._top_p(logits.clone(), p), expected)
    kept = expected.isfinite().sum(-1).tolist()
    for row, (count, wanted) in enumerate(zip(kept, p.tolist(), strict=True)):
        cumulative = logits[row].softmax(0).sort(descending=True).values.cumsum(0)
        assert count == int((cumulative < wanted).sum()) + 1


def test_rows_of_one_batch_keep_their_own_settings() -> None:
    draws = [Draw.of(Sampling(temperature=0)), Draw.of(Sampling(top_k=1)), Draw.of(Sampling(seed=3))]
    mixed = sample(LOGITS.expand(3, -1), draws)
    assert [m.token for m in mixed[:2]] == [0, 0]
    assert mixed[1].logprob == pytest.approx(0)
    alone = sample(LOGITS, [Draw.of(Sampling(seed=3))])[0]
    assert mixed[2] == alone


def test_logits_that_are_not_finite_are_told_as_such() -> None:
    (drawn,) = sample(torch.full((1, 5), torch.nan), [Draw.of(Sampling(seed=1))])
    assert math.isnan(drawn.logprob)
