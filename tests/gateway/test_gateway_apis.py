"""Responses and Messages, by their official clients: what the model saw, what the client got, what is on record."""

import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from scripted import Reply, ScriptedModel

from agentlightning.collector import inspect_cli
from agentlightning.collector.convert_cli import convert
from agentlightning.proto.dataset import open_dataset
from agentlightning.proto.packed import unpack_floats, unpack_ids

ADD = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
FUNCTION: Any = {"type": "function", "name": "add", "description": "Adds.", "parameters": ADD, "strict": True}
TOOL: Any = {"name": "add", "description": "Adds.", "input_schema": ADD}
ASKED = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": ADD}}
BOTH = Reply("Two sums.", [("add", {"a": 1, "b": 2}), ("add", {"a": 3, "b": 4})], reasoning="I must add")
TIMES = {"agentlightning.time.queue_ms", "agentlightning.time.first_token_ms", "start", "end"}


class Place:
    """One rollout with a scripted model, and clients that hold its token."""

    def __init__(self, gateway: Any, sink: Any, model: ScriptedModel, name: str) -> None:
        self.gateway, self.sink, self.model, self.name = gateway, sink, model, name
        self.token = gateway.begin(name, policy="scripted")["token"]
        self.openai = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=self.token, max_retries=0)
        self.anthropic = anthropic.Anthropic(base_url=gateway.url, api_key=self.token, max_retries=0)

    def post(self, path: str, **body: Any) -> Any:
        key = {"authorization": f"Bearer {self.token}"}
        return self.gateway.http.post(path, json={"model": "scripted", **body}, headers=key)

    def spans(self) -> list[dict[str, Any]]:
        return self.sink.calls(self.name)

    def recorded(self, index: int = -1) -> Any:
        return json.loads(self.spans()[index]["agentlightning.response"])


@pytest.fixture
def place(gateway: Any, sink: Any, request: pytest.FixtureRequest) -> Iterator[Place]:
    model = ScriptedModel(lambda body: "The answer is 3.")
    body = {"engine_id": "scripted", "policy": "scripted", "url": model.url}
    gateway.ask("POST", "/api/engines", body, role="admin")
    yield Place(gateway, sink, model, request.node.name.replace("[", "-").replace("]", ""))
    gateway.ask("DELETE", "/api/engines/scripted", role="admin")
    model.close()


def plain(value: Any) -> Any:
    return value.model_dump(exclude_unset=True, by_alias=True)


# ------------------------------------------------------------------------------- Responses


def test_a_response_is_what_the_client_expects_and_what_is_recorded(place):
    got = place.openai.responses.create(
        model="scripted", input="1 + 2?", instructions="Be brief.", max_output_tokens=50
    )
    assert got.output_text == "The answer is 3."
    assert (got.status, got.model, got.object) == ("completed", "scripted", "response")
    asked = place.model.requests[-1]
    assert asked["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1 + 2?"},
    ]
    assert (asked["max_completion_tokens"], asked["return_token_ids"], asked["logprobs"]) == (50, True, True)
    (span,) = place.spans()
    assert place.recorded() == plain(got)
    assert json.loads(span["agentlightning.request"])["instructions"] == "Be brief."
    assert span["gen_ai.response.id"] == got.id
    ids = unpack_ids(span["agentlightning.response.token_ids"])
    assert len(ids) == got.usage.output_tokens == len(unpack_floats(span["agentlightning.response.logprobs"]))
    assert len(unpack_ids(span["agentlightning.prompt.token_ids"])) == got.usage.input_tokens
    assert 0 <= span["agentlightning.time.queue_ms"] <= span["agentlightning.time.first_token_ms"]


def test_a_streamed_response_ends_as_the_unstreamed_one_and_both_leave_one_record(place):
    place.model.script = lambda body: BOTH
    ask: Any = {"model": "scripted", "input": "Add.", "tools": [FUNCTION], "parallel_tool_calls": True}
    whole = place.openai.responses.create(**ask)
    place.model._number = 0  # the same ids again
    with place.openai.responses.stream(**ask) as stream:
        events = list(stream)
        streamed = stream.get_final_response()
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "Two sums."
    assert "".join(e.delta for e in events if e.type == "response.reasoning_text.delta") == "I must add"
    for kind in ("output_item.added", "output_item.done"):
        assert kinds.count(f"response.{kind}") == 4
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call", "function_call"]
    for one, other in zip(whole.output, streamed.output, strict=True):
        given, again = one.to_dict(), other.to_dict()
        again.pop("parsed_arguments", None)
        for part in again.get("content") or ():
            part.pop("parsed", None)
        assert given == again
    first, second = place.spans()
    differ = {key for key in first if first[key] != second.get(key)} | (second.keys() - first.keys())
    assert differ - TIMES == {
        "agentlightning.call.id",
        "span_id",
        "agentlightning.request",
        "gen_ai.request.stream",
    }


