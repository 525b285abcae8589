from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from agentlightning.proto.dataset import (
    AttemptEntry,
    Dataset,
    commit_manifest,
    describe_file,
    open_dataset,
    write_files,
)
from agentlightning.proto.errors import DataError
from agentlightning.proto.schemas import TABLES, TRANSITIONS


def transition(rollout: str, *, call: str = "c", ids: list[int] | None = None) -> dict[str, Any]:
    return {
        "run_id": "run",
        "rollout_id": rollout,
        "attempt": 0,
        "seq": 0,
        "call_id": call,
        "span_id": "00" * 8,
        "trace_id": "00" * 16,
        "response_token_ids": ids,
        "rewards": [("reward", 1.0)],
        "token_source": "engine",
        "done": True,
        "start_time": 1,
        "duration_ms": 1.0,
        "source": "gateway",
    }


def put(root: Path, name: str, *rows: dict[str, Any], generation: int = 0) -> None:
    table = pa.Table.from_pylist(list(rows), schema=TRANSITIONS)
    files = write_files(root, name, {"transitions": table})
    attempts = [AttemptEntry(row["rollout_id"], 0, "run", 1, generation) for row in rows]
    commit_manifest(root, "collector", files, attempts=attempts, journal={"counters": {"late": generation}})


def test_rows_come_back_as_they_were_to_the_last_token(tmp_path: Path) -> None:
    row = transition("a", ids=[1, 49151, 0])
    put(tmp_path, "one", row)
    (back,) = open_dataset(tmp_path).table("transitions").to_pylist()
    for name, value in row.items():
        if name != "start_time":
            assert back[name] == value
    assert back["prompt_token_ids"] is None  # unknown is not empty


def test_a_file_that_no_manifest_names_does_not_exist(tmp_path: Path) -> None:
    put(tmp_path, "one", transition("a"))
    write_files(tmp_path, "two", {"transitions": pa.Table.from_pylist([transition("b")], schema=TRANSITIONS)})
    assert open_dataset(tmp_path).table("transitions").column("rollout_id").to_pylist() == ["a"]


def test_only_the_newest_generation_of_an_attempt_counts(tmp_path: Path) -> None:
    put(tmp_path, "one", transition("a", call="old"), transition("b", call="b"))
    put(tmp_path, "two", transition("a", call="new"), transition("a", call="late"), generation=1)
    dataset = open_dataset(tmp_path)
    assert sorted(dataset.table("transitions").column("call_id").to_pylist()) == ["b", "late", "new"]
    only = dataset.table("transitions", attempts=[("a", 0)], columns=["call_id"])
    assert sorted(only.column("call_id").to_pylist()) == ["late", "new"]
    assert dataset.attempts["a", 0].generation == 1
    assert dataset.counters() == {"late": 2 - 1}


def test_two_writers_never_take_the_same_number(tmp_path: Path) -> None:
    first = commit_manifest(tmp_path, "collector", [])
    second = commit_manifest(tmp_path, "trainer", [])
    (tmp_path / "manifests" / "00000003.json").touch()  # a third writer is about to
    (tmp_path / "manifests" / "00000003.json").write_bytes(
        (tmp_path / "manifests" / "00000002.json").read_bytes()
    )
    third = commit_manifest(tmp_path, "trainer", [])
    assert [first.number, second.number, third.number] == [1, 2, 4]


def test_refreshing_shows_what_was_added_since(tmp_path: Path) -> None:
    put(tmp_path, "one", transition("a"))
    dataset = open_dataset(tmp_path)
    put(tmp_path, "two", transition("b"))
    assert len(dataset.table("transitions")) == 1
    dataset.refresh()
    assert len(dataset.table("transitions")) == 2


def test_a_missing_or_damaged_file_is_named(tmp_path: Path) -> None:
    put(tmp_path, "one", transition("a"))
    path = tmp_path / "transitions" / "one.parquet"
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(DataError, match=r"one\.parquet, named by manifest 1, cannot be read"):
        open_dataset(tmp_path).table("transitions")
    with pytest.raises(DataError, match="cannot be read"):
        describe_file(tmp_path, "transitions", "transitions/one.parquet")
    with pytest.raises(DataError, match="is not a data set"):
        open_dataset(tmp_path / "transitions")


def test_the_entry_of_a_written_file_can_be_read_from_the_file(tmp_path: Path) -> None:
    table = pa.Table.from_pylist([transition("a")], schema=TRANSITIONS)
    (entry,) = write_files(tmp_path, "one", {"transitions": table})
    assert describe_file(tmp_path, "transitions", entry.path) == entry


def test_rows_of_an_older_schema_get_the_columns_they_lacked(tmp_path: Path) -> None:
    table = pa.Table.from_pylist([transition("a")], schema=TRANSITIONS).drop_columns(["agent_path"])
    import pyarrow.parquet as pq

    (entry,) = write_files(
        tmp_path, "one", {"transitions": pa.Table.from_pylist([transition("a")], schema=TRANSITIONS)}
    )
    pq.write_table(table, tmp_path / entry.path)
    commit_manifest(tmp_path, "collector", [describe_file(tmp_path, "transitions", entry.path)])
    assert open_dataset(tmp_path).table("transitions").column("agent_path").to_pylist() == [None]


def test_an_empty_data_set_has_empty_tables_with_their_columns(tmp_path: Path) -> None:
    commit_manifest(tmp_path, "collector", [])
    for name, schema in TABLES.items():
        assert Dataset(tmp_path).table(name).column_names == schema.names
