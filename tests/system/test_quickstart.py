"""The quickstart itself, cut short: the real model, the real AutoGen agent, one step."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentlightning.proto.dataset import open_dataset


@pytest.mark.slow
def test_the_quickstart_runs_a_real_autogen_agent_on_a_real_model(tmp_path: Path) -> None:
    short = ["train.steps=1", "train.groups_per_step=3", "train.group_size=4", "evaluate.tasks=4"]
    done = subprocess.run(
        [sys.executable, "-m", "agentlightning.cli", "quickstart", f"run.root={tmp_path}", *short],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_WAIT_POLICY": "passive"},
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Engine and trainer agree" in done.stdout
    assert "step   1/1" in done.stdout
    assert "What to try next" in done.stdout

    dataset = open_dataset(tmp_path / "quickstart")
    rows = dataset.table("transitions").to_pylist()
    assert len({row["rollout_id"] for row in rows}) == 3 * 4 + 2 * 4
    assert all(row["token_source"] == "engine" and row["error"] is None for row in rows)
    assert any('"tool_calls"' in row["response"] for row in rows)
    samples = dataset.table("samples").to_pylist()
    # Most rollouts are two calls that the merger made one sample of.
    merged = [sample for sample in samples if len(sample["call_ids"]) == 2]
    assert len(merged) > len(samples) / 2

    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(tmp_path / "quickstart" / "checkpoint")
