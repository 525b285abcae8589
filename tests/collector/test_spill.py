"""Open attempts beyond the memory limit: on disk, whole, and gone when they are written."""

import math
from pathlib import Path

import pytest
import spans
from journal_place import Place

from agentlightning.collector import conversion, open_attempts
from agentlightning.collector import spill as spill_module
from agentlightning.collector.span import Event, Link, Resource, Span
from agentlightning.collector.spill import Spill


def a_span(number: int, resource: Resource) -> Span:
    values = {
        "text": "é\ud800"[:1],
        "bytes": b"\xff",
        "int": 2**60,
        "float": -0.0,
        "list": [1, [True, None]],
        "map": {"a": {}},
    }
    return Span(
        "span",
        "ab" * 16,
        f"{number:016x}",
        None,
        "name",
        1,
        2,
        values,
        resource,
        events=[Event("event", 3, {"nan": math.inf})],
        links=[Link("cd" * 16, "ef" * 8, {}, "state", 1, 2)],
        rollout_id="r",
        attempt=3,
    )


def fields(span: Span) -> list[object]:
    return [getattr(span, name) for name in Span.__dataclass_fields__ if name != "resource"]


def test_spans_come_back_as_they_were_and_share_their_resource(tmp_path: Path) -> None:
    spill = Spill(tmp_path)
    resource = Resource({"service.name": "x"})
    sent = [a_span(n, resource) for n in range(5)]
    place = spill.write(sent)
    back = spill.read(place)
    assert [fields(span) for span in back] == [fields(span) for span in sent]
    assert {id(span.resource) for span in back} == {id(back[0].resource)}
    assert back[0].resource.attributes == resource.attributes
    assert list(tmp_path.iterdir()) == []  # it has no name: nothing is left by a crash


def test_a_segment_goes_when_nothing_in_it_is_needed(tmp_path: Path) -> None:
    spill = Spill(tmp_path, segment_bytes=2000)
    places = [spill.write([a_span(n, Resource({}))]) for n in range(40)]
    assert spill.segments == len({place.segment for place in places}) > 3
    for place in places[1:]:
        spill.release(place)
    assert spill.segments == 2  # the first, which is needed, and the current one
    assert spill.bytes == places[0].length
    assert spill.read(places[0])[0].span_id == f"{0:016x}"
    spill.release(places[0])
    assert (spill.segments, spill.bytes) == (1, 0)


def test_what_the_disk_does_not_take_stays_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_attempts, "MEMORY_BYTES", 2000)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    place = Place(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(spill_module.os, "pwrite", full)
        for n in range(6):
            place.send(spans.gateway_call("r", n))
        place.run()
        (attempt,) = place.converter._open
        assert (attempt.places, len(attempt.spans)) == ([], 6)
    place.send(spans.gateway_call("r", 6))
    place.run()
    assert attempt.places
    place.seal("r", None)
    place.run()
    assert place.calls("r") == 7


def test_memory_stays_within_its_limit_and_each_span_is_decoded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[int] = []
    decode = conversion.decode
    monkeypatch.setattr(
        conversion,
        "decode",
        lambda record, counters: (decoded.append(record.position), decode(record, counters))[1],
    )
    monkeypatch.setattr(open_attempts, "MEMORY_BYTES", 20_000)
    place = Place(tmp_path)
    rollouts = [f"r{n}" for n in range(30)]
    for call in range(
        8
    ):  # each record holds a span of every attempt: read again for each it would be quadratic
        place.send(*(spans.gateway_call(rollout, call) for rollout in rollouts))
        place.run()
        assert place.converter._open._held <= 20_000
    for rollout in rollouts:
        place.seal(rollout, None)
        place.run()
    assert len(decoded) == 8
    assert len(place.rows()) == 240
    assert place.converter._open._held == 0
    assert place.converter._open._spill.bytes == 0
