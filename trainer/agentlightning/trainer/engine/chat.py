"""A chat completion body, checked field by field, and the prompt that it means.

Every field is honoured, or refused with its name: nothing is ignored in silence. `FIELDS` is the whole table.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jinja2

from agentlightning.trainer.engine.errors import RequestError, too_long
from agentlightning.trainer.engine.sampling import Sampling

__all__ = ["FIELDS", "ChatRequest", "Template", "parse_chat"]

MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20

HONOURED = "honoured"
NO_EFFECT = "accepted: it says something about the request and nothing about the answer"


@dataclass(frozen=True, slots=True)
class Only:
    """A field that is honoured for these values, and refused for others."""

    values: tuple[object, ...]


FIELDS: dict[str, object] = {
    "model": HONOURED,
    "messages": HONOURED,
    "max_tokens": HONOURED,
    "max_completion_tokens": HONOURED,
    "temperature": HONOURED,
    "top_p": HONOURED,
    "top_k": HONOURED,
    "seed": HONOURED,
    "stop": HONOURED,
    "n": HONOURED,
    "logprobs": HONOURED,
    "top_logprobs": HONOURED,
    "stream": HONOURED,
    "stream_options": HONOURED,
    "tools": HONOURED,
    "tool_choice": Only(("none", "auto")),
    "return_token_ids": HONOURED,
    "ignore_eos": HONOURED,
    "user": NO_EFFECT,
    "safety_identifier": NO_EFFECT,
    "prompt_cache_key": NO_EFFECT,
    "prompt_cache_retention": NO_EFFECT,
    "metadata": NO_EFFECT,
    "store": NO_EFFECT,
    "service_tier": NO_EFFECT,
    "presence_penalty": Only((0,)),
    "frequency_penalty": Only((0,)),
    "repetition_penalty": Only((1,)),
    "min_p": Only((0,)),
    "logit_bias": Only(({},)),
    "response_format": Only(({"type": "text"},)),
    "modalities": Only((["text"],)),
    "parallel_tool_calls": Only((True,)),
}
"""What becomes of each request field. One that is not here is refused as unknown. `null` means absent, always."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request that can be served."""

    prompt: list[int]
    sampling: Sampling
    choices: int
    logprobs: bool
    stream: bool
    include_usage: bool
    return_token_ids: bool
    parse_tools: bool


class Template:
    """Messages and tools → prompt ids, by the tokenizer's chat template."""

    def __init__(self, tokenizer: Any, *, verbatim_arguments: bool) -> None:
        self._tokenizer = tokenizer
        self._verbatim = verbatim_arguments

    def render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> list[int]:
        if not self._verbatim:
            messages = [_with_parsed_arguments(message) for message in messages]
        try:
            text = self._tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=True
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise RequestError(
                f"The model's chat template cannot render these messages: {error}", param="messages"
            ) from error
        # The template has written the special tokens; the tokenizer must not add its own.
        ids: list[int] = self._tokenizer(text, add_special_tokens=False).input_ids
        return ids


def parse_chat(body: Any, *, template: Template, model: str, context: int, tool_parser: bool) -> ChatRequest:
    """Check a request body and render its prompt. Raises RequestError, with the field that is at fault."""
    if not isinstance(body, dict):
        raise RequestError("The request body must be a JSON object.")
    fields = _Fields({name: value for name, value in body.items() if value is not None})
    asked = fields.text("model")
    if asked is None:
        raise RequestError("The field model is missing.", param="model")
    if asked != model:
        raise RequestError(
            f"The model {asked!r} does not exist here; this engine serves {model!r}.",
            status=404,
            code="model_not_found",
            param="model",
        )
    messages = [_message(message, f"messages.{i}") for i, message in enumerate(fields.items("messages"))]
    if not messages:
        raise RequestError("The field messages must hold at least one message.", param="messages")
    tools = [_tool(tool, f"tools.{i}") for i, tool in enumerate(fields.items("tools"))]
    prompt = template.render(messages, tools or None)
    limit = fields.integer("max_completion_tokens", 1)
    limit = limit if limit is not None else fields.integer("max_tokens", 1)
    if len(prompt) + (limit or 1) > context:
        raise too_long(context, len(prompt), limit)
    logprobs = fields.boolean("logprobs")
    top_logprobs = fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS) or 0
    if top_logprobs and not logprobs:
        raise RequestError("The field top_logprobs needs logprobs to be true.", param="top_logprobs")
    options = fields.mapping("stream_options")
    temperature = fields.number("temperature", 0, 100, 1.0)
    sampling = Sampling(
        # Logits divided by less would overflow; there is nothing left to draw at such a temperature anyway.
        temperature=temperature if temperature >= 1e-4 else 0.0,
        top_p=fields.number("top_p", 0, 1, 1.0),
        top_k=max(0, fields.integer("top_k", -1) or 0),
        seed=fields.integer("seed", None),
        max_tokens=limit if limit is not None else context - len(prompt),
        stop=fields.stops(),
        top_logprobs=top_logprobs,
        ignore_eos=fields.boolean("ignore_eos"),
    )
    if sampling.top_p == 0:
        raise RequestError("The field top_p must be above 0; temperature 0 is greedy.", param="top_p")
    choice = body.get("tool_choice") or "auto"
    return ChatRequest(
        prompt=prompt,
        sampling=sampling,
        choices=fields.integer("n", 1, MAX_CHOICES) or 1,
        logprobs=logprobs,
        stream=fields.boolean("stream"),
        include_usage=bool(options.get("include_usage")),
        return_token_ids=fields.boolean("return_token_ids"),
        parse_tools=tool_parser and bool(tools) and choice == "auto",
    )


