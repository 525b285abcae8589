"""A chat completion request: the prompt, the way to sample, and the form of the answer that it means."""

import json
from dataclasses import dataclass
from typing import Any

import jinja2

from agentlightning.trainer.engine.errors import RequestError, too_long
from agentlightning.trainer.engine.fields import Fields
from agentlightning.trainer.engine.grammar import Constraint, Form, Grammars, Offer
from agentlightning.trainer.engine.messages import read_message, read_tool, with_parsed_arguments
from agentlightning.trainer.engine.sampling import Sampling

__all__ = ["ChatRequest", "Template", "parse_chat"]

MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20


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
    constraint: Constraint | None = None
    """At the beginning of an answer; each choice goes on from a copy."""


class Template:
    """Messages and tools → prompt ids, by the tokenizer's chat template."""

    def __init__(self, tokenizer: Any, *, verbatim_arguments: bool) -> None:
        self._tokenizer = tokenizer
        self._verbatim = verbatim_arguments

    def render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> list[int]:
        if not self._verbatim:
            messages = [with_parsed_arguments(message) for message in messages]
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


def parse_chat(
    body: Any, *, template: Template, grammars: Grammars, model: str, context: int, tool_parser: bool
) -> ChatRequest:
    """Check a request body and render its prompt. Raises RequestError, with the field that is at fault."""
    if not isinstance(body, dict):
        raise RequestError("The request body must be a JSON object.")
    fields = Fields({name: value for name, value in body.items() if value is not None})
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
    messages = [read_message(message, f"messages.{i}") for i, message in enumerate(fields.items("messages"))]
    if not messages:
        raise RequestError("The field messages must hold at least one message.", param="messages")
    tools = [read_tool(tool, f"tools.{i}") for i, tool in enumerate(fields.items("tools"))]
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
        presence_penalty=fields.number("presence_penalty", -2, 2, 0.0),
        frequency_penalty=fields.number("frequency_penalty", -2, 2, 0.0),
        biases=fields.biases(grammars.vocabulary),
    )
    if sampling.top_p == 0:
        raise RequestError("The field top_p must be above 0; temperature 0 is greedy.", param="top_p")
    choice, named = _choice(fields.any("tool_choice"), tools)
    form = _form(fields, tools, choice, named)
    if form is not None and form.offers and not tool_parser:
        raise RequestError(
            "This engine was started without a tool parser (--tool-parser none): it cannot promise calls.",
            code="unsupported_value",
            param="tools",
        )
    if form is not None and sampling.ignore_eos:
        raise RequestError(
            "The field ignore_eos cannot go with strict tools, tool_choice or response_format: what they ask for ends.",
            param="ignore_eos",
        )
    return ChatRequest(
        prompt=prompt,
        sampling=sampling,
        choices=fields.integer("n", 1, MAX_CHOICES) or 1,
        logprobs=logprobs,
        stream=fields.boolean("stream"),
        include_usage=bool(options.get("include_usage")),
        return_token_ids=fields.boolean("return_token_ids"),
        parse_tools=tool_parser and bool(tools) and choice != "none",
        constraint=grammars.compile(form) if form is not None else None,
    )


def _choice(given: Any, tools: list[dict[str, Any]]) -> tuple[str, str | None]:
    """`none`, `auto` or `required`, and the one tool that may be called, if it is named."""
    if given is None:
        return "auto", None
    if given in ("none", "auto") or (given == "required" and tools):
        return str(given), None
    function = given.get("function") if isinstance(given, dict) and given.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if any(tool["function"]["name"] == name for tool in tools):
        return "required", name
    raise RequestError(
        "The field tool_choice must be none, auto, required (with tools), or name one of the tools, "
        f"not {json.dumps(given)[:200]}.",
        code="unsupported_value",
        param="tool_choice",
    )


def _form(fields: Fields, tools: list[dict[str, Any]], choice: str, named: str | None) -> Form | None:
    """What the answer must look like; None where anything goes."""
    schema = _schema(fields.mapping("response_format"))
    parallel = fields.any("parallel_tool_calls") is None or fields.boolean("parallel_tool_calls")
    strict = any(tool["function"].get("strict") for tool in tools)
    bound = choice == "required" or strict or not parallel or schema is not None
    offers: tuple[Offer, ...] = ()
    if tools and choice != "none" and bound:
        offers = tuple(
            _offer(tool["function"], f"tools.{i}.function")
            for i, tool in enumerate(tools)
            if named in (None, tool["function"]["name"])
        )
    if not offers and schema is None:
        return None
    return Form(offers, must_call=choice == "required", parallel=parallel, schema=schema)


def _offer(function: dict[str, Any], where: str) -> Offer:
    strict = bool(function.get("strict"))
    # Absent parameters are an empty list of them.
    schema = function.get("parameters") or {"properties": {}, "additionalProperties": not strict}
    return Offer(function["name"], schema | {"type": "object"}, f"{where}.parameters", strict)


def _schema(wanted: dict[str, Any]) -> dict[str, Any] | None:
    """The JSON schema that `response_format` asks for."""
    kind = wanted.get("type")
    if not wanted or kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    schema = wanted.get("json_schema", {}) if kind == "json_schema" else None
    schema = schema.get("schema") if isinstance(schema, dict) else None
    if not isinstance(schema, dict):
        raise RequestError(
            "The field response_format must be of type text, json_object, or json_schema with a json_schema.schema, "
            f"not {json.dumps(wanted)[:200]}.",
            code="unsupported_value",
            param="response_format",
        )
    return schema
