"""The other side of `exports.py`: TRL loads each file and makes one optimiser step. Runs in TRL's environment.

Prints one line of JSON per file.
"""

import json
import sys
from pathlib import Path
from typing import Any

from datasets import load_dataset
from transformers import AutoTokenizer
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

try:
    from trl import KTOConfig, KTOTrainer
except ImportError:  # in some versions it is kept apart
    from trl.experimental.kto import KTOConfig, KTOTrainer

TRAINERS = {
    "sft": (SFTTrainer, SFTConfig),
    "prompt-completion": (SFTTrainer, SFTConfig),
    "dpo": (DPOTrainer, DPOConfig),
    "kto": (KTOTrainer, KTOConfig),
}


def main() -> None:
    scratch, forms = Path(sys.argv[1]), sys.argv[2:]
    tokenizer = AutoTokenizer.from_pretrained(scratch / "model")
    for form in forms:
        for ending, loader in (("jsonl", "json"), ("parquet", "parquet")):
            print(json.dumps(trained(scratch, form, ending, loader, tokenizer)), flush=True)


def trained(scratch: Path, form: str, ending: str, loader: str, tokenizer: Any) -> dict[str, Any]:
    trainer, config = TRAINERS[form]
    result = {
        "format": form,
        "file": ending,
        "trainer": trainer.__name__,
        "rows": 0,
        "loss": None,
        "error": None,
    }
    try:
        rows = load_dataset(
            loader,
            data_files=str(scratch / f"{form}.{ending}"),
            split="train",
            cache_dir=str(scratch / "cache"),
        )
        result["rows"] = len(rows)
        settings = config(
            output_dir=str(scratch / "out"),
            use_cpu=True,
            bf16=False,
            max_steps=1,
            per_device_train_batch_size=2,
            report_to=[],
            max_length=512,
        )
        made = trainer(str(scratch / "model"), args=settings, train_dataset=rows, processing_class=tokenizer)
        result["loss"] = made.train().training_loss
    except Exception as error:  # noqa: BLE001 – the table says which format it was
        result["error"] = f"{type(error).__name__}: {error}"[:300]
    return result


if __name__ == "__main__":
    main()
