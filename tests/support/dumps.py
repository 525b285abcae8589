"""Recorded dumps of real instrumentations, and what their calls are in one form."""

import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from agentlightning.collector.assemble import Assembled, assemble
from agentlightning.collector.linking import TraceLinks
from agentlightning.collector.otlp_json import decode_logs_json, decode_traces_json
from agentlightning.collector.span import Span

FOLDER = Path(__file__).parents[1] / "data" / "otlp"
MANIFEST: dict[str, dict[str, Any]] = {
    line["file"].removesuffix(".json"): line
    for line in map(json.loads, (FOLDER / "MANIFEST.jsonl").read_text().splitlines())
}


def path(name: str) -> Path:
    return FOLDER / f"{name}.json.gz"


def load(name: str) -> list[Span]:
    document = json.loads(gzip.decompress(path(name).read_bytes()))
    decode = decode_logs_json if "resourceLogs" in document else decode_traces_json
    counters: Counter[str] = Counter()
    found = decode(document, counters)
    assert not +counters
    return found


def assembled(spans: Iterable[Span]) -> list[Assembled]:
    """Attempts as `agl convert` makes them."""
    by_attempt: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        by_attempt[span.rollout_id].append(span)
    links = TraceLinks()
    for rollout, members in by_attempt.items():
        links.add(rollout, members)
    heads = links.heads()
    merged: dict[str, list[Span]] = defaultdict(list)
    for rollout, members in sorted(by_attempt.items()):
        merged[heads.get(rollout, rollout)] += members
    return [assemble(rollout, 0, members) for rollout, members in sorted(merged.items())]


def calls(name: str, *more: str) -> list[dict[str, Any]]:
    """Every call of a dump, as what can be compared between two runs of one program."""
    spans = [span for part in (name, *more) for span in load(part)]
    return [features(row) for made in assembled(spans) for row in made.transitions]


def features(row: dict[str, Any]) -> dict[str, Any]:
    request, response = (json.loads(row[side]) if row[side] else {} for side in ("request", "response"))
    seen: dict[Any, int] = {}
    choices = response.get("choices")
    return {
        "api": {"resp": "responses", "cmpl": "completions"}.get((response.get("id") or "")[:4], "chat"),
        "question": _messages(request["messages"], seen)
        if "messages" in request
        else repr(request.get("prompt")),
        "answer": None
        if choices is None
        else tuple(
            _messages([item["message"]], seen) if "message" in item else item["text"] for item in choices
        ),
        "tools": json.dumps(
            [_without(tool["function"], "strict") for tool in request.get("tools", ())], sort_keys=True
        ),
        "sampling": row["sampling"],
        "finish_reason": row["finish_reason"],
        "error": row["error"],
        "agent": row["agent"],
        "agent_path": tuple(row["agent_path"]),
        "model": row["model"],
    }


def _messages(messages: list[dict[str, Any]], seen: dict[Any, int]) -> tuple[Any, ...]:
    """Roles, texts and tool calls. Ids differ from run to run: what counts is which of them are equal."""

    def number(name: Any) -> int:
        assert name, "a tool call without an id"
        return seen.setdefault(name, len(seen))

    return tuple(
        (
            message["role"],
            _text(message["content"]),
            tuple(
                (
                    number(call["id"]),
                    call["function"]["name"],
                    json.dumps(json.loads(call["function"]["arguments"]), sort_keys=True),
                )
                for call in message.get("tool_calls", ())
            ),
            number(message["tool_call_id"]) if message["role"] == "tool" else None,
        )
        for message in messages
    )


def _text(content: Any) -> Any:
    return tuple(part["text"] for part in content) if isinstance(content, list) else content


def _without(mapping: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in mapping.items() if key != name}
