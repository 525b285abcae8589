"""Anthropic's Messages: requests to the chat API, and answers from it. `messages_input` translates the conversation."""

from typing import Any, ClassVar, Final

import orjson

from agentlightning.gateway.answer import Answer
from agentlightning.gateway.blocks import Block, BlockWriter, sealed, typed_event
from agentlightning.gateway.errors import ModelError
from agentlightning.gateway.memory import Memory
from agentlightning.gateway.messages_input import chat_messages, chat_tools, tool_choice
from agentlightning.gateway.request import Api, ModelRequest, Writer, load
from agentlightning.gateway.rules import (
    BOOLEAN,
    COUNT,
    INTEGER,
    ITEMS,
    NUMBER,
    OBJECT,
    TEXT,
    BadRequest,
    Json,
    Table,
    accepted,
    check,
    honoured,
    only,
    refused,
)

__all__ = ["Messages", "anthropic_error"]

_BILLING: Final = "says nothing about the answer"
_HOSTED: Final = "the gateway runs no tools and keeps no files"
_ERRORS: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
}
_STOPS: Final = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "content_filter": "refusal",
}
_EFFORTS: Final = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}


class Messages(Api):
    """`POST /v1/messages`."""

    path = "messages"
    fields: ClassVar[Table] = {
        "model": honoured("the policy's name, or its base model's", TEXT),
        "messages": honoured(
            "text, images, tool calls, results and thinking; documents only as text; a last message of the "
            "assistant's is continued, where the engine can",
            ITEMS,
        ),
        "max_tokens": honoured("required; at most what the run allows", COUNT),
        "system": honoured("text, or blocks of it; Claude Code's `x-anthropic-billing-header` is taken out"),
        "tools": honoured(
            "tools that the client runs; those that Anthropic runs are left out and counted "
            "(`hosted_tools_left_out`); deferred tools are offered at once",
            ITEMS,
        ),
        "tool_choice": honoured("auto, any, tool or none; `disable_parallel_tool_use`", OBJECT),
        "temperature": honoured("unless the run sets the sampling", NUMBER),
        "top_p": honoured("unless the run sets the sampling", NUMBER),
        "top_k": honoured("unless the run sets the sampling", INTEGER),
        "seed": honoured("unless the run sets the sampling; an extension of ours", INTEGER),
        "stop_sequences": honoured("where to stop", ITEMS),
        "stream": honoured("as typed server-sent events", BOOLEAN),
        "thinking": honoured(
            "enabled or adaptive: reasoning is shown as thinking blocks (emptied by `display: omitted`), else it is "
            "left out; `budget_tokens` is no limit of its own, `max_tokens` is",
            OBJECT,
        ),
        "output_config": honoured(
            "`format`: a JSON schema; `effort`: to the engine as reasoning_effort", OBJECT
        ),
        "output_format": honoured("a JSON schema", OBJECT),
        "context_management": honoured(
            "`clear_thinking_20251015` that keeps all: nothing is cleared", OBJECT
        ),
        "cache_control": accepted("the engine caches prefixes by itself"),
        "metadata": accepted(_BILLING),
        "service_tier": accepted(_BILLING),
        "inference_geo": accepted(_BILLING),
        "diagnostics": accepted(_BILLING),
        "speed": only("standard", why="engines have one speed"),
        "container": refused(_HOSTED),
        "mcp_servers": refused(_HOSTED),
    }

    def parse(self, raw: bytes, memory: Memory) -> ModelRequest:
        return self._parse(raw, memory, self.fields)

    def parse_count(self, raw: bytes, memory: Memory) -> ModelRequest:
        """A request of `/v1/messages/count_tokens`, as the call of one token that counts its prompt."""
        body = load(raw)
        if body.get("stream"):
            raise BadRequest("'stream' cannot be asked of count_tokens.", "stream")
        return self._parse(orjson.dumps({**body, "max_tokens": 1}), memory, self.fields)

    def _parse(self, raw: bytes, memory: Memory, fields: Table) -> ModelRequest:
        body = load(raw)
        if not isinstance(body.get("messages"), list) or not body["messages"]:
            raise BadRequest("messages: at least one message is required.", "messages")
        if body.get("max_tokens") is None:
            raise BadRequest("max_tokens: Field required.", "max_tokens")
        check(body, fields)
        chat: Json = {"messages": chat_messages(body, memory), "max_completion_tokens": body["max_tokens"]}
        if chat["messages"][-1]["role"] == "assistant":
            chat |= {"add_generation_prompt": False, "continue_final_message": True}
        notes: list[str] = []
        tools = chat_tools(body.get("tools") or (), notes)
        if tools:
            chat["tools"] = tools
            chat |= tool_choice(body.get("tool_choice"))
        for name in ("temperature", "top_p", "top_k", "seed", "stream"):
            if body.get(name) is not None:
                chat[name] = body[name]
        if body.get("stop_sequences"):
            chat["stop"] = body["stop_sequences"]
        chat |= _output(body)
        return ModelRequest(
            api=self, raw=raw, body=body, chat=chat, wants_usage=True, notes=notes, context=_thinking(body)
        )

    def writer(self, request: ModelRequest) -> Writer:
        return MessagesWriter(request)

    def refusal(self, error: ModelError) -> bytes:
        return orjson.dumps(anthropic_error(error))


