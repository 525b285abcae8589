"""Folder, local object store and memory: the same promises, the same data set."""

import threading
import time
from pathlib import Path

import pytest
import small_data

from agentlightning.proto.dataset import open_dataset
from agentlightning.proto.errors import ConfigError, DataError
from agentlightning.proto.manifests import commit_manifest
from agentlightning.proto.stores import FolderStore, ObjectStore, Store, location, open_store


@pytest.fixture(params=["folder", "file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    match request.param:
        case "folder":
            return open_store(tmp_path / "data")
        case "file":
            return open_store(f"file://{tmp_path}/objects/data")
    return open_store(f"memory://{tmp_path}")


def test_a_location_is_a_folder_or_an_object_store(tmp_path: Path) -> None:
    assert location("runs/demo") == Path("runs/demo")
    assert location("s3://bucket/prefix") == "s3://bucket/prefix"
    assert isinstance(open_store(tmp_path), FolderStore)
    assert isinstance(open_store(str(tmp_path)), FolderStore)
    assert isinstance(open_store("s3://bucket/prefix"), ObjectStore)
    with pytest.raises(ConfigError, match="cannot be used as a data set's place"):
        open_store("floppy://a/b")


def test_files_are_put_listed_read_and_deleted(store: Store) -> None:
    assert store.list("manifests") == []
    store.put("manifests/2.json", b"two")
    store.put("manifests/1.json", b"one")
    store.put("manifests/1.json", b"one again")
    store.put("other/3.json", b"three")
    assert [listed.name for listed in store.list("manifests")] == ["manifests/1.json", "manifests/2.json"]
    assert [listed.name for listed in store.list("manifests", "1.json")] == ["manifests/2.json"]
    (listed,) = store.list("other")
    assert listed.bytes == 5
    assert abs(listed.modified - time.time()) < 60
    assert store.get("manifests/1.json") == b"one again"
    store.delete(["manifests/1.json", "manifests/9.json"])
    with pytest.raises(FileNotFoundError):
        store.get("manifests/1.json")


def test_of_many_writers_each_number_has_one(store: Store) -> None:
    def write(name: str) -> None:
        for _ in range(10):
            commit_manifest(store, name, [])

    threads = [threading.Thread(target=write, args=(f"writer{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    small_data.put(store, "one", ["a"])
    dataset = open_dataset(store.location)
    assert [manifest.number for manifest in dataset.manifests] == list(range(1, 42))
    writers = [manifest.writer for manifest in dataset.manifests[:40]]
    assert sorted(writers) == sorted(f"writer{n}" for n in range(4) for _ in range(10))


def test_a_name_is_given_once(store: Store) -> None:
    won: list[int] = []

    def claim(number: int) -> None:
        if store.put_if_absent("claims/one", b"%d" % number):
            won.append(number)

    threads = [threading.Thread(target=claim, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = won
    assert store.get("claims/one") == b"%d" % winner


def test_a_data_set_is_read_where_it_lies(store: Store) -> None:
    with pytest.raises(DataError, match="is not a data set"):
        open_dataset(store.location)
    small_data.put(store, "one", ["a", "b"])
    small_data.put(store, "two", ["a"], generation=1)
    dataset = open_dataset(store.location)
    assert small_data.calls(dataset) == ["a/0#1", "a/1#1", "b/0", "b/1"]
    assert dataset.names("rollouts") == ["rollouts/one.parquet", "rollouts/two.parquet"]
    assert len(dataset.table("spans", attempts=[("b", 0)])) == 2
    small_data.put(store, "three", ["c"])
    assert ("c", 0) not in dataset.attempts
    dataset.refresh()
    assert ("c", 0) in dataset.attempts
    store.delete(["transitions/three.parquet"])
    with pytest.raises(DataError, match=r"three\.parquet, named by manifest 3, cannot be read"):
        dataset.table("transitions")
