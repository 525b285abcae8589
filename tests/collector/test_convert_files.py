"""`agl convert`: files in, a data set out, to the last token."""

import gzip
import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import spans
from google.protobuf.internal.encoder import _VarintBytes

from agentlightning.collector import convert_cli
from agentlightning.collector.convert_cli import convert
from agentlightning.proto.dataset import open_dataset
from agentlightning.proto.errors import ConfigError, DataError
from agentlightning.proto.packed import unpack_floats, unpack_ids

DUMPS = Path(__file__).parents[1] / "data" / "otlp"


def pieces() -> list[spans.Piece]:
    """Three rollouts, with everything that a rollout may have."""
    made: list[spans.Piece] = []
    for rollout, calls in (("r1", 3), ("r2", 1), ("r3", 0)):
        made += [spans.gateway_call(rollout, n, prompt=list(range(50 * n + 1))) for n in range(calls)]
        made.append(spans.rollout_span(rollout, calls))
        made.append(
            spans.evaluation(
                f"{calls:016x}"[:-1] + "e", 0.5 * calls, trace="b" * 32, resource=spans.identity(rollout)
            )
        )
    made.append(spans.gateway_call("r1", 7, error="aborted", response=[9]))
    made.append(made[0])  # sent twice
    return made


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    path = tmp_path / "spans.binpb"
    path.write_bytes(spans.body(*pieces()))
    return path


def table(out: Path, name: str = "transitions") -> pa.Table:
    found = open_dataset(out).table(name)
    order = [
        (c, "ascending")
        for c in ("rollout_id", "attempt", "seq", "start_time", "span_id")
        if c in found.column_names
    ]
    return found.sort_by(order).combine_chunks()


def test_every_token_comes_back_exactly(recorded: Path, tmp_path: Path) -> None:
    report = convert([recorded], tmp_path / "out")
    assert (report.rollouts, report.transitions, report.calls) == (3, 5, 4)
    assert report.counters["duplicate"] == 1
    rows = {(row["rollout_id"], row["call_id"]): row for row in table(tmp_path / "out").to_pylist()}
    assert len(rows) == 5
    for _, _, span in pieces():
        attributes = {item.key: item.value for item in span.attributes}
        if "agentlightning.call.id" not in attributes:
            continue
        key = (
            attributes["agentlightning.rollout.id"].string_value,
            attributes["agentlightning.call.id"].string_value,
        )
        row = rows[key]
        ids = "agentlightning.prompt.token_ids", "agentlightning.response.token_ids"
        assert row["prompt_token_ids"] == unpack_ids(attributes[ids[0]].bytes_value)
        assert row["response_token_ids"] == unpack_ids(attributes[ids[1]].bytes_value)
        assert row["response_logprobs"] == unpack_floats(
            attributes["agentlightning.response.logprobs"].bytes_value
        )
        assert row["request"] == attributes["agentlightning.request"].string_value
        assert row["response"] == attributes["agentlightning.response"].string_value


def forms() -> dict[str, Callable[[], tuple[str, bytes]]]:
    whole = pieces()
    halves = [spans.body(*whole[:4]), spans.body(*whole[4:])]
    lines = b"\n".join(json.dumps(spans.document(*part)).encode() for part in (whole[:4], whole[4:]))
    return {
        "json": lambda: ("a.json", json.dumps(spans.document(*whole)).encode()),
        "pretty json": lambda: ("a.json", json.dumps(spans.document(*whole), indent=2).encode()),
        "json list": lambda: (
            "a.json",
            json.dumps([spans.document(*whole[:4]), spans.document(*whole[4:])]).encode(),
        ),
        "json lines": lambda: ("a.jsonl", lines),
        "gzip": lambda: ("a.jsonl.gz", gzip.compress(lines)),
        "varint lengths": lambda: ("a.pb", b"".join(_VarintBytes(len(half)) + half for half in halves)),
        "fixed lengths": lambda: ("a.pb", b"".join(struct.pack(">I", len(half)) + half for half in halves)),
    }


