import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentlightning.proto.errors import ConfigError, DataError
from agentlightning.trainer import checkpoint
from agentlightning.trainer.advantage import Outcome, score
from agentlightning.trainer.learner import Learner, LearnerSettings, LoraSettings
from agentlightning.trainer.samples import SampleSet

Model = Callable[..., Any]
Batch = Callable[..., SampleSet]


def settings(lora: LoraSettings | None = None) -> LearnerSettings:
    return LearnerSettings(lr=1e-2, dtype="float32", lora=lora, minibatches=2, warmup_steps=5, seed=3)


def train(learner: Learner, make: Batch, steps: range) -> list[float]:
    """Updates on batches that the three global random generators have a say in."""
    losses = []
    for step in steps:
        sample_set = make(step)
        noise = random.random() + float(np.random.random()) + float(torch.rand(()))
        rollouts = sorted({(s.rollout_id, s.group_id) for s in sample_set.samples})
        outcomes = [Outcome(r, g, float(np.random.random()) * noise) for r, g in rollouts]
        scored = score(sample_set, outcomes)
        losses.append(learner.update(scored.samples, scored.advantages).metrics["loss"])
    return losses


def everything(learner: Learner) -> dict[str, torch.Tensor]:
    state = {f"parameter.{name}": p.detach().clone() for name, p in learner.trainable.items()}
    for name, p in learner.trainable.items():
        state |= {f"{key}.{name}": value.clone() for key, value in learner.optimizer.state[p].items()}
    return state | {"random": torch.get_rng_state()}


@pytest.mark.parametrize("lora", [None, LoraSettings(rank=4)])
def test_a_resumed_run_is_bit_equal(
    tiny_llama: Model, random_batch: Batch, tmp_path: Path, lora: LoraSettings | None
) -> None:
    learner = Learner(tiny_llama(), settings(lora))
    train(learner, random_batch, range(2))
    checkpoint.save(tmp_path, learner, cursor={"epoch": 1, "row": 17}, config_digest="d")
    losses = train(learner, random_batch, range(2, 4))
    expected, python, numbers = everything(learner), random.random(), np.random.random()

    for seeded in (random.seed, np.random.seed, torch.manual_seed):
        seeded(99)
    fresh = Learner(tiny_llama(), settings(lora))
    path = checkpoint.latest(tmp_path)
    assert path is not None
    assert checkpoint.load(path, fresh, config_digest="d") == {"epoch": 1, "row": 17}
    assert (fresh.step, fresh.version) == (4, 2)
    assert train(fresh, random_batch, range(2, 4)) == losses
    resumed = everything(fresh)
    assert resumed.keys() == expected.keys()
    assert all(torch.equal(resumed[name], expected[name]) for name in expected)
    assert (fresh.step, fresh.version) == (learner.step, learner.version)
    assert (random.random(), np.random.random()) == (python, numbers)


def test_a_checkpoint_before_the_first_step_can_be_resumed(
    tiny_llama: Model, random_batch: Batch, tmp_path: Path
) -> None:
    learner = Learner(tiny_llama(), settings())
    path = checkpoint.save(tmp_path, learner, cursor=None, config_digest="d")
    train(learner, random_batch, range(1))
    fresh = Learner(tiny_llama(1), settings())
    assert checkpoint.load(path, fresh) is None
    train(fresh, random_batch, range(1))
    assert all(
        torch.equal(a, b) for a, b in zip(learner.trainable.values(), fresh.trainable.values(), strict=True)
    )


def test_the_newest_two_are_kept_and_an_incomplete_one_is_passed_over(
    tiny_llama: Model, tmp_path: Path
) -> None:
    learner = Learner(tiny_llama(), settings())
    for step in (1, 2, 10):
        learner.step = step
        checkpoint.save(tmp_path, learner, cursor=step, config_digest="d")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-10", "step-2"]
    assert checkpoint.latest(tmp_path) == tmp_path / "step-10"
    with (tmp_path / "step-10" / checkpoint.TENSORS).open("r+b") as file:
        file.truncate(100)
    assert checkpoint.latest(tmp_path) == tmp_path / "step-2"
    with pytest.raises(DataError, match="not a complete checkpoint"):
        checkpoint.load(tmp_path / "step-10", learner)
    assert checkpoint.latest(tmp_path / "nowhere") is None


def test_saving_a_step_again_replaces_its_cursor(tiny_llama: Model, tmp_path: Path) -> None:
    learner = Learner(tiny_llama(), settings())
    for cursor in ("old", "new"):
        path = checkpoint.save(tmp_path, learner, cursor=cursor, config_digest="d")
    assert checkpoint.load(path, learner) == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["step-0"]


def test_a_checkpoint_of_other_settings_or_another_model_is_refused(
    tiny_llama: Model, tmp_path: Path
) -> None:
    path = checkpoint.save(tmp_path, Learner(tiny_llama(), settings()), cursor=0, config_digest="d")
    with pytest.raises(ConfigError, match="other settings"):
        checkpoint.load(path, Learner(tiny_llama(), settings()), config_digest="e")
    with pytest.raises(ConfigError, match="another model"):
        checkpoint.load(path, Learner(tiny_llama(hidden=64), settings()), config_digest="d")
    with pytest.raises(ConfigError, match="LoRA"):
        checkpoint.load(path, Learner(tiny_llama(), settings(LoraSettings(rank=2))), config_digest="d")


def test_the_digest_does_not_depend_on_the_order_of_keys() -> None:
    assert checkpoint.config_digest({"a": 1, "b": [2]}) == checkpoint.config_digest({"b": [2], "a": 1})
    assert checkpoint.config_digest({"a": 1}) != checkpoint.config_digest({"a": 2})


SAVE_FOR_EVER = """
import sys
from pathlib import Path
import torch
from agentlightning.trainer import checkpoint
from agentlightning.trainer.learner import Learner, LearnerSettings
from transformers import LlamaConfig, LlamaForCausalLM
torch.set_num_threads(1)
model = LlamaForCausalLM(LlamaConfig(vocab_size=31, hidden_size=512, intermediate_size=512, num_hidden_layers=2,
    num_attention_heads=2, head_dim=16, attn_implementation="sdpa"))
learner = Learner(model, LearnerSettings(dtype="float32"))
while True:
    learner.step += 1
    print(checkpoint.save(Path(sys.argv[1]), learner, cursor=learner.step, config_digest="d"), flush=True)
"""


def test_kill_9_while_saving_leaves_a_complete_checkpoint(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", SAVE_FOR_EVER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        saved = [child.stdout.readline() for _ in range(3)]
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    path = checkpoint.latest(tmp_path)
    assert path is not None
    assert int(path.name.removeprefix("step-")) >= len(saved)
    assert json.loads((path / checkpoint.STATE).read_text())["cursor"] >= len(saved)
