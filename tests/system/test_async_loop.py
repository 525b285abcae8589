"""The asynchronous loop, every component real."""

import json
import os
from collections.abc import Callable
from typing import Any

import pytest
from running import Run, assert_exact, wait_for

from agentlightning.proto.dataset import open_dataset

Make = Callable[..., Run]
ASYNC: dict[str, dict[str, Any]] = {
    "agent": {"target": "lingering:solve", "evaluator": "lingering:evaluate", "concurrency": 8},
    "loop": {"kind": "async", "staleness": 2, "drain_s": 0.0},
    "evaluate": {"tasks": 0},
    # Long answers: some are in flight when weights change, and go on with the new ones.
    "policy": {"sampling": {"temperature": 1.0, "max_tokens": 120}},
    "engine": {"max_model_len": 1024},
}


@pytest.mark.slow
def test_agents_go_on_while_weights_change_and_a_killed_run_takes_its_groups_up_again(make_run: Make) -> None:
    run = make_run(**ASYNC, train={"steps": 5})
    run.start()
    wait_for(lambda: len(run.events("step")) >= 2, why=lambda: run.output.read_text() + run.logs())
    run.kill("trainer")
    saved = max((run.root / "checkpoints").glob("step-*"), key=lambda path: int(path.name[5:]))
    state = json.loads((saved / "state.json").read_text())
    under_way = {number for number, _ in state["cursor"]["supply"]["started"]}
    run.finish("--resume")

    assert_exact(run, steps=5)
    steps = run.events("step")
    assert [event["rollouts"] for event in steps] == [8] * 5
    assert max(event["staleness"]["max"] for event in steps) <= 2
    assert any(event["staleness"]["mean"] > 0 for event in steps)
    assert sum(event["carried_over"] for event in steps) > 0
    dataset = open_dataset(run.root)
    samples = dataset.table("samples").to_pylist()
    assert under_way & {
        int(row["group_id"].rsplit("g", 1)[1]) for row in samples if row["step"] > state["step"]
    }
    assert os.listdir(run.root / "state" / "plans") == ["step-5.json"]  # no older step can be repeated

    rollouts: dict[str, set[int]] = {}
    for call in dataset.table("transitions").to_pylist():
        versions = call["model_versions"][1::2] if call["model_versions"] else [call["model_version"]]
        assert versions == sorted(versions)  # weights only ever get newer
        rollouts.setdefault(call["rollout_id"], set()).update(versions)
    assert any(len(versions) > 1 for versions in rollouts.values())  # carried over a change of weights
    for sample in samples:  # no token mixes two versions: each has one
        sampled = [v for v, flag in zip(sample["versions"], sample["mask"], strict=True) if flag]
        assert sampled == sorted(sampled)
        assert all(0 <= version < sample["step"] for version in sampled)