class _Fields:
    """Typed access to a body of which every field is known to be honoured."""

    def __init__(self, body: dict[str, Any]) -> None:
        for name, value in body.items():
            rule = FIELDS.get(name)
            if rule is None:
                raise RequestError(f"The field {name} is not known to this engine.", param=name)
            if isinstance(rule, Only) and not any(
                (type(value) is not bool and value == v) or value is v for v in rule.values
            ):
                honoured = " or ".join(json.dumps(v) for v in rule.values)
                raise RequestError(
                    f"The field {name} is honoured as {honoured} only; the embedded engine cannot do "
                    f"{json.dumps(value)[:200]}.",
                    code="unsupported_value",
                    param=name,
                )
        self._body = body

    def _get(self, name: str, kind: str, fits: Callable[[Any], bool]) -> Any:
        value = self._body.get(name)
        if value is not None and not fits(value):
            raise RequestError(f"The field {name} must be {kind}, not {json.dumps(value)[:200]}.", param=name)
        return value

    def text(self, name: str) -> str | None:
        value: str | None = self._get(name, "a string", lambda v: isinstance(v, str))
        return value

    def boolean(self, name: str) -> bool:
        return bool(self._get(name, "true or false", lambda v: isinstance(v, bool)))

    def items(self, name: str) -> list[Any]:
        return self._get(name, "a list", lambda v: isinstance(v, list)) or []

    def mapping(self, name: str) -> dict[str, Any]:
        return self._get(name, "an object", lambda v: isinstance(v, dict)) or {}

    def integer(self, name: str, low: int | None, high: int | None = None) -> int | None:
        bounds = "" if low is None else f" of at least {low}" if high is None else f" from {low} to {high}"
        value: int | None = self._get(
            name,
            f"an integer{bounds}",
            lambda v: type(v) is int and (low is None or v >= low) and (high is None or v <= high),
        )
        return value

    def number(self, name: str, low: float, high: float, default: float) -> float:
        value = self._get(
            name,
            f"a number from {low:g} to {high:g}",
            lambda v: type(v) in (int, float) and math.isfinite(v) and low <= v <= high,
        )
        return default if value is None else float(value)

    def stops(self) -> tuple[str, ...]:
        value = self._get(
            "stop",
            "a string or a list of at most 16 strings, none of them empty",
            lambda v: (
                (isinstance(v, str) and v != "")
                or (isinstance(v, list) and len(v) <= 16 and all(isinstance(s, str) and s for s in v))
            ),
        )
        return (value,) if isinstance(value, str) else tuple(value or ())


ROLES = ("system", "developer", "user", "assistant", "tool")


def _message(message: Any, where: str) -> dict[str, Any]:
    """A message as templates expect it: content a string, tool calls as the client sent them."""
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise RequestError(f"{where} must be an object with a role of {', '.join(ROLES)}.", param=where)
    known = {
        "role",
        "content",
        "name",
        "tool_calls",
        "tool_call_id",
        "refusal",
        "audio",
        "function_call",
        "annotations",
    }
    for name, value in message.items():
        if name not in known or (name in ("audio", "function_call", "refusal") and value):
            raise RequestError(f"{where}.{name} is not honoured by this engine.", param=f"{where}.{name}")
    # Templates know no developer; it is the newer name of the same role.
    clean: dict[str, Any] = {"role": "system" if message["role"] == "developer" else message["role"]}
    clean["content"] = _content(message.get("content"), f"{where}.content")
    for name in ("name", "tool_call_id"):
        if message.get(name) is not None:
            clean[name] = message[name]
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list) or (calls and message["role"] != "assistant"):
        raise RequestError(
            f"{where}.tool_calls must be a list, in an assistant's message.", param=f"{where}.tool_calls"
        )
    if calls:
        clean["tool_calls"] = [_call(call, f"{where}.tool_calls.{i}") for i, call in enumerate(calls)]
    elif message.get("content") is None:
        raise RequestError(f"{where} has neither content nor tool_calls.", param=where)
    return clean


def _content(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where} must be a string or a list of parts.", param=where)
    texts: list[str] = []
    for i, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise RequestError(
                f"{where}.{i} is not a text part; this engine reads text only.", param=f"{where}.{i}"
            )
        texts.append(part["text"])
    return "".join(texts)


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if (
        not isinstance(function, dict)
        or not isinstance(function.get("name"), str)
        or not isinstance(function.get("arguments"), str)
    ):
        raise RequestError(
            f"{where} must be a function call with a name, and arguments as a string.", param=where
        )
    return {
        "id": call.get("id"),
        "type": "function",
        "function": {"name": function["name"], "arguments": function["arguments"]},
    }


def _tool(tool: Any, where: str) -> dict[str, Any]:
    if (
        not isinstance(tool, dict)
        or tool.get("type") != "function"
        or not isinstance(tool.get("function"), dict)
    ):
        raise RequestError(f'{where} must be an object with type "function" and a function.', param=where)
    if not isinstance(tool["function"].get("name"), str):
        raise RequestError(f"{where}.function.name must be a string.", param=f"{where}.function.name")
    if tool["function"].get("strict"):
        raise RequestError(
            f"{where}.function.strict: this engine does not constrain what the model writes.",
            code="unsupported_value",
            param=f"{where}.function.strict",
        )
    return tool


def _with_parsed_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Arguments as an object, as the templates that come with models expect them. Ours keeps the letters."""
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        try:
            arguments = json.loads(call["function"]["arguments"] or "{}")
        except ValueError:
            arguments = call["function"]["arguments"]
        calls.append(call | {"function": call["function"] | {"arguments": arguments}})
    return message | {"tool_calls": calls}
