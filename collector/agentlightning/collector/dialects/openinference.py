"""OpenInference: `openinference.span.kind`, messages spelt out attribute by attribute.

The raw request and response (`input.value`, `output.value`) say more than the attributes: settings,
the text of tool arguments, the response id, token ids and log-probabilities. They are read where they
are an API's own bodies; LangChain's, the Agents SDK's and AutoGen's forms are recognised by their shape.
"""

from collections.abc import Mapping
from typing import Any, Final

from agentlightning.collector import tokens
from agentlightning.collector.bodies import (
    choice,
    dump,
    finish_reason,
    normal_body,
    request_body,
    response_body,
    sampling_of,
    structured,
    text_of,
    unflatten,
    usage_of,
)
from agentlightning.collector.dialects import langchain, nodes, responses
from agentlightning.collector.roles import Agent, Call, Role, Tool, new_call, response_id, string
from agentlightning.collector.span import Span

__all__ = ["read"]

_KIND: Final = "openinference.span.kind"
_SCOPES: Final = "openinference.instrumentation."


def read(span: Span) -> Role | None:
    """What a span of OpenInference is."""
    attributes = span.attributes
    kind = attributes.get(_KIND)
    if not isinstance(kind, str):
        return None
    match kind.upper():
        case "LLM":
            return _call(span)
        case "AGENT":
            name = string(attributes.get("agent.name")) or string(attributes.get("graph.node.id"))
            return Agent(name or span.name)
        case "TOOL":
            return Tool(string(attributes.get("tool.name")) or span.name)
        case "CHAIN":
            return nodes.chain_role(span.name, _metadata(attributes))
    return None


def _call(span: Span) -> Call:
    attributes = span.attributes
    call = new_call(span)
    call.agent = nodes.node_of(_metadata(attributes)) or string(attributes.get("agent.name"))
    parameters = structured(attributes.get("llm.invocation_parameters"))
    parameters = parameters if isinstance(parameters, dict) else {}
    call.model = string(attributes.get("llm.model_name")) or string(parameters.get("model"))
    _read_request(call, attributes, parameters)
    _read_response(call, attributes)
    if call.error is not None and call.response is not None and call.finish_reason is None:
        call.finish_reason = "error"
    return call


def _read_request(call: Call, attributes: dict[str, Any], parameters: dict[str, Any]) -> None:
    value = _value(call, attributes, "input")
    messages = _messages(call, attributes, "llm.input_messages.")
    tools = [
        structured(_tree(item, "tool").get("json_schema")) for item in unflatten(attributes, "llm.tools.")
    ]
    if isinstance(value, dict) and _is_chat(value):
        body = normal_body(value)
        call.sampling = sampling_of(value)
    elif isinstance(value, dict) and "prompt" in value and not messages:
        body = dict(value)
        call.sampling = sampling_of(value)
    else:
        if isinstance(value, dict) and "input" in value:  # the Responses API
            parameters = {**parameters, **{k: v for k, v in value.items() if k not in ("input", "tools")}}
            messages = responses.messages(value) or messages
        elif not messages and isinstance(value, list):
            messages = [item for item in value if isinstance(item, dict) and "role" in item]
        elif not messages and isinstance(value, dict):
            messages = langchain.chat_messages(value) if "messages" in value else []
        # The Agents SDK gives the response's settings for the request's: defaults, not what was asked.
        echo = "created_at" in parameters and "id" in parameters
        call.sampling = {} if echo else sampling_of(parameters)
        prompts = [
            text_of(_tree(item, "prompt").get("text")) for item in unflatten(attributes, "llm.prompts.")
        ]
        if prompts and not messages:
            body = {
                "model": call.model,
                "prompt": prompts[0] if len(prompts) == 1 else prompts,
                **call.sampling,
            }
        elif messages:
            stream = parameters.get("stream") is True
            body = request_body(call.model, messages, tools, call.sampling, stream=stream)
        else:
            return
    call.model = call.model or string(body.get("model"))
    call.request = dump(body)