@pytest.mark.parametrize("form", sorted(forms()))
def test_every_form_of_the_same_spans_gives_the_same_rows(form: str, recorded: Path, tmp_path: Path) -> None:
    name, content = forms()[form]()
    (tmp_path / name).write_bytes(content)
    convert([recorded], tmp_path / "one")
    report = convert([tmp_path / name], tmp_path / "two")
    assert not report.refused
    for rows in ("transitions", "rollouts", "spans"):
        assert table(tmp_path / "one", rows).equals(table(tmp_path / "two", rows)), rows


def test_token_ids_as_arrays_give_the_same_rows_as_packed_ones(tmp_path: Path) -> None:
    arrays = {
        "agentlightning.prompt.token_ids": [1, 2, 3],
        "agentlightning.response.token_ids": [10, 11, 12],
        "agentlightning.response.logprobs": [-0.25, -0.5, -0.75],
    }
    for name, more in (("packed", {}), ("arrays", arrays)):
        (tmp_path / f"{name}.pb").write_bytes(spans.body(spans.gateway_call("r", 0, **more)))
        convert([tmp_path / f"{name}.pb"], tmp_path / name)
    assert table(tmp_path / "packed").equals(table(tmp_path / "arrays"))


@pytest.mark.parametrize("given", ["data set", "folder", "files"])
def test_transitions_derived_again_from_the_spans_table_are_equal(
    given: str, recorded: Path, tmp_path: Path
) -> None:
    shutil.copy(DUMPS / "openai-agents__genai_agents+genai_openai.json.gz", tmp_path / "dump.json.gz")
    convert([recorded, tmp_path / "dump.json.gz"], tmp_path / "one")
    inputs = {
        "data set": [tmp_path / "one"],
        "folder": [tmp_path / "one" / "spans"],
        "files": open_dataset(tmp_path / "one").files("spans"),
    }[given]
    report = convert(inputs, tmp_path / "two")
    assert not report.refused
    for rows in ("transitions", "spans"):
        assert table(tmp_path / "one", rows).equals(table(tmp_path / "two", rows)), rows


def test_log_records_and_spans_may_come_in_files_of_their_own(tmp_path: Path) -> None:
    verdict = {"gen_ai.evaluation.name": "reward", "gen_ai.evaluation.score.value": 0.5}
    _, _, call = spans.gateway_call("r", 0, trace="a" * 32)
    (tmp_path / "spans.pb").write_bytes(spans.body(spans.gateway_call("r", 0, trace="a" * 32)))
    log = spans.log_body(
        "gen_ai.evaluation.result",
        {**verdict, "agentlightning.rollout.id": "r"},
        parent=call.span_id.hex(),
    )
    (tmp_path / "logs.pb").write_bytes(log)
    report = convert([tmp_path / "spans.pb", tmp_path / "logs.pb"], tmp_path / "out")
    assert not report.refused
    assert table(tmp_path / "out").column("reward").to_pylist() == [0.5]
    assert sorted(table(tmp_path / "out", "spans").column("signal").to_pylist()) == ["log", "span"]