def anthropic_error(error: ModelError) -> Json:
    """An error in Anthropic's form."""
    kind = _ERRORS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    told: Json = {"type": kind, "message": str(error), "code": error.code}
    if error.param is not None:
        told["param"] = error.param
    return {"type": "error", "error": told}


def _thinking(body: Json) -> str:
    """How reasoning is shown: `shown`, `omitted` (blocks without their text), or `hidden`."""
    thinking = body.get("thinking") or {"type": "disabled"}
    check(thinking, _THINKING, "thinking.")
    if thinking.get("type") not in ("enabled", "adaptive", "disabled"):
        raise BadRequest("'thinking.type' must be enabled, adaptive or disabled.", "thinking.type")
    if thinking["type"] == "disabled":
        return "hidden"
    return "omitted" if thinking.get("display") == "omitted" else "shown"


_THINKING: Final[Table] = {
    "type": honoured("", TEXT),
    "budget_tokens": honoured("", COUNT),
    "display": only("summarized", "omitted", why="reasoning is shown whole or not at all"),
}
_OUTPUT: Final[Table] = {"format": honoured("", OBJECT), "effort": honoured("", TEXT)}
_CONTEXT: Final[Table] = {"edits": honoured("", ITEMS)}


def _output(body: Json) -> Json:
    """What the fields about output and context mean in the chat API."""
    config = body.get("output_config") or {}
    check(config, _OUTPUT, "output_config.")
    made: Json = {}
    if (effort := config.get("effort")) is not None:
        if effort not in _EFFORTS:
            known = ", ".join(_EFFORTS)
            raise BadRequest(f"'output_config.effort' must be one of {known}.", "output_config.effort")
        made["reasoning_effort"] = _EFFORTS[effort]
    wanted = config.get("format") or body.get("output_format")
    if wanted is not None:
        if wanted.get("type") != "json_schema" or not isinstance(wanted.get("schema"), dict):
            raise BadRequest("'output_config.format' must be a json_schema with its schema.", "output_config")
        schema = {"name": "output", "schema": wanted["schema"], "strict": True}
        made["response_format"] = {"type": "json_schema", "json_schema": schema}
    context = body.get("context_management") or {}
    check(context, _CONTEXT, "context_management.")
    for edit in context.get("edits") or ():
        if edit != {"type": "clear_thinking_20251015", "keep": "all"}:
            raise BadRequest(
                "'context_management' may only keep all thinking: the gateway edits no prompt.",
                "context_management",
                "unsupported_value",
            )
    return made


