"""Dumps larger than memory: read span by span, kept on disk by attempt, with a bar."""

import io
import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import dumps
import pytest
import spans
from google.protobuf.internal.encoder import _VarintBytes
from hypothesis import given, settings
from hypothesis import strategies as st

from agentlightning.collector import inputs, json_stream
from agentlightning.collector.convert_cli import convert
from agentlightning.collector.progress import Progress
from agentlightning.collector.span import Span
from agentlightning.collector.spool import Spool
from agentlightning.proto.dataset import open_dataset

NAME = "langgraph__oi_langchain+genai_openai"


def document(name: str = NAME) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(inputs.gzip.decompress(dumps.path(name).read_bytes()))
    return found


def flat(parts: list[Any]) -> list[tuple[str, str, str]]:
    return [
        (json.dumps(resource.get("resource", {})), json.dumps(scope.get("scope", {})), json.dumps(item))
        for part in parts
        for resources in part.values()
        for resource in resources
        for scope in resource.get("scopeSpans", resource.get("scopeLogs"))
        for item in scope.get("spans", scope.get("logRecords"))
    ]


def reader(text: bytes, sizes: list[int]) -> Any:
    """Gives pieces of these sizes, again and again."""
    left = io.BytesIO(text)
    turn = iter(range(10**9))
    return lambda size: left.read(sizes[next(turn) % len(sizes)])


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1000, 30000), min_size=1, max_size=5), st.booleans(), st.booleans())
def test_span_by_span_is_what_parsing_at_once_gives(sizes: list[int], pretty: bool, turned: bool) -> None:
    whole = document("openai-raw__genai_openai_ev.logs" if pretty else "openai-raw__oi_openai")
    if turned:  # a writer that puts resource and scope behind
        for resources in whole.values():
            for resource in resources:
                inner = resource.pop("scopeSpans", None) or resource.pop("scopeLogs")
                scopes = [dict(reversed(list(scope.items()))) for scope in inner]
                given = resource.pop("resource")
                resource["scopeLogs" if pretty else "scopeSpans"] = scopes
                resource["resource"] = given
    text = json.dumps(whole, indent=1 if pretty else None, ensure_ascii=False).encode()
    parts = list(json_stream.documents(reader(text, sizes)))
    assert flat(parts) == flat([whole])


def test_strings_with_brackets_quotes_and_backslashes_confuse_nobody() -> None:
    nasty = ['"}]', "\\", '\\"', "[{", "é\u2028", '{"spans":[{']
    attributes = [{"key": text, "value": {"stringValue": text}} for text in nasty]
    whole = {
        "other": {"resourceSpans": [1, {"scopeSpans": []}]},
        "resourceSpans": [
            {
                "resource": {"attributes": attributes},
                "scopeSpans": [
                    {
                        "scope": {"name": nasty[0]},
                        "spans": [{"name": text, "attributes": attributes} for text in nasty],
                    }
                ],
            }
        ],
    }
    text = json.dumps(whole).encode()
    for size in (1, 7, 1 << 20):
        parts = list(json_stream.documents(reader(text, [size])))
        assert flat(parts) == flat([{"resourceSpans": whole["resourceSpans"]}])


