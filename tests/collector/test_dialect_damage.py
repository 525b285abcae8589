"""Damaged, lost, doubled and strange spans: kept, counted by name, and their neighbours unharmed."""

import copy
import gzip
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import dumps
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentlightning.collector import calls
from agentlightning.collector.assemble import assemble
from agentlightning.collector.calls import Agent, Call, Tool, read_role
from agentlightning.collector.convert_cli import convert
from agentlightning.collector.span import Event, Resource, Span
from agentlightning.collector.tables import tables
from agentlightning.proto.dataset import open_dataset

# One dump per dialect, and stacks of them.
NAMES = (
    "openai-raw__genai_openai_ev",
    "openai-raw__tl_openai",
    "openai-raw__oi_openai",
    "langgraph__openllmetry-0.49.8-legacy",
    "langgraph__oi_langchain+genai_openai",
    "autogen__oi_autogen",
    "openai-agents__oi_agents+genai_openai",
)
SMALL = "langgraph__oi_langchain+genai_openai"


def a_span(name: str, attributes: dict[str, Any], **more: Any) -> Span:
    given = {"span_id": "1" * 16, "parent_span_id": None, "start_ns": 10, "end_ns": 20, **more}
    return Span(
        "span", "a" * 32, name=name, attributes=attributes, resource=Resource({}), rollout_id="r", **given
    )


def call_of(span: Span) -> Call:
    role = read_role(span)
    assert isinstance(role, Call)
    return role


@pytest.mark.parametrize("name", NAMES)
def test_content_that_cannot_be_parsed_is_counted_and_costs_no_call(name: str) -> None:
    spans = dumps.load(name)
    before = sum(len(made.transitions) for made in dumps.assembled(spans))
    broken = 0
    for span in spans:
        for key in ("gen_ai.input.messages", "input.value"):
            if isinstance(span.attributes.get(key), str) and isinstance(read_role(span), Call):
                span.attributes[key] = span.attributes[key][:-5]  # a limit of the SDK cuts text
                broken += 1
                break
        if broken == 3:
            break
    made = dumps.assembled(spans)
    rows = [row for attempt in made for row in attempt.transitions]
    assert len(rows) == before
    assert sum(len(attempt.spans) for attempt in made) == len(spans)
    counters: Counter[str] = sum((attempt.counters for attempt in made), Counter())
    named = {name for name in counters if name.startswith("unparsed.")}
    assert named <= {"unparsed.input_messages_text", "unparsed.input_value_text"}
    if (
        "legacy" not in name and "+" not in name and "autogen" not in name
    ):  # they write no such text, or tell twice
        assert counters["unparsed"] == broken == 3


