"""A model's server in vLLM's shape whose answers a test writes: `script(body)` gives text, tool calls or an error.

Every answer has ids and log-probabilities of its own, made from its words and the number of the call, so that
an answer that was mixed up with another is seen.
"""

import json
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Script = Callable[[dict[str, Any]], "Reply | str"]


@dataclass
class Reply:
    """One answer of the model."""

    text: str | None = None
    tools: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """Names and arguments of the functions that it calls."""
    reasoning: str | None = None
    """What it thinks before."""
    status: int = 200
    hold: threading.Event | None = None
    """A stream waits for it after its first words, a plain answer before its head."""


class ScriptedModel:
    """Serves `script` on loopback; `requests` are the bodies it got."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.changed = threading.Condition()
        self._number = 0
        model = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                if self.path == "/health":
                    return self.json({"status": "ok", "model_version": 1})
                return self.json({"object": "list", "data": [{"id": "scripted", "object": "model"}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                with model.changed:
                    model._number += 1
                    number = model._number
                    model.requests.append(body)
                    model.headers.append({name.lower(): value for name, value in self.headers.items()})
                    model.changed.notify_all()
                made = model.script(body)
                reply = Reply(made) if isinstance(made, str) else made
                if reply.status != 200:
                    error = {"message": "scripted failure", "type": "server_error", "code": None}
                    return self.json({"error": error}, reply.status)
                if self.path.endswith("/embeddings"):
                    return self.json({"object": "list", "data": [{"index": 0, "embedding": [0.5, -1.0]}]})
                if "prompt" in body:
                    made = _completion(body, reply, number)
                    if body.get("stream"):
                        return self.stream(iter([made, None]), reply.hold)
                    return self.json(made)
                if body.get("stream"):
                    return self.stream(_chunks(body, reply, number), reply.hold)
                if reply.hold is not None:
                    reply.hold.wait(20)
                return self.json(_plain(body, reply, number))

            def json(self, body: Any, status: int = 200) -> None:
                data = json.dumps(body).encode()
                try:
                    self.send_response(status)
                    self.send_header("content-type", "application/json")
                    self.send_header("content-length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)
                except OSError:  # the client has left
                    self.close_connection = True

            def stream(self, chunks: Iterator[Any], hold: threading.Event | None) -> None:
                self.send_response(200)
                self.send_header("content-type", "text/event-stream")
                self.send_header("transfer-encoding", "chunked")
                self.end_headers()
                try:
                    for position, chunk in enumerate(chunks):
                        if position == 3 and hold is not None:
                            hold.wait(20)
                        data = (
                            b"data: " + (b"[DONE]" if chunk is None else json.dumps(chunk).encode()) + b"\n\n"
                        )
                        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
                        self.wfile.flush()
                    self.wfile.write(b"0\r\n\r\n")
                except OSError:
                    self.close_connection = True

            def log_message(self, *_: Any) -> None:
                """Silence."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def wait_for_requests(self, number: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.requests) >= number, 20)

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def last(body: dict[str, Any]) -> str:
    """The newest message's text."""
    return str(body["messages"][-1].get("content") or "")


def system(body: dict[str, Any]) -> str:
    """The system prompt, by which a script knows which agent is asking."""
    first = body["messages"][0]
    return str(first["content"]) if first["role"] in ("system", "developer") else ""


def answered(body: dict[str, Any]) -> bool:
    """Whether the newest message is a tool's result."""
    return bool(body["messages"][-1]["role"] == "tool")


def _pieces(reply: Reply, number: int) -> list[tuple[str, int, float]]:
    parts = [reply.reasoning, reply.text, json.dumps(reply.tools) if reply.tools else None]
    text = " ".join(part for part in parts if part is not None)
    words = [word + " " for word in text.split(" ")] or [""]
    words[-1] = words[-1].removesuffix(" ")
    ids = [zlib.crc32(f"{number} {place} {word}".encode()) % 49_000 for place, word in enumerate(words)]
    return [
        (word, token, -(1 + token % 97) / 128) for word, token in zip(words, ids, strict=True)
    ]  # exact in float32


def _prompt_ids(body: dict[str, Any]) -> list[int]:
    return [zlib.crc32(word.encode()) % 49_000 for word in json.dumps(body["messages"]).split()]


