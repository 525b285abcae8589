"""`agl inspect`: what a data set holds, and one rollout call by call."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import spans

from agentlightning.collector import inspect_cli
from agentlightning.collector.convert_cli import convert
from agentlightning.proto.dataset import commit_manifest, open_dataset, write_files
from agentlightning.proto.schemas import SAMPLES


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two rollouts of three calls, one of them aborted; the trainer has used one."""
    call = {"agentlightning__agent__path": ["crew", "writer"]}
    pieces = [
        spans.gateway_call("r1", 0, **call),
        spans.gateway_call(
            "r1",
            1,
            agentlightning__request=json.dumps(
                {
                    "messages": [
                        {"role": "user", "content": "q0"},
                        {"role": "user", "content": "and then?\x1b[31m"},
                    ]
                }
            ),
        ),
        spans.gateway_call("r2", 0, error="aborted"),
        spans.rollout_span("r1", 2),
        spans.rollout_span("r2", 0, state="failed", **{"agentlightning.rollout.cause": "timeout"}),
        spans.evaluation("9" * 16, 0.5, resource=spans.identity("r1")),
    ]
    (tmp_path / "spans.pb").write_bytes(spans.body(*pieces))
    out = tmp_path / "data"
    convert([tmp_path / "spans.pb"], out)
    row: dict[str, Any] = {
        "rollout_id": "r1", "attempt": 0, "step": 4, "sample": 0, "call_ids": ["a", "b"], "reason": "first",
        "token_ids": [1, 2, 3, 4], "mask": [False, True, True, False],
    }  # fmt: skip
    samples = pa.Table.from_pylist([row], schema=pa.schema([f.with_nullable(True) for f in SAMPLES]))
    commit_manifest(out, "trainer", write_files(out, "step-4", {"samples": samples.cast(SAMPLES)}))
    return out


def printed(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert inspect_cli.main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


def test_the_summary_adds_up(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = json.loads(printed(capsys, data, "--json"))
    assert figures["outcomes"] == {"failed: timeout": 1, "succeeded": 1}
    assert figures["rollouts"] == figures["attempts"] == 2
    calls = figures["calls"]
    assert (calls["all"], calls["failed"], calls["stored"], calls["expected"]) == (3, 1, 2, 2)
    assert calls["by_agent"] == {"writer": 1, "none": 2}
    assert figures["tokens"] == {"prompt": 9, "response": 9}
    assert figures["versions"] == {"3": 3}
    assert figures["rewards"]["reward"]["mean"] == 0.5
    assert figures["samples"] == {
        "all": 1,
        "steps": 1,
        "by_reason": {"first": 1},
        "tokens_trained": 2,
        "tokens_of_context": 2,
    }


def test_the_summary_for_the_terminal_names_everything(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(capsys, data)
    for part in (
        "2 rollouts",
        "failed: timeout",
        "reward",
        "calls by weight version",
        "why a sample began",
        "first",
    ):
        assert part in text


def test_a_rollout_is_shown_call_by_call(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, data, "--rollout", "r1")
    for part in (
        "rollout r1, attempt 0: succeeded",
        "rewards: reward 0.5",
        "2 stored of 2 expected",
        "call 0 · crew › writer · policy · 3 → 3 tokens, log-prob mean -0.500, version 3 · stop",
        "⇒ assistant: a0",
        "[1 messages as before]",
        "and then?\\x1b[31m",  # no control character reaches the terminal
        "sample 0 of step 4: began because first; 2 calls, 4 tokens, 2 trained",
    ):
        assert part in text, part
    assert "\x1b" not in text
    assert "user: q0" in printed(capsys, data, "--rollout", "r1", "--full").split("call 1")[1]


def test_a_rollout_as_json_holds_bodies_and_figures(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = json.loads(printed(capsys, data, "--rollout", "r2", "--json"))
    assert (shown["state"], shown["cause"]) == ("failed", "timeout")
    (call,) = shown["calls"]
    assert call["error"] == "aborted"
    assert call["request"]["messages"][0]["content"] == "q0"
    assert (call["prompt_tokens"], call["response_tokens"]) == (3, 3)


def test_rollouts_are_listed(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [line.split()[0] for line in printed(capsys, data, "--list").splitlines()] == [
        "rollout",
        "r1",
        "r2",
    ]


def test_one_run_alone_is_shown(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(printed(capsys, data, "--run", "other", "--json"))["attempts"] == 0
    assert json.loads(printed(capsys, data, "--run", "run", "--json"))["calls"]["all"] == 3


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--rollout", "r3"], "has no rollout 'r3'. Valid names: r1, r2."),
        (["--rollout", "r1", "--attempt", "7"], "Rollout r1 has no attempt 7: it has 0."),
    ],
)
def test_what_is_not_there_is_one_sentence(
    arguments: list[str], sentence: str, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert inspect_cli.main([str(data), *arguments]) == 2
    assert sentence in capsys.readouterr().err


def test_a_folder_that_is_no_data_set_is_said_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect_cli.main([str(tmp_path)]) == 2
    assert "is not a data set" in capsys.readouterr().err


def test_an_empty_data_set_can_be_inspected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "manifests").mkdir()
    assert "0 rollouts" in printed(capsys, tmp_path)
    assert open_dataset(tmp_path).attempts == {}
