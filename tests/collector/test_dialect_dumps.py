"""The dialects in the wild: dumps of real programs, each under several instrumentations."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dumps
import pytest

from agentlightning.collector.calls import Call, read_role
from agentlightning.collector.convert_cli import convert
from agentlightning.proto.dataset import open_dataset
from agentlightning.proto.packed import unpack_floats, unpack_ids

# Calls that no span of the dump tells of, and why.
NOT_RECORDED = {
    "openai-raw__genai_openai": 3,  # no /v1/completions
    "openai-raw__genai_openai_ev": 3,
    "openai-raw__genai_openai+httpx2": 3,
    "openai-raw-special__genai_openai": 1,  # no client.post
    "openai-raw__contrib-openai_v2-2.4b0": 7,  # no /v1/completions, no Responses
    "openai-raw__contrib-openai_v2_latest-2.4b0": 7,
    "autogen__builtin": 14,  # agents and tools only
    "openai-agents__genai_agents": 22,  # agents and tools only
}


@pytest.mark.parametrize("name", sorted(dumps.MANIFEST))
def test_every_model_call_of_a_dump_is_one_transition_whatever_was_stacked(name: str, tmp_path: Path) -> None:
    report = convert([dumps.path(name)], tmp_path / "out")
    assert report.transitions == dumps.MANIFEST[name]["http_llm_calls"] - NOT_RECORDED.get(name, 0)
    assert report.spans == dumps.MANIFEST[name]["spans"]
    assert +report.counters == {"without_rollout": report.spans}
    assert not report.refused
    again = convert([tmp_path / "out"], tmp_path / "again")
    assert (again.transitions, again.rollouts) == (report.transitions, report.rollouts)


Row = dict[str, Any]
AGENTS = ("agent", "agent_path")
BROKEN_OFF = ("scripted mid-stream error", "_OTHER")  # what ended a stream before its end


def broken_off(row: Row) -> bool:
    return row["question"][-1][1] in ("x", "break early") and row["answer"] is not None


def everywhere(row: Row) -> bool:
    return True


def of_chat(row: Row) -> bool:
    return row["api"] == "chat"


# A program's reference, and for every other dump of it what its dialect does not carry, and where.
PROGRAMS: dict[str, dict[str, dict[str, Callable[[Row], bool]]]] = {
    "openai-raw__genai_openai": {
        "openai-raw__genai_openai_ev": {},
        "openai-raw__genai_openai+httpx2": {},
        # Without an error, without a reason where a stream broke off; the seed.
        "openai-raw__tl_openai": {"error": broken_off, "finish_reason": broken_off, "seed": everywhere},
        # A stream that was left early is a success without a reason.
        "openai-raw__oi_openai": {"error": broken_off, "finish_reason": broken_off},
        "openai-raw__oi_openai_genai": {"error": broken_off, "finish_reason": broken_off},
        "openai-raw__contrib-openai_v2_latest-2.4b0": {
            "tools": everywhere,
            "error": broken_off,
            "finish_reason": broken_off,
        },
    },
    "openai-raw-special__genai_openai": {"openai-raw-special__oi_openai": {}},
    "langgraph__oi_langchain": {
        "langgraph__tl_langchain": {},
        "langgraph__tl_langchain+tl_openai": {},
        "langgraph__openllmetry-0.49.8-legacy": {},
        "langgraph__oi_langchain+oi_openai": {"error": everywhere},  # LangChain raises another class
        "langgraph__oi_langchain+genai_openai": {"error": everywhere},
        "langgraph__genai_langchain": dict.fromkeys(AGENTS, everywhere),  # graphs, no nodes
        "langgraph__genai_langchain+genai_openai": dict.fromkeys(AGENTS, everywhere),
        "langgraph__genai_openai": dict.fromkeys((*AGENTS, "error"), everywhere),
    },
    # LangSmith's own export, by its package; and the flattened messages of an old OpenLLMetry, by its.
    "langgraph-team__oi_langchain": {"langgraph-team__langsmith-0.15.1-otel": {}},
    "openai-tools__genai_openai": {"openai-tools__openllmetry-0.40.14-flattened": {"error": everywhere}},
    "autogen__builtin+genai_openai": {
        "autogen__builtin+tl_openai": {},
        "autogen__builtin+oi_openai": {},
        "autogen__oi_autogen": {"tools": everywhere, "sampling": everywhere},
    },
    "openai-agents__genai_agents+genai_openai": {
        "openai-agents__oi_agents+genai_openai": {},
        "openai-agents__genai_openai": dict.fromkeys(AGENTS, everywhere),
        "openai-agents__oi_agents": {
            "tools": everywhere,  # only of Responses
            "sampling": everywhere,  # only of chat
            "finish_reason": everywhere,  # only of Responses and streams
            "error": everywhere,  # its text, not its class
        },
        "openai-agents__tl_agents": {
            "answer": everywhere,  # only of Responses
            "tools": everywhere,
            "sampling": everywhere,
            "finish_reason": everywhere,
            "error": everywhere,
            "agent_path": everywhere,  # the workflow's name
            "model": everywhere,
        },
    },
}


@pytest.mark.parametrize(
    ("reference", "other"), [(name, other) for name, others in PROGRAMS.items() for other in others]
)
def test_dialects_of_one_program_say_the_same_where_they_carry_it(reference: str, other: str) -> None:
    absent = PROGRAMS[reference][other]
    rows = []
    for name in (reference, other):
        # Calls that one of the two has no span of are in neither.
        found = [row for row in dumps.calls(name) if row["api"] != "completions"]
        if "contrib" in other:
            found = [row for row in found if row["api"] == "chat"]
        found = [row for row in found if "client.post" not in str(row["question"])]
        if "seed" in absent:
            for row in found:
                sampling = json.loads(row["sampling"])
                sampling.pop("seed", None)
                row["sampling"] = json.dumps(sampling)
        rows.append(found)
    for what in rows[0][0]:
        if what == "api":
            continue
        told = [
            Counter(
                (row["question"], _comparable(row[what], what))
                for row in found
                if what not in absent or not absent[what](row)
            )
            for found in rows
        ]
        assert told[0] == told[1], what


def _comparable(value: Any, what: str) -> Any:
    return json.dumps(json.loads(value), sort_keys=True) if what == "sampling" else value


def test_where_only_a_part_of_the_calls_carries_a_thing_it_is_right_there() -> None:
    reference = dumps.calls("openai-agents__genai_agents+genai_openai")
    openinference = dumps.calls("openai-agents__oi_agents")
    openllmetry = dumps.calls("openai-agents__tl_agents")
    for what, rows, api in (
        ("tools", openinference, "responses"),
        ("finish_reason", openinference, "responses"),
        ("sampling", openinference, "chat"),
        ("answer", openllmetry, "responses"),
        ("tools", openllmetry, "responses"),
        ("finish_reason", openllmetry, "responses"),
    ):
        told = Counter(
            (row["question"], row[what]) for row in rows if row["api"] == api and row["error"] is None
        )
        known = Counter((row["question"], row[what]) for row in reference if row["error"] is None)
        assert told
        if api == "chat":  # a stream of it carries nothing but messages
            told = Counter({item: count for item, count in told.items() if item[1] != "{}"})
        assert not {item for item in told if item not in known}, what


def test_content_in_log_records_is_the_content_of_its_span() -> None:
    chat = Counter(
        (row["question"], row["answer"])
        for row in dumps.calls("openai-raw__genai_openai")
        if row["api"] == "chat"
    )
    older = dumps.calls("openai-raw__contrib-openai_v2-2.4b0", "openai-raw__contrib-openai_v2-2.4b0.logs")
    told = Counter((row["question"], row["answer"]) for row in older)
    # Of a stream that broke off it writes no answer.
    assert sum((chat - told).values()) <= 2
    assert all(answer is None for _, answer in told - chat)
    bare = dumps.calls("openai-raw__contrib-openai_v2-2.4b0")
    assert len(bare) == len(older)
    assert all(row["answer"] is None for row in bare)


@pytest.mark.parametrize("with_spans", [True, False])
def test_one_record_of_details_tells_a_call_with_or_without_its_span(with_spans: bool) -> None:
    reference = dumps.calls("openai-raw__genai_openai_ev")
    names = ["openai-raw__genai_openai_ev.logs"] + ["openai-raw__genai_openai_ev"] * with_spans
    found = dumps.calls(*names)
    assert len(found) == len(reference)
    for what in ("question", "answer", "tools", "finish_reason", "model"):
        told = [Counter((row["question"], row[what]) for row in rows) for rows in (reference, found)]
        assert told[0] == told[1], what


def test_content_of_spans_and_of_the_logs_beside_them_is_joined_in_any_order(tmp_path: Path) -> None:
    name = "openai-raw__contrib-openai_v2-2.4b0"
    inputs = [dumps.path(name), dumps.path(f"{name}.logs")]
    assert convert(inputs, tmp_path / "one").transitions == 14
    assert convert(inputs[::-1], tmp_path / "two").transitions == 14
    order = [("rollout_id", "ascending"), ("seq", "ascending")]
    one, two = (open_dataset(tmp_path / out).table("transitions").sort_by(order) for out in ("one", "two"))
    assert one.equals(two)
    assert sum(value is not None for value in one.column("response").to_pylist()) >= 10


def test_token_ids_in_an_openinference_response_are_the_calls_tokens() -> None:
    rows = [row for made in dumps.assembled(dumps.load("openai-raw__oi_openai")) for row in made.transitions]
    with_ids = [row for row in rows if row["response_token_ids"] is not None]
    assert len(with_ids) == 11  # where the program had asked the engine for them
    for row in with_ids:
        body = json.loads(row["response"]) if row["response"] else {}
        first = (body.get("choices") or [{}])[0]
        assert unpack_ids(row["response_token_ids"])
        assert row["token_source"] == "engine"
        if "token_ids" in first:
            assert unpack_ids(row["response_token_ids"]) == first["token_ids"]
        if row["response_logprobs"] is not None:
            assert len(unpack_floats(row["response_logprobs"])) == len(unpack_ids(row["response_token_ids"]))


def test_a_rollout_id_on_the_resource_puts_all_traces_into_one_attempt() -> None:
    spans = dumps.load("langgraph__oi_langchain+genai_openai")
    for span in spans:
        span.rollout_id = "r"
    (made,) = dumps.assembled(spans)
    assert len(made.transitions) == 21
    assert made.rollout["calls_stored"] == 20  # one is an error


@pytest.mark.parametrize(
    ("name", "outer"),
    [
        ("langgraph__oi_langchain+oi_openai", "openinference.instrumentation.langchain"),
        ("langgraph__oi_langchain+genai_openai", "openinference.instrumentation.langchain"),
        ("openai-agents__oi_agents+genai_openai", "openinference.instrumentation.openai_agents"),
    ],
)
def test_stacks_that_only_time_and_content_join_are_counted_once(name: str, outer: str) -> None:
    """Without response ids in one of the two, and neither in the other's context."""
    spans = dumps.load(name)
    calls = {span.span_id for span in spans if span.scope == outer and isinstance(read_role(span), Call)}
    for span in spans:
        if span.span_id in calls:
            for key in [
                key for key in span.attributes if key.startswith(("output.", "llm.output_messages."))
            ]:
                del span.attributes[key]
        elif span.parent_span_id in calls:
            span.parent_span_id = None
            span.trace_id = span.rollout_id = f"{int(span.span_id, 16):032x}"
    rows = [row for made in dumps.assembled(spans) for row in made.transitions]
    assert len(rows) == dumps.MANIFEST[name]["http_llm_calls"]
    assert all(row["agent"] for row in rows)
