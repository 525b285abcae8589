"""What spans are read as: real dumps of instrumentations, and our own attributes in every form."""

import base64
import gzip
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import spans
from hypothesis import given, settings
from hypothesis import strategies as st

from agentlightning.collector import calls, genai_messages, otlp, otlp_json, tokens
from agentlightning.collector.assemble import assemble
from agentlightning.collector.calls import Agent, Call, Tool, read_role
from agentlightning.collector.span import Span
from agentlightning.collector.tables import tables
from agentlightning.proto import attributes as names
from agentlightning.proto.packed import pack_floats, pack_ids

DUMPS = Path(__file__).parents[1] / "data" / "otlp"


def load(name: str) -> list[Span]:
    return otlp_json.decode_traces_json(
        json.loads(gzip.decompress((DUMPS / f"{name}.gz").read_bytes())), Counter()
    )


def decode(*pieces: spans.Piece) -> list[Span]:
    counters: Counter[str] = Counter()
    decoded = otlp.decode_traces(spans.body(*pieces), counters)
    assert not counters
    return decoded


def call_of(piece: spans.Piece) -> Call:
    role = read_role(decode(piece)[0])
    assert isinstance(role, Call)
    return role


def test_graph_nodes_that_are_agents_name_their_calls() -> None:
    dump = load("langgraph__genai_langchain+genai_openai-node-metadata.json")
    made = assemble(*dump[0].key, dump)
    assert [(row["agent"], row["agent_path"]) for row in made.transitions] == [
        ("writer", ["sql_graph", "writer"]),
        ("checker", ["sql_graph", "checker"]),
    ]


def test_content_in_structures_is_read_as_content_in_json_text() -> None:
    on_spans = {
        span.attributes[names.RESPONSE_ID]: span
        for span in load("openai-raw__genai_openai_ev.json")
        if names.RESPONSE_ID in span.attributes
    }
    events = otlp_json.decode_logs_json(
        json.loads(gzip.decompress((DUMPS / "openai-raw__genai_openai_ev.logs.json.gz").read_bytes())),
        Counter(),
    )
    compared = 0
    for event in events:
        span = on_spans.get(event.attributes.get(names.RESPONSE_ID))
        if span is None:
            continue
        for read in (
            lambda found: genai_messages.chat_request(found, "m", {}),
            lambda found: genai_messages.chat_response(found, "id", "m", []),
        ):
            assert read(event.attributes) == read(span.attributes)
        compared += 1
    assert compared >= 10


def test_messages_become_an_openai_body_with_tools_and_sampling() -> None:
    first, second = load("openai-raw__genai_openai_ev.json")[:2]
    role = read_role(second)
    assert isinstance(role, Call)
    request, response = json.loads(role.request or ""), json.loads(role.response or "")
    assert [message["role"] for message in request["messages"]] == ["system", "user", "assistant", "tool"]
    tool_call = request["messages"][2]["tool_calls"][0]
    assert tool_call["function"] == {"name": "calculate", "arguments": '{"expression":"6*7"}'}
    assert request["messages"][3] == {"role": "tool", "tool_call_id": tool_call["id"], "content": "42"}
    assert request["tools"][0]["function"]["name"] == "calculate"
    assert (request["temperature"], request["max_tokens"]) == (0.7, 64)
    assert response["choices"][0]["message"]["content"] == "The final answer is 42."
    asked = read_role(first)
    assert isinstance(asked, Call)
    assert asked.finish_reason == "tool_calls"


def test_agents_and_tools_are_told_from_calls() -> None:
    roles = [read_role(span) for span in load("autogen__builtin+genai_openai.json")]
    assert Counter(type(role).__name__ for role in roles) == {
        "Call": 14,
        "Agent": 13,
        "Tool": 3,
        "NoneType": 23,
    }
    assert all(role.name for role in roles if isinstance(role, Agent | Tool))


@pytest.mark.parametrize("form", ["bytes", "base64", "array", "json"])
def test_token_ids_in_every_accepted_form_are_the_same(form: str) -> None:
    prompt, response, logprobs = [0, 1, 127, 128, 49151, 2**31 - 1], [5, 6], [-0.5, -1.25]
    forms: dict[str, Any] = {
        "bytes": (pack_ids(prompt), pack_ids(response), pack_floats(logprobs)),
        "base64": tuple(
            base64.b64encode(packed).decode()
            for packed in (pack_ids(prompt), pack_ids(response), pack_floats(logprobs))
        ),
        "array": (prompt, response, logprobs),
        "json": (json.dumps(prompt), json.dumps(response), json.dumps(logprobs)),
    }
    given_prompt, given_response, given_logprobs = forms[form]
    call = call_of(
        spans.gateway_call(
            "r",
            0,
            agentlightning__prompt__token_ids=given_prompt,
            agentlightning__response__token_ids=given_response,
            agentlightning__response__logprobs=given_logprobs,
        )
    )
    assert call.prompt_ids == pack_ids(prompt)
    assert call.response_ids == pack_ids(response)
    assert call.logprobs == pack_floats(logprobs)
    assert call.unparsed == []


