"""The converter on a real journal: sealing, generations, and exactly once whenever it is killed."""

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
import spans
from journal_place import Place

from agentlightning.collector import conversion as converter_module
from agentlightning.collector import open_attempts
from agentlightning.collector.records import Kind
from agentlightning.proto import ids


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def whole(rollout_id: str, calls: int) -> list[spans.Piece]:
    return [
        *(spans.gateway_call(rollout_id, n) for n in range(calls)),
        spans.rollout_span(rollout_id, calls),
    ]


def test_an_attempt_is_written_when_it_is_sealed_and_not_before(place: Place) -> None:
    place.send(*whole("r", 2))
    place.run()
    assert place.dataset.attempts == {}
    place.seal("r", 2)
    place.run()
    entry = place.dataset.attempts["r", 0]
    assert (entry.calls_stored, entry.generation, entry.run_id) == (2, 0, "run")
    (row,) = place.rows("rollouts")
    assert (row["state"], row["calls_expected"], row["input"]) == ("succeeded", 2, '{"question": "?"}')
    assert len(place.rows()) == 2
    assert len(place.rows("spans")) == 3
    assert place.told.of("commit") == [{"type": "commit", "manifest": 1}]


def test_attempts_that_are_ready_together_share_one_commit(place: Place) -> None:
    for n in range(10):
        place.send(*whole(f"r{n}", 2))
    place.write(
        (
            Kind.SEAL,
            json.dumps(
                {"attempts": [{"rollout_id": f"r{n}", "attempt": 0, "calls_expected": 2} for n in range(10)]}
            ).encode(),
        )
    )
    place.run()
    assert len(place.dataset.attempts) == 10
    assert len(place.dataset.manifests) == 1
    assert len(place.dataset.files("transitions")) == 1


def test_a_seal_waits_for_the_calls_that_the_ledger_has(place: Place) -> None:
    place.send(
        spans.gateway_call("r", 0), spans.gateway_call("r", 1, error="aborted"), spans.rollout_span("r", 2)
    )
    place.seal("r", 2)
    place.run(later=100)
    assert place.dataset.attempts == {}
    (pending,) = place.told.of("pending")
    assert pending["attempts"] == [
        {
            "rollout_id": "r",
            "attempt": 0,
            "calls_expected": 2,
            "calls_stored": 1,
            "reason": "1 of 2 calls have not arrived.",
        }
    ]
    place.send(spans.gateway_call("r", 2))
    place.run()
    assert place.dataset.attempts["r", 0].calls_stored == 2


def test_a_seal_waits_a_little_for_the_gateways_word_on_the_outcome(place: Place) -> None:
    place.send(spans.gateway_call("r", 0))
    place.seal("r", 1)
    place.run()
    assert place.dataset.attempts == {}
    place.send(spans.rollout_span("r", 1))
    place.run()
    assert place.rows("rollouts")[0]["state"] == "succeeded"
    place.send(spans.gateway_call("s", 0))
    place.seal("s", 1)
    place.run()
    assert ("s", 0) not in place.dataset.attempts
    place.run(later=open_attempts.ROLLOUT_SPAN_SECONDS)
    assert place.dataset.attempts["s", 0].calls_stored == 1


def test_a_seal_without_a_count_writes_what_is_there_even_nothing(place: Place) -> None:
    place.send(spans.gateway_call("r", 0))
    place.seal("r", None)
    place.seal("unknown", None)
    place.seal("none expected", 0)
    place.run(later=3)
    assert place.dataset.attempts["r", 0].calls_stored == 1
    assert place.dataset.attempts["unknown", 0].calls_stored == 0
    assert place.dataset.attempts["none expected", 0].calls_stored == 0
    assert {row["rollout_id"] for row in place.rows("rollouts")} == {"r", "unknown", "none expected"}


def test_without_a_seal_a_finished_attempt_is_written_when_it_is_quiet(place: Place) -> None:
    place.send(*whole("r", 2))
    place.send(spans.gateway_call("open", 0))
    place.run()
    assert place.dataset.attempts == {}
    place.run(later=open_attempts.QUIET_SECONDS + 0.1)
    assert list(place.dataset.attempts) == [("r", 0)]


def test_a_trace_without_a_rollout_is_its_own_once_its_root_and_all_parents_are_in(place: Place) -> None:
    trace = "c" * 32
    chat = spans.span("chat", "2" * 16, trace=trace, parent="1" * 16, gen_ai__operation__name="chat")
    place.send(chat)
    place.run(later=50)
    assert place.dataset.attempts == {}
    place.send(spans.span("root", "1" * 16, trace=trace))
    place.run(later=3)
    assert list(place.dataset.attempts) == [(trace, 0)]
    assert len(place.rows()) == 1


def test_an_idle_attempt_is_written_as_truncated_and_counted(place: Place) -> None:
    place.send(spans.gateway_call("r", 0), spans.rollout_span("r", 5))
    place.run(later=299)
    assert place.dataset.attempts == {}
    place.run(later=301)
    assert place.dataset.attempts["r", 0].calls_stored == 1
    assert place.dataset.counters()["truncated"] == 1