@pytest.mark.parametrize("form", ["document", "lines", "pretty", "gzip"])
def test_a_large_file_gives_the_rows_of_a_small_one(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert([dumps.path(NAME)], tmp_path / "small")
    monkeypatch.setattr(inputs, "WHOLE_BYTES", 1000)
    text = json.dumps(document(), indent=2 if form == "pretty" else None).encode()
    if form == "lines":
        text = b"\n".join(
            json.dumps({"resourceSpans": [{**resource, "scopeSpans": [scope]}]}).encode()
            for resource in document()["resourceSpans"]
            for scope in resource["scopeSpans"]
        )
    path = tmp_path / "dump.json"
    path.write_bytes(inputs.gzip.compress(text) if form == "gzip" else text)
    report = convert([path], tmp_path / "large")
    assert not report.refused
    order = [("rollout_id", "ascending"), ("seq", "ascending")]
    small, large = (
        open_dataset(tmp_path / out).table("transitions").sort_by(order) for out in ("small", "large")
    )
    assert small.equals(large)


@pytest.mark.parametrize("form", ["message", "fixed", "varint"])
def test_large_protobuf_files_give_the_rows_of_small_ones(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = [spans.gateway_call("r", n) for n in range(20)]
    whole = spans.body(*calls)
    (tmp_path / "small.pb").write_bytes(whole)
    convert([tmp_path / "small.pb"], tmp_path / "small")
    monkeypatch.setattr(inputs, "WHOLE_BYTES", 500)
    parts = [spans.body(call) for call in calls]
    content = {
        "message": whole,
        "fixed": b"".join(struct.pack(">I", len(part)) + part for part in parts),
        "varint": b"".join(_VarintBytes(len(part)) + part for part in parts),
    }[form]
    (tmp_path / "large.pb").write_bytes(content)
    report = convert([tmp_path / "large.pb"], tmp_path / "large")
    assert not report.refused
    order = [("rollout_id", "ascending"), ("seq", "ascending")]
    small, large = (
        open_dataset(tmp_path / out).table("transitions").sort_by(order) for out in ("small", "large")
    )
    assert small.equals(large)
    (tmp_path / "cut.pb").write_bytes(content[:-3])
    report = convert([tmp_path / "cut.pb", tmp_path / "small.pb"], tmp_path / "cut")
    assert "cut off" in report.refused[0]
    assert report.transitions == 20
    assert report.counters["duplicate"] == (0 if form == "message" else 19)  # what comes before is read


def test_a_large_file_that_ends_too_early_is_refused_from_there_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "WHOLE_BYTES", 1000)
    text = dumps.path(NAME)
    (tmp_path / "cut.json").write_bytes(inputs.gzip.decompress(text.read_bytes())[:-20000])
    report = convert([tmp_path / "cut.json"], tmp_path / "out")
    assert report.transitions > 0
    assert "not JSON to its end" in report.refused[0]
    (tmp_path / "other.json").write_text(json.dumps({"hello": ["x" * 2000]}))
    report = convert([tmp_path / "cut.json", tmp_path / "other.json"], tmp_path / "two")
    assert "is not OTLP/JSON" in report.refused[1]


def test_spans_come_back_from_disk_as_they_were(tmp_path: Path) -> None:
    whole = dumps.load("openai-raw__oi_openai") + dumps.load("openai-raw__genai_openai_ev.logs")
    names = [name for name in Span.__dataclass_fields__ if name not in ("resource", "events", "links")]
    with Spool(tmp_path) as spool:
        for span in whole:
            spool.add(span)
        found = [span for key in spool for span in spool.load([key])]
        assert not list(tmp_path.iterdir())  # a file without a name

    def plain(span: Span) -> list[Any]:
        events = [(event.name, event.time_ns, event.attributes) for event in span.events]
        return [span.resource.attributes, events, *(getattr(span, name) for name in names)]

    assert sorted(map(repr, map(plain, found))) == sorted(map(repr, map(plain, whole)))


def test_log_records_that_name_no_rollout_go_with_the_spans_of_their_trace(tmp_path: Path) -> None:
    name = "openai-raw__contrib-openai_v2-2.4b0"
    stamped = document(name)
    for scope in stamped["resourceSpans"][0]["scopeSpans"]:
        for span in scope["spans"]:  # as a processor stamps them, which sees no log records
            rollout = {"key": "agentlightning.rollout.id", "value": {"stringValue": "r"}}
            span.setdefault("attributes", []).append(rollout)
    (tmp_path / "spans.json").write_text(json.dumps(stamped))
    report = convert([tmp_path / "spans.json", dumps.path(f"{name}.logs")], tmp_path / "out")
    assert (report.rollouts, report.transitions) == (1, 14)
    assert "without_rollout" not in report.counters
    responses = open_dataset(tmp_path / "out").table("transitions").column("response").to_pylist()
    assert sum(response is not None for response in responses) >= 10


def test_the_bar_is_on_the_terminal_alone() -> None:
    stream = io.StringIO()
    with Progress(stream) as bar:
        bar.update("reading", 1, 2)
    assert stream.getvalue() == ""
    with Progress(stream, shown=True) as bar:
        bar.update("reading", 1, 2)
        bar.update("reading", 2, 2)
    assert " 50%" in stream.getvalue()
    assert "100%" in stream.getvalue()
    assert stream.getvalue().endswith("\r")


MEASURE = """
import resource, sys
from agentlightning.collector.convert_cli import main
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert main(sys.argv[1:]) == 0
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in kilobytes on Linux")
def test_memory_stays_flat_while_the_dump_grows(tmp_path: Path) -> None:
    peaks = []
    for copies in (150, 300):  # 30 and 60 MB
        path = tmp_path / f"{copies}.json"
        with open(path, "w") as file:
            file.write('{"resourceSpans":[')
            for copy in range(copies):
                text = json.dumps(document())
                for span in dumps.load(NAME):
                    text = text.replace(span.trace_id, f"{copy:08x}{span.trace_id[8:]}")
                text = text.replace("chatcmpl-", f"chatcmpl-{copy}x")
                file.write("," * bool(copy) + text[text.index("[") + 1 : text.rindex("]")])
            file.write("]}")
        made = subprocess.run(
            [sys.executable, "-c", MEASURE, str(path), "--out", str(tmp_path / f"out{copies}"), "--json"],
            capture_output=True,
            text=True,
            check=True,
        )
        *report, peak = made.stdout.splitlines()
        assert json.loads("\n".join(report))["transitions"] == 21 * copies
        peaks.append(int(peak) >> 10)
    assert peaks[1] - peaks[0] < 50, peaks  # megabytes, for 30 more of input
    assert peaks[1] < 350, peaks
