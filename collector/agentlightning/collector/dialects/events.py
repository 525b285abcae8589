"""Content that came as events: laid on its span's attributes, in the form of the current conventions.

Three generations: one log record with everything (`gen_ai.client.inference.operation.details`), one
record per message (`gen_ai.user.message`, …, `gen_ai.choice`, their content in the body), and events
on the span itself. What the span says wins over what its events say.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from agentlightning.collector.bodies import structured
from agentlightning.collector.span import LOG_BODY, Event, Span
from agentlightning.proto import attributes as names

__all__ = ["is_content", "laid_on", "stand_in"]

DETAILS: Final = {"gen_ai.client.inference.operation.details", "gen_ai.client.inference.details"}
CHOICE: Final = "gen_ai.choice"
MESSAGES: Final = {
    "gen_ai.system.message": "system",
    "gen_ai.user.message": "user",
    "gen_ai.assistant.message": "assistant",
    "gen_ai.tool.message": "tool",
}
_SPAN_EVENTS: Final = {
    "gen_ai.content.prompt": "gen_ai.prompt",
    "gen_ai.content.completion": "gen_ai.completion",
}
_INPUT: Final = "gen_ai.input.messages"
_OUTPUT: Final = "gen_ai.output.messages"


def is_content(record: Span | Event) -> bool:
    """Whether a record or an event holds a part of what a model call's span does not say."""
    return record.name in DETAILS or record.name in MESSAGES or record.name in (CHOICE, *_SPAN_EVENTS)


def laid_on(span: Span, records: Iterable[Span]) -> Span:
    """The span as it would be, had it said itself what its events say; itself if they say nothing."""
    told = [event for event in span.events if is_content(event)]
    logs = sorted((record for record in records if is_content(record)), key=_order)
    if not told and not logs:
        return span
    found = _attributes(logs)
    for name, value in _attributes(told).items():
        found.setdefault(name, value)
    return replace(span, attributes={**found, **span.attributes})


def stand_in(records: list[Span]) -> Span | None:
    """For the span of records whose span never came: what they tell of the call; None if that is none."""
    ordered = sorted(records, key=_order)
    first, found = ordered[0], _attributes(ordered)
    if _OUTPUT not in found and names.RESPONSE_ID not in found and names.ERROR_TYPE not in found:
        return None
    found.setdefault(names.OPERATION_NAME, "chat")
    return replace(
        first,
        signal="span",
        name=f"chat {found.get(names.REQUEST_MODEL, '')}".strip(),
        end_ns=max(record.end_ns for record in records),
        attributes={
            **found,
            **{key: first.attributes[key] for key in names.IDENTITY if key in first.attributes},
        },
    )


def _order(record: Span) -> tuple[int, bool, bool, str]:
    """By time; of one moment the system's message first, and what went in before what came out."""
    choice = record.name == CHOICE
    body = str(record.attributes.get(LOG_BODY)) if choice else ""
    return (record.start_ns, choice, record.name != "gen_ai.system.message", body)


def _attributes(records: Iterable[Span | Event]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    inputs: list[Any] = []
    outputs: list[tuple[int, Any]] = []
    for record in records:
        content = _content(record)
        if record.name in DETAILS:
            for source in (record.attributes, content):
                for name, value in source.items():
                    if name.startswith(("gen_ai.", "error.", "openai.")):
                        found.setdefault(name, value)
        elif record.name in MESSAGES:
            inputs.append(_message(content, MESSAGES[record.name]))
        elif record.name == CHOICE:
            message = content.get("message")
            message = message if isinstance(message, dict) else {"content": message or content.get("content")}
            if content.get("tool_calls") and not message.get("tool_calls"):
                message = {**message, "tool_calls": content["tool_calls"]}
            made = _message(message, "assistant")
            made["finish_reason"] = content.get("finish_reason")
            index = content.get("index")
            outputs.append((index if isinstance(index, int) else len(outputs), made))
        elif record.name in _SPAN_EVENTS:
            value = structured(record.attributes.get(_SPAN_EVENTS[record.name]))
            listed = [
                item for item in (value if isinstance(value, list) else [value]) if isinstance(item, dict)
            ]
            if record.name == "gen_ai.content.prompt":
                inputs.extend(_message(item, "user") for item in listed)
            else:
                outputs.extend((len(outputs), _message(item, "assistant")) for item in listed)
    if inputs:
        found.setdefault(_INPUT, inputs)
    if outputs:
        found.setdefault(_OUTPUT, [made for _, made in sorted(outputs, key=lambda item: item[0])])
        reasons = [made.get("finish_reason") for _, made in outputs if made.get("finish_reason")]
        if reasons:
            found.setdefault(names.FINISH_REASONS, reasons)
    return found


def _content(record: Span | Event) -> dict[str, Any]:
    """A record's content: its body, or for events on spans an attribute, or the attributes themselves."""
    for name in (LOG_BODY, "gen_ai.event.content"):
        value = structured(record.attributes.get(name))
        if isinstance(value, dict):
            return {key.removeprefix("gen_ai.event."): item for key, item in value.items()}
        if isinstance(value, str):
            return {"content": value}
    return {
        key: structured(value) if key in ("message", "tool_calls") else value
        for key, value in record.attributes.items()
    }


def _message(content: Mapping[str, Any], role: str) -> dict[str, Any]:
    """A message in OpenAI's form; the tool's call is named `id` here."""
    made = {key: content[key] for key in ("content", "tool_calls", "name") if content.get(key) is not None}
    made.setdefault("content", None)
    made["role"] = content.get("role") or role
    if made["role"] == "tool":
        made["tool_call_id"] = content.get("tool_call_id", content.get("id"))
    return made
