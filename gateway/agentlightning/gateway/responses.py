"""OpenAI's Responses: requests to the chat API, and answers from it. `responses_input` translates the conversation."""

from typing import Any, ClassVar, Final

import orjson

from agentlightning.gateway.answer import Answer, Choice
from agentlightning.gateway.blocks import Block, BlockWriter, sealed, typed_event
from agentlightning.gateway.errors import ModelError
from agentlightning.gateway.memory import Memory
from agentlightning.gateway.request import Api, ModelRequest, Writer, load
from agentlightning.gateway.responses_input import chat_messages, chat_tools, input_items, tool_choice
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
    Rule,
    Table,
    accepted,
    check,
    honoured,
    only,
    refused,
)

__all__ = ["Responses"]

_BILLING: Final = "says nothing about the answer"
_HOSTED: Final = "the gateway runs no tools and keeps no files"
_ENCRYPTED: Final = "reasoning.encrypted_content"
_LOGPROBS: Final = "message.output_text.logprobs"
_INCLUDES: Final = (_ENCRYPTED, _LOGPROBS)


class Responses(Api):
    """`POST /v1/responses`."""

    path = "responses"
    fields: ClassVar[Table] = {
        "model": honoured("the policy's name, or its base model's", TEXT),
        "input": honoured(
            "text, or items: messages with text and images, function calls, outputs, reasoning"
        ),
        "instructions": honoured("the first system message", TEXT),
        "previous_response_id": honoured(
            "an earlier answer of this attempt that was not `store: false`, as long as the gateway remembers it "
            "(64 MiB in all, until it restarts); else 400 `previous_response_not_found`",
            TEXT,
        ),
        "max_output_tokens": honoured("at most what the run allows", COUNT),
        "tools": honoured(
            "functions, and namespaces of them; tools that OpenAI runs are left out and counted "
            "(`hosted_tools_left_out`)",
            ITEMS,
        ),
        "tool_choice": honoured("auto, none, required, or a function"),
        "parallel_tool_calls": honoured("passed to the engine, which honours or refuses it", BOOLEAN),
        "text": honoured("`format`: text, json_object or json_schema", OBJECT),
        "reasoning": honoured(
            "`effort`: to the engine as reasoning_effort; reasoning is shown whole, `summary` changes nothing",
            OBJECT,
        ),
        "include": honoured(f"`{_ENCRYPTED}`, `{_LOGPROBS}`", ITEMS),
        "top_logprobs": honoured(f"with `{_LOGPROBS}`", INTEGER),
        "temperature": honoured("unless the run sets the sampling", NUMBER),
        "top_p": honoured("unless the run sets the sampling", NUMBER),
        "top_k": honoured("unless the run sets the sampling; an extension of ours", INTEGER),
        "seed": honoured("unless the run sets the sampling; an extension of ours", INTEGER),
        "stop": honoured("where to stop; an extension of ours"),
        "stream": honoured("as typed server-sent events", BOOLEAN),
        "store": honoured("false: not remembered for previous_response_id", BOOLEAN),
        "stream_options": accepted("nothing is padded", OBJECT),
        "truncation": only("disabled", why="the gateway edits no prompt"),
        "metadata": accepted(_BILLING),
        "client_metadata": accepted(_BILLING),
        "user": accepted(_BILLING),
        "safety_identifier": accepted(_BILLING),
        "prompt_cache_key": accepted(_BILLING),
        "prompt_cache_retention": accepted(_BILLING),
        "prompt_cache_options": accepted(_BILLING),
        "service_tier": accepted(_BILLING),
        "background": only(False, why="an answer is given when it is there"),
        "conversation": refused("use previous_response_id"),
        "prompt": refused("the gateway has no stored prompts"),
        "max_tool_calls": refused(_HOSTED),
        "context_management": refused("the gateway edits no prompt"),
        "moderation": refused("the gateway moderates nothing"),
        "image": refused("policies answer in text"),
        "access_programs": refused(_HOSTED),
        "background_options": refused("an answer is given when it is there"),
    }

    def parse(self, raw: bytes, memory: Memory) -> ModelRequest:
        body = load(raw)
        check(body, self.fields)
        include = body.get("include") or []
        if unknown := [name for name in include if name not in _INCLUDES]:
            raise BadRequest(f"'include' cannot have {unknown[0]!r}.", "include", "unsupported_value")
        items = input_items(body, memory)
        messages = chat_messages(body.get("instructions"), items)
        if not messages:
            raise BadRequest("'input' must hold at least one message.", "input")
        notes: list[str] = []
        functions, names = chat_tools(body.get("tools") or (), notes)
        chat: Json = {"messages": messages}
        if functions:
            chat["tools"] = functions
            chat |= tool_choice(body.get("tool_choice"))
            if body.get("parallel_tool_calls") is not None:
                chat["parallel_tool_calls"] = body["parallel_tool_calls"]
        for name in ("temperature", "top_p", "top_k", "seed", "stop", "stream"):
            if body.get(name) is not None:
                chat[name] = body[name]
        if body.get("max_output_tokens") is not None:
            chat["max_completion_tokens"] = body["max_output_tokens"]
        if body.get("top_logprobs"):
            chat["top_logprobs"] = body["top_logprobs"]
        chat |= _format(body.get("text") or {})
        reasoning = body.get("reasoning") or {}
        check(reasoning, _REASONING, "reasoning.")
        if reasoning.get("effort") is not None:
            chat["reasoning_effort"] = reasoning["effort"]
        return ModelRequest(
            api=self,
            raw=raw,
            body=body,
            chat=chat,
            wants_logprobs=_LOGPROBS in include,
            wants_usage=True,
            notes=notes,
            context=(items, names),
        )

    def writer(self, request: ModelRequest) -> Writer:
        return ResponsesWriter(request)


