"""Peak memory of an update: by the budget of a pass, activation checkpointing, LoRA and bf16.

    python benchmarks/memory.py

Two groups of 8 rollouts, prompts of 500 tokens, answers of about 200, on a random Llama of some 20 million parameters. Each
variant runs in a process of its own; the peak is what the learner itself reports of the phase `backward`, less what the
process held before it. On a CPU that is resident memory, on a GPU what torch had allocated.
"""

import json
import os
import subprocess
import sys

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

VARIANTS: dict[str, dict[str, object]] = {
    "budget 4096": {"max_tokens": 4096},
    "budget 2048": {"max_tokens": 2048},
    "budget 1024": {"max_tokens": 1024},
    "budget 4096, checkpointing": {"max_tokens": 4096, "gradient_checkpointing": True},
    "budget 4096, bf16": {"max_tokens": 4096, "dtype": "bfloat16"},
    "budget 4096, LoRA r 16": {"max_tokens": 4096, "lora": 16},
    "budget 4096, LoRA r 16, checkpointing": {"max_tokens": 4096, "lora": 16, "gradient_checkpointing": True},
}


def main() -> int:
    if len(sys.argv) > 1:
        print(json.dumps(measure(VARIANTS[sys.argv[1]])))
        return 0
    print(f"{'':<42}{'passes':>8}{'peak MiB':>10}{'seconds':>10}")
    for name in VARIANTS:
        done = subprocess.run([sys.executable, __file__, name], check=True, capture_output=True, text=True)
        result = json.loads(done.stdout.splitlines()[-1])
        print(
            f"{name:<42}{result['passes']:>8.0f}{result['peak']:>10,.0f}{result['seconds']:>10.1f}",
            flush=True,
        )
    return 0


def measure(variant: dict[str, object]) -> dict[str, float]:
    import torch
    from packing import VOCABULARY, make_batch
    from transformers import LlamaConfig, LlamaForCausalLM

    from agentlightning.trainer.adapters import LoraSettings
    from agentlightning.trainer.advantage import score
    from agentlightning.trainer.learner import Learner, LearnerSettings
    from agentlightning.trainer.samples import build_samples

    calls, outcomes = make_batch(2, 500, 200)
    scored = score(build_samples(calls), outcomes)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=384,
            intermediate_size=1024,
            num_hidden_layers=12,
            num_attention_heads=6,
            num_key_value_heads=2,
            attn_implementation="sdpa",
        )
    )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options = {"dtype": "float32"} | variant
    rank = options.pop("lora", None)
    lora = LoraSettings(rank=int(str(rank))) if rank else None
    learner = Learner(model.to(device), LearnerSettings(lora=lora, **options))  # type: ignore[arg-type]
    with learner.memory.phase("before"):
        pass
    before = learner.memory.take()["before"]
    metrics = learner.update(scored.samples, scored.advantages).metrics
    return {
        "peak": metrics["peak_memory_backward_mib"] - before,
        "passes": metrics["micro_batches"],
        "seconds": metrics["seconds"],
    }


if __name__ == "__main__":
    sys.exit(main())