@pytest.mark.parametrize("name", NAMES)
def test_a_span_that_lost_its_attributes_is_kept_counted_and_hurts_no_neighbour(name: str) -> None:
    spans = dumps.load(name)
    whole = {row["span_id"]: row for made in dumps.assembled(spans) for row in made.transitions}
    victim = next(span for span in spans if span.span_id in whole)
    kept = dict(list(victim.attributes.items())[len(victim.attributes) // 2 :])  # the SDK evicts the oldest
    victim.dropped_attributes = len(victim.attributes) - len(kept)
    victim.attributes = kept
    made = dumps.assembled(spans)
    assert sum(attempt.rollout["dropped_attributes"] for attempt in made) == victim.dropped_attributes
    assert victim.span_id in {span.span_id for attempt in made for span in attempt.spans}
    rows = {row["span_id"]: row for attempt in made for row in attempt.transitions}
    for span_id, row in whole.items():
        if span_id in rows and span_id != victim.span_id:
            what = ("request", "response", "agent_path", "sampling", "error")
            assert {key: rows[span_id][key] for key in what} == {key: row[key] for key in what}
    assert len(whole) - 1 <= len(rows) <= len(whole) + 1


def test_an_orphan_is_counted_and_is_a_call_nevertheless() -> None:
    spans = dumps.load("openai-agents__oi_agents")
    agents = {span.span_id for span in spans if span.name == "triage"}
    left = [span for span in spans if span.span_id not in agents]
    made = dumps.assembled(left)
    assert sum(len(attempt.transitions) for attempt in made) == 22
    orphans = sum(span.parent_span_id in agents for span in left)
    assert sum(attempt.counters["orphan"] for attempt in made) == orphans > 0


@pytest.mark.parametrize(
    "value",
    [None, "", "null", "{", "[1]", "[[]]", '[{"role": 5}]', [], {}, 7, True, b"\xff", [{"parts": 3}], [None]],
)
@pytest.mark.parametrize(
    "attributes",
    [
        {"gen_ai.operation.name": "chat", "gen_ai.input.messages": ..., "gen_ai.output.messages": ...},
        {"gen_ai.operation.name": "chat", "gen_ai.system_instructions": ..., "gen_ai.tool.definitions": ...},
        {"gen_ai.operation.name": "text_completion", "gen_ai.input.messages": ...},
        {"gen_ai.operation.name": "chat", "gen_ai.response.finish_reasons": ..., "gen_ai.response.id": ...},
        {"openinference.span.kind": "LLM", "input.value": ..., "output.value": ...},
        {"openinference.span.kind": "LLM", "llm.invocation_parameters": ..., "metadata": ...},
        {"openinference.span.kind": "LLM", "llm.input_messages.0.message.role": ..., "llm.tools.0": ...},
        {"openinference.span.kind": "LLM", "llm.output_messages.0.message.tool_calls.0": ...},
        {"openinference.span.kind": "LLM", "llm.output_messages.0.message.contents.0.message_content": ...},
        {"llm.request.type": "chat", "gen_ai.prompt.0.content": ..., "gen_ai.completion.0.role": ...},
        {"llm.request.type": "chat", "gen_ai.prompt.0": ..., "gen_ai.prompt.0.tool_calls.x": ...},
        {"llm.request.type": "chat", "gen_ai.prompt.0.role": "user", "llm.request.functions.0": ...},
        {"langsmith.span.kind": "llm", "gen_ai.prompt": ..., "gen_ai.completion": ...},
        {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": ...},
        {"traceloop.span.kind": "workflow", "traceloop.entity.name": ...},
    ],
)
def test_no_value_of_any_attribute_breaks_a_dialect(attributes: dict[str, Any], value: Any) -> None:
    filled = {key: value if content is ... else content for key, content in attributes.items()}
    made = assemble("r", 0, [a_span("x", filled, scope="opentelemetry.instrumentation.langchain")])
    assert len(made.spans) == 1
    assert len(made.transitions) <= 1


STRANGE = (
    *(None, "", "{", "[]", "{}", [], {}, 3, True, [None]),
    '[{"role": 1, "content": [1, {"type": []}], "tool_calls": [1, {"function": 3}, {"id": []}]}]',
    '[{"role": "tool", "parts": [{"type": "text", "content": [1]}, {"type": "tool_call_response", "id": [3]}]}]',
    '{"messages": [[{"id": [1], "kwargs": {"tool_calls": [{"args": [1]}]}}]], "choices": [{"message": {"tool_calls": [{}]}}]}',
    '{"output": [1, {"type": "message", "content": "x"}, {"type": "reasoning", "summary": [1]}]}',
    '{"generations": [[{"message": {"kwargs": []}}]], "llm_output": 4}',
    '{"choices": [1, null, {"message": null, "token_ids": "x", "logprobs": {"content": [{}]}}]}',
    '{"choices": [], "output": [], "incomplete_details": 3, "status": "incomplete"}',
    '{"input": 3, "instructions": 4, "prompt": null, "finish_reason": 3, "content": [{"id": 3}]}',
)


def test_a_dialect_that_fails_costs_its_content_not_the_call_and_not_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def failing(span: Span) -> None:
        raise TypeError("of a shape that nobody has foreseen")

    spans = dumps.load("openai-raw__oi_openai")
    monkeypatch.setattr(calls, "DIALECTS", (("failing", failing), *calls.DIALECTS))
    made = dumps.assembled(spans)
    assert sum(len(attempt.transitions) for attempt in made) == 21
    assert sum(attempt.counters["unparsed.failing_content"] for attempt in made) == 21


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", sorted(dumps.MANIFEST))
def test_whatever_attributes_hold_or_lack_nothing_breaks_and_every_span_is_kept(name: str, seed: int) -> None:
    chance = random.Random(seed)
    spans = dumps.load(name)
    for span in spans:
        for key in list(span.attributes):
            roll = chance.random()
            if roll < 0.15:
                del span.attributes[key]
            elif roll < 0.45:
                span.attributes[key] = copy.deepcopy(chance.choice(STRANGE))
        if span.parent_span_id and chance.random() < 0.1:
            span.parent_span_id = chance.choice(spans).span_id  # cycles among them
    made = dumps.assembled(spans)
    assert sum(len(attempt.spans) for attempt in made) == len(spans)
    tables(made)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.randoms(use_true_random=False), st.integers(2, 4))
def test_shuffled_doubled_and_split_over_files_a_dump_gives_the_same_rows(
    tmp_path_factory: pytest.TempPathFactory, shuffle: random.Random, files: int
) -> None:
    folder = tmp_path_factory.mktemp("split")
    document = json.loads(gzip.decompress(dumps.path(SMALL).read_bytes()))
    pieces = [
        (resource.get("resource"), scope.get("scope"), span)
        for resource in document["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]
    doubled = [*pieces, *shuffle.sample(pieces, 10)]
    shuffle.shuffle(doubled)
    for number in range(files):
        part = [
            {"resource": resource, "scopeSpans": [{"scope": scope, "spans": [span]}]}
            for resource, scope, span in doubled[number::files]
        ]
        (folder / f"{number}.json").write_text(json.dumps({"resourceSpans": part}))
    report = convert([folder], folder / "out")
    assert report.counters["duplicate"] == 10
    convert([dumps.path(SMALL)], folder / "whole")
    order = [("rollout_id", "ascending"), ("seq", "ascending")]
    got, expected = (
        open_dataset(folder / out).table("transitions").sort_by(order).combine_chunks()
        for out in ("out", "whole")
    )
    assert got.equals(expected)


# ---- forms of which there is no dump ----

LC = {"lc": 1, "type": "constructor"}


def message(kind: str, **fields: Any) -> dict[str, Any]:
    return {**LC, "id": ["langchain", "schema", "messages", kind], "kwargs": fields}


def test_langsmith_runs_are_calls_tools_and_nodes() -> None:
    result = {
        "generations": [
            [
                {
                    "text": "",
                    "generation_info": {"finish_reason": "tool_calls"},
                    "message": message(
                        "AIMessage",
                        content="",
                        tool_calls=[{"name": "f", "args": {"a": 1}, "id": "c2", "type": "tool_call"}],
                        response_metadata={"id": "chatcmpl-1", "finish_reason": "tool_calls"},
                    ),
                }
            ]
        ],
        "llm_output": {"id": "chatcmpl-1"},
    }
    history = [
        message("SystemMessage", content="s"),
        message("HumanMessage", content="q"),
        message("AIMessage", content="", tool_calls=[{"name": "f", "args": {}, "id": "c1"}]),
        message("ToolMessage", content="42", tool_call_id="c1"),
    ]
    call = call_of(
        a_span(
            "ChatOpenAI",
            {
                "langsmith.span.kind": "llm",
                "gen_ai.operation.name": "chat",
                "gen_ai.request.model": "m",
                "langsmith.metadata.langgraph_node": "writer",
                "langsmith.metadata.ls_temperature": 0.5,
                "gen_ai.prompt": json.dumps({"messages": [history]}),
                "gen_ai.completion": json.dumps(result),
            },
        )
    )
    request, response = json.loads(call.request or ""), json.loads(call.response or "")
    assert [m["role"] for m in request["messages"]] == ["system", "user", "assistant", "tool"]
    assert request["messages"][2]["tool_calls"][0]["id"] == request["messages"][3]["tool_call_id"] == "c1"
    assert json.loads(response["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"]) == {"a": 1}
    assert (call.response_id, call.finish_reason, call.agent) == ("chatcmpl-1", "tool_calls", "writer")
    assert call.sampling == {"temperature": 0.5}
    prompt = a_span("ChatPromptTemplate", {"langsmith.span.kind": "prompt", "gen_ai.operation.name": "chat"})
    assert read_role(prompt) is None
    tool = a_span("search", {"langsmith.span.kind": "tool"})
    assert read_role(tool) == Tool("search")
    node = a_span("writer", {"langsmith.span.kind": "chain", "langsmith.metadata.langgraph_node": "writer"})
    assert read_role(node) == Agent("writer")


def test_langsmith_wraps_openai_bodies_too() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "q"}], "temperature": 0, "seed": 3}
    answer = {
        "id": "chatcmpl-2",
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": "a"}, "finish_reason": "length"}
        ],
    }
    attributes = {
        "langsmith.span.kind": "llm",
        "gen_ai.prompt": json.dumps(body),
        "gen_ai.completion": json.dumps(answer),
    }
    call = call_of(a_span("ChatOpenAI", attributes))
    assert call.sampling == {"temperature": 0, "seed": 3}
    assert (call.response_id, call.finish_reason) == ("chatcmpl-2", "length")


