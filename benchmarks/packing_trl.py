"""One side of `packing.py`: TRL's GRPOTrainer on samples that were made beforehand. Runs in TRL's environment.

Prints one line of JSON: token positions computed in one optimiser step, and seconds of each step. A forward hook counts,
so passes without gradient count too, as far as TRL makes them.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

SIZE = 8


class Clock(TrainerCallback):
    def __init__(self, counted: list[int]) -> None:
        self.counted = counted
        self.seconds: list[float] = []
        self.tokens: list[int] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.counted.clear()
        self.began = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.perf_counter() - self.began)
        self.tokens.append(sum(self.counted))


def main() -> None:
    scratch, steps = Path(sys.argv[1]), int(sys.argv[2])
    batch = json.loads((scratch / "batch.json").read_text())
    model = LlamaForCausalLM.from_pretrained(scratch / "model", attn_implementation="sdpa")
    groups = len(batch) // SIZE
    words = {f"w{i}": i for i in range(model.config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    counted: list[int] = []
    model.register_forward_pre_hook(
        lambda module, arguments, named: counted.append(named["input_ids"].numel()), with_kwargs=True
    )
    served: dict[str, int] = {}

    def sampled(prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
        rows = []
        for prompt in prompts:
            place = served.get(prompt, 0)
            served[prompt] = place + 1
            rows.append(batch[int(prompt[1:]) * SIZE + place % SIZE])
        return {
            "prompt_ids": [row["prompt"] for row in rows],
            "completion_ids": [row["answer"] for row in rows],
            "logprobs": [[-8.0] * len(row["answer"]) for row in rows],
            "judged": [row["reward"] for row in rows],
        }

    clock = Clock(counted)
    trainer = GRPOTrainer(
        model,
        reward_funcs=lambda judged, **_: judged,
        args=GRPOConfig(
            output_dir=str(scratch / "out"),
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=SIZE,
            gradient_accumulation_steps=groups,
            num_generations=SIZE,
            max_completion_length=max(len(row["answer"]) for row in batch),
            max_steps=steps,
            learning_rate=1e-6,
            beta=0.0,
            gradient_checkpointing=False,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            shuffle_dataset=False,
        ),
        processing_class=PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, bos_token="w0", eos_token="w1", pad_token="w2"
        ),
        train_dataset=Dataset.from_list([{"prompt": f"w{g}"} for g in range(groups)]),
        rollout_func=sampled,
        callbacks=[clock],
    )
    trainer.train()
    print(
        json.dumps({"tokens": clock.tokens[-1], "seconds": clock.seconds, "threads": torch.get_num_threads()})
    )


if __name__ == "__main__":
    main()
