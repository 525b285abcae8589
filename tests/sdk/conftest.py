"""Two real servers on loopback: a collector that decodes OTLP, and a model's server that speaks OpenAI's shapes."""

import gzip
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

import agentlightning.sdk as agl

KEY = "sk-live-51f0c2d7e9a84b6c"


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that leaves early is part of the tests."""


class Sink:
    """An OTLP/HTTP collector. `status` is what it answers; `gate` cleared makes it hang."""

    def __init__(self) -> None:
        self.status = 200
        self.reject = 0
        self.refuse: Any = lambda span: False
        self.gate = threading.Event()
        self.gate.set()
        self.bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        self.attempts = 0
        self._changed = threading.Condition()
        sink = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                sink.gate.wait(20)
                with sink._changed:
                    sink.attempts += 1
                    status = sink.status
                    if status == 200 and any(sink.refuse(span) for span in _decode(body)):
                        status = 400
                    if status == 200:
                        sink.bodies.append(body)
                        sink.headers.append(dict(self.headers))
                    sink._changed.notify_all()
                answer = ExportTraceServiceResponse()
                if sink.reject:
                    answer.partial_success.rejected_spans = sink.reject
                data = answer.SerializeToString()
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = _Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def wait_for_attempts(self, number: int, timeout: float = 20) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.attempts >= number, timeout)

    def spans(self) -> list[SimpleNamespace]:
        return [span for body in self.bodies for span in _decode(body)]

    def named(self, name: str) -> list[SimpleNamespace]:
        return [span for span in self.spans() if span.name == name]

    def one(self, name: str) -> SimpleNamespace:
        (span,) = self.named(name)
        return span

    def close(self) -> None:
        self.gate.set()
        self.server.shutdown()
        self.server.server_close()


def _decode(body: bytes) -> list[SimpleNamespace]:
    return [
        SimpleNamespace(
            name=span.name,
            trace_id=span.trace_id.hex(),
            span_id=span.span_id.hex(),
            parent=span.parent_span_id.hex(),
            kind=span.kind,
            status=span.status.code,
            scope=scope.scope.name,
            attributes={item.key: _value(item.value) for item in span.attributes},
            events=[
                (event.name, {item.key: _value(item.value) for item in event.attributes})
                for event in span.events
            ],
            links=[link.span_id.hex() for link in span.links],
            resource={item.key: _value(item.value) for item in resource.resource.attributes},
            start=span.start_time_unix_nano,
            end=span.end_time_unix_nano,
        )
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind) if kind else None


PROMPT_IDS = [1, 2, 3, 49151]
WORDS = ["The", " answer", " is", " 42", "<end>"]
IDS = [101, 102, 103, 104, 2]
LOGPROBS = [-0.5, -1.25, -0.125, -2.0, -0.0625]


class Llm:
    """A model's server: plain, streamed, tools, n answers, completions, Responses; what goes wrong is the model's name."""

    def __init__(self) -> None:
        self.requests: list[SimpleNamespace] = []
        self.gate = threading.Event()
        self.gate.set()
        self.changed = threading.Condition()
        self.number = 0
        llm = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                raw = self.rfile.read(int(self.headers["content-length"]))
                body = json.loads(raw)
                llm.number += 1
                headers = {name.lower(): value for name, value in self.headers.items()}
                with llm.changed:
                    llm.requests.append(SimpleNamespace(path=self.path, headers=headers, raw=raw))
                    llm.changed.notify_all()
                model = body.get("model", "m")
                if model == "broken":
                    key = self.headers.get("authorization", "")
                    return self.answer({"error": {"message": f"bad key {key}", "type": "server_error"}}, 500)
                if self.path.endswith("/chat/completions"):
                    chunks, plain = chat(body, f"chatcmpl-{llm.number}")
                elif self.path.endswith("/completions"):
                    chunks, plain = completion(f"cmpl-{llm.number}")
                elif self.path.endswith("/responses") and "input" in body:
                    chunks, plain = responses(f"resp-{llm.number}")
                else:
                    return self.answer({"unrelated": True})
                if body.get("stream"):
                    return self.stream(chunks, model)
                return self.answer(plain, zipped=model == "zipped", call_id=model == "recorded")

            def answer(
                self, body: Any, status: int = 200, *, zipped: bool = False, call_id: bool = False
            ) -> None:
                data = json.dumps(body).encode()
                if zipped:
                    data = gzip.compress(data)
                self.send_response(status)
                self.send_header("content-type", "application/json")
                if zipped:
                    self.send_header("content-encoding", "gzip")
                if call_id:
                    self.send_header("x-agentlightning-call-id", "call-of-the-gateway")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def stream(self, events: list[Any], model: str) -> None:
                self.send_response(200)
                self.send_header("content-type", "text/event-stream; charset=utf-8")
                packer = None
                if model == "zipped":
                    import zlib

                    self.send_header("content-encoding", "gzip")
                    packer = zlib.compressobj(wbits=31)
                self.send_header("transfer-encoding", "chunked")
                if model == "recorded":
                    self.send_header("x-agentlightning-call-id", "call-of-the-gateway")
                self.end_headers()
                try:
                    for number, event in enumerate(events):
                        if number == 3 and model == "dies":
                            self.close_connection = True
                            return
                        if number == 3 and model == "reports":
                            event = {
                                "error": {"message": "out of memory", "type": "engine_error", "code": 500}
                            }
                        if number == 3 and model in ("slow", "held"):
                            llm.gate.wait(20)
                        kind = (
                            f"event: {event['type']}\n" if isinstance(event, dict) and "type" in event else ""
                        )
                        text = event if isinstance(event, str) else json.dumps(event)
                        data = f"{kind}data: {text}\n\n".encode()
                        if packer is not None:
                            data = packer.compress(data) + packer.flush(2)
                        step = 7 if model == "torn" else len(data)  # events cut anywhere
                        for start in range(0, len(data), step):
                            part = data[start : start + step]
                            self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
                            self.wfile.flush()
                    if packer is not None:
                        data = packer.flush()
                        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
                    self.wfile.write(b"0\r\n\r\n")
                except OSError:  # the client has left
                    self.close_connection = True

            def log_message(self, *_: Any) -> None:
                pass

        self.server = _Server(("127.0.0.1", 0), Handler)
        self.base = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.url = self.base + "/v1"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def wait_for_requests(self, number: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.requests) >= number, 20)

    def close(self) -> None:
        self.gate.set()
        self.server.shutdown()
        self.server.server_close()


def chat(body: dict[str, Any], name: str) -> tuple[list[Any], dict[str, Any]]:
    """The same answer twice: as chunks of a stream, and plain. Ids are there if asked for, as vLLM has it."""
    exact = bool(body.get("return_token_ids"))
    head = {"id": name, "created": 1, "model": body.get("model", "m")}
    chunks: list[Any] = []
    plain_choices = []
    first = {"prompt_token_ids": PROMPT_IDS, "model_version": 3} if exact else {}
    for index in range(body.get("n") or 1):
        ids = [token + 1000 * index for token in IDS]
        deltas: list[dict[str, Any]]
        message: dict[str, Any]
        if body.get("tools"):
            arguments = '{"expression": "6*7"}'
            call = {
                "id": f"call-{index}",
                "type": "function",
                "function": {"name": "calculate", "arguments": arguments},
            }
            deltas = [{"role": "assistant", "content": None}]
            deltas.append(
                {"tool_calls": [{**call, "index": 0, "function": {"name": "calculate", "arguments": ""}}]}
            )
            deltas += [
                {"tool_calls": [{"index": 0, "function": {"arguments": part}}]}
                for part in (arguments[:9], arguments[9:], "")
            ]
            message, reason = {"role": "assistant", "content": None, "tool_calls": [call]}, "tool_calls"
        else:
            deltas = [
                {"role": "assistant", "content": WORDS[0]},
                *({"content": word} for word in WORDS[1:4]),
                {},
            ]
            message, reason = {"role": "assistant", "content": "".join(WORDS[:4])}, "stop"
        entries = [
            {"token": word, "logprob": value, "top_logprobs": []}
            for word, value in zip(WORDS, LOGPROBS, strict=True)
        ]
        choice: dict[str, Any] = {"index": index, "message": message, "finish_reason": reason}
        if exact:
            choice |= {"token_ids": ids, "logprobs": {"content": entries}}
        plain_choices.append(choice)
        for number, delta in enumerate(deltas):
            part: dict[str, Any] = {"index": index, "delta": delta, "finish_reason": None, "logprobs": None}
            if exact:
                part |= {
                    "token_ids": ids[number : number + 1],
                    "logprobs": {"content": entries[number : number + 1]},
                }
            chunks.append(
                {
                    **head,
                    "object": "chat.completion.chunk",
                    **(first if not chunks else {}),
                    "choices": [part],
                }
            )
        chunks.append(
            {
                **head,
                "object": "chat.completion.chunk",
                "choices": [{"index": index, "delta": {}, "finish_reason": reason}],
            }
        )
    usage = {"prompt_tokens": 4, "completion_tokens": 5, "total_tokens": 9}
    chunks += [{**head, "object": "chat.completion.chunk", "choices": [], "usage": usage}, "[DONE]"]
    return chunks, {**head, "object": "chat.completion", "choices": plain_choices, "usage": usage, **first}


def completion(name: str) -> tuple[list[Any], dict[str, Any]]:
    head = {"id": name, "object": "text_completion", "created": 1, "model": "m"}
    choice = {
        "index": 0,
        "text": "".join(WORDS[:4]),
        "finish_reason": "stop",
        "prompt_token_ids": PROMPT_IDS,
        "token_ids": IDS,
        "logprobs": {
            "tokens": WORDS,
            "token_logprobs": LOGPROBS,
            "top_logprobs": None,
            "text_offset": [0] * 5,
        },
    }
    chunks: list[Any] = [
        {
            **head,
            "choices": [
                {
                    "index": 0,
                    "text": word if word != "<end>" else "",
                    "finish_reason": "stop" if word == "<end>" else None,
                    "token_ids": [token],
                    "logprobs": {
                        "tokens": [word],
                        "token_logprobs": [value],
                        "top_logprobs": None,
                        "text_offset": [0],
                    },
                }
                | ({"prompt_token_ids": PROMPT_IDS} if word == WORDS[0] else {})
            ],
        }
        for word, token, value in zip(WORDS, IDS, LOGPROBS, strict=True)
    ]
    return [*chunks, "[DONE]"], {**head, "choices": [choice]}


def responses(name: str) -> tuple[list[Any], dict[str, Any]]:
    text = "".join(WORDS[:4])
    part = {"type": "output_text", "text": text, "annotations": []}
    item = {"id": "msg-1", "type": "message", "role": "assistant", "status": "completed", "content": [part]}
    whole = {
        "id": name,
        "object": "response",
        "created_at": 1,
        "model": "m",
        "status": "completed",
        "output": [item],
        "usage": {"input_tokens": 4, "output_tokens": 5, "total_tokens": 9},
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
    }
    begun = {**whole, "status": "in_progress", "output": [], "usage": None}
    where = {"item_id": "msg-1", "output_index": 0, "content_index": 0, "logprobs": []}
    chunks: list[Any] = [{"type": "response.created", "sequence_number": 0, "response": begun}]
    chunks += [
        {"type": "response.output_text.delta", "sequence_number": number, "delta": word, **where}
        for number, word in enumerate(WORDS[:4], 1)
    ]
    chunks.append({"type": "response.completed", "sequence_number": 9, "response": whole})
    return chunks, whole


@pytest.fixture
def sink() -> Iterator[Sink]:
    server = Sink()
    yield server
    server.close()


@pytest.fixture
def llm() -> Iterator[Llm]:
    server = Llm()
    yield server
    server.close()


@pytest.fixture
def traced(sink: Sink) -> Iterator[Sink]:
    """The sink, with this process instrumented to send to it."""
    agl.instrument(endpoint=sink.url, openai="none")  # the hook and nothing beside it
    yield sink
    sink.status = 200
    sink.gate.set()
    agl.uninstrument()


@pytest.fixture
def exact() -> SimpleNamespace:
    """What the model's server says in every exact answer."""
    return SimpleNamespace(prompt=PROMPT_IDS, ids=IDS, logprobs=LOGPROBS, text="".join(WORDS[:4]), key=KEY)


class Script:
    """Runs Python source in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(
        self, source: str, *arguments: str, code: int = 0, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        path = self.folder / "program.py"
        path.write_text(source)
        started = time.monotonic()
        done = subprocess.run(
            [sys.executable, str(path), *arguments],
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == code, done.stderr
        self.seconds = time.monotonic() - started
        return done


@pytest.fixture
def script(tmp_path: Path) -> Script:
    return Script(tmp_path)
