"""`agl export`: training sets for other trainers, with tools kept."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from recordings import Spoken, Told, assistant, user, write_recording

from agentlightning.trainer import export_cli

TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
CALLS_TOOL = {
    "role": "assistant",
    "content": None,
    "refusal": None,
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "2"}


def with_tools(last: str) -> list[Spoken]:
    asked = [{"role": "system", "content": "s"}, user("q")]
    return [
        Spoken(messages=asked, answer=CALLS_TOOL, tools=[TOOL]),
        Spoken(messages=[*asked, CALLS_TOOL, RESULT], answer=assistant(last), tools=[TOOL]),
    ]


def single(text: str, question: str = "q", agent: str | None = None) -> list[Spoken]:
    return [Spoken(messages=[user(question)], answer=assistant(text), agent=agent)]


def exported(
    tmp_path: Path, told: list[Told], *options: str, name: str = "out.jsonl"
) -> list[dict[str, Any]]:
    write_recording(tmp_path / "data", told)
    assert export_cli.main([str(tmp_path / "data"), "--out", str(tmp_path / name), *options]) == 0
    if name.endswith(".parquet"):
        rows: list[dict[str, Any]] = pq.read_table(tmp_path / name).to_pylist()
        return rows
    return [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]


def test_a_conversation_with_tools_is_one_row_with_arguments_as_objects(tmp_path: Path) -> None:
    (row,) = exported(tmp_path, [Told("r", with_tools("two"), reward=1.0)], "--format", "sft")
    called = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    assert row == {
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": None, "tool_calls": [called]},
            {"role": "tool", "content": "2", "tool_call_id": "c1"},
            {"role": "assistant", "content": "two"},
        ],
        "tools": [TOOL],
        "task_id": "t",
        "rollout_id": "r",
        "reward": 1.0,
    }


def test_conversations_that_do_not_continue_each_other_are_rows_of_their_own(tmp_path: Path) -> None:
    calls = [*with_tools("two"), *single("summary", "another agent's question", agent="critic")]
    rows = exported(tmp_path, [Told("r", calls)], "--format", "sft")
    assert [len(row["messages"]) for row in rows] == [5, 2]
    (row,) = exported(tmp_path, [Told("r", calls)], "--format", "sft", "--agent", "critic")
    assert row["messages"][-1]["content"] == "summary"


def test_each_call_is_a_prompt_and_its_completion(tmp_path: Path) -> None:
    first, second = exported(tmp_path, [Told("r", with_tools("two"))], "--format", "prompt-completion")
    assert len(first["prompt"]) == 2
    assert first["completion"][0]["tool_calls"][0]["function"]["name"] == "add"
    assert second["prompt"][:2] == first["prompt"]
    assert second["completion"] == [{"role": "assistant", "content": "two"}]


def test_the_best_of_a_group_is_preferred_to_the_worst_if_they_are_far_enough_apart(tmp_path: Path) -> None:
    told = [
        Told("a", single("bad"), reward=0.1, group="g1"),
        Told("b", single("good"), reward=0.9, group="g1"),
        Told("c", single("also good"), reward=0.9, group="g1"),
        Told("d", single("x"), reward=0.4, group="g2"),
        Told("e", single("y"), reward=0.5, group="g2"),
        Told("f", single("alone"), reward=1.0, group="g3"),
        Told("h", single("unjudged"), reward=None, group="g3"),
    ]
    (row,) = exported(tmp_path, told, "--format", "dpo", "--margin", "0.2")
    assert (row["chosen"], row["rejected"]) == ([assistant("good")], [assistant("bad")])
    assert row["prompt"] == [user("q")]
    assert (row["chosen_rollout_id"], row["rejected_rollout_id"]) == ("b", "a")
    assert (row["chosen_reward"], row["rejected_reward"]) == (0.9, 0.1)


def test_what_both_said_first_is_prompt_and_a_pair_without_common_prompt_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = [
        Told("a", with_tools("two"), reward=1.0, group="g1"),
        Told("b", with_tools("three"), reward=0.0, group="g1"),
        Told("c", single("x", "one world"), reward=1.0, group="g2"),
        Told("d", single("y", "another"), reward=0.0, group="g2"),
    ]
    (row,) = exported(tmp_path, told, "--format", "dpo")
    assert [message["role"] for message in row["prompt"]] == ["system", "user", "assistant", "tool"]
    assert (row["chosen"], row["rejected"]) == ([assistant("two")], [assistant("three")])
    assert "1 group_without_common_prompt" in capsys.readouterr().out


def test_labels_say_which_answers_are_desirable(tmp_path: Path) -> None:
    told = [
        Told("a", single("x"), reward=0.7),
        Told("b", single("y"), reward=0.2),
        Told("c", single("z"), reward=None),
    ]
    rows = exported(tmp_path, told, "--format", "kto", "--min-reward", "0.6")
    assert [(row["rollout_id"], row["label"]) for row in rows] == [("a", True), ("b", False)]


def test_only_good_rollouts_are_imitated(tmp_path: Path) -> None:
    told = [Told(f"r{n}", single(str(n)), reward=n / 4, group=f"g{n % 2}") for n in range(5)]
    rows = exported(tmp_path, told, "--format", "sft", "--min-reward", "0.25", "--best-of-group", "1")
    assert sorted(row["rollout_id"] for row in rows) == ["r3", "r4"]


def test_parquet_holds_the_same_with_arguments_and_tools_as_text(tmp_path: Path) -> None:
    told = [Told("a", with_tools("two"), reward=1.0), Told("b", with_tools("three"), reward=0.0)]
    for form in ("sft", "prompt-completion", "dpo", "kto"):
        lines = exported(tmp_path, told, "--format", form)
        rows = exported(tmp_path, told, "--format", form, name="out.parquet")
        assert len(rows) == len(lines)
        assert json.loads(rows[0]["tools"]) == lines[0]["tools"] == [TOOL]
    (call,) = pq.read_table(tmp_path / "out.parquet").to_pylist()[0]["completion"][0]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"a": 1}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--format", "sft", "--out", "x.csv"], "must end in .jsonl or .parquet"),
        (["--format", "dpo", "--out", "x.jsonl", "--min-reward", "1"], "use --margin"),
        (["--format", "kto", "--out", "x.jsonl", "--best-of-group", "1"], "learns to avoid"),
        (
            ["--format", "dpo", "--out", "x.jsonl", "--margin", "9"],
            "gives no row of this format (left out: 1 group_",
        ),
        (["--format", "sft", "--out", "/no/such/folder/x.jsonl"], "cannot be written"),
    ],
)
def test_mistakes_are_one_sentence_and_leave_no_file(
    options: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    told = [Told("a", single("x"), reward=1.0), Told("b", single("y"), reward=0.0)]
    write_recording(tmp_path / "data", told)
    assert export_cli.main([str(tmp_path / "data"), *options]) == 2
    assert sentence in capsys.readouterr().err
    assert not [path for path in tmp_path.iterdir() if "x." in path.name]
