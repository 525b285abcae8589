"""Tokens per second of the embedded engine, beside transformers' own `generate` in the same run.

    python benchmarks/engine.py                       # SmolLM2-135M, batches of 1, 16 and 64
    python benchmarks/engine.py --dtype float32 --rounds 3 --json

Every request has a prompt of 150 tokens and samples exactly 32 tokens at temperature 1. In `same prompt` all share
it, as the rollouts of one task do; in `8 groups` the first 100 tokens are common and eight endings of 50 are asked
for in turn, as in a training step. `generate` gets the same prompts as one rectangular batch.
Each figure is the best of the rounds, which alternate between the two, because other programs may share the machine.
"""

import argparse
import json
import os
import queue
import sys
import time
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as `agl engine` does, before torch is imported

import torch

from agentlightning.trainer.engine.runner import Runner
from agentlightning.trainer.engine.sampling import Sampling
from agentlightning.trainer.engine.scheduler import Event, Scheduler
from agentlightning.trainer.engine.sequence import Emitted, Sequence
from agentlightning.trainer.model import choose_dtype, load

PROMPT, COMMON, GROUPS = 150, 100, 8


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--tokens", type=int, default=32, help="tokens to sample per request")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    arguments = parser.parse_args()
    dtype, why = choose_dtype(arguments.dtype)
    peer, tokenizer = load(arguments.model, dtype=dtype)
    model, _ = load(arguments.model, dtype=dtype)
    engine = InProcess(model, tokenizer)
    if not arguments.json:
        print(
            f"{arguments.model}, {str(dtype)[6:]} ({why}), {torch.get_num_threads()} threads; tokens per second"
        )
        print(f"{'batch':>5}  {'prompts':<12} {'engine':>8} {'generate':>9} {'ratio':>6}")
    rows = []
    for batch in arguments.batches:
        for shape in ["same prompt", "8 groups"] if batch >= GROUPS else ["same prompt"]:
            ours, theirs = [], []
            for round_ in range(arguments.rounds):
                prompts = make_prompts(batch, shape, seed=round_, vocabulary=len(tokenizer))
                ours.append(batch * arguments.tokens / engine.seconds(prompts, arguments.tokens))
                theirs.append(batch * arguments.tokens / generate_seconds(peer, prompts, arguments.tokens))
            row = {"batch": batch, "prompts": shape, "engine": max(ours), "generate": max(theirs)}
            rows.append(row)
            if not arguments.json:
                ratio = max(ours) / max(theirs)
                print(
                    f"{batch:>5}  {shape:<12} {max(ours):>8.0f} {max(theirs):>9.0f} {ratio:>5.1f}x",
                    flush=True,
                )
    engine.scheduler.stop()
    if arguments.json:
        print(
            json.dumps(
                {"dtype": str(dtype)[6:], "threads": torch.get_num_threads(), "tokens_per_second": rows}
            )
        )
    return 0


class InProcess:
    """The engine without HTTP."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._told: queue.SimpleQueue[list[Event]] = queue.SimpleQueue()
        self._tokenizer = tokenizer
        self.scheduler = Scheduler(Runner(model, prefix_tokens=16384), self._told.put)
        self.scheduler.start()

    def seconds(self, prompts: list[list[int]], tokens: int) -> float:
        # Every round has prompts of its own, and the first round of a shape finds nothing in the prefix tree.
        sampling = Sampling(max_tokens=tokens, ignore_eos=True)
        start = time.perf_counter()
        self.scheduler.submit(
            [
                Sequence.start(p, sampling, tokenizer=self._tokenizer, end_tokens=frozenset(), client=None)
                for p in prompts
            ]
        )
        unfinished = len(prompts)
        while unfinished:
            for _, event in self._told.get():
                assert isinstance(event, Emitted), event
                unfinished -= event.finish is not None
        return time.perf_counter() - start


def generate_seconds(model: Any, prompts: list[list[int]], tokens: int) -> float:
    ids = torch.tensor(prompts)
    start = time.perf_counter()
    with torch.inference_mode():
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            do_sample=True,
            temperature=1.0,
            top_k=0,
        )
    return time.perf_counter() - start


def make_prompts(batch: int, shape: str, *, seed: int, vocabulary: int) -> list[list[int]]:
    # The batch is in the seed, so that no case finds the prompts of another in the prefix tree.
    random = torch.Generator().manual_seed(1000 * seed + batch + (len(shape) << 20))

    def draw(count: int) -> list[int]:
        ids: list[int] = torch.randint(5, vocabulary, (count,), generator=random).tolist()
        return ids

    common = draw(COMMON)
    endings = [draw(PROMPT - COMMON) for _ in range(GROUPS if shape == "8 groups" else 1)]
    return [common + endings[i % len(endings)] for i in range(batch)]


if __name__ == "__main__":
    sys.exit(main())