def _calls(reply: Reply, number: int) -> list[dict[str, Any]]:
    return [
        {
            "id": f"call_{number}_{place}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments)},
        }
        for place, (name, arguments) in enumerate(reply.tools)
    ]


def _head(body: dict[str, Any], number: int, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{number}", "object": kind, "created": 1, "model": body.get("model", "scripted")}


def _usage(body: dict[str, Any], tokens: int) -> dict[str, int]:
    prompt = len(_prompt_ids(body))
    return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}


def _entry(piece: tuple[str, int, float]) -> dict[str, Any]:
    return {"token": piece[0], "logprob": piece[2], "bytes": list(piece[0].encode()), "top_logprobs": []}


def _plain(body: dict[str, Any], reply: Reply, number: int) -> dict[str, Any]:
    pieces = _pieces(reply, number)
    message: dict[str, Any] = {"role": "assistant", "content": reply.text, "refusal": None}
    if reply.tools:
        message["tool_calls"] = _calls(reply, number)
    if reply.reasoning is not None:
        message["reasoning_content"] = reply.reasoning
    choice: dict[str, Any] = {"index": 0, "message": message}
    choice["finish_reason"] = "tool_calls" if reply.tools else "stop"
    choice["token_ids"] = [token for _, token, _ in pieces]
    choice["logprobs"] = {"content": [_entry(piece) for piece in pieces]}
    answer = {**_head(body, number, "chat.completion"), "choices": [choice], "model_version": 1}
    return {**answer, "usage": _usage(body, len(pieces)), "prompt_token_ids": _prompt_ids(body)}


def _completion(body: dict[str, Any], reply: Reply, number: int) -> dict[str, Any]:
    """An answer of the completions API: one choice for each prompt, with ids of its own; as the one chunk of a stream, too."""
    prompts = body["prompt"] if isinstance(body["prompt"], list) else [body["prompt"]]
    pieces = _pieces(reply, number)
    choices = [
        {
            "index": index,
            "text": reply.text,
            "finish_reason": "stop",
            "token_ids": [token for _, token, _ in pieces],
            "prompt_token_ids": [zlib.crc32(word.encode()) % 49_000 for word in prompt.split()],
            "logprobs": {
                "tokens": [word for word, _, _ in pieces],
                "token_logprobs": [value for _, _, value in pieces],
                "top_logprobs": [None for _ in pieces],
                "text_offset": list(range(len(pieces))),
            },
        }
        for index, prompt in enumerate(prompts)
    ]
    return {**_head(body, number, "text_completion"), "choices": choices, "model_version": 1}


def _chunks(body: dict[str, Any], reply: Reply, number: int) -> Iterator[Any]:
    head = _head(body, number, "chat.completion.chunk")
    pieces = _pieces(reply, number)

    def chunk(delta: dict[str, Any], reason: str | None = None, **more: Any) -> dict[str, Any]:
        return {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": reason, **more}]}

    yield chunk({"role": "assistant", "content": ""}) | {
        "prompt_token_ids": _prompt_ids(body),
        "model_version": 1,
    }
    thought = len((reply.reasoning or "").split(" ")) if reply.reasoning is not None else 0
    said = thought + (len(reply.text.split(" ")) if reply.text is not None else 0)
    for place, piece in enumerate(pieces):
        more = {"token_ids": [piece[1]], "logprobs": {"content": [_entry(piece)]}}
        word = piece[0].rstrip(" ") if place in (thought - 1, said - 1) else piece[0]
        if place < thought:
            yield chunk({"reasoning_content": word}, **more)
        elif place < said:
            yield chunk({"content": word}, **more)
        elif place < len(pieces) - 1:
            yield chunk({}, **more)  # held back until complete, as parsers do
        else:
            calls = [{"index": index, **call} for index, call in enumerate(_calls(reply, number))]
            yield chunk({"tool_calls": calls}, **more)
    yield chunk({}, "tool_calls" if reply.tools else "stop")
    if (body.get("stream_options") or {}).get("include_usage"):
        yield {**head, "choices": [], "usage": _usage(body, len(pieces))}
    yield None
