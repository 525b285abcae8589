"""Do other trainers take what `agl export` writes? TRL loads each file and makes an optimiser step of it.

    python benchmarks/exports.py

TRL is installed in an environment of its own (`benchmarks/peers.py`). The rollouts have tools, tool results and plain
answers; the model is tiny and random, because only the way there is in question.
"""

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "benchmarks")]

import peers  # noqa: E402
from recordings import Spoken, Told, assistant, user, write_recording  # noqa: E402
from tinymodel import build_tiny_model  # noqa: E402

from agentlightning.trainer import export_cli  # noqa: E402
from agentlightning.trainer.export import FORMATS  # noqa: E402
from agentlightning.trainer.model import load_tokenizer  # noqa: E402

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
ADD = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": PARAMETERS}}


def main() -> int:
    home = peers.environment("trl")
    if home is None:
        return 1
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        build_tiny_model(scratch / "model")
        load_tokenizer(scratch / "model").save_pretrained(
            scratch / "model"
        )  # with a template that shows tools
        write_recording(scratch / "data", rollouts())
        for form in FORMATS:
            for ending in ("jsonl", "parquet"):
                out = ["--format", form, "--out", str(scratch / f"{form}.{ending}")]
                with contextlib.redirect_stdout(io.StringIO()):
                    if (code := export_cli.main([str(scratch / "data"), *out])) != 0:
                        return code
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
        command = [home / "bin" / "python", ROOT / "benchmarks" / "exports_trl.py", scratch, *FORMATS]
        answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in answer.stdout.splitlines() if line.startswith('{"format"')]
    print(f"{'format':<20}{'file':<9}{'rows':>5}{'loss':>9}  TRL trainer")
    for line in lines:
        result = line["error"] or line["trainer"]
        loss = "–" if line["loss"] is None else f"{line['loss']:.4f}"
        print(f"{line['format']:<20}{line['file']:<9}{line['rows']:>5}{loss:>9}  {result}")
    if len(lines) < 2 * len(FORMATS):
        print(answer.stderr[-2000:], file=sys.stderr)
        return 1
    return 1 if any(line["error"] for line in lines) else 0


def rollouts() -> list[Told]:
    told = []
    for n in range(4):
        for reward, text in ((1.0, f"It is {n + 1}."), (0.0, "I do not know.")):
            asked = [{"role": "system", "content": "Use the tool."}, user(f"What is {n} + 1?")]
            call = {
                "id": "c1",
                "type": "function",
                "function": {"name": "add", "arguments": f'{{"a": {n}, "b": 1}}'},
            }
            calls: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [call]}
            result = {"role": "tool", "tool_call_id": "c1", "content": str(n + 1)}
            first = Spoken(messages=asked, answer=calls, tools=[ADD])
            second = Spoken(messages=[*asked, calls, result], answer=assistant(text), tools=[ADD])
            told.append(Told(f"tool-{n}-{reward:.0f}", [first, second], reward=reward, group=f"tool-{n}"))
            plain = Spoken(messages=[user("Say it.")], answer=assistant(text))
            told.append(Told(f"plain-{n}-{reward:.0f}", [plain], reward=reward, group=f"plain-{n}"))
    return told


if __name__ == "__main__":
    sys.exit(main())