@pytest.mark.parametrize(
    ("attribute", "content", "reason"),
    [
        (names.PROMPT_TOKEN_IDS, b"\1\2\3", "prompt_token_ids_length"),
        (names.PROMPT_TOKEN_IDS, "no base64!", "prompt_token_ids_text"),
        (names.PROMPT_TOKEN_IDS, [1, 2**31], "prompt_token_ids_range"),
        (names.PROMPT_TOKEN_IDS, ["a"], "prompt_token_ids_type"),
        (names.PROMPT_TOKEN_IDS, 7, "prompt_token_ids_type"),
        (names.RESPONSE_TOKEN_IDS, b"\1\2\3\4\5", "response_token_ids_length"),
        (names.RESPONSE_LOGPROBS, pack_floats([-1.0]), "response_logprobs_not_parallel"),
        (names.RESPONSE_LOGPROBS, b"\0", "response_logprobs_length"),
        (names.MODEL_VERSIONS, "nonsense", "model_versions"),
    ],
)
def test_what_cannot_be_trusted_is_left_out_and_the_rest_of_the_row_stays(
    attribute: str, content: Any, reason: str
) -> None:
    piece = spans.gateway_call("r", 0, **{attribute: content})
    made = assemble("r", 0, decode(piece))
    assert made.counters["unparsed"] >= 1
    assert made.counters[f"unparsed.{reason}"] == 1
    assert made.rollout["unparsed"] >= 1
    (row,) = made.transitions
    assert row["request"]
    assert row["response"]
    assert row["call_id"]
    if attribute == names.PROMPT_TOKEN_IDS:
        assert row["prompt_token_ids"] is None
        assert row["response_token_ids"] is not None
    if reason in ("response_token_ids_length", "response_logprobs_not_parallel"):
        assert row["response_token_ids"] is None
        assert row["response_logprobs"] is None


@given(st.lists(st.integers(0, 2**31 - 1)))
def test_an_array_on_the_wire_is_packed_exactly(ids: list[int]) -> None:
    raw = spans.value(ids).array_value.SerializeToString()
    assert tokens.pack_array(raw, floats=False) == pack_ids(ids)


@given(st.lists(st.floats(width=32)))
def test_a_float_array_on_the_wire_is_packed_exactly(values: list[float]) -> None:
    raw = spans.value(values).array_value.SerializeToString()
    packed = tokens.pack_array(raw, floats=True)
    assert packed is not None
    np.testing.assert_array_equal(np.frombuffer(packed, "<f4"), np.array(values, "<f4"))


@given(st.binary(max_size=64))
def test_an_array_of_anything_else_is_not_mistaken_for_ids(raw: bytes) -> None:
    packed = tokens.pack_array(raw, floats=False)
    if packed:
        again = spans.value(np.frombuffer(packed, "<i4").tolist()).array_value.SerializeToString()
        assert len(again) <= len(raw)  # varints may be longer than needed, never shorter


def test_effective_sampling_comes_from_attributes_else_from_the_request() -> None:
    call = call_of(spans.gateway_call("r", 0))
    assert call.sampling == {"temperature": 0.7}
    piece = spans.gateway_call(
        "r",
        0,
        **{"gen_ai.request.temperature": None},
        agentlightning__request='{"temperature": 0.2, "min_p": 0.1, "messages": []}',
    )
    assert call_of(piece).sampling == {"temperature": 0.2, "min_p": 0.1}


def test_errors_say_type_and_message() -> None:
    assert call_of(spans.gateway_call("r", 0, error="aborted")).error == "aborted"
    piece = spans.span("chat", "1" * 16, error="boom", gen_ai__operation__name="chat", error__type="Timeout")
    assert call_of(piece).error == "Timeout: boom"
    assert call_of(spans.span("chat", "1" * 16, gen_ai__operation__name="chat")).error is None


def test_an_evaluation_may_be_a_span_an_event_or_a_log_record() -> None:
    contents = {names.EVALUATION_NAME: "reward", names.EVALUATION_SCORE: 0.5}
    as_span = decode(spans.evaluation("2" * 16, 0.5, parent="1" * 16))[0]
    as_event = decode(spans.span("agent", "1" * 16, events=[(names.EVALUATION_RESULT, contents)]))[0]
    as_log = otlp.decode_logs(spans.log_body(names.EVALUATION_RESULT, contents, parent="1" * 16), Counter())[
        0
    ]
    for span in (as_span, as_event, as_log):
        (evaluation,) = calls.evaluations(span)
        assert (evaluation.name, evaluation.value, evaluation.span_id) == ("reward", 0.5, "1" * 16)


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**63 - 1)
        | st.floats()
        | st.text()
        | st.binary(max_size=20),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
        max_leaves=12,
    )
)
def test_attributes_of_every_type_come_back_from_json_as_they_were(content: Any) -> None:
    counters: Counter[str] = Counter()
    text = otlp_json.attributes_dump({"k": content})
    assert text == orjson.dumps(otlp_json.attributes_to_json({"k": content}))
    back = otlp_json.attributes_from_json(orjson.loads(text), counters)["k"]
    assert not counters
    assert repr(back) == repr(content)  # repr, for NaN


