"""What is large stands once in the data set, and comes back whole; the fast decoder against the plain one."""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import spans
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue

from agentlightning.collector import otlp, tokens
from agentlightning.collector.assemble import assemble
from agentlightning.collector.convert_cli import convert
from agentlightning.collector.span import Span
from agentlightning.collector.tables import CALL_COLUMNS, spans_from_table, tables
from agentlightning.proto import attributes as names
from agentlightning.proto.packed import pack_ids


def decoded(*pieces: spans.Piece) -> list[Span]:
    return otlp.decode_traces(spans.body(*pieces), Counter())


def again(
    tables: dict[str, Any], counters: Counter[str] | None = None, *, with_calls: bool = True
) -> list[Span]:
    calls = tables["transitions"].select(CALL_COLUMNS) if with_calls else None
    return list(spans_from_table(tables["spans"], calls, Counter() if counters is None else counters))


def test_tokens_and_bodies_of_a_call_stand_once_and_come_back() -> None:
    sent = decoded(spans.gateway_call("r", 0), spans.gateway_call("r", 1), spans.rollout_span("r", 2))
    made = tables([assemble("r", 0, sent)])
    text = "".join(made["spans"].column("attributes").to_pylist())
    assert "bytesValue" not in text
    shared = {names.PROMPT_TOKEN_IDS, names.RESPONSE_TOKEN_IDS, names.RESPONSE_LOGPROBS}
    for row in made["spans"].to_pylist():
        if row["name"] != names.ROLLOUT_SPAN_NAME:
            assert shared <= set(row["in_transitions"])
    back = {span.span_id: span for span in again(made)}
    for span in sent:
        assert list(back[span.span_id].attributes.items()) == list(span.attributes.items())


def test_what_a_row_of_transitions_says_differently_stays_on_the_span() -> None:
    values = {
        "gen_ai__operation__name": "chat",
        "agentlightning__prompt__token_ids": "[1, 2]",  # as text: the row has it packed
        "agentlightning__response__token_ids": pack_ids([3]),
        "agentlightning__response__logprobs": b"odd",
        "agentlightning__request": "",
    }
    sent = decoded(spans.span("chat", "1" * 16, **values))
    made = tables([assemble("a" * 32, 0, sent)])
    (row,) = made["spans"].to_pylist()
    assert row["in_transitions"] == [names.RESPONSE_TOKEN_IDS]
    assert again(made)[0].attributes == sent[0].attributes


def test_spans_without_their_transitions_are_counted_not_made_up(tmp_path: Path) -> None:
    (tmp_path / "dump.bin").write_bytes(spans.body(spans.gateway_call("r", 0), spans.rollout_span("r", 1)))
    convert([tmp_path / "dump.bin"], tmp_path / "data")
    (file,) = (tmp_path / "data" / "spans").iterdir()
    alone = tmp_path / "alone" / "alone.parquet"
    alone.parent.mkdir()
    alone.write_bytes(file.read_bytes())
    report = convert([alone], tmp_path / "again")
    assert report.counters["without_transition"] > 0
    assert any("Give the data set's folder" in sentence for sentence in report.refused)


@pytest.mark.parametrize("seed", range(4))
def test_arrays_are_packed_as_the_plain_parser_reads_them(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(400):
        limits = [128, 50_000, 2**31]
        ids = [draw.randrange(draw.choice(limits)) for _ in range(draw.randrange(1, 40))]
        if draw.random() < 0.2:
            ids[draw.randrange(len(ids))] = draw.choice([-1, 2**31, 2**40, -(2**63)])
        data = ArrayValue(values=[AnyValue(int_value=i) for i in ids]).SerializeToString()
        fits = all(0 <= i < 2**31 for i in ids)
        assert tokens.pack_array(data, floats=False) == (pack_ids(ids) if fits else None)
        damaged = bytearray(data)
        damaged[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        packed = tokens.pack_array(bytes(damaged), floats=False)
        if packed is not None:
            plain = ArrayValue.FromString(bytes(damaged))
            assert packed == pack_ids(item.int_value for item in plain.values)


@pytest.mark.parametrize("size", [0, 1, 95, 96, 128, 131, 16_380, 16_384, 16_390, 2_097_140, 2_097_160])
def test_attributes_of_every_length_are_read_as_they_were_written(size: int) -> None:
    for key in ("k", "k" * 20, "k" * 127, "k" * 200):
        for given in ("é" * (size // 2), b"\x80" * size):
            kind = {"string_value": given} if isinstance(given, str) else {"bytes_value": given}
            raw = KeyValue(key=key, value=AnyValue(**kind)).SerializeToString()
            counters: Counter[str] = Counter()
            for _ in range(2):  # the second time it may be remembered
                assert otlp._raw_attributes([raw], counters) == {key: given}
            assert not counters