def _read_response(call: Call, attributes: dict[str, Any]) -> None:
    value = _value(call, attributes, "output")
    if isinstance(value, list) and len(value) == 1 and responses.is_response(value[0]):
        value = value[0]
    reason = finish_reason(attributes.get("llm.finish_reason"))
    usage = usage_of(attributes.get("llm.token_count.prompt"), attributes.get("llm.token_count.completion"))
    messages = _messages(call, attributes, "llm.output_messages.")
    choices: list[dict[str, Any]] = []
    if isinstance(value, dict) and isinstance(value.get("choices"), list):
        body = normal_body(value)
        call.response_id = response_id(value.get("id"))
        call.model = string(value.get("model")) or call.model
        call.response = dump(body)
        call.finish_reason = reason or _first_reason(body["choices"])
        _read_tokens(call, value)
        return
    if responses.is_response(value):
        call.response_id = response_id(responses.real_id(value))
        choices = [responses.answer(value)]
        reason = choices[0]["finish_reason"]  # the Agents SDK says "stop" when tools are called
        _read_tokens(call, value)
    elif isinstance(value, dict) and "generations" in value:
        call.response_id = langchain.result_id(value)
        choices = langchain.choices(value)
        if call.error is not None and not any(item["message"]["content"] for item in choices):
            return  # LangChain makes an empty answer of an error
    elif isinstance(value, dict) and "finish_reason" in value and "content" in value:  # AutoGen
        choices = [choice(0, _autogen_answer(value), value["finish_reason"])]
    elif isinstance(value, list):
        found = [item for item in value if isinstance(item, dict) and "role" in item]
        choices = [choice(index, item, None) for index, item in enumerate(found)]
    if messages and not responses.is_response(value):
        reasons = [item["finish_reason"] for item in choices]
        choices = [
            choice(index, item, reasons[index] if index < len(reasons) else reason)
            for index, item in enumerate(messages)
        ]
    if not choices:
        texts = [_tree(item, "completion").get("text") for item in unflatten(attributes, "llm.choices.")]
        choices = [
            {"index": index, "text": text, "finish_reason": reason} for index, text in enumerate(texts)
        ]
    if choices:
        call.finish_reason = reason or _first_reason(choices)
        call.response = dump(response_body(call.response_id, call.model, choices, usage))


