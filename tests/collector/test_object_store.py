"""The collector on an object store, and across checkpoints, compaction and retention."""

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
import pyarrow as pa
import pytest
import spans
from journal_place import Place

from agentlightning.collector.upkeep import clean, compact, retain
from agentlightning.proto import transitions_pb2 as pb
from agentlightning.proto.dataset import open_dataset
from agentlightning.proto.manifests import write_checkpoint
from agentlightning.proto.transitions_pb2_grpc import TransitionsStub


def whole(rollout_id: str, calls: int) -> list[spans.Piece]:
    return [*(spans.gateway_call(rollout_id, n) for n in range(calls)), spans.rollout_span(rollout_id, calls)]


def test_a_collector_writes_to_an_object_store_and_serves_from_it(
    collectors: Callable[[str], Any], tmp_path: Path
) -> None:
    collector = collectors("remote")
    collector.data = f"file://{tmp_path}/objects/data"
    collector.start()
    headers = {"content-type": "application/x-protobuf"}
    with httpx.Client(trust_env=False) as client, grpc.insecure_channel(collector.grpc) as channel:
        body = spans.body(*whole("r", 3))
        assert client.post(f"{collector.http}/v1/traces", content=body, headers=headers).status_code == 200
        stub = TransitionsStub(channel)
        attempts = [pb.Attempt(rollout_id="r", attempt=0, calls_expected=3)]
        answer = stub.Seal(pb.SealRequest(attempts=attempts, timeout_s=20), timeout=40)
        assert [entry.calls_stored for entry in answer.sealed] == [3]
        parts = stub.Fetch(pb.FetchRequest(table="transitions", attempts=attempts), timeout=30)
        rows = pa.concat_tables([pa.ipc.open_stream(part.ipc_stream).read_all() for part in parts])
    assert len(rows) == 3
    assert collector.stop() == 0
    assert len(open_dataset(collector.data).table("transitions")) == 3
    assert not (collector.state / "data").exists()


@pytest.mark.parametrize("seed", range(4))
def test_upkeep_and_kills_in_between_change_no_row(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    place = Place(tmp_path / "rough", f"memory://{tmp_path}")
    calm = Place(tmp_path / "calm")
    for n in range(24):
        pieces = whole(f"r{n}", 2)
        draw.shuffle(pieces)
        for target in (place, calm):
            target.send(*pieces[:2])
            target.seal(f"r{n}", None if n % 3 else 2)  # some too early
            target.send(*pieces[1:])
            target.run(later=3)
        match draw.randrange(5):
            case 0:
                compact(place.dataset)
            case 1:
                write_checkpoint(place.dataset.store, place.dataset.history, grace=-60)
                place.converter.dataset.refresh(look=True)
            case 2:
                clean(place.dataset, grace=-1)
            case 3:
                place.restart()
    compact(place.dataset)
    place.restart()
    place.run(later=1000)
    calm.run(later=1000)
    for table in ("transitions", "spans"):
        assert sorted(map(repr, place.rows(table))) == sorted(map(repr, calm.rows(table)))
    assert place.dataset.counters() == calm.dataset.counters()
    assert len(place.rows()) == 48


def test_what_retention_took_away_does_not_come_back_from_the_journal(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.send(spans.gateway_call("open", 0))  # the journal is needed from here on
    place.send(*whole("old", 2))
    place.seal("old", 2)
    place.run()
    dataset = place.dataset
    assert retain(dataset, max_age=0.0, now=time.time() + 10) == 1
    write_checkpoint(dataset.store, dataset.history, grace=-60)
    place.restart()
    place.send(spans.gateway_call("old", 7))  # late, for something that is gone
    place.seal("open", 1)
    place.run(later=1000)
    assert list(place.dataset.attempts) == [("open", 0)]
    assert place.dataset.counters()["expired"] == 1


def test_two_collectors_write_into_one_data_set(tmp_path: Path) -> None:
    one, two = Place(tmp_path / "one", tmp_path / "data"), Place(tmp_path / "two", tmp_path / "data")
    for n in range(3):  # the same positions, the same numbers of commits
        for name, place in (("a", one), ("b", two)):
            place.send(*whole(f"{name}{n}", 1))
            place.seal(f"{name}{n}", 1)
            place.run()
        one.restart()
        two.restart()
    assert sorted(row["rollout_id"] for row in one.rows()) == ["a0", "a1", "a2", "b0", "b1", "b2"]
