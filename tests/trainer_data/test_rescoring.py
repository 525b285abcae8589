"""`agl rescore`: new rewards as a new generation; failures cost their rollout alone."""

import json
from pathlib import Path

import pytest
import spans
from recordings import Spoken, Told, assistant, user, write_recording

from agentlightning.collector.convert_cli import convert
from agentlightning.proto.dataset import open_dataset
from agentlightning.trainer import rescore_cli

REWARDS = """
import os, time

def length(rollout):
    assert rollout.messages[-1]["role"] == "assistant"
    assert rollout.transitions[-1]["response"]["choices"][0]["message"] == rollout.messages[-1]
    return float(len(rollout.messages[-1]["content"]))

def exact(rollout):
    right = rollout.messages[-1]["content"] == rollout.task["reference"]["answer"]
    return {"reward": float(right), "asked": float(rollout.task["input"]["q"] == "?")}

def troubled(rollout):
    number = int(rollout.rollout_id[1:])
    if number == 0:
        raise ValueError("no idea")
    if number == 1:
        time.sleep(60)
    if number == 2:
        os._exit(3)
    if number == 3:
        return float("nan")
    if number == 4:
        return None
    return 7

def one(rollout):
    return 1.0
"""


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)
    calls = [
        [Spoken(messages=[user("?")], answer=assistant("a" * n), prompt=[1], response=[2])] for n in range(8)
    ]
    told = [Told(f"r{n}", calls[n], reward=0.5, input={"q": "?"}) for n in range(8)]
    return write_recording(tmp_path / "data", told, files=2)


def rewards(data: Path) -> dict[str, float]:
    return {row["rollout_id"]: row["reward"] for row in open_dataset(data).table("rollouts").to_pylist()}


def test_new_rewards_are_a_new_generation_and_the_rest_is_as_it_was(data: Path) -> None:
    before = {
        name: open_dataset(data).table(name).sort_by("rollout_id") for name in ("transitions", "rollouts")
    }
    assert rescore_cli.main([str(data), "--reward", "my_rewards:length", "--workers", "2"]) == 0
    assert rewards(data) == {f"r{n}": float(n) for n in range(8)}
    dataset = open_dataset(data)
    assert dataset.table("transitions").sort_by("rollout_id").equals(before["transitions"])
    columns = [name for name in before["rollouts"].column_names if name not in ("reward", "rewards")]
    assert (
        dataset.table("rollouts")
        .sort_by("rollout_id")
        .select(columns)
        .equals(before["rollouts"].select(columns))
    )
    assert {entry.generation for entry in dataset.attempts.values()} == {1}
    assert len(dataset.table("spans")) == 8 + 8  # the new judgements are among the spans


def test_doing_it_again_does_nothing(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rescore_cli.main([str(data), "--reward", "my_rewards:one"]) == 0
    manifests = len(open_dataset(data).manifests)
    files = sorted(data.glob("*/*"))
    assert rescore_cli.main([str(data), "--reward", "my_rewards:one"]) == 0
    assert "8 rollouts judged, 0 changed." in capsys.readouterr().out
    assert len(open_dataset(data).manifests) == manifests
    assert sorted(data.glob("*/*")) == files


def test_a_dry_run_shows_the_difference_and_writes_nothing(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {
        path: path.read_bytes() for path in data.rglob("*") if path.is_file() and "lock" not in path.parts[-2]
    }
    assert rescore_cli.main([str(data), "--reward", "my_rewards:one", "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "8 rollouts judged, 8 would change." in text
    assert "mean reward before 0.500" in text
    assert "mean reward after  1.000" in text
    assert "r0  0.5 → 1" in text
    assert all(path.read_bytes() == content for path, content in files.items())
    assert rewards(data)["r0"] == 0.5


def test_a_function_that_fails_costs_its_rollout_alone_under_a_name(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--reward", "my_rewards:troubled", "--timeout", "2", "--workers", "2", "--json"]
    assert rescore_cli.main([str(data), *options]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["failures"] == {
        "reward_raised": 1,
        "reward_timeout": 1,
        "reward_process_died": 1,
        "reward_not_finite": 1,
        "reward_no_number": 1,
    }
    assert "ValueError: no idea (my_rewards.py:" in document["examples"]["reward_raised"]
    assert rewards(data) == dict.fromkeys((f"r{n}" for n in range(5)), 0.5) | dict.fromkeys(
        ("r5", "r6", "r7"), 7.0
    )


def test_named_rewards_and_references_of_the_tasks(data: Path, tmp_path: Path) -> None:
    task = {"task_id": "t", "input": {}, "reference": {"answer": "aaa"}}
    (tmp_path / "tasks.jsonl").write_text(json.dumps(task))
    assert rescore_cli.main([str(data), "--reward", "my_rewards:exact", "--tasks", "tasks.jsonl"]) == 0
    assert rewards(data)["r3"] == 1.0
    assert rewards(data)["r4"] == 0.0
    (row,) = open_dataset(data).table("rollouts", attempts=[("r3", 0)]).to_pylist()
    assert row["rewards"] == [("asked", 1.0), ("reward", 1.0)]


def test_deriving_the_data_again_from_the_spans_gives_the_new_rewards(data: Path, tmp_path: Path) -> None:
    pieces = [
        spans.gateway_call("r1", 0),
        spans.rollout_span("r1", 1),
        spans.evaluation("9" * 16, 0.25, resource=spans.identity("r1")),
    ]
    (tmp_path / "spans.pb").write_bytes(spans.body(*pieces))
    convert([tmp_path / "spans.pb"], tmp_path / "real")
    assert rewards(tmp_path / "real") == {"r1": 0.25}
    assert rescore_cli.main([str(tmp_path / "real"), "--reward", "my_rewards:one"]) == 0
    assert rewards(tmp_path / "real") == {"r1": 1.0}
    convert([tmp_path / "real"], tmp_path / "again")
    assert rewards(tmp_path / "again") == {"r1": 1.0}
    transitions = [open_dataset(tmp_path / name).table("transitions") for name in ("real", "again")]
    assert transitions[0].equals(transitions[1])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--reward", "my_rewards:none"], "cannot be loaded: AttributeError"),
        (["--reward", "no_such_module:f"], "cannot be loaded: ModuleNotFoundError"),
        (["--reward", "nonsense"], "write module:function"),
        (["--reward", "my_rewards:one", "--run", "other"], "no complete rollouts"),
    ],
)
def test_mistakes_are_one_sentence(
    options: list[str], sentence: str, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rescore_cli.main([str(data), *options]) == 2
    assert sentence in capsys.readouterr().err