class MessagesWriter(BlockWriter):
    """An answer of the Messages API."""

    def __init__(self, request: ModelRequest) -> None:
        super().__init__(request)
        self.shows_reasoning = request.context != "hidden"
        self._omits = request.context == "omitted"

    def begin(self, answer: Answer) -> bytes:
        message = self._message(answer)
        message["usage"] = _usage(answer, sampled=0)
        return typed_event({"type": "message_start", "message": message})

    def open(self, block: Block) -> bytes:
        empty: Json = {"type": "text", "text": ""}
        if block.kind == "reasoning":
            empty = {"type": "thinking", "thinking": "", "signature": ""}
        elif block.kind == "tool":
            empty = {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}
        return typed_event({"type": "content_block_start", "index": block.index, "content_block": empty})

    def grow(self, block: Block, text: str, entries: list[Json]) -> bytes:
        if block.kind == "reasoning":
            return b"" if self._omits else self._delta(block, type="thinking_delta", thinking=text)
        if block.kind == "tool":
            return self._delta(block, type="input_json_delta", partial_json=text)
        return self._delta(block, type="text_delta", text=text)

    def close(self, block: Block, answer: Answer) -> bytes:
        events = b""
        if block.kind == "reasoning":
            events = self._delta(block, type="signature_delta", signature=sealed(block.text))
        return events + typed_event({"type": "content_block_stop", "index": block.index})

    def finish(self, answer: Answer) -> bytes:
        reason, sequence = _stop(answer)
        delta = {"stop_reason": reason, "stop_sequence": sequence, "stop_details": None}
        told = {"type": "message_delta", "delta": delta, "usage": _usage(answer)}
        return typed_event(told) + typed_event({"type": "message_stop"})

    def whole(self, answer: Answer) -> Json:
        message = self._message(answer)
        message["content"] = [self._block(block) for block in self.blocks(answer.only())]
        message["stop_reason"], message["stop_sequence"] = _stop(answer)
        message["usage"] = _usage(answer)
        return message

    def error(self, error: ModelError) -> bytes:
        return typed_event(anthropic_error(error))

    def response_id(self, answer: Answer) -> str | None:
        found = super().response_id(answer)
        return None if found is None else "msg_" + found.removeprefix("chatcmpl-")

    def remember(self, answer: Answer, memory: Memory) -> None:
        for block in self.blocks(answer.only()):
            if block.kind == "tool" and block.call_id:
                memory.keep_arguments(block.call_id, block.text)

    def _message(self, answer: Answer) -> Json:
        return {
            "id": self.response_id(answer),
            "type": "message",
            "role": "assistant",
            "model": self.request.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "stop_details": None,
        }

    def _block(self, block: Block) -> Json:
        if block.kind == "reasoning":
            text = "" if self._omits else block.text
            return {"type": "thinking", "thinking": text, "signature": sealed(block.text)}
        if block.kind == "tool":
            given = _input(block.text)
            return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": given}
        return {"type": "text", "text": block.text}

    def _delta(self, block: Block, **delta: Any) -> bytes:
        return typed_event({"type": "content_block_delta", "index": block.index, "delta": delta})


def _input(arguments: str) -> Json:
    """A tool call's input. What is no JSON object is given as text, so that it is not lost."""
    try:
        given = orjson.loads(arguments or "{}")
    except ValueError:
        given = None
    return given if isinstance(given, dict) else {"arguments": arguments}


def _stop(answer: Answer) -> tuple[str, str | None]:
    choice = answer.only()
    matched = choice.extra.get("stop_reason")
    if choice.finish_reason == "stop" and isinstance(matched, str):
        return "stop_sequence", matched
    return _STOPS.get(choice.finish_reason or "stop", "end_turn"), None


def _usage(answer: Answer, sampled: int | None = None) -> Json:
    prompt, completion, cached = answer.counts()
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": completion if sampled is None else sampled,
    }