def test_a_late_span_makes_a_new_generation_that_holds_everything(place: Place) -> None:
    place.send(*whole("r", 2), *whole("other", 1))
    place.seal("r", 2)
    place.seal("other", 1)
    place.run()
    place.send(spans.evaluation("9" * 16, 0.75, resource=spans.identity("r")))
    place.run()
    assert place.dataset.attempts["r", 0].generation == 0
    place.run(later=2)
    assert place.dataset.attempts["r", 0].generation == 1
    rollouts = {row["rollout_id"]: row for row in place.rows("rollouts")}
    assert (rollouts["r"]["reward"], rollouts["r"]["late"], rollouts["r"]["calls_expected"]) == (0.75, 1, 2)
    assert place.calls("r") == 2
    assert place.calls("other") == 1
    assert len(place.rows("spans")) == 6
    counters = place.dataset.counters()
    assert (counters["late"], counters["generations"], counters["calls"]) == (1, 1, 3)
    place.send(spans.gateway_call("r", 5))
    place.seal("r", 3)  # a seal does not wait for quiet
    place.run()
    assert place.dataset.attempts["r", 0].calls_stored == 3
    assert place.dataset.counters()["late"] == 2


def test_a_copy_that_comes_late_is_a_duplicate_and_changes_no_row(place: Place) -> None:
    place.send(*whole("r", 2))
    place.seal("r", 2)
    place.run()
    place.send(spans.gateway_call("r", 1))
    place.run(later=5)
    place.send(*whole("s", 1))
    place.seal("s", 1)
    place.run()
    assert place.dataset.attempts["r", 0].generation == 0
    assert place.dataset.counters()["duplicate"] == 1


def test_an_attempts_own_copies_are_counted_in_its_row(place: Place) -> None:
    place.send(*whole("r", 2), spans.gateway_call("r", 1))
    place.send(spans.gateway_call("r", 0))
    place.seal("r", 2)
    place.run()
    assert place.rows("rollouts")[0]["duplicate"] == 2
    assert place.calls("r") == 2


def test_attempts_of_one_rollout_are_kept_apart(place: Place) -> None:
    place.send(spans.gateway_call("r", 0), spans.gateway_call("r", 0, attempt=1))
    place.seal("r", None, attempt=1)
    place.run()
    assert list(place.dataset.attempts) == [("r", 1)]
    assert len(place.rows()) == 1


def test_json_and_logs_in_the_journal_are_read_too(place: Place) -> None:
    place.write((Kind.TRACES_JSON, json.dumps(spans.document(*whole("r", 1))).encode()))
    verdict = {
        "gen_ai.evaluation.name": "reward",
        "gen_ai.evaluation.score.value": 1,
        "agentlightning.rollout.id": "r",
    }
    place.write((Kind.LOGS, spans.log_body("gen_ai.evaluation.result", verdict)))
    place.write((Kind.TRACES_JSON, b""), (Kind.TRACES_JSON, b"{}"))
    place.seal("r", 1)
    place.run()
    assert place.rows("rollouts")[0]["reward"] == 1.0


def test_a_body_that_cannot_be_read_is_counted_and_stops_nothing(place: Place) -> None:
    place.write((Kind.TRACES, b"\xff\xff"), (Kind.TRACES_JSON, b"[3]"), (Kind.SEAL, b"{}"), (Kind.SEAL, b"x"))
    place.send(*whole("r", 1))
    place.seal("r", 1)
    place.run()
    assert place.calls("r") == 1
    assert place.dataset.counters()["undecodable"] == 4


def test_damaged_journal_bytes_are_counted_and_cost_only_themselves(place: Place) -> None:
    place.send(*whole("before", 1))
    begin = int.from_bytes((place.root / "journal" / "committed").read_bytes(), "little")
    place.send(*whole("damaged", 1))
    place.send(*whole("after", 1))
    with open(place.root / "journal" / f"{0:016x}.log", "r+b") as file:
        file.seek(begin + 100)
        file.write(b"\xff" * 8)
    place.restart()
    for rollout in ("before", "damaged", "after"):
        place.seal(rollout, 1)
    place.run(later=3)
    assert sorted(rollout for rollout, _ in place.dataset.attempts) == ["after", "before"]
    place.send(*whole("more", 1))
    place.seal("more", 1)
    place.restart()  # it is read again, and not counted again
    place.run(later=3)
    assert place.dataset.counters()["journal_quarantined"] == 1
    assert len(list((place.root / "journal" / "quarantine").iterdir())) == 1


