"""Parts of a data set, old versions of it, and what other readers see of its files."""

import datetime
from pathlib import Path
from typing import Any

import duckdb
import polars
import pyarrow.parquet as pq
import pytest
import small_data

from agentlightning.proto.dataset import Dataset, open_dataset
from agentlightning.proto.manifests import commit_manifest, write_checkpoint
from agentlightning.proto.schemas import TABLES

V1 = Path(__file__).parents[1] / "data" / "dataset-v1"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    small_data.put(tmp_path, "one", ["a", "b"], run="r1")
    small_data.put(tmp_path, "two", ["c"], run="r2", split="val", day=1)
    small_data.put(tmp_path, "three", ["d"], run="r2", day=2, truncated=True, calls=1)
    return tmp_path


def day(number: int) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(small_data.START / 1e6 + number * 86_400, datetime.UTC)


@pytest.mark.parametrize(
    ("part", "rollouts"),
    [
        ({}, "abcd"),
        ({"run": "r1"}, "ab"),
        ({"split": "val"}, "c"),
        ({"rollouts": ["a", "d", "unknown"]}, "ad"),
        ({"since": day(1)}, "cd"),
        ({"until": day(1)}, "ab"),
        ({"since": day(1), "until": day(2)}, "c"),
        ({"since": day(1).replace(tzinfo=None), "run": "r2"}, "cd"),
        ({"sealed": True}, "abc"),
        ({"agent": "writer"}, "abc"),
        ({"run": "r2", "sealed": True, "split": "train"}, ""),
    ],
)
def test_a_selection_is_the_same_in_every_table(root: Path, part: dict[str, Any], rollouts: str) -> None:
    dataset = open_dataset(root, **part)
    assert sorted(rollout for rollout, _ in dataset.attempts) == list(rollouts)
    for table in ("transitions", "rollouts", "spans"):
        found = dataset.table(table, columns=["rollout_id"]).column("rollout_id").to_pylist()
        assert sorted(set(found)) == list(rollouts), table
    if part.get("agent"):
        assert set(dataset.table("transitions").column("agent").to_pylist()) == {"writer"}


def test_a_selection_of_attempts_is_narrowed_further(root: Path) -> None:
    dataset = open_dataset(root, run="r2")
    assert len(dataset.table("rollouts", attempts=[("a", 0), ("c", 0)])) == 1


def test_a_data_set_of_the_first_version_is_read() -> None:
    dataset = open_dataset(V1)
    assert {manifest.schema_version for manifest in dataset.manifests} == {1}
    assert {key: entry.generation for key, entry in dataset.attempts.items()} == {("a", 0): 1, ("b", 0): 0}
    for name, schema in TABLES.items():
        assert dataset.table(name).column_names == schema.names
    calls = dataset.table("transitions").sort_by([("rollout_id", "ascending"), ("seq", "ascending")])
    assert calls.column("prompt_token_ids").to_pylist() == [[1, 2, 3], [1, 2, 4], [1, 2, 3]]
    assert dataset.table("spans").column("in_transitions").null_count == len(dataset.table("spans"))
    rewards = {row["rollout_id"]: row["reward"] for row in dataset.table("rollouts").to_pylist()}
    assert rewards == {"a": 0.75, "b": None}


def test_a_checkpoint_says_what_all_manifests_say(root: Path) -> None:
    small_data.put(root, "four", ["a"], generation=1)
    before = Dataset(root)
    rows = small_data.calls(before)
    write_checkpoint(before.store, before.history, grace=-60)
    assert list((root / "manifests").iterdir()) == []
    after = Dataset(root)
    assert small_data.calls(after) == rows
    assert after.attempts == before.attempts
    assert after.counters() == before.counters() == {"calls": 9}
    assert after.history.journals == before.history.journals
    assert after.history.highs == before.history.highs
    small_data.put(root, "five", ["e"])
    after.refresh()
    assert after.manifests[-1].number == 5
    assert ("e", 0) in after.attempts


def test_a_reader_that_was_left_behind_a_checkpoint_finds_its_way(root: Path) -> None:
    sleeper = Dataset(root)
    small_data.put(root, "four", ["e"])
    writer = Dataset(root)
    write_checkpoint(writer.store, writer.history, grace=-60)
    small_data.put(root, "five", ["f"])
    sleeper.refresh(look=True)  # as it does once a minute
    assert small_data.calls(sleeper) == small_data.calls(Dataset(root))
    assert sleeper.history.last == 5


def test_a_writer_that_was_left_behind_a_checkpoint_takes_no_number_twice(root: Path) -> None:
    sleeper = Dataset(root)
    small_data.put(root, "four", ["e"])
    writer = Dataset(root)
    write_checkpoint(writer.store, writer.history, grace=-60)
    assert commit_manifest(sleeper.store, "late", [], after=sleeper.history.last).number == 5


def test_a_commit_lists_nothing_that_a_checkpoint_holds(root: Path) -> None:
    dataset = Dataset(root)
    write_checkpoint(dataset.store, dataset.history, grace=3600)
    for name in ("00000001", "00000002"):  # as if they could not even be listed
        (root / "manifests" / f"{name}.json").unlink()
    assert small_data.put(root, "four", ["e"]).number == 4
    assert len(Dataset(root).attempts) == 5


def test_arrow_duckdb_and_polars_read_the_same_rows_from_the_named_files(root: Path) -> None:
    dataset = Dataset(root)
    for table in ("transitions", "rollouts", "spans"):
        ours = dataset.table(table).to_pylist()
        files = [str(path) for path in dataset.files(table)]
        assert [row for file in files for row in pq.read_table(file, partitioning=None).to_pylist()] == ours
        assert polars.concat([polars.read_parquet(file) for file in files]).height == len(ours)
        columns = [
            name for name in ("rollout_id", "call_id", "response_token_ids") if name in TABLES[table].names
        ]
        wanted = [tuple(row[name] for name in columns) for row in ours]
        assert polars.concat([polars.read_parquet(f, columns=columns) for f in files]).rows() == wanted
        query = f"select {', '.join(columns)} from read_parquet({files!r})"
        assert sorted(duckdb.sql(query).fetchall()) == sorted(wanted)