def test_tools_and_their_results_reach_the_model_as_one_conversation(place):
    place.model.script = lambda body: BOTH if body["messages"][-1]["role"] == "user" else "3 and 7."
    first = place.openai.responses.create(
        model="scripted", input="Add.", tools=[FUNCTION], include=["reasoning.encrypted_content"], store=False
    )
    calls = [item for item in first.output if item.type == "function_call"]
    thought = {k: v for k, v in first.output[0].to_dict().items() if k != "content"}
    assert thought["encrypted_content"]
    history: Any = [{"role": "user", "content": "Add."}, thought, *(i.to_dict() for i in first.output[1:])]
    history += [
        {
            "type": "function_call_output",
            "call_id": call.call_id,
            "output": str(sum(json.loads(call.arguments).values())),
        }
        for call in calls
    ]
    second = place.openai.responses.create(model="scripted", input=history, tools=[FUNCTION])
    assert second.output_text == "3 and 7."
    asked = place.model.requests[-1]
    assert asked["tools"] == [{**ASKED, "function": {**ASKED["function"], "strict": True}}]
    assert asked["messages"] == [
        {"role": "user", "content": "Add."},
        {
            "role": "assistant",
            "content": "Two sums.",
            "reasoning_content": "I must add",
            "tool_calls": [
                {
                    "id": call.call_id,
                    "type": "function",
                    "function": {"name": "add", "arguments": call.arguments},
                }
                for call in calls
            ],
        },
        {"role": "tool", "tool_call_id": calls[0].call_id, "content": "3"},
        {"role": "tool", "tool_call_id": calls[1].call_id, "content": "7"},
    ]


def test_a_previous_response_is_the_conversation_before_unless_it_was_not_stored(place, gateway):
    first = place.openai.responses.create(model="scripted", input="1 + 2?", instructions="Brief.")
    again = place.openai.responses.create(
        model="scripted", input="Sure?", previous_response_id=first.id, instructions="Long."
    )
    assert [(m["role"], m["content"]) for m in place.model.requests[-1]["messages"]] == [
        ("system", "Long."),
        ("user", "1 + 2?"),
        ("assistant", "The answer is 3."),
        ("user", "Sure?"),
    ]
    assert again.previous_response_id == first.id
    unstored = place.openai.responses.create(model="scripted", input="x", store=False)
    for lost in (unstored.id, "resp_none"):
        with pytest.raises(openai.BadRequestError) as caught:
            place.openai.responses.create(model="scripted", input="y", previous_response_id=lost)
        assert caught.value.code == "previous_response_not_found"
    other = gateway.begin("another-rollout", policy="scripted")["token"]
    with pytest.raises(openai.BadRequestError):  # nobody reads the conversation of another
        place.openai.with_options(api_key=other).responses.create(
            model="scripted", input="y", previous_response_id=first.id
        )


