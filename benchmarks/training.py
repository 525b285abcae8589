"""Seconds of a training step by phase, and the update beside a plain padded loop in the same run.

    agl quickstart
    python benchmarks/training.py runs/quickstart [--step 1] [--rounds 3]

The phases are those that the run itself measured. For the update, the samples of one of its steps are trained again:
by our learner, packed into a token tree, and by the loop that one would write by hand: the same model with the same
adapters, sequences padded into batches of eight, logits of every position, the same REINFORCE loss and AdamW. Both compute
in the same dtype, rounds alternate, and the best of each is shown, because other programs may share the machine.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as `agl train` does, before torch is imported

import numpy as np
import torch
from peft import LoraConfig, get_peft_model

from agentlightning.proto.dataset import open_dataset
from agentlightning.trainer.config import load_config
from agentlightning.trainer.learner import Learner
from agentlightning.trainer.model import choose_dtype, load_model
from agentlightning.trainer.recipe import learner_settings
from agentlightning.trainer.samples import Sample, build_samples, read_calls

BATCH = 8


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--step", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    phases(options.run)
    update(options.run, options.step, options.rounds)
    return 0


def phases(run: Path) -> None:
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [event["seconds"] for event in events if event["event"] == "step"]
    total = statistics.median(step["total"] for step in steps)
    print(f"{len(steps)} steps of {run.name}, median seconds per step")
    for name in ("rollouts", "read", "merge", "update", "checkpoint", "publish", "total"):
        seconds = statistics.median(step[name] for step in steps)
        print(f"  {name:<11}{seconds:8.2f}  {seconds / total:6.1%}")


def update(run: Path, step: int, rounds: int) -> None:
    samples, advantages = read_step(run, step)
    config = load_config(run / "config.yaml")
    learner = Learner(load_model(config.policy.model), learner_settings(config))
    lora = config.policy.lora
    assert lora is not None, "this benchmark compares LoRA updates"
    peer = get_peft_model(
        load_model(config.policy.model),
        LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=lora.target_modules),
    )
    optimizer = torch.optim.AdamW([p for p in peer.parameters() if p.requires_grad], lr=1e-6)
    ours, theirs, computed = [], [], 0.0
    for _ in range(rounds):
        began = time.perf_counter()
        computed = learner.update(samples, advantages).metrics["tokens_computed"]
        ours.append(time.perf_counter() - began)
        began = time.perf_counter()
        padded = padded_update(peer, optimizer, samples, advantages, config.policy.sampling.temperature)
        theirs.append(time.perf_counter() - began)
    print(f"update on the {len(samples)} samples of step {step} that carry a signal, best of {rounds}")
    print(f"  packed   {min(ours):8.2f} s  {computed:9,.0f} tokens computed")
    print(f"  padded   {min(theirs):8.2f} s  {padded:9,} tokens computed")
    print(f"  ratio    {min(ours) / min(theirs):8.2f}    {computed / padded:9.2f}")


def read_step(run: Path, step: int) -> tuple[list[Sample], list[np.ndarray]]:
    """The samples that a step trained, with their advantages; those of groups without a signal are left out."""
    dataset = open_dataset(run)
    rows = [row for row in dataset.table("samples").to_pylist() if row["step"] == step]
    wanted = {(row["rollout_id"], row["sample"]): row["advantages"] for row in rows}
    attempts = {(row["rollout_id"], row["attempt"]) for row in rows}
    built = build_samples(read_calls(dataset.table("transitions", attempts=attempts))).samples
    samples, advantages = [], []
    for sample in built:
        advantage = np.array(wanted[sample.rollout_id, sample.index], np.float32)
        if advantage.any():
            samples.append(sample)
            advantages.append(advantage)
    return samples, advantages


def padded_update(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    samples: list[Sample],
    advantages: list[np.ndarray],
    temperature: float,
) -> int:
    """One update by the plain loop; returns how many token positions it computed."""
    dtype, _ = choose_dtype()
    total = sum(sample.trained for sample in samples)
    computed = 0
    optimizer.zero_grad()
    for start in range(0, len(samples), BATCH):
        batch = samples[start : start + BATCH]
        width = max(len(sample.token_ids) for sample in batch)
        ids = torch.zeros(len(batch), width, dtype=torch.long)
        attention = torch.zeros(len(batch), width, dtype=torch.long)
        weight = torch.zeros(len(batch), width)
        for row, (sample, advantage) in enumerate(zip(batch, advantages[start : start + BATCH], strict=True)):
            length = len(sample.token_ids)
            ids[row, :length] = torch.from_numpy(sample.token_ids.astype(np.int64))
            attention[row, :length] = 1
            weight[row, :length] = torch.from_numpy(advantage)
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            logits = (
                model(input_ids=ids, attention_mask=attention, use_cache=False).logits[:, :-1].float()
                / temperature
            )
        logp = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
        (-(logp * weight[:, 1:]).sum() / total).backward()
        computed += ids.numel()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return computed


if __name__ == "__main__":
    sys.exit(main())