def test_the_flattened_dialect_of_the_client_and_what_is_no_model_call() -> None:
    call = call_of(
        a_span(
            "openai.completion",
            {
                "llm.request.type": "completion",
                "gen_ai.request.model": "m",
                "gen_ai.prompt.0.user": "-- q",
                "gen_ai.completion.0.content": "SELECT 1",
                "gen_ai.completion.0.finish_reason": "length",
            },
        )
    )
    assert json.loads(call.request or "")["prompt"] == "-- q"
    assert json.loads(call.response or "")["choices"][0]["text"] == "SELECT 1"
    assert call.finish_reason == "length"
    response = {"gen_ai.prompt.0.role": "user", "gen_ai.prompt.0.content": "q", "gen_ai.request.model": "m"}
    assert isinstance(read_role(a_span("openai.response", response)), Call)
    embedding = {"llm.request.type": "embedding", "gen_ai.prompt.0.content": "q"}
    assert read_role(a_span("openai.embeddings", embedding)) is None
    agent = {"traceloop.span.kind": "agent", "gen_ai.agent.name": "triage", "gen_ai.prompt.0.content": "q"}
    assert read_role(a_span("triage.agent", agent)) == Agent("triage")
    chain = {"traceloop.span.kind": "workflow", "traceloop.entity.name": "RunnableSequence"}
    assert read_role(a_span("RunnableSequence.workflow", chain)) is None