def test_structured_output_images_and_log_probabilities(place):
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    form: Any = {"type": "json_schema", "name": "number", "schema": schema, "strict": True}
    picture = {"type": "input_image", "image_url": "data:image/png;base64,AA==", "detail": "low"}
    got = place.openai.responses.create(
        model="scripted",
        input=[{"role": "user", "content": [{"type": "input_text", "text": "What?"}, picture]}],
        text={"format": form},
        include=["message.output_text.logprobs"],
        top_logprobs=2,
        reasoning={"effort": "low", "summary": "auto"},
        temperature=0.5,
    )
    asked = place.model.requests[-1]
    assert asked["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "number", "schema": schema, "strict": True},
    }
    assert asked["messages"][0]["content"] == [
        {"type": "text", "text": "What?"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA==", "detail": "low"}},
    ]
    assert (asked["top_logprobs"], asked["reasoning_effort"], asked["temperature"]) == (2, "low", 0.5)
    entries = got.output[0].content[0].logprobs
    assert "".join(entry.token for entry in entries) == got.output_text
    assert place.recorded() == plain(got)


def test_functions_in_a_namespace_keep_it_and_hosted_tools_are_left_out_and_counted(place, gateway):
    place.model.script = lambda body: Reply(None, [("math__add", {"a": 1, "b": 2})])
    tools: Any = [{"type": "namespace", "name": "math", "tools": [FUNCTION]}, {"type": "web_search"}]
    before = gateway.counters().get("hosted_tools_left_out", 0)
    got = place.openai.responses.create(model="scripted", input="Add.", tools=tools)
    assert [tool["function"]["name"] for tool in place.model.requests[-1]["tools"]] == ["math__add"]
    assert (got.output[0].name, got.output[0].namespace) == ("add", "math")
    assert gateway.counters()["hosted_tools_left_out"] == before + 1
    place.openai.responses.create(model="scripted", input=[got.output[0].to_dict()], tools=tools)
    (call,) = place.model.requests[-1]["messages"][0]["tool_calls"]
    assert call["function"]["name"] == "math__add"


# -------------------------------------------------------------------------------- Messages


def test_a_message_is_what_the_client_expects_and_what_is_recorded(place):
    got = place.anthropic.messages.create(
        model="scripted",
        max_tokens=50,
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        messages=[{"role": "user", "content": "1 + 2?"}],
        stop_sequences=["END"],
        extra_body={"top_k": 5},
    )
    assert [block.to_dict() for block in got.content] == [{"type": "text", "text": "The answer is 3."}]
    assert (got.stop_reason, got.role, got.model) == ("end_turn", "assistant", "scripted")
    asked = place.model.requests[-1]
    assert asked["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1 + 2?"},
    ]
    assert (asked["max_completion_tokens"], asked["stop"], asked["top_k"]) == (50, ["END"], 5)
    (span,) = place.spans()
    assert place.recorded() == plain(got)
    assert span["gen_ai.response.id"] == got.id
    assert len(unpack_ids(span["agentlightning.response.token_ids"])) == got.usage.output_tokens


@pytest.mark.parametrize("thinking", [None, {"type": "adaptive"}, {"type": "adaptive", "display": "omitted"}])
def test_a_streamed_message_ends_as_the_unstreamed_one_and_both_leave_one_record(place, thinking):
    place.model.script = lambda body: BOTH
    ask: Any = {"model": "scripted", "max_tokens": 50, "tools": [TOOL]}
    ask["messages"] = [{"role": "user", "content": "Add."}]
    if thinking:
        ask["thinking"] = thinking
    whole = place.anthropic.messages.create(**ask)
    place.model._number = 0
    with place.anthropic.messages.stream(**ask) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    assert plain(streamed) == plain(whole) == place.recorded()
    blocks = [block.type for block in whole.content]
    assert blocks == [*(["thinking"] if thinking else []), "text", "tool_use", "tool_use"]
    if thinking:
        assert whole.content[0].thinking == ("" if "display" in thinking else "I must add")
    assert whole.stop_reason == "tool_use"
    first, second = place.spans()
    differ = {key for key in first if first[key] != second.get(key)} | (second.keys() - first.keys())
    assert differ - TIMES == {
        "agentlightning.call.id",
        "span_id",
        "agentlightning.request",
        "gen_ai.request.stream",
    }


@pytest.mark.parametrize("display", ["summarized", "omitted"])
def test_what_an_agent_gives_back_is_to_the_letter_what_the_model_wrote(place, display):
    place.model.script = lambda body: BOTH if body["messages"][-1]["role"] == "user" else "3 and 7."
    ask: Any = {"model": "scripted", "max_tokens": 50, "tools": [TOOL]}
    ask["thinking"] = {"type": "enabled", "budget_tokens": 1024, "display": display}
    question = {"role": "user", "content": "Add."}
    first = place.anthropic.messages.create(**ask, messages=[question])
    calls = [block for block in first.content if block.type == "tool_use"]
    results: Any = [
        {"type": "tool_result", "tool_use_id": calls[0].id, "content": "3"},
        {
            "type": "tool_result",
            "tool_use_id": calls[1].id,
            "content": [{"type": "text", "text": "no"}],
            "is_error": True,
        },
        {"type": "text", "text": "Go on."},
    ]
    answer: Any = {"role": "assistant", "content": [block.to_dict() for block in first.content]}
    place.anthropic.messages.create(**ask, messages=[question, answer, {"role": "user", "content": results}])
    made = place.model.requests[-1]["messages"]
    assert made[1] == {
        "role": "assistant",
        "content": "Two sums.",
        "reasoning_content": "I must add",
        "tool_calls": [
            # with the spaces that Python's JSON has and the gateway's has not
            {
                "id": calls[0].id,
                "type": "function",
                "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'},
            },
            {
                "id": calls[1].id,
                "type": "function",
                "function": {"name": "add", "arguments": '{"a": 3, "b": 4}'},
            },
        ],
    }
    assert made[2:] == [
        {"role": "tool", "tool_call_id": calls[0].id, "content": "3"},
        {"role": "tool", "tool_call_id": calls[1].id, "content": "Error: no"},
        {"role": "user", "content": "Go on."},
    ]


