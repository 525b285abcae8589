"""Tokens computed and seconds per update: the token tree beside padded batches and TRL's GRPOTrainer, on the same samples.

    python benchmarks/packing.py [--groups 2] [--rounds 2] [--prompt 2000] [--answer 200] [--no-trl]

Groups of 8 rollouts: one prompt, answers of their own, random rewards; a small random Llama; fp32 and full fine-tuning on
every side. What is measured is one optimiser step, forward and backward, from samples to changed weights:

- ours: `Learner.update`, what samples share computed once, at most `--max-tokens` nodes a pass;
- padded: the plain loop, one group a pass, logits at the answers only;
- TRL: GRPOTrainer as it comes (beta 0, one group per device batch), given the same samples by its `rollout_func`; in an
  environment of its own, made on the first run;
- verl: arithmetic, not a run. Its batch has prompts padded to `max_prompt_length` and answers to `max_response_length`,
  here the longest of each; with `use_remove_padding` every sequence is computed without padding, and still whole.

The target is a third of the tokens of each. The best of the rounds counts, because other programs may share the machine.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import torch
from peers import environment
from transformers import LlamaConfig, LlamaForCausalLM

from agentlightning.trainer.advantage import Outcome, score
from agentlightning.trainer.calls import Call
from agentlightning.trainer.learner import Learner, LearnerSettings
from agentlightning.trainer.samples import Sample, build_samples

SIZE = 8
VOCABULARY = 4096
TARGET = 3.0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=2000)
    parser.add_argument("--answer", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=4096)
    parser.add_argument("--no-trl", action="store_true", help="leave TRL out")
    options = parser.parse_args()
    calls, outcomes = make_batch(options.groups, options.prompt, options.answer)
    scored = score(build_samples(calls), outcomes)
    samples, advantages = list(scored.samples), list(scored.advantages)
    learner = Learner(make_model(), LearnerSettings(lr=1e-6, dtype="float32", max_tokens=options.max_tokens))
    plain = make_model()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-6)
    ours, theirs, tokens, padded = [], [], 0.0, 0
    for _ in range(options.rounds):
        began = time.perf_counter()
        tokens = learner.update(samples, advantages).metrics["tokens_computed"]
        ours.append(time.perf_counter() - began)
        began = time.perf_counter()
        padded = padded_update(plain, optimizer, samples, advantages)
        theirs.append(time.perf_counter() - began)
    rows: list[tuple[str, float, float | None]] = [
        ("ours", tokens, min(ours)),
        ("padded loop", padded, min(theirs)),
    ]
    if not options.no_trl and (found := trl(calls, outcomes, options.rounds)) is not None:
        rows.append(("TRL GRPOTrainer", *found))
    prompts = [len(call.prompt) for call in calls]
    answers = [len(call.sampled) for call in calls]
    rows.append(("verl, padded (arithmetic)", len(calls) * (max(prompts) + max(answers)), None))
    rows.append(("verl, padding removed (arithmetic)", sum(prompts) + sum(answers), None))
    print(
        f"{options.groups} groups of {SIZE}, prompts of {options.prompt}, answers of about {options.answer}"
    )
    print(f"{'':<36}{'tokens':>10}{'of ours':>10}{'target':>8}{'seconds':>10}{'of ours':>10}")
    for name, count, seconds in rows:
        target = "" if name == "ours" else f"{TARGET:.0f}x"
        time_ = "" if seconds is None else f"{seconds:10.2f}{seconds / min(ours):>9.2f}x"
        print(f"{name:<36}{count:>10,.0f}{count / tokens:>9.2f}x{target:>8}{time_}")
    return 0


def make_batch(groups: int, prompt: int, answer: int) -> tuple[list[Call], list[Outcome]]:
    generator = np.random.default_rng(0)
    draw = lambda n: generator.integers(3, VOCABULARY, n).astype(np.int32)  # noqa: E731
    calls, outcomes = [], []
    for g in range(groups):
        question = draw(prompt)
        for i in range(SIZE):
            said = draw(int(generator.integers(answer * 3 // 4, answer + 1)))
            call = Call(
                f"{g}-{i}",
                f"{g}-{i}",
                group_id=str(g),
                prompt_ids=question,
                response_ids=said,
                logprobs=np.full(len(said), -np.log(VOCABULARY), np.float32),
            )
            calls.append(call)
            outcomes.append(Outcome(call.rollout_id, str(g), float(generator.random())))
    return calls, outcomes


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=256,
            intermediate_size=768,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=8192,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=2,
            attn_implementation="sdpa",
        )
    ).eval()


def padded_update(
    model: LlamaForCausalLM,
    optimizer: torch.optim.Optimizer,
    samples: list[Sample],
    advantages: list[np.ndarray],
) -> int:
    """One update by the plain loop; returns how many token positions it computed."""
    computed = 0
    optimizer.zero_grad()
    for start in range(0, len(samples), SIZE):
        batch = samples[start : start + SIZE]
        width = max(len(sample.token_ids) for sample in batch)
        first = min(int(sample.mask.argmax()) for sample in batch)  # where the earliest answer begins
        ids, attention, weight = (
            torch.zeros(len(batch), width, dtype=t) for t in (torch.long, torch.long, torch.float)
        )
        for row, (sample, advantage) in enumerate(zip(batch, advantages[start : start + SIZE], strict=True)):
            length = len(sample.token_ids)
            ids[row, :length] = torch.from_numpy(sample.token_ids.astype(np.int64))
            attention[row, :length] = 1
            weight[row, :length] = torch.from_numpy(advantage) / sample.trained / len(samples)
        logits = (
            model(input_ids=ids, attention_mask=attention, use_cache=False, logits_to_keep=width - first + 1)
            .logits[:, :-1]
            .float()
        )
        logp = logits.log_softmax(-1).gather(2, ids[:, first:, None])[..., 0]
        ratio = (logp - logp.detach()).exp()
        (-(ratio * weight[:, first:]).sum()).backward()
        computed += ids.numel()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return computed


def trl(calls: list[Call], outcomes: list[Outcome], rounds: int) -> tuple[float, float] | None:
    """Tokens and seconds of a step of TRL's trainer."""
    folder = environment("trl")
    if folder is None:
        return None
    with tempfile.TemporaryDirectory() as scratch:
        make_model().save_pretrained(f"{scratch}/model")
        batch = [
            {"prompt": c.prompt.tolist(), "answer": c.sampled.tolist(), "reward": o.reward}
            for c, o in zip(calls, outcomes, strict=True)
        ]
        Path(scratch, "batch.json").write_text(json.dumps(batch))
        script = Path(__file__).parent / "packing_trl.py"
        command = [str(folder / "bin" / "python"), str(script), scratch, str(rounds + 1)]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=1800)
        if done.returncode:
            print(f"TRL is left out, it ended with: {done.stderr[-1500:]}", file=sys.stderr)
            return None
    result = json.loads(done.stdout.splitlines()[-1])
    return result["tokens"], min(result["seconds"][1:])


if __name__ == "__main__":
    sys.exit(main())
