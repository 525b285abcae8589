from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from running import Run
from tinymodel import build_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-model")
    build_tiny_model(folder)
    return folder


@pytest.fixture
def make_run(tmp_path: Path, tiny_model: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def make(**sections: dict[str, Any]) -> Run:
        config: dict[str, dict[str, Any]] = {
            "run": {"name": "run", "root": str(tmp_path)},
            "agent": {
                "target": "letters:solve",
                "evaluator": "letters:evaluate",
                "concurrency": 8,
                "timeout_s": 60,
            },
            "tasks": {"train": "letters:tasks", "val": "letters:tasks"},
            "policy": {
                "name": "tiny",
                "model": str(tiny_model),
                "dtype": "float32",
                "sampling": {"temperature": 1.0, "max_tokens": 12},
            },
            "engine": {"dtype": "float32", "max_model_len": 512},
            "train": {
                "steps": 3,
                "groups_per_step": 2,
                "group_size": 4,
                "learning_rate": 1e-3,
                "refill_rounds": 0,
            },
            "evaluate": {"tasks": 4},
        }
        for name, values in sections.items():
            config[name] = {**config.get(name, {}), **values}
        root = Path(config["run"]["root"])
        root.mkdir(exist_ok=True)
        run = Run(root, config)
        runs.append(run)
        return run

    yield make
    for run in runs:
        run.stop()