def test_killed_between_the_files_and_the_manifest_nothing_is_lost_or_doubled(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.send(*whole("r", 2))
    place.seal("r", 2)
    with monkeypatch.context() as patch:

        def die(*_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

        patch.setattr(converter_module, "commit_manifest", die)
        with pytest.raises(KeyboardInterrupt):
            place.run()
    (leftover,) = (place.data / "transitions").iterdir()
    assert place.rows() == []
    place.send(*whole("s", 1))  # so that the next commit holds something else
    place.seal("s", 1)
    place.restart()
    assert not leftover.exists()
    place.run()
    assert place.calls("r") == 2
    assert place.calls("s") == 1
    assert place.dataset.counters()["calls"] == 3
    named = {path.name for path in place.dataset.files("transitions")}
    assert {path.name for path in (place.data / "transitions").iterdir()} == named


def test_a_full_disk_loses_nothing_and_counts_nothing_twice(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.send(*whole("r", 2), spans.gateway_call("r", 0))
    place.seal("r", 2)
    with monkeypatch.context() as patch:

        def full(*_: Any, **__: Any) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr(converter_module, "write_files", full)
        for _ in range(3):
            with pytest.raises(OSError, match="No space"):
                place.converter.step()
    place.run()
    assert place.calls("r") == 2
    assert place.dataset.counters() == {"calls": 2, "duplicate": 1, "records": 1, "spans": 4}


def records(chance: random.Random) -> list[tuple[str, Any]]:
    """A shuffled life of some rollouts: spans in batches, a tenth of them twice, seals, late rewards."""
    pieces: list[spans.Piece] = []
    for n in range(6):
        pieces += whole(f"r{n}", n)
    chance.shuffle(pieces)
    pieces += chance.choices(pieces, k=len(pieces) // 10)
    batches: list[tuple[str, Any]] = []
    while pieces:
        size = chance.randint(1, 4)
        batches.append(("spans", pieces[:size]))
        pieces = pieces[size:]
    for n in range(6):
        batches.insert(chance.randint(0, len(batches)), ("seal", (f"r{n}", n)))
        late = spans.evaluation(
            ids.derived_span_id("late", str(n)), float(n), trace="b" * 32, resource=spans.identity(f"r{n}")
        )
        batches.append(("spans", [late]))
    return batches


def content(place: Place) -> dict[str, list[dict[str, Any]]]:
    found = {}
    for table in ("transitions", "rollouts", "spans"):
        rows = place.rows(table)
        for row in rows:  # what is late, or a copy of what is written, depends on when it was written
            row.pop("late", None)
            row.pop("duplicate", None)
        found[table] = sorted(rows, key=repr)
    return found


@pytest.mark.parametrize("seed", range(12))
def test_whenever_it_is_killed_every_span_is_in_the_data_set_exactly_once(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    script = records(chance)
    calm, rough = Place(tmp_path / "calm"), Place(tmp_path / "rough")
    for kind, given in script:
        for place in (calm, rough):
            if kind == "spans":
                place.send(*given)
            else:
                place.seal(*given)
        if chance.random() < 0.4:
            rough.converter.step(time.time() + chance.choice([0, 0, 2.5]))
        if chance.random() < 0.4:
            rough.restart()
    calm.run(later=1000)
    rough.run(later=1000)
    rough.restart()
    rough.run(later=2000)
    assert content(rough) == content(calm)
    assert {row["rollout_id"]: row["reward"] for row in rough.rows("rollouts")} == {
        f"r{n}": float(n) for n in range(6)
    }
    counters = rough.dataset.counters()
    assert counters["spans"] == calm.dataset.counters()["spans"]
    assert counters["duplicate"] == calm.dataset.counters()["duplicate"]
    assert counters["calls"] == 15 == len(rough.rows())
    late = sum(row["late"] for row in rough.rows("rollouts"))
    assert counters.get("late", 0) == late


def test_attempts_beyond_the_memory_limit_go_to_disk_and_come_out_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = []
    for name, limit in (("ample", 1 << 30), ("tight", 2000)):
        monkeypatch.setattr(open_attempts, "MEMORY_BYTES", limit)
        place = Place(tmp_path / name)
        everything = [piece for n in range(6) for piece in whole(f"r{n}", n)]
        random.Random(1).shuffle(everything)
        for first in range(0, len(everything), 3):
            place.send(*everything[first : first + 3])
        place.run()
        spilled = [bool(attempt.places) for attempt in place.converter._open]
        assert any(spilled) == (name == "tight")
        for n in range(6):
            place.seal(f"r{n}", n)
        place.run()
        places.append(content(place))
    assert places[0] == places[1]


def test_the_journal_can_be_cut_behind_what_is_written(place: Place) -> None:
    place.send(spans.gateway_call("open", 0))
    for n in range(3):
        place.send(*whole(f"r{n}", 1))
        place.seal(f"r{n}", 1)
    place.run()
    journal = place.dataset.manifests[-1].journal
    assert journal["low"] == 0 < journal["high"]  # the first record is still needed
    place.seal("open", None)
    place.run()
    journal = place.dataset.manifests[-1].journal
    assert journal["low"] == journal["high"] == place.converter.position


def test_a_new_journal_beside_an_old_data_set_begins_anew(place: Place, tmp_path: Path) -> None:
    place.send(*whole("r", 1))
    place.seal("r", 1)
    place.run()
    other = Place(tmp_path / "other")
    other.data = place.data
    other.restart()
    assert other.converter.position == 0
    other.send(*whole("s", 1))
    other.seal("s", 1)
    other.run()
    assert {key for key, _ in place.dataset.attempts} == {"r", "s"}