@given(st.dictionaries(st.sampled_from([
    names.OPERATION_NAME, names.CALL_ID, names.REQUEST, names.RESPONSE_TOKEN_IDS, names.PROMPT_TOKEN_IDS,
    names.RESPONSE_LOGPROBS, names.MODEL_VERSION, names.MODEL_VERSIONS, names.CHOICE, names.FINISH_REASONS,
    names.AGENT_NAME, names.AGENT_PATH, names.EVALUATION_NAME, names.EVALUATION_SCORE, names.ROLLOUT_STATE,
    names.CALLS_EXPECTED, names.TASK_INPUT, names.ROLLOUT_ID, names.ATTEMPT, names.SOURCE, names.RUN_ID,
    "gen_ai.input.messages", "gen_ai.output.messages", "gen_ai.system_instructions", "gen_ai.tool.definitions",
]), st.one_of(
    st.sampled_from(["chat", "invoke_agent", "gateway", "[1]", "{}", "[{}]", '[{"parts": 3}]', "", "null", '[[1]]']),
    st.integers(-(2**63), 2**63 - 1), st.floats(), st.booleans(), st.binary(max_size=9), st.lists(st.integers(-5, 5), max_size=3),
    st.lists(st.dictionaries(st.sampled_from(["role", "parts", "type", "content"]), st.none() | st.integers() .filter(lambda n: abs(n) < 2**62) | st.text(max_size=3), max_size=3), max_size=2),
)))  # fmt: skip
def test_no_attribute_whatever_its_type_breaks_the_assembly(contents: dict[str, Any]) -> None:
    contents.setdefault(names.OPERATION_NAME, "chat")
    piece = spans.span("s", "1" * 16, **contents)
    decoded = otlp.decode_traces(spans.body(piece), Counter())
    made = [assemble(*span.key, [span]) for span in decoded]
    assert sum(len(table) for table in tables(made).values()) >= 2
    assert all(math.isfinite(row["reward"]) for row in (made[0].rollout,) if row["reward"] is not None)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(["key", "value", "values", "stringValue", "intValue", "doubleValue", "bytesValue",
                         "boolValue", "arrayValue", "kvlistValue", "attributes", "name", "code", "timeUnixNano",
                         "droppedAttributesCount", "traceId"]),
        inner,
        max_size=3,
    ),
    max_leaves=15,
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["attributes", "events", "links", "status", "kind", "flags", "name", "startTimeUnixNano",
                         "endTimeUnixNano", "parentSpanId", "droppedAttributesCount", "traceState"]),
        JSON,
    )
)  # fmt: skip
def test_a_json_span_of_whatever_shape_becomes_rows_or_is_counted(fields: dict[str, Any]) -> None:
    item = {**fields, "traceId": "A" * 32, "spanId": "1" * 16}
    document = {"resourceSpans": [{"scopeSpans": [{"spans": [item]}]}]}
    (span,) = otlp_json.decode_traces_json(document, Counter())
    assert (span.trace_id, span.span_id) == ("a" * 32, "1" * 16)
    made = tables([assemble(*span.key, [span])])
    assert len(made["spans"]) == 1


@pytest.mark.parametrize(
    ("stated", "attempt"),
    [(2, 2), ("2", 2), ("x", 0), ("9" * 5000, 0), (-1, 0), (2**40, 0), (True, 0), (1.5, 0)],
)
def test_an_attempt_number_may_be_text_and_nonsense_is_counted(stated: Any, attempt: int) -> None:
    counters: Counter[str] = Counter()
    piece = spans.span("s", "1" * 16, resource={names.ROLLOUT_ID: "r", names.ATTEMPT: stated})
    (span,) = otlp.decode_traces(spans.body(piece), counters)
    assert span.key == ("r", attempt)
    assert counters["invalid_attempt"] == (attempt == 0)


def test_a_spans_own_identity_wins_over_its_resources() -> None:
    resource = {names.ROLLOUT_ID: "resource", names.ATTEMPT: 1, names.RUN_ID: "run"}
    decoded = decode(
        spans.span("s", "1" * 16, resource=resource, **{names.ROLLOUT_ID.replace(".", "__"): "own"})
    )
    assert decoded[0].key == ("own", 1)
    assert decode(spans.span("s", "1" * 16))[0].key == ("a" * 32, 0)


def test_values_nested_too_deep_are_counted_not_followed() -> None:
    deep: Any = 1
    for _ in range(40):
        deep = [deep]
    counters: Counter[str] = Counter()
    (span,) = otlp.decode_traces(spans.body(spans.span("s", "1" * 16, deep=deep, fine=[1])), counters)
    assert span.attributes == {"deep": None, "fine": [1]}
    assert counters == {"unparsed_attribute": 1}
