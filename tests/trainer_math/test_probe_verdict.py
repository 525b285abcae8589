from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from agentlightning.trainer.learner import Learner, LearnerSettings, LoraSettings
from agentlightning.trainer.probe import Expectation, compare, expect


def drawn(count: int = 4, length: int = 48) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(31, (count, length), generator=generator).tolist()


def train_a_little(learner: Learner, scale: float = 0.05) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        for p in learner.trainable.values():
            p.add_(scale * torch.randn_like(p))


def score(server: Any, sequences: list[list[int]]) -> list[list[float | None]]:
    """What an engine that serves `server` answers."""
    answer: list[list[float | None]] = []
    with torch.no_grad():
        for sequence in sequences:
            ids = torch.tensor([sequence])
            logp = server(input_ids=ids).logits[0, :-1].float().log_softmax(-1).gather(1, ids[0, 1:, None])
            answer.append([None, *logp[:, 0].tolist()])
    return answer


def served(learner: Learner, folder: Path, dtype: torch.dtype) -> Any:
    learner.save_pretrained(folder, dtype=dtype)
    return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)


@pytest.mark.parametrize("lora", [None, LoraSettings(rank=4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_server_of_the_published_weights_passes_and_one_of_others_does_not(
    tiny_llama: Callable[..., Any], tmp_path: Path, lora: LoraSettings | None, dtype: torch.dtype
) -> None:
    learner = Learner(tiny_llama(), LearnerSettings(dtype="float32", lora=lora))
    sequences = [[1, 2, 3], *drawn()]
    stale = score(served(learner, tmp_path / "stale", dtype), sequences)
    train_a_little(learner)
    before = {name: p.clone() for name, p in learner.model.named_parameters()}
    expected = expect(learner, sequences, learner.merged_state_dict(dtype), dtype)
    assert all(
        torch.equal(p, before[name]) and p.dtype == torch.float32
        for name, p in learner.model.named_parameters()
    )
    server = served(learner, tmp_path / "new", dtype)
    assert server.dtype == dtype
    verdict = compare(expected, score(server, sequences))
    assert verdict.ok, verdict.sentence
    assert verdict.tokens == 2 + 4 * 47
    assert not compare(expected, stale).ok


def test_a_stale_engine_is_found_although_the_update_is_smaller_than_the_rounding_noise(
    tiny_llama: Callable[..., Any], tmp_path: Path
) -> None:
    learner = Learner(tiny_llama(), LearnerSettings(dtype="float32"))
    train_a_little(learner)
    sequences = drawn(16)
    dtype = torch.bfloat16
    previous = expect(learner, sequences, learner.merged_state_dict(dtype), dtype)
    stale = score(served(learner, tmp_path / "stale", dtype), sequences)
    train_a_little(learner, 0.001)
    expected = expect(learner, sequences, learner.merged_state_dict(dtype), dtype)
    new = score(served(learner, tmp_path / "new", dtype), sequences)
    assert compare(expected, stale).ok  # the plain distance does not tell
    verdict = compare(expected, stale, previous=previous)
    assert not verdict.ok
    assert "old weights" in verdict.sentence
    verdict = compare(expected, new, previous=previous)
    assert verdict.ok, verdict.sentence
    assert verdict.position == pytest.approx(1.0, abs=0.3)


def one_token(logprob: float) -> Expectation:
    import numpy as np

    return Expectation(np.array([logprob]), (2,), 0.0, 0.0, torch.float32)


def test_answers_that_cannot_be_compared_are_no_agreement() -> None:
    assert not compare(one_token(-1.0), [[None]]).ok
    assert not compare(one_token(-1.0), [[None, None]]).ok
    assert not compare(one_token(-1.0), [[None, float("nan")]]).ok
    assert not compare(one_token(-1.0), []).ok
    assert "agree on 1 probe tokens in float32" in compare(one_token(-1.0), [[None, -1.0001]]).sentence
