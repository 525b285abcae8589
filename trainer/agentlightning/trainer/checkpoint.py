"""Checkpoints: all that a run needs to go on as if it had never stopped.

A checkpoint is a folder `step-N` with `state.safetensors` (trained parameters, optimiser, torch's random state) and
`state.json` (counters, data cursor, the other random states, and the size and digest of the former). It is written under another name,
flushed and renamed: it is there whole or not at all. No pickle.
"""

import hashlib
import json
import logging
import os
import random
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from agentlightning.proto.errors import ConfigError, DataError
from agentlightning.trainer.learner import Learner

__all__ = ["config_digest", "latest", "load", "oldest", "save"]

log = logging.getLogger(__name__)

FORMAT = 1
TENSORS, STATE = "state.safetensors", "state.json"


def save(root: Path, learner: Learner, *, cursor: Any, config_digest: str, keep: int = 2) -> Path:
    """Write `root/step-N` and remove all but the newest `keep`.

    Args:
        cursor: any JSON value: where the loop is in its data.
        config_digest: of the settings that a resumed run must share.
    """
    root.mkdir(parents=True, exist_ok=True)
    final = root / f"step-{learner.step}"
    temporary = Path(tempfile.mkdtemp(prefix=f".step-{learner.step}-", dir=root))
    try:
        tensors = _tensors(learner)
        save_file(tensors, temporary / TENSORS)
        state = {
            "format": FORMAT,
            "step": learner.step,
            "version": learner.version,
            "config_digest": config_digest,
            "cursor": cursor,
            "size": (temporary / TENSORS).stat().st_size,
            "python_random": random.getstate(),
            "numpy_random": _numpy_state(),
        }
        (temporary / STATE).write_text(json.dumps(state))
        for name in (TENSORS, STATE):
            _flush(temporary / name)
        _flush(temporary)
        if final.exists():  # of this very step: the new one has the newer cursor
            os.rename(final, old := Path(tempfile.mkdtemp(prefix=".old-", dir=root)) / "step")
            os.rename(temporary, final)
            shutil.rmtree(old.parent)
        else:
            os.rename(temporary, final)
        _flush(root)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    for path in _complete(root)[keep:]:
        shutil.rmtree(path)
    return final


def latest(root: Path) -> Path | None:
    """The newest complete checkpoint, if there is one."""
    return next(iter(_complete(root)), None)


def oldest(root: Path) -> int:
    """Step of the oldest complete checkpoint: nothing before it will ever be repeated. 0: there is none."""
    complete = _complete(root)
    return int(complete[-1].name.removeprefix("step-")) if complete else 0


def load(path: Path, learner: Learner, *, config_digest: str | None = None) -> Any:
    """Put a learner, and this process's random generators, where they were; the cursor that was saved with them."""
    state = _read_state(path)
    if state is None:
        raise DataError(f"{path} is not a complete checkpoint. Resume from another one, or start a new run.")
    if config_digest is not None and state["config_digest"] != config_digest:
        raise ConfigError(
            f"The checkpoint {path} was written under other settings. Restore the settings, or start a new run."
        )
    try:
        tensors = load_file(path / TENSORS, device="cpu")
    except SafetensorError as error:
        raise DataError(f"The checkpoint {path} cannot be read: {error}.") from error
    _check_names(path, tensors, learner)
    with torch.no_grad():
        for name, parameter in learner.trainable.items():
            parameter.copy_(tensors[f"parameter.{name}"])
    learner.optimizer.load_state_dict(_optimizer_state(learner, tensors))
    torch.set_rng_state(tensors["torch_random"])
    if learner.device.type == "cuda" and "cuda_random" in tensors:
        torch.cuda.set_rng_state(tensors["cuda_random"], learner.device)
    version, internal, gauss = state["python_random"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy_random"]
    np.random.set_state((name, np.array(keys, np.uint32), position, has_gauss, cached))
    learner.step, learner.version = state["step"], state["version"]
    return state["cursor"]


def config_digest(settings: Any) -> str:
    """A digest of settings (any JSON value) that does not depend on the order of their keys."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _tensors(learner: Learner) -> dict[str, torch.Tensor]:
    tensors = {"torch_random": torch.get_rng_state()}
    if learner.device.type == "cuda":
        tensors["cuda_random"] = torch.cuda.get_rng_state(learner.device)
    for name, parameter in learner.trainable.items():
        tensors[f"parameter.{name}"] = parameter.detach().cpu().contiguous()
        for key, value in learner.optimizer.state[parameter].items():
            tensors[f"optimizer.{key}.{name}"] = value.detach().cpu().contiguous()
    return tensors


def _optimizer_state(learner: Learner, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    state = learner.optimizer.state_dict()
    entries = {}
    for i, name in enumerate(learner.trainable):
        values = {
            key: tensors[f"optimizer.{key}.{name}"]
            for key in ("step", "exp_avg", "exp_avg_sq")
            if f"optimizer.{key}.{name}" in tensors
        }
        if values:  # none before the first step
            entries[i] = values
    return {"state": entries, "param_groups": state["param_groups"]}


def _check_names(path: Path, tensors: dict[str, torch.Tensor], learner: Learner) -> None:
    saved = {
        key.removeprefix("parameter."): t.shape for key, t in tensors.items() if key.startswith("parameter.")
    }
    wanted = {name: parameter.shape for name, parameter in learner.trainable.items()}
    different = sorted(name for name in saved.keys() | wanted.keys() if saved.get(name) != wanted.get(name))
    if different:
        raise ConfigError(
            f"The checkpoint {path} is of another model or another LoRA setting: {len(different)} parameters differ, "
            f"the first is {different[0]}."
        )


def _numpy_state() -> Sequence[Any]:
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return [name, np.asarray(keys).tolist(), position, has_gauss, cached]


def _complete(root: Path) -> list[Path]:
    """Complete checkpoints, newest first."""
    if not root.is_dir():
        return []
    numbered = [(int(m[1]), p) for p in root.iterdir() if (m := re.fullmatch(r"step-(\d+)", p.name))]
    complete = []
    for _, path in sorted(numbered, reverse=True):
        if _read_state(path) is None:
            log.warning("%s is not a complete checkpoint and is passed over.", path)
        else:
            complete.append(path)
    return complete


def _read_state(path: Path) -> dict[str, Any] | None:
    try:
        state = json.loads((path / STATE).read_text())
        if state["format"] != FORMAT or state["size"] != (path / TENSORS).stat().st_size:
            return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return state


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
