"""`agl train` that is killed by SIGKILL at named points of its steps, and resumed until it is done.

    python killed.py CONFIG.yaml '[["update", 1], …]'

Each entry is a point and the step at which to die there; an entry [null, seconds] dies at no point but after a time.
One process imports everything once and forks each try from there.
"""

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from agentlightning.proto import dataset
from agentlightning.trainer import checkpoint
from agentlightning.trainer.clients import EngineClient, GatewayClient
from agentlightning.trainer.config import load_config
from agentlightning.trainer.learner import Learner
from agentlightning.trainer.loop import Trainer
from agentlightning.trainer.metrics import Metrics
from agentlightning.trainer.model import load_model, load_tokenizer
from agentlightning.trainer.publish import Publisher
from agentlightning.trainer.run import train

POINTS: dict[str, tuple[Any, str, bool]] = {
    "before the update": (Learner, "update", False),
    "between gradient and new weights": (torch.optim.AdamW, "step", False),
    "after the update": (Learner, "update", True),
    "before the samples": (dataset, "write_files", False),
    "after the samples": (dataset, "write_files", True),
    "in a checkpoint": (checkpoint, "_flush", False),
    "after a checkpoint": (checkpoint, "save", True),
    "before the samples are visible": (Trainer, "_commit_samples", False),
    "before the publish": (Publisher, "prepare", False),
    "between hold and swap": (EngineClient, "load_weights", False),
    "between swap and release": (GatewayClient, "release", False),
    "before the record": (Metrics, "add", False),
    "after the record": (Metrics, "add", True),
}
"""Where: the function, and whether to die after it."""


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()


def arm(point: str, step: int) -> None:
    """Die at a point of a step; the step is counted from what the run's metrics say is done."""
    owner, name, after = POINTS[point]
    function: Callable[..., Any] = getattr(owner, name)
    load: Callable[..., Any] = Trainer._step
    running = [0]

    async def counted(trainer: Trainer, *arguments: Any) -> Any:
        running[0] = trainer.learner.step + 1
        return await load(trainer, *arguments)

    def dies(*arguments: Any, **options: Any) -> Any:
        if running[0] == step and not after:
            die()
        result = function(*arguments, **options)
        if running[0] == step and after:
            die()
        return result

    Trainer._step = counted  # type: ignore[method-assign]
    setattr(owner, name, dies)


def attempt(config: Path, entry: tuple[Any, Any] | None) -> int:
    """One try, in a process of its own. Returns how it ended."""
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1]
    if entry is not None and entry[0] is None:
        threading.Timer(entry[1], die).start()
    elif entry is not None:
        arm(*entry)
    loaded = load_config(config)
    code = train(loaded, resume=(loaded.directory / "config.yaml").exists())
    sys.stdout.flush()
    os._exit(code)


def main() -> int:
    config, entries = Path(sys.argv[1]), json.loads(sys.argv[2])
    model = load_config(config).policy.model
    load_model(model), load_tokenizer(model)  # so that what they import is there, too
    for entry in entries:
        ended = attempt(config, entry)
        if not (os.WIFSIGNALED(ended) and os.WTERMSIG(ended) == signal.SIGKILL):
            print(f"{entry} was not reached: {ended}", flush=True)
            return 1
        print(f"killed: {entry}", flush=True)
    return os.waitstatus_to_exitcode(attempt(config, None))


if __name__ == "__main__":
    sys.exit(main())