def test_one_message_of_several_results_is_a_message_for_each() -> None:
    attributes = {
        "openinference.span.kind": "LLM",
        "llm.input_messages.0.message.role": "assistant",
        "llm.input_messages.0.message.tool_calls.1.tool_call.id": "a",
        "llm.input_messages.0.message.tool_calls.1.tool_call.function.name": "f",
        "llm.input_messages.0.message.tool_calls.2.tool_call.id": "b",
        "llm.input_messages.0.message.tool_calls.2.tool_call.function.name": "g",
        "llm.input_messages.1.message.role": "function",
        "llm.input_messages.1.message.function.0": '{"content": "1", "call_id": "a"}',
        "llm.input_messages.1.message.function.1": '{"content": "2", "call_id": "b"}',
    }
    messages = json.loads(call_of(a_span("create", attributes)).request or "")["messages"]
    assert [(m["role"], m.get("tool_call_id"), m["content"]) for m in messages] == [
        ("assistant", None, None),
        ("tool", "a", "1"),
        ("tool", "b", "2"),
    ]
    assert [call["function"]["arguments"] for call in messages[0]["tool_calls"]] == ["{}", "{}"]


def test_older_events_on_the_span_itself_are_its_content() -> None:
    events = [
        Event("gen_ai.system.message", 11, {"gen_ai.event.content": '{"role": "system", "content": "s"}'}),
        Event("gen_ai.user.message", 12, {"content": "q"}),
        Event(
            "gen_ai.choice",
            13,
            {"gen_ai.event.content": '{"finish_reason": "stop", "index": 0, "message": {"content": "a"}}'},
        ),
    ]
    call = call_of(a_span("chat", {"gen_ai.operation.name": "chat"}, events=events))
    assert [m["content"] for m in json.loads(call.request or "")["messages"]] == ["s", "q"]
    assert json.loads(call.response or "")["choices"][0]["message"]["content"] == "a"
    assert call.finish_reason == "stop"
    events = [
        Event("gen_ai.content.prompt", 11, {"gen_ai.prompt": '[{"role": "user", "content": "q"}]'}),
        Event(
            "gen_ai.content.completion", 12, {"gen_ai.completion": '[{"role": "assistant", "content": "a"}]'}
        ),
    ]
    call = call_of(a_span("chat", {"gen_ai.operation.name": "chat"}, events=events))
    assert json.loads(call.request or "")["messages"] == [{"role": "user", "content": "q"}]
    assert json.loads(call.response or "")["choices"][0]["message"]["content"] == "a"


def test_tokens_of_our_hook_are_read_on_a_span_of_any_dialect() -> None:
    ids = {"agentlightning.response.token_ids": [1, 2], "agentlightning.prompt.token_ids": [3]}
    for attributes in (
        {"openinference.span.kind": "LLM", "llm.model_name": "m"},
        {"llm.request.type": "chat", "gen_ai.request.model": "m"},
        {"gen_ai.operation.name": "chat", "gen_ai.request.model": "m"},
    ):
        call = call_of(a_span("x", {**attributes, **ids, "agentlightning.request": '{"seed": 1}'}))
        assert (call.response_ids, call.prompt_ids) == (b"\1\0\0\0\2\0\0\0", b"\3\0\0\0")
        assert call.sampling == {"seed": 1}


def test_a_log_record_keeps_its_body_and_its_rollout(tmp_path: Path) -> None:
    name = "openai-raw__contrib-openai_v2-2.4b0.logs"
    convert([dumps.path(name)], tmp_path / "out")
    texts = open_dataset(tmp_path / "out").table("spans").column("attributes").to_pylist()
    assert len(texts) == len(dumps.load(name))
    assert any("What is 6*7?" in text for text in texts)


def test_reading_a_role_changes_no_span() -> None:
    for name in NAMES:
        for span in dumps.load(name):
            before = copy.deepcopy((span.attributes, span.events))
            read_role(span)
            assert (span.attributes, span.events) == before
