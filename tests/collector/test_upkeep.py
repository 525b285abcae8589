"""Compaction, retention and deletion: readers see the same rows before, while and after."""

import threading
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import small_data

from agentlightning.collector.cli import main
from agentlightning.collector.convert_cli import convert
from agentlightning.collector.upkeep import Upkeep, clean, compact, retain
from agentlightning.collector.upkeep_settings import UpkeepSettings
from agentlightning.proto.dataset import Dataset, open_dataset
from agentlightning.proto.stores import Store, open_store


def rows(dataset: Dataset) -> dict[str, list[dict[str, Any]]]:
    return {name: dataset.table(name).to_pylist() for name in ("transitions", "rollouts", "spans")}


def many(root: Any, count: int = 12) -> Dataset:
    for n in range(count):
        small_data.put(root, f"f{n}", [f"r{n}a", f"r{n}b"])
    small_data.put(root, "late", ["r3a"], generation=1)
    return Dataset(root)


@pytest.mark.parametrize("kind", ["folder", "memory"])
def test_many_files_become_one_and_every_row_is_as_it_was(kind: str, tmp_path: Path) -> None:
    store: Store = open_store(tmp_path if kind == "folder" else f"memory://{tmp_path}")
    dataset = many(store)
    before, attempts, counters = rows(dataset), dict(dataset.attempts), dataset.counters()
    assert compact(dataset) == 39
    assert compact(dataset) == 0
    assert [len(dataset.names(table)) for table in ("transitions", "rollouts", "spans")] == [1, 1, 1]
    for seen in (dataset, Dataset(store)):
        assert rows(seen) == before
        assert dict(seen.attempts) == attempts
        assert seen.counters() == counters


def test_after_compaction_the_named_files_hold_no_older_generation(tmp_path: Path) -> None:
    dataset = many(tmp_path, 2)
    small_data.put(tmp_path, "later", ["r0a"], generation=1)
    dataset.refresh()
    assert sum(pq.read_metadata(path).num_rows for path in dataset.files("transitions")) == 12
    compact(dataset)
    plain = [pq.read_table(path, partitioning=None).to_pylist() for path in dataset.files("transitions")]
    assert [row for part in plain for row in part] == dataset.table("transitions").to_pylist()
    assert len(dataset.table("transitions")) == 10


def test_readers_are_unharmed_while_it_runs(tmp_path: Path) -> None:
    dataset = many(tmp_path, 30)
    before = rows(dataset)
    stop, wrong = threading.Event(), []

    def read() -> None:
        reader = Dataset(tmp_path)
        while not stop.is_set():
            reader.refresh()
            if reader.table("transitions", columns=["call_id"]).num_rows != len(before["transitions"]):
                wrong.append(reader.history.last)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    try:
        for target in (20_000, 60_000, 1 << 20):
            compact(dataset, target_bytes=target)
            clean(dataset, grace=60)
    finally:
        stop.set()
        for reader in readers:
            reader.join()
    assert not wrong
    assert sorted(map(repr, rows(Dataset(tmp_path))["transitions"])) == sorted(
        map(repr, before["transitions"])
    )


def test_a_late_generation_that_comes_meanwhile_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from agentlightning.collector import upkeep

    dataset = many(tmp_path, 4)
    put = upkeep.put_manifest
    monkeypatch.setattr(
        upkeep,
        "put_manifest",
        lambda store, manifest: (
            small_data.put(tmp_path, "meanwhile", ["r1a"], generation=1) if manifest.number == 6 else None,
            put(store, manifest),
        )[1],
    )
    assert compact(dataset) == 0  # it was overtaken
    assert "r1a/0#1" in small_data.calls(dataset)
    assert "r1a/0" not in small_data.calls(dataset)
    assert compact(dataset) > 0
    assert "r1a/0#1" in small_data.calls(Dataset(tmp_path))
    named = {name for table in ("transitions", "rollouts", "spans") for name in dataset.names(table)}
    small_data.put(tmp_path, "m0-crashed", ["x"])  # its manifest is gone: a compaction that died
    (tmp_path / "manifests" / f"{dataset.history.last + 1:08d}.json").unlink()
    assert clean(dataset, grace=-1, orphans=True) > 3
    there = {f"{p.parent.name}/{p.name}" for p in tmp_path.glob("*/*.parquet")}
    assert there == named  # what was written in vain is gone too


