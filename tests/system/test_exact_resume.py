"""After `kill -9` at any point of a step a run ends bit by bit as if nothing had happened.

Sampling cannot be repeated bit by bit, so it is done once: a first run samples, undisturbed; then the same run is made
again from the start, of the same recorded rollouts, found by their ids, and is killed at every point.
"""

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from killed import POINTS
from running import AGENTS, Run

from agentlightning.proto.dataset import Dataset
from agentlightning.trainer.config import config_from
from agentlightning.trainer.launch import Layout, Services, launch, start_agents
from agentlightning.trainer.plans import Plans
from agentlightning.trainer.supervisor import Supervisor

STEPS = 4


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[tuple[Services, Layout]]:
    root = tmp_path_factory.mktemp("services")
    config = config_from(
        {
            "run": {"root": str(root)},
            "agent": {"target": "letters:solve", "evaluator": "letters:evaluate", "concurrency": 8},
            "policy": {"name": "tiny", "model": str(tiny_model)},
            "engine": {"dtype": "float32", "max_model_len": 512},
        }
    )
    layout = Layout(config.directory)
    path = os.pathsep.join(filter(None, [str(AGENTS), os.environ.get("PYTHONPATH")]))
    supervisor = Supervisor({"OMP_NUM_THREADS": "1", "PYTHONPATH": path})
    try:
        served = launch(config, layout, supervisor, say=lambda text: None)
        start_agents(config, layout, supervisor, served, say=lambda text: None)
        yield served, layout
    finally:
        supervisor.stop()


def settings(served: Services, layout: Layout, root: Path, kind: str, model: Path) -> dict[str, Any]:
    http = json.loads(layout.ready("collector").read_text())["addresses"]["http"]
    return {
        "run": {"name": kind, "root": str(root)},
        "tasks": {"train": "letters:tasks"},
        "policy": {"name": "tiny", "model": str(model), "dtype": "float32", "sampling": {"max_tokens": 12}},
        "engine": {"url": served.engine, "token_file": str(served.engine_token_file)},
        "collector": {
            "grpc": served.collector_grpc,
            "http": http,
            "token_file": str(layout.token("collector")),
        },
        "gateway": {"url": served.gateway, "token_file": str(layout.token("gateway"))},
        "controller": {"start": False},
        "agent": {"concurrency": 8},
        "train": {
            "steps": STEPS,
            "groups_per_step": 2,
            "group_size": 4,
            "learning_rate": 1e-3,
            "warmup_steps": 3,
        },
        "loop": {"kind": kind, "staleness": 2},
        "evaluate": {"tasks": 0},
        # Not after every step: what was trained since is done again.
        "checkpoint": {"every": 2, "keep": 2},
    }


def outcome(root: Path) -> dict[str, Any]:
    """All that a run leaves behind and must not depend on its being killed, bit by bit."""
    newest = root / "checkpoints" / f"step-{STEPS}"
    state = json.loads((newest / "state.json").read_text())
    state["cursor"]["record"] = {
        k: state["cursor"]["record"][k] for k in ("step", "version", "reward", "groups")
    }
    samples = [entry for manifest in Dataset(root / "data").manifests for entry in manifest.files]
    steps = [
        {key: event[key] for key in ("step", "version", "reward", "rollouts", "groups", "tokens")}
        for event in map(json.loads, (root / "metrics.jsonl").read_text().splitlines())
        if event["event"] == "step"
    ]
    return {
        "state": state,
        "tensors": (newest / "state.safetensors").read_bytes(),
        "weights": (root / "checkpoint" / "model.safetensors").read_bytes(),
        "samples": sorted(
            (entry.path, entry.sha256) for entry in samples if entry.path.startswith("samples")
        ),
        "steps": steps,
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_run_that_is_killed_anywhere_ends_bit_by_bit_as_one_that_is_not(
    services: tuple[Services, Layout], tmp_path: Path, tiny_model: Path, kind: str
) -> None:
    first = Run(tmp_path, settings(*services, tmp_path, kind, tiny_model))
    first.finish()
    expected = outcome(first.root)
    assert [step["step"] for step in expected["steps"]] == list(range(1, STEPS + 1))

    again = tmp_path / "again"
    config = again / "config.yaml"
    again.mkdir()
    config.write_text(yaml.safe_dump(settings(*services, again, kind, tiny_model)))
    if kind == "async":  # when which rollout ended is no property of a run: it is given
        for step, groups in groups_of_steps(first.root).items():
            Plans(Layout(again / kind).plans).write(step, sorted(groups))
    deaths = schedule(random.Random(kind))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(AGENTS), environment.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(AGENTS / "killed.py"), str(config), json.dumps(deaths)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("killed: ") == len(deaths)
    found = outcome(again / kind)
    for name, value in expected.items():
        assert found[name] == value, name


def schedule(chance: random.Random) -> list[tuple[str | None, float]]:
    """Every point once, at a random step, and some moments; checkpoints are made after steps 2 and 4 alone.

    A step whose checkpoint is on disk is not done again: of each such step, one death comes after that.
    """
    deaths: list[tuple[str | None, float]] = [(None, chance.uniform(0.1, 1.5)) for _ in range(2)]
    at: list[tuple[str | None, float]] = [("between hold and swap", 4)]
    names = list(POINTS)
    saved = names.index("after a checkpoint")
    for number, name in enumerate(names):
        steps = [2, 4] if name == "in a checkpoint" else [2] if number == saved else [1, 3]
        at.append((name, chance.choice(steps if number >= saved - 1 else [1, 2, 3, 4])))
    return deaths + sorted(at, key=lambda death: (death[1], names.index(death[0] or "")))


def groups_of_steps(root: Path) -> dict[int, set[int]]:
    groups: dict[int, set[int]] = {}
    for row in Dataset(root).table("samples").to_pylist():
        groups.setdefault(row["step"], set()).add(int(row["group_id"].rsplit("g", 1)[1]))
    return groups
