"""In the running collector, spans and log records that name no rollout find their attempt in whatever order they come."""

import gzip
import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import spans
from journal_place import Place

from agentlightning.collector.convert_cli import convert
from agentlightning.collector.records import Kind
from agentlightning.proto.dataset import open_dataset

STACKED = Path(__file__).parents[1] / "data/otlp/langgraph__oi_langchain+genai_openai.json.gz"
"""Both instrumentations tell of each call, in traces of their own; none names a rollout."""
ROLLOUT = {"agentlightning.rollout.id": "r"}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def single_spans() -> list[bytes]:
    """The dump, a request for each span."""
    bodies = []
    for line in gzip.decompress(STACKED.read_bytes()).splitlines():
        for resource in json.loads(line)["resourceSpans"]:
            for scope in resource["scopeSpans"]:
                for span in scope["spans"]:
                    one = {**resource, "scopeSpans": [{**scope, "spans": [span]}]}
                    bodies.append(json.dumps({"resourceSpans": [one]}).encode())
    return bodies


def content(folder: Path) -> dict[str, list[Any]]:
    """What a data set says, but for how often it was written."""
    dataset = open_dataset(folder)
    calls = dataset.table("transitions").to_pylist()
    found = {"transitions": sorted(calls, key=lambda row: (row["rollout_id"], row["seq"]))}
    for table, columns in (
        ("rollouts", ["rollout_id", "calls_stored"]),
        ("spans", ["rollout_id", "trace_id", "span_id"]),
    ):
        found[table] = sorted(map(repr, dataset.table(table, columns=columns).to_pylist()))
    return found


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    folder = tmp_path_factory.mktemp("converted") / "data"
    convert([STACKED], folder)
    return content(folder)


@pytest.mark.parametrize("seed", range(3))
def test_traces_of_the_same_calls_become_the_attempts_that_agl_convert_makes(
    place: Place, converted: dict[str, list[Any]], seed: int
) -> None:
    bodies = single_spans()
    random.Random(seed).shuffle(bodies)
    place.write(*((Kind.TRACES_JSON, body) for body in bodies))
    place.run(later=10)
    assert content(place.data) == converted


@pytest.mark.parametrize("seed", range(3))
def test_it_is_so_too_when_some_come_late_and_the_converter_is_killed_in_between(
    place: Place, converted: dict[str, list[Any]], seed: int
) -> None:
    bodies = single_spans()
    draw = random.Random(seed)
    draw.shuffle(bodies)
    cuts = sorted(draw.sample(range(len(bodies)), 5))
    for begin, end in itertools.pairwise([0, *cuts, len(bodies)]):
        place.write(*((Kind.TRACES_JSON, body) for body in bodies[begin:end]))
        place.run(later=draw.choice([0, 10, 1000]))
        if draw.random() < 0.5:
            place.restart()
    place.run(later=1000)
    assert content(place.data) == converted
    place.restart()
    place.run(later=1000)
    assert content(place.data) == converted, "nothing is written again"


def call(span_id: str, scope: str, trace: str, start: int) -> spans.Piece:
    return spans.span(
        "chat m", span_id, trace=trace, start=start, scope=scope, gen_ai__operation__name="chat",
        gen_ai__request__model="m", gen_ai__response__id="resp-1",
    )  # fmt: skip


def test_a_trace_that_is_written_already_is_taken_in_by_one_that_began_before(place: Place) -> None:
    inner, outer = "b" * 32, "a" * 32
    place.send(call("01" * 8, "openai", inner, 5))
    place.run(later=10)
    assert set(place.dataset.attempts) == {(inner, 0)}
    place.send(call("02" * 8, "langchain", outer, 4))
    place.run(later=10)
    assert [row["rollout_id"] for row in place.rows()] == [outer]
    assert [row["rollout_id"] for row in place.rows("rollouts")] == [outer]
    assert {row["trace_id"] for row in place.rows("spans")} == {inner, outer}
    assert place.dataset.counters()["calls"] == 1
    place.restart()
    place.send(spans.span("more", "03" * 8, trace=inner, parent="01" * 8, start=5))
    place.run(later=10)
    assert {row["rollout_id"] for row in place.rows("spans")} == {outer}
    assert len(place.rows("spans")) == 3


def test_two_calls_that_only_look_alike_stay_two(place: Place) -> None:
    for number, trace in enumerate(("a" * 32, "b" * 32)):
        place.send(call(f"{number + 1:02}" * 8, "openai", trace, 0))
    place.run(later=10)
    assert len(place.rows()) == 2


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_log_records_join_the_rollout_that_their_trace_belongs_to(
    place: Place, order: tuple[int, ...]
) -> None:
    trace = "c" * 32
    event = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "m", "gen_ai.input.messages": [{"role": "user", "parts": [{"type": "text", "content": "Hi?"}]}]}  # fmt: skip
    chat = spans.span("chat m", "01" * 8, trace=trace, resource=ROLLOUT, gen_ai__operation__name="chat", gen_ai__request__model="m")  # fmt: skip
    told: list[tuple[Kind, bytes]] = [
        (Kind.TRACES, spans.body(chat)),
        (Kind.LOGS, spans.log_body("gen_ai.client.inference.operation.details", event, trace=trace, parent="01" * 8)),
        (Kind.LOGS, spans.log_body("something.else", {"a": "b"}, trace=trace)),
    ]  # fmt: skip
    for index in order:
        place.write(told[index])
        place.run(later=0)
        place.restart()
    place.seal("r", None)
    place.run()
    assert set(place.dataset.attempts) == {("r", 0)}
    (row,) = place.rows()
    assert row["rollout_id"] == "r"
    assert "Hi?" in row["request"]
    assert len(place.rows("spans")) == 3


def test_a_log_record_after_its_attempt_was_written_makes_the_next_generation_once(place: Place) -> None:
    trace = "c" * 32
    place.send(spans.span("chat m", "01" * 8, trace=trace, resource=ROLLOUT, gen_ai__operation__name="chat"))
    place.seal("r", None)
    place.run()
    place.send(spans.span("work", "09" * 8, trace="d" * 32, resource={"agentlightning.rollout.id": "open"}))
    place.write((Kind.LOGS, spans.log_body("something.else", {"a": "b"}, trace=trace)))
    for _ in range(3):
        place.run(later=5)
        place.restart()  # reads again from the open attempt's beginning, after the span that named the rollout
    assert place.dataset.attempts["r", 0].generation == 1
    assert [row["rollout_id"] for row in place.rows("spans")] == ["r", "r"]