def test_two_compactions_at_once_leave_each_row_once(tmp_path: Path) -> None:
    many(tmp_path, 20)
    before = sorted(small_data.calls(Dataset(tmp_path)))
    workers = [threading.Thread(target=compact, args=(Dataset(tmp_path),)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert small_data.calls(Dataset(tmp_path)) == before


def test_the_old_goes_by_age_and_by_size(tmp_path: Path) -> None:
    now = time.time()
    dataset = many(tmp_path, 6)
    assert retain(dataset, max_age=3600) == 0
    assert retain(dataset, max_age=3600, now=now + 7200) == 7
    assert dict(dataset.attempts) == {}
    assert len(dataset.table("transitions")) == 0
    assert len(dataset.history.expired) == 12
    for n in range(6):
        small_data.put(tmp_path, f"g{n}", [f"new{n}"])
    dataset.refresh()
    size = sum(entry.bytes for entry in dataset.manifests[-1].files)
    assert retain(dataset, max_bytes=3 * size + 10) == 3
    assert sorted(rollout for rollout, _ in dataset.attempts) == ["new3", "new4", "new5"]
    assert sorted(dataset.attempts) == sorted(Dataset(tmp_path).attempts)


def test_what_compaction_made_is_as_old_as_its_rows(tmp_path: Path) -> None:
    dataset = many(tmp_path, 3)
    time.sleep(0.05)
    before = time.time()
    compact(dataset)
    assert retain(dataset, max_age=0.0, now=before) == 1


def test_files_are_deleted_after_the_grace_and_not_before(tmp_path: Path) -> None:
    dataset = many(tmp_path, 3)
    compact(dataset)
    assert clean(dataset, grace=60) == 0
    assert len(list(tmp_path.glob("*/*.parquet"))) == 15
    assert clean(dataset, grace=60, now=time.time() + 61) == 12
    assert len(list(tmp_path.glob("*/*.parquet"))) == 3
    assert len(small_data.calls(Dataset(tmp_path))) == 14


def test_upkeep_does_what_is_due_and_writes_checkpoints(tmp_path: Path) -> None:
    dataset = many(tmp_path, 70)
    calls = small_data.calls(dataset)
    upkeep = Upkeep(dataset, UpkeepSettings(compact_files=16, grace_seconds=-1))
    upkeep.run()
    assert len(dataset.names("transitions")) == 1
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["00000072.json"]
    assert small_data.calls(Dataset(tmp_path)) == calls
    upkeep.run()
    assert small_data.calls(Dataset(tmp_path)) == calls


def test_the_command_compacts_and_what_it_leaves_can_be_converted_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import spans

    bodies = [spans.body(spans.gateway_call(f"r{n}", 0), spans.rollout_span(f"r{n}", 1)) for n in range(3)]
    (tmp_path / "dump").mkdir()
    for n, body in enumerate(bodies):
        (tmp_path / "dump" / f"{n}.bin").write_bytes(body)
    convert([tmp_path / "dump"], tmp_path / "data")
    late = spans.evaluation("9" * 16, 0.5, resource=spans.identity("r0"))
    (tmp_path / "late.bin").write_bytes(spans.body(late))
    wanted = open_dataset(tmp_path / "data").table("transitions")
    small_data.put(tmp_path / "data", "more", ["x"])
    assert main(["compact", str(tmp_path / "data"), "--grace", "-1"]) == 0
    assert "3 files hold 4 attempts" in capsys.readouterr().out
    assert len(list((tmp_path / "data").glob("*/*.parquet"))) == 3
    report = convert([tmp_path / "data"], tmp_path / "again")
    assert not report.refused
    again = open_dataset(tmp_path / "again", rollouts=["r0", "r1", "r2"]).table("transitions")
    assert again.sort_by("rollout_id").equals(wanted.sort_by("rollout_id"))
    with pytest.raises(SystemExit):
        main(["compact"])
    assert main(["compact", str(tmp_path / "nothing")]) == 2
