from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from agentlightning.trainer.learner import Learner, LearnerSettings, LoraSettings
from agentlightning.trainer.probe import compare, probe_sequences, trainer_logprobs
from transformers import AutoModelForCausalLM


def train_a_little(learner: Learner) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        for p in learner.trainable.values():
            p.add_(0.05 * torch.randn_like(p))


@pytest.mark.parametrize("lora", [None, LoraSettings(rank=4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_probe_is_what_a_server_of_the_published_weights_would_say(
    tiny_llama: Callable[..., Any], tmp_path: Path, lora: LoraSettings | None, dtype: torch.dtype
) -> None:
    learner = Learner(tiny_llama(), LearnerSettings(dtype="float32", lora=lora))
    train_a_little(learner)
    before = {name: p.clone() for name, p in learner.model.named_parameters()}
    sequences = probe_sequences(31, texts=[[1, 2, 3]])
    ours = trainer_logprobs(learner, sequences, dtype)
    assert all(
        torch.equal(p, before[name]) and p.dtype == torch.float32
        for name, p in learner.model.named_parameters()
    )

    learner.save_pretrained(tmp_path, dtype=dtype)
    server = AutoModelForCausalLM.from_pretrained(tmp_path, local_files_only=True)
    assert server.dtype == dtype
    theirs = []
    with torch.no_grad():
        for sequence in sequences:
            ids = torch.tensor([sequence])
            logp = server(input_ids=ids).logits[0, :-1].float().log_softmax(-1).gather(1, ids[0, 1:, None])
            theirs.append([None, *logp[:, 0].tolist()])
    verdict = compare(ours, theirs, dtype)
    assert verdict.ok, verdict.sentence
    assert verdict.tokens == 2 + 4 * 47
    assert verdict.mean < 1e-6

    stale = trainer_logprobs(Learner(tiny_llama(), LearnerSettings(dtype="float32")), sequences, dtype)
    assert not compare(ours, stale, dtype).ok


def test_answers_that_cannot_be_compared_are_no_agreement() -> None:
    assert not compare([[None, -1.0]], [[None]], torch.float32).ok
    assert not compare([[None, -1.0]], [[None, None]], torch.float32).ok
    assert not compare([[None, -1.0]], [[None, float("nan")]], torch.float32).ok
    assert not compare([], [], torch.float32).ok
    assert (
        "agree on 1 probe tokens in float32"
        in compare([[None, -1.0]], [[None, -1.0001]], torch.float32).sentence
    )


def test_probe_sequences_are_the_same_each_time() -> None:
    assert probe_sequences(100, seed=1) == probe_sequences(100, seed=1)
    assert probe_sequences(100, count=1, length=5, texts=[[1], [2, 3]])[0] == [2, 3]