def test_the_billing_header_of_claude_code_does_not_reach_the_model(place):
    line = "x-anthropic-billing-header: cc_version=2.1; cch=%s;"
    blocks: Any = [{"type": "text", "text": line % "1"}, {"type": "text", "text": "You are an agent."}]
    for system in (blocks, line % "2" + "\n\nYou are an agent."):
        place.anthropic.messages.create(
            model="scripted", max_tokens=5, system=system, messages=[{"role": "user", "content": "x"}]
        )
    one, other = (request["messages"] for request in place.model.requests)
    assert one == other
    assert one[0] == {"role": "system", "content": "You are an agent."}
    assert "billing" in place.spans()[0]["agentlightning.request"]  # the record says what was sent


def test_tool_choice_images_and_structured_output_of_messages(place):
    image: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    place.anthropic.messages.create(
        model="scripted",
        max_tokens=5,
        messages=[{"role": "user", "content": [{"type": "text", "text": "What?"}, image]}],
        tools=[TOOL, {"type": "web_search_20250305", "name": "web_search"}],
        tool_choice={"type": "tool", "name": "add", "disable_parallel_tool_use": True},
        extra_body={"output_config": {"effort": "max", "format": {"type": "json_schema", "schema": ADD}}},
    )
    asked = place.model.requests[-1]
    assert asked["tools"] == [ASKED]
    assert asked["tool_choice"] == {"type": "function", "function": {"name": "add"}}
    assert asked["parallel_tool_calls"] is False
    assert asked["messages"][0]["content"][1]["image_url"]["url"] == "data:image/png;base64,AA=="
    assert asked["response_format"]["json_schema"]["schema"] == ADD
    assert asked["reasoning_effort"] == "high"


def test_count_tokens_counts_what_the_model_would_see_and_records_nothing(place):
    messages: Any = [{"role": "user", "content": "How many tokens is this?"}]
    counted = place.anthropic.messages.count_tokens(model="scripted", messages=messages)
    assert place.model.requests[-1]["max_completion_tokens"] == 1
    got = place.anthropic.messages.create(model="scripted", max_tokens=5, messages=messages)
    assert counted.input_tokens == got.usage.input_tokens > 0
    assert len(place.spans()) == 1


def test_errors_of_messages_are_anthropics(place, gateway):
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        place.anthropic.post("/v1/messages", body={"model": "scripted", "messages": [{}]}, cast_to=object)
    with pytest.raises(anthropic.NotFoundError):
        place.anthropic.messages.create(
            model="none", max_tokens=5, messages=[{"role": "user", "content": "x"}]
        )
    with pytest.raises(anthropic.AuthenticationError):
        place.anthropic.with_options(api_key="alr_forged").messages.count_tokens(
            model="scripted", messages=[{"role": "user", "content": "x"}]
        )
    place.model.script = lambda body: Reply("x", status=500)
    with pytest.raises(anthropic.InternalServerError) as caught:
        place.anthropic.messages.create(
            model="scripted", max_tokens=5, messages=[{"role": "user", "content": "x"}]
        )
    assert caught.value.body["error"]["type"] == "api_error"
    (span,) = place.spans()
    assert (span["error.type"], span["status"]) == ("engine_failed", 2)


# ------------------------------------------------------------------------------ every API