_REASONING: Final[Table] = {
    "effort": honoured("", TEXT),
    "summary": accepted(""),
    "generate_summary": accepted(""),
    "context": only("auto", why="the gateway edits no prompt"),
}
_TEXT_FIELDS: Final[dict[str, Rule]] = {
    "format": honoured("", OBJECT),
    "verbosity": only("medium", why="policies have no such setting"),
}


def _format(text: Json) -> Json:
    """How the text is to be structured, in the chat API's words."""
    check(text, _TEXT_FIELDS, "text.")
    wanted = text.get("format") or {"type": "text"}
    match wanted.get("type"):
        case "text":
            return {}
        case "json_object":
            return {"response_format": {"type": "json_object"}}
        case "json_schema":
            kept = ("name", "description", "schema", "strict")
            schema = {name: wanted[name] for name in kept if wanted.get(name) is not None}
            return {"response_format": {"type": "json_schema", "json_schema": schema}}
    raise BadRequest("'text.format.type' must be text, json_object or json_schema.", "text.format")


class ResponsesWriter(BlockWriter):
    """An answer of the Responses API: a response object and its output items."""

    def __init__(self, request: ModelRequest) -> None:
        super().__init__(request)
        self._items, self._names = request.context
        self._include = request.body.get("include") or ()
        self._sequence = -1
        self._suffix = ""
        """Of the ids of this answer's items."""

    def begin(self, answer: Answer) -> bytes:
        response = self._response(answer)
        return b"".join(
            self._event(f"response.{what}", response=response) for what in ("created", "in_progress")
        )

    def open(self, block: Block) -> bytes:
        empty = Block(block.kind, block.index, "", block.call_id, block.name)
        item = self._item(empty, status="in_progress")
        if block.kind != "tool":
            item["content"] = []
        item.pop("encrypted_content", None)
        events = self._event("response.output_item.added", output_index=block.index, item=item)
        if block.kind != "tool":
            part = self._part(empty)
            events += self._of(block, "response.content_part.added", content_index=0, part=part)
        return events

    def grow(self, block: Block, text: str, entries: list[Json]) -> bytes:
        if block.kind == "tool":
            return self._of(block, "response.function_call_arguments.delta", delta=text)
        if block.kind == "reasoning":
            return self._of(block, "response.reasoning_text.delta", content_index=0, delta=text)
        logprobs = [_logprob(entry) for entry in entries] if self.request.wants_logprobs else []
        return self._of(block, "response.output_text.delta", content_index=0, delta=text, logprobs=logprobs)

    def close(self, block: Block, answer: Answer) -> bytes:
        item = self._item(block, answer)
        if block.kind == "tool":
            done = {"arguments": block.text, "name": item["name"]}
            events = self._of(block, "response.function_call_arguments.done", **done)
        else:
            part = item["content"][0]
            told = {"content_index": 0, "text": block.text}
            if block.kind == "reasoning":
                events = self._of(block, "response.reasoning_text.done", **told)
            else:
                events = self._of(block, "response.output_text.done", **told, logprobs=part["logprobs"])
            events += self._of(block, "response.content_part.done", content_index=0, part=part)
        return events + self._event("response.output_item.done", output_index=block.index, item=item)

    def finish(self, answer: Answer) -> bytes:
        response = self.whole(answer)
        return self._event(f"response.{response['status']}", response=response)

    def whole(self, answer: Answer) -> Json:
        response = self._response(answer)
        choice = answer.only()
        response["output"] = [self._item(block, answer) for block in self.blocks(choice)]
        response["status"] = "completed"
        if (why := _INCOMPLETE.get(choice.finish_reason or "")) is not None:
            response |= {"status": "incomplete", "incomplete_details": {"reason": why}}
        prompt, sampled, cached = answer.counts()
        response["usage"] = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": cached},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": answer.reasoning_tokens()},
            "total_tokens": prompt + sampled,
        }
        return response

    def blocks(self, choice: Choice) -> list[Block]:
        return super().blocks(choice) or [Block("text", 0)]

    def error(self, error: ModelError) -> bytes:
        told = orjson.loads(error.body())["error"]
        return self._event("error", error=told, **{key: told[key] for key in ("code", "message", "param")})

    def response_id(self, answer: Answer) -> str | None:
        found = super().response_id(answer)
        return None if found is None else "resp_" + found.removeprefix("chatcmpl-")

    def remember(self, answer: Answer, memory: Memory) -> None:
        response_id = self.response_id(answer)
        if self.request.body.get("store") is not False and response_id is not None:
            output = [self._item(block, answer) for block in self.blocks(answer.only())]
            memory.keep_items(response_id, [*self._items, *output])

    def _response(self, answer: Answer) -> Json:
        """The response before its output."""
        body = self.request.body
        response_id = self.response_id(answer) or ""
        self._suffix = response_id.removeprefix("resp_")
        told: Json = {
            "id": response_id,
            "object": "response",
            "created_at": answer.head.get("created") or 0,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "model": self.request.model,
            "output": [],
            "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": body.get("tools") or [],
            "text": body.get("text") or {"format": {"type": "text"}},
            "truncation": "disabled",
            "store": body.get("store") is not False,
            "metadata": body.get("metadata") or {},
            "usage": None,
        }
        for name in _ECHOED:
            told[name] = body.get(name)
        return told

    def _item(self, block: Block, answer: Answer | None = None, status: str = "completed") -> Json:
        """A block as an output item; `answer` where it is finished."""
        item: Json = {"id": self._item_id(block), "type": "message", "status": status}
        if block.kind == "tool":
            namespace, name = self._names.get(block.name, (None, block.name))
            item |= {"type": "function_call", "call_id": block.call_id, "name": name, "arguments": block.text}
            if namespace is not None:
                item["namespace"] = namespace
        elif block.kind == "reasoning":
            item |= {"type": "reasoning", "summary": [], "content": [self._part(block)]}
            if _ENCRYPTED in self._include:
                item["encrypted_content"] = sealed(block.text)
        else:
            item |= {"role": "assistant", "content": [self._part(block, answer)]}
        return item

    def _part(self, block: Block, answer: Answer | None = None) -> Json:
        if block.kind == "reasoning":
            return {"type": "reasoning_text", "text": block.text}
        entries = []
        if answer is not None and self.request.wants_logprobs:
            entries = _spelling(answer.only().logprob_entries or [], block.text)
        return {
            "type": "output_text",
            "text": block.text,
            "annotations": [],
            "logprobs": [_logprob(entry) for entry in entries],
        }

    def _item_id(self, block: Block) -> str:
        prefix = {"tool": "fc", "reasoning": "rs", "text": "msg"}[block.kind]
        return f"{prefix}_{block.call_id or self._suffix}"

    def _of(self, block: Block, kind: str, **fields: Any) -> bytes:
        return self._event(kind, item_id=self._item_id(block), output_index=block.index, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._sequence += 1
        return typed_event({"type": kind, "sequence_number": self._sequence, **fields})


_INCOMPLETE: Final = {"length": "max_output_tokens", "content_filter": "content_filter"}
_ECHOED: Final = (
    "instructions",
    "previous_response_id",
    "max_output_tokens",
    "temperature",
    "top_p",
    "top_logprobs",
    "reasoning",
    "user",
)


def _logprob(entry: Json) -> Json:
    told = {"token": entry["token"], "logprob": entry["logprob"], "bytes": entry.get("bytes") or []}
    return {**told, "top_logprobs": entry.get("top_logprobs") or []}


def _spelling(entries: list[Json], text: str) -> list[Json]:
    """Those of an answer's tokens that spell `text`: it may have others, before it and after."""
    pieces = [bytes(entry.get("bytes") or entry["token"].encode()) for entry in entries]
    spelled, wanted = b"".join(pieces), text.encode()
    start = spelled.find(wanted)
    if start < 0 or not wanted:
        return []
    found, position = [], 0
    for entry, piece in zip(entries, pieces, strict=True):
        if piece and start <= position < start + len(wanted):
            found.append(entry)
        position += len(piece)
    return found
