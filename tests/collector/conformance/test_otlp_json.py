"""OTLP/JSON: what its encoding adds. `docs/conformance.md` lists the cases."""

import json
from collections import Counter
from typing import Any

import pytest
from otlp_clients import export

from agentlightning.collector.open_attempts import decode

IDS = {"traceId": "0af7651916cd43dd8448eb211c80319c", "spanId": "b7ad6b7169203331"}


def stored(collector: Any) -> list[Any]:
    counters: Counter[str] = Counter()
    return [span for record in collector.journal() for span in decode(record, counters)]


def document(*spans: dict[str, Any]) -> bytes:
    return json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": list(spans)}]}]}).encode()


def attribute(value: Any) -> dict[str, Any]:
    return {**IDS, "attributes": [{"key": "k", "value": value}]}


def kept(collector: Any, *spans: dict[str, Any]) -> list[Any]:
    assert export(collector, "json", document(*spans)).ok
    return stored(collector)


def test_j01_identifiers_are_hex_in_any_case(shared: Any) -> None:
    [span] = kept(shared, {"traceId": IDS["traceId"].upper(), "spanId": "B7ad6B7169203331"})
    assert (span.trace_id, span.span_id) == (IDS["traceId"], IDS["spanId"])


def test_j02_identifiers_in_base64_are_no_identifiers(shared: Any) -> None:
    """protobuf's own JSON mapping would write them so; OTLP does not."""
    answer = export(
        shared, "json", document({"traceId": "CvdlGRbNQ92ESOshHIAxnA==", "spanId": "t61rcWkgMzE="})
    )
    assert (answer.ok, answer.rejected) == (True, 1)
    answer = export(shared, "json", document({"traceId": int("1" * 34), "spanId": int("1" * 18)}))
    assert (answer.ok, answer.rejected) == (True, 1)
    escaped = document(IDS).replace(b'"0af7', b'"\\u0030af7')
    assert export(shared, "json", escaped).ok
    assert [span.trace_id for span in stored(shared)] == [IDS["traceId"]]


def test_j03_integers_of_64_bits_are_text_or_numbers(shared: Any) -> None:
    times = ("1700000000000000001", 1700000000000000001)
    spans = [
        {**IDS, "startTimeUnixNano": t, **attribute({"intValue": v})}
        for t, v in zip(times, ("7", 7), strict=True)
    ]
    assert [(s.start_ns, s.attributes["k"]) for s in kept(shared, *spans)] == [(1700000000000000001, 7)] * 2


def test_j04_integers_keep_all_their_bits(shared: Any) -> None:
    values = [2**63 - 1, -(2**63), 2**53 + 1]
    spans = [attribute({"intValue": form(value)}) for value in values for form in (str, int)]
    assert [span.attributes["k"] for span in kept(shared, *spans)] == [v for v in values for _ in range(2)]


def test_j05_enums_are_numbers(shared: Any) -> None:
    [span] = kept(shared, {**IDS, "kind": 3, "status": {"code": 2, "message": "m"}})
    assert (span.kind, span.status_code, span.status_message) == (3, 2, "m")


def test_j06_bytes_are_base64(shared: Any) -> None:
    assert kept(shared, attribute({"bytesValue": "AAH/"}))[0].attributes["k"] == b"\x00\x01\xff"


def test_j07_doubles_are_numbers_or_names(shared: Any) -> None:
    values = [0.5, 3, "0.25", "Infinity", "-Infinity"]
    spans = [attribute({"doubleValue": value}) for value in values]
    got = [span.attributes["k"] for span in kept(shared, *spans)]
    assert got == [0.5, 3.0, 0.25, float("inf"), float("-inf")]


def test_j08_null_is_absent(shared: Any) -> None:
    span = {**IDS, "name": None, "attributes": None, "events": None, "status": None, "parentSpanId": None}
    [got] = kept(shared, span)
    assert (got.name, got.attributes, got.events, got.parent_span_id) == ("", {}, [], None)
    assert export(shared, "json", b'{"resourceSpans":null}').ok


def test_j09_field_names_are_lower_camel_case_and_protobufs_are_taken(shared: Any) -> None:
    span = {"trace_id": IDS["traceId"], "span_id": IDS["spanId"], "start_time_unix_nano": "5"}
    body = {"resource_spans": [{"scope_spans": [{"spans": [span]}]}]}
    assert export(shared, "json", json.dumps(body).encode()).ok
    assert [s.start_ns for s in stored(shared)] == [5]


@pytest.mark.parametrize(
    "body",
    [
        b"nonsense",
        b'{"resourceSpans":[',
        b"[]",
        b"3",
        b'{"resourceSpans":{}}',
        b'{"resourceSpans":[3]}',
        b'{"resourceSpans":[{"scopeSpans":[{"spans":["x"]}]}]}',
        b'{"resourceSpans":[]} trailing',
        b'{"resourceSpans":[],}',
        b"{'resourceSpans':[]}",
        b'{"resourceSpans":[{"scopeSpans":[{"spans":[{"name":NaN}]}]}]}',
    ],
)
def test_j10_what_is_no_otlp_json_is_refused_with_a_sentence(shared: Any, body: bytes) -> None:
    answer = export(shared, "json", body)
    assert (answer.code, answer.retryable) == ("400", False)
    assert len(answer.message) > 20
    assert shared.journal() == []


def test_j11_text_that_is_no_unicode_is_refused(shared: Any) -> None:
    """Acknowledged, it could be stored by nobody: neither Arrow nor JSON holds it."""
    for name in (b"\xff\xfe", b"\\ud800", b"\xed\xa0\x80", b"\\udc00\\ud800", b"a\x01b"):
        body = document({**IDS, "name": "NAME"}).replace(b"NAME", name)
        assert export(shared, "json", body).code == "400"
    body = document({**IDS, "name": "NAME"}).replace(b"NAME", b"\\ud83d\\ude42")
    assert export(shared, "json", body).ok
    assert [span.name for span in stored(shared)] == ["\U0001f642"]


@pytest.mark.parametrize("depth", [30, 100, 1000, 100_000])
def test_j12_depth_crashes_nothing_and_what_is_taken_can_be_read(shared: Any, depth: int) -> None:
    value = b'{"arrayValue":{"values":[' * depth + b'{"intValue":1}' + b"]}}" * depth
    body = document(attribute("VALUE"), {**IDS, "name": "other"}).replace(b'"VALUE"', value)
    answer = export(shared, "json", body)
    assert answer.code in ("200", "400")
    if answer.ok:
        assert [span.name for span in stored(shared)] == ["", "other"]
    assert export(shared, "json", document(IDS)).ok


def test_j13_white_space_and_a_mark_are_allowed(shared: Any) -> None:
    assert export(shared, "json", b" \r\n" + document(IDS) + b"\n ").ok
    assert len(stored(shared)) == 1


def test_j14_keys_that_come_twice_take_the_last(shared: Any) -> None:
    body = document(IDS).replace(b'"traceId"', b'"name":"first","name":"second","traceId"')
    assert export(shared, "json", body).ok
    assert [span.name for span in stored(shared)] == ["second"]