def test_every_field_that_is_not_honoured_is_refused_by_its_name(place):
    message = [{"role": "user", "content": "x"}]
    cases = [
        ("/v1/chat/completions", {"messages": message}, {"nonsense": 1, "audio": {}, "modalities": ["audio"]}),
        ("/v1/completions", {"prompt": "x"}, {"nonsense": 1, "suffix": "y", "echo": True}),
        ("/v1/responses", {"input": "x"}, {"nonsense": 1, "background": True, "truncation": "auto"}),
        ("/v1/messages", {"messages": message, "max_tokens": 1}, {"nonsense": 1, "mcp_servers": [], "speed": "fast"}),
        ("/v1/embeddings", {"input": "x"}, {"nonsense": 1}),
    ]  # fmt: skip
    for path, body, fields in cases:
        for name, value in fields.items():
            answer = place.post(path, **body, **{name: value})
            assert answer.status_code == 400, (path, name)
            assert name in answer.json()["error"]["message"]
            assert answer.json()["error"]["param"] == name
    bad = [
        ("/v1/responses", {"input": [{"type": "item_reference", "id": "x"}]}, "input.0"),
        ("/v1/responses", {"input": "x", "tools": [{"type": "custom", "name": "x"}]}, "tools.0.type"),
        ("/v1/responses", {"input": "x", "include": ["file_search_call.results"]}, "include"),
        ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "tool"}]}, "messages.0.role"),
        (
            "/v1/messages",
            {"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "search_result"}]}]},
            "messages.0.content.0",
        ),
    ]
    for path, body, param in bad:
        answer = place.post(path, **body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert not place.model.requests


@pytest.mark.parametrize("stream", [False, True])
def test_completions_leave_a_record_for_each_prompt_with_its_own_ids(place, stream):
    answer = place.post("/v1/completions", prompt=["one two", "three"], max_tokens=5, stream=stream)
    assert answer.status_code == 200
    assert ("token_ids" in answer.text, "logprobs" in answer.text) == (False, False)
    asked = place.model.requests[-1]
    assert (asked["return_token_ids"], asked["logprobs"]) == (True, 0)
    first, second = place.spans()
    for span, prompt in ((first, 2), (second, 1)):
        assert span["gen_ai.operation.name"] == "text_completion"
        assert len(unpack_ids(span["agentlightning.prompt.token_ids"])) == prompt
        ids = unpack_ids(span["agentlightning.response.token_ids"])
        assert len(ids) == len(unpack_floats(span["agentlightning.response.logprobs"])) == 4
    texts = [json.loads(span["agentlightning.response"])["choices"][0]["text"] for span in (first, second)]
    assert texts == ["The answer is 3."] * 2
    shown = place.post("/v1/completions", prompt="one", logprobs=1).json()["choices"][0]["logprobs"]
    assert place.recorded()["choices"][0]["logprobs"] == shown


def test_records_of_every_api_become_transitions(place, sink, until, tmp_path, capsys):
    place.model.script = lambda body: BOTH if body.get("tools") else "The answer is 3."
    message: Any = [{"role": "user", "content": "Add."}]
    chat = place.openai.chat.completions.create(model="scripted", messages=message)
    got = [
        place.openai.responses.create(
            model="scripted", input="Add.", instructions="Be brief.", tools=[FUNCTION], temperature=0.5
        ),
        place.anthropic.messages.create(
            model="scripted", max_tokens=50, messages=message, tools=[TOOL], thinking={"type": "adaptive"}
        ),
    ]
    place.gateway.finish(place.name)
    until(lambda: len(sink.of(place.name)) == 4)  # the attempt's end, too
    for number, body in enumerate(sink.bodies):
        (tmp_path / f"{number}.pb").write_bytes(body)
    convert(sorted(tmp_path.glob("*.pb")), tmp_path / "data")
    rows = open_dataset(tmp_path / "data").table("transitions").to_pylist()
    rows = sorted((row for row in rows if row["rollout_id"] == place.name), key=lambda row: row["seq"])
    assert [row["finish_reason"] for row in rows] == ["stop", "tool_calls", "tool_calls"]
    spans = place.spans()
    for row, span in zip(rows, spans, strict=True):
        assert (row["source"], row["policy"], row["token_source"]) == ("gateway", "scripted", "engine")
        assert (row["call_id"], row["model_version"]) == (span["agentlightning.call.id"], 1)
        assert row["response_token_ids"] == unpack_ids(span["agentlightning.response.token_ids"])
        assert row["prompt_token_ids"] == unpack_ids(span["agentlightning.prompt.token_ids"])
        assert len(row["response_logprobs"]) == len(row["response_token_ids"])
        assert row["error"] is None
    assert json.loads(rows[0]["response"])["id"] == chat.id
    assert [json.loads(row["response"]) for row in rows[1:]] == [plain(one) for one in got]
    assert json.loads(rows[1]["request"])["instructions"] == "Be brief."
    assert json.loads(rows[1]["sampling"])["temperature"] == 0.5
    assert json.loads(rows[2]["sampling"])["max_tokens"] == 50
    assert inspect_cli.main([str(tmp_path / "data"), "--rollout", place.name, "--full"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("⇒ assistant calls add: ") == 4
    assert shown.count("⇒ assistant (reasoning): I must add") == 2
    assert "system: Be brief." in shown


def test_both_providers_clients_can_list_the_models(place):
    assert [model.id for model in place.openai.models.list()] == ["scripted"]
    assert [(model.id, model.type) for model in place.anthropic.models.list()] == [("scripted", "model")]
    assert place.anthropic.models.retrieve("scripted").display_name == "scripted"
    assert place.openai.models.retrieve("scripted").id == "scripted"


def test_embeddings_pass_through_and_are_not_recorded(place):
    made = place.openai.embeddings.create(model="scripted", input="x", encoding_format="float")
    assert made.data[0].embedding == [0.5, -1.0]
    assert place.model.requests[-1] == {"model": "scripted", "input": "x", "encoding_format": "float"}
    assert not place.spans()


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_never_reached_its_client_is_given_when_it_asks_again(place, sink, until, stream):
    before = place.gateway.counters().get("calls_undelivered", 0)
    sink.mode = "hang"  # the call is recorded when its client has gone
    body = {"model": "scripted", "input": "x", "stream": stream}
    key = {"authorization": f"Bearer {place.token}"}
    sent = place.gateway.http.build_request("POST", "/v1/responses", json=body, headers=key)
    head = "".join(f"{name}: {value}\r\n" for name, value in sent.headers.items())
    with socket.create_connection((sent.url.host, sent.url.port)) as client:
        client.sendall(f"POST {sent.url.path} HTTP/1.1\r\n{head}\r\n".encode() + sent.content)
        until(lambda: sink.waiting)
    for _ in range(3):  # what the gateway answers after the client's leaving, it answers knowing of it
        place.gateway.http.get("/healthz")
    sink.proceed.set()
    sink.mode = "ok"
    until(lambda: place.gateway.counters().get("calls_undelivered", 0) > before)
    again = place.gateway.http.post("/v1/responses", json=body, headers=key)
    assert again.status_code == 200
    assert "The answer is 3." in again.text
    assert len(place.model.requests) == len(place.spans()) == 1


def test_a_client_that_leaves_a_stream_stops_the_engine_whatever_the_api(place, until):
    hold = threading.Event()
    place.model.script = lambda body: Reply("A long answer of many words indeed.", hold=hold)
    message = [{"role": "user", "content": "x"}]
    for number, (path, body) in enumerate(
        (("/v1/responses", {"input": "x"}), ("/v1/messages", {"messages": message, "max_tokens": 5}))
    ):
        key = {"authorization": f"Bearer {place.token}"}
        asked = {"model": "scripted", "stream": True, **body}
        with (
            httpx.Client(base_url=place.gateway.url) as client,
            client.stream("POST", path, json=asked, headers=key) as answer,
        ):
            next(answer.iter_raw())
        until(lambda count=number + 1: len(place.spans()) == count)
        assert place.spans()[-1]["error.type"] == "aborted"
    hold.set()


def test_a_failure_in_the_middle_of_a_stream_is_the_apis_own_error(gateway, engine):
    engine.mode = "die"
    claimed = gateway.begin("breaks-by-api")
    client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=claimed["token"], max_retries=0)
    with pytest.raises(openai.APIError, match="broke off"):
        list(client.responses.create(model="default", input="x", stream=True))
    other = anthropic.Anthropic(base_url=gateway.url, api_key=claimed["token"], max_retries=0)
    with pytest.raises(anthropic.APIStatusError, match="broke off"):
        list(
            other.messages.create(
                model="default", max_tokens=5, messages=[{"role": "user", "content": "x"}], stream=True
            )
        )


def test_a_retry_gets_the_same_bytes_by_every_api(place):
    message = [{"role": "user", "content": "x"}]
    for path, body in (
        ("/v1/responses", {"input": "x"}),
        ("/v1/messages", {"messages": message, "max_tokens": 5}),
        ("/v1/chat/completions", {"messages": message}),
    ):
        for stream in (False, True):
            first = place.post(path, **body, stream=stream)
            key = {"authorization": f"Bearer {place.token}", "x-stainless-retry-count": "1"}
            again = place.gateway.http.post(path, content=first.request.content, headers=key)
            assert first.content == again.content
            assert first.headers["content-type"] == again.headers["content-type"]
    assert len(place.model.requests) == len(place.spans()) == 6