def _messages(call: Call, attributes: Mapping[str, Any], prefix: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for item in unflatten(attributes, prefix):
        results = item.get("function", _tree(item, "message").get("function"))
        if isinstance(results, list) and results:  # AutoGen's message of several tools' results
            found.extend(_result(structured(result)) for result in results)
        else:
            found.append(_message(call, item))
    return found


def _result(result: Any) -> dict[str, Any]:
    if not isinstance(result, dict):
        return {"role": "tool", "content": text_of(result)}
    return {
        "role": "tool",
        "tool_call_id": result.get("call_id"),
        "content": text_of(result.get("content")),
    }


def _message(call: Call, item: dict[str, Any]) -> dict[str, Any]:
    """A message that was spelt out in attributes."""
    tree = {**item, **_tree(item, "message")}
    made: dict[str, Any] = {"role": tree.get("role"), "content": tree.get("content")}
    if made["role"] == "developer" and call.span.scope == f"{_SCOPES}autogen_agentchat":
        made["role"] = "system"  # AutoGen knows no other, this instrumentation writes it so
    contents = tree.get("contents")
    if made["content"] is None and isinstance(contents, list):
        made["content"] = [
            _part(_tree(part, "message_content")) for part in contents if isinstance(part, dict)
        ]
    calls = tree.get("tool_calls")
    if isinstance(calls, list):
        made["tool_calls"] = [_tree(item, "tool_call") for item in calls if isinstance(item, dict)]
    elif tree.get("function_call_name"):
        made["function_call"] = {
            "name": tree["function_call_name"],
            "arguments": tree.get("function_call_arguments_json"),
        }
    if string(tree.get("tool_call_id")):
        made["tool_call_id"] = tree["tool_call_id"]
    if string(tree.get("name")):
        made["name"] = tree["name"]
    return made


def _part(part: Mapping[str, Any]) -> dict[str, Any]:
    image = _tree(_tree(part, "image"), "image")
    if image:
        return {"type": "image_url", "image_url": {"url": image.get("url")}}
    return {"type": part.get("type", "text"), "text": part.get("text")}


def _autogen_answer(value: Mapping[str, Any]) -> dict[str, Any]:
    content = value["content"]
    if not isinstance(content, list):
        return {"role": "assistant", "content": content}
    calls = [item for item in content if isinstance(item, dict)]
    return {"role": "assistant", "content": value.get("thought"), "tool_calls": calls}


def _read_tokens(call: Call, body: Mapping[str, Any]) -> None:
    """Token ids and log-probabilities that an engine had put into the response."""
    choices = body.get("choices")
    first = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else body
    prompt = body.get("prompt_token_ids") or first.get("prompt_token_ids")
    call.prompt_ids = _pack(call, prompt, "prompt_token_ids", floats=False)
    call.response_ids = _pack(call, first.get("token_ids"), "response_token_ids", floats=False)
    if call.response_ids is None:
        return
    logprobs = _pack(call, _logprobs(first), "response_logprobs", floats=True)
    if logprobs is not None and len(logprobs) == len(call.response_ids):
        call.logprobs = logprobs
    elif logprobs is not None:
        call.response_ids = None  # which of the two is wrong cannot be known
        call.unparsed.append("response_logprobs_not_parallel")


def _logprobs(answer: Mapping[str, Any]) -> list[Any] | None:
    """One per token: the chat API's, the completions API's, or the Responses API's (of its text)."""
    told = answer.get("logprobs")
    if isinstance(told, Mapping):
        found = told.get("token_logprobs")
        content = told.get("content")
        if not isinstance(found, list) and isinstance(content, list):
            found = [item.get("logprob") for item in content if isinstance(item, Mapping)]
        return found if isinstance(found, list) else None
    if responses.is_response(answer):
        parts = [
            part
            for item in answer["output"]
            if isinstance(item, Mapping) and isinstance(item.get("content"), list)
            for part in item["content"]
        ]
        found = [
            entry.get("logprob")
            for part in parts
            if isinstance(part, Mapping)
            for entry in part.get("logprobs") or ()
        ]
        return found or None
    return None


def _pack(call: Call, value: Any, what: str, *, floats: bool) -> bytes | None:
    if not isinstance(value, list):
        return None
    try:
        return tokens.pack(value, floats=floats)
    except ValueError as error:
        call.unparsed.append(f"{what}_{error}")
        return None


def _first_reason(choices: list[Any]) -> str | None:
    return choices[0].get("finish_reason") if choices and isinstance(choices[0], dict) else None


def _is_chat(value: Mapping[str, Any]) -> bool:
    messages = value.get("messages")
    return isinstance(messages, list) and all(isinstance(item, dict) and "role" in item for item in messages)


def _value(call: Call, attributes: Mapping[str, Any], side: str) -> Any:
    """`input.value` or `output.value`, parsed if it says that it is JSON."""
    value = attributes.get(f"{side}.value")
    parsed = structured(value)
    if isinstance(parsed, str) and attributes.get(f"{side}.mime_type") == "application/json":
        call.unparsed.append(f"{side}_value_text")
    return parsed


def _metadata(attributes: Mapping[str, Any]) -> Mapping[str, Any]:
    metadata = structured(attributes.get("metadata"))
    return metadata if isinstance(metadata, dict) else {}


def _tree(item: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    inner = item.get(name)
    return inner if isinstance(inner, dict) else {}