def test_converting_again_changes_nothing_and_another_data_set_is_not_overwritten(
    recorded: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    first = convert([recorded], out)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert convert([recorded], out) == first
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    renamed = recorded.rename(tmp_path / "other-name")
    assert convert([renamed], tmp_path / "out2") == first
    names = [sorted(path.name for path in (place / "spans").iterdir()) for place in (out, tmp_path / "out2")]
    assert names[0] == names[1]  # of the content alone
    with pytest.raises(ConfigError, match="holds another data set"):
        convert([DUMPS / "langgraph__genai_openai.json.gz"], out)


def test_pyarrow_duckdb_and_polars_open_the_files_and_agree(recorded: Path, tmp_path: Path) -> None:
    convert([recorded], tmp_path / "out")
    for name in ("transitions", "rollouts", "spans"):
        (file,) = open_dataset(tmp_path / "out").files(name)
        ours = pq.read_table(file)
        by_duckdb = duckdb.sql(f"select * from read_parquet('{file}')").to_arrow_table()
        by_polars = polars.read_parquet(file)
        assert len(ours) == len(by_duckdb) == len(by_polars) > 0
        assert ours.column_names == by_duckdb.column_names == by_polars.columns
        for column in ours.column_names:
            if ours.schema.field(column).type in (pa.string(), pa.int32(), pa.float64(), pa.bool_()):
                values = ours.column(column).to_pylist()
                assert values == by_duckdb.column(column).to_pylist() == by_polars[column].to_list(), column
    (file,) = open_dataset(tmp_path / "out").files("transitions")
    ids = "list_sum(response_token_ids)"
    total = duckdb.sql(f"select sum({ids}) from read_parquet('{file}')").fetchall()[0][0]
    polars_total = polars.read_parquet(file)["response_token_ids"].list.sum().sum()
    assert (
        total == polars_total == sum(map(sum, pq.read_table(file).column("response_token_ids").to_pylist()))
    )


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("empty.json", b"", "is empty"),
        ("broken.json", b'{"resourceSpans": [', "neither JSON nor JSON lines"),
        ("other.json", b'{"hello": 1}', "is not OTLP/JSON"),
        ("wrong.json", b'{"resourceSpans": {"a": 1}}', "resourceSpans must be a list"),
        ("noise.pb", b"\x93 not protobuf at all", "neither OTLP JSON"),
        ("cut.pb", None, "is left out"),
        ("cut.gz", gzip.compress(b"{}" * 99)[:-9], "cannot be read"),
        ("bad.parquet", b"PAR1 nothing", "cannot be read as Parquet"),
    ],
)
def test_a_bad_file_is_named_and_the_rest_goes_on(
    name: str,
    content: bytes | None,
    sentence: str,
    recorded: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / name).write_bytes(recorded.read_bytes()[:-3] if content is None else content)
    code = convert_cli.main([str(tmp_path / name), str(recorded), "--out", str(tmp_path / "out"), "--json"])
    printed = capsys.readouterr()
    assert code == 1
    report: dict[str, Any] = json.loads(printed.out)
    assert report["transitions"] == 5
    (refused,) = report["refused"]
    assert name in refused
    assert sentence in refused
    assert refused in printed.err
    code = convert_cli.main([str(tmp_path / name), "--out", str(tmp_path / "none")])
    assert code == 2
    assert "Nothing could be read" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_a_bad_line_is_left_out_and_named(recorded: Path, tmp_path: Path) -> None:
    good = json.dumps(spans.document(*pieces()))
    (tmp_path / "a.jsonl").write_text(good + "\n{broken\n" + json.dumps({"resourceMetrics": []}) + "\n")
    report = convert([tmp_path / "a.jsonl"], tmp_path / "out")
    assert report.transitions == 5
    assert [sentence for sentence in report.refused if "line 2 is not JSON" in sentence] == report.refused
    assert report.counters["metrics_ignored"] == 1


def test_a_parquet_file_of_another_table_is_refused_with_a_remedy(recorded: Path, tmp_path: Path) -> None:
    convert([recorded], tmp_path / "one")
    with pytest.raises(DataError, match=r"not a file of the spans table.*Give the data set's folder"):
        convert([tmp_path / "one" / "transitions"], tmp_path / "two")


def test_missing_inputs_and_spans_without_identifiers_are_counted(recorded: Path, tmp_path: Path) -> None:
    bad = spans.span("s", "0" * 16)
    (tmp_path / "bad.pb").write_bytes(spans.body(bad, spans.gateway_call("r", 0)))
    report = convert([tmp_path / "bad.pb", tmp_path / "absent"], tmp_path / "out")
    assert report.counters["invalid_id"] == 1
    assert report.refused == [f"{tmp_path / 'absent'} does not exist."]
    assert open_dataset(tmp_path / "out").counters()["invalid_id"] == 1


def test_help_says_what_the_command_does(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        convert_cli.main(["--help"])
    assert exit.value.code == 0
    assert "agl convert traces.jsonl --out data" in capsys.readouterr().out
