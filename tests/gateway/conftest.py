"""Real servers for the gateway's tests, each on a free loopback port: a scripted engine, an OTLP sink, the gateway.

The gateway runs as its own process, by its own command, so that it can be killed.
"""

import asyncio
import contextlib
import hashlib
import itertools
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import postgresql_server
import pytest
import uvicorn
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from agentlightning.gateway.control.table import OPERATIONS

TOKENS = {
    "admin": "admin-token-0123456789",
    "trainer": "trainer-token-0123456789",
    "controller": "controller-token-012",
}
WAIT = 20.0


class Server:
    """A Starlette application on uvicorn in a thread of this process."""

    def __init__(self, routes: list[Route], port: int = 0) -> None:
        self.socket = socket.create_server(("127.0.0.1", port))
        self.port = self.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        app = Starlette(routes=routes)
        self._server = uvicorn.Server(
            uvicorn.Config(app, lifespan="off", log_level="warning", access_log=False)
        )
        self._thread = threading.Thread(target=self._server.run, args=([self.socket],), daemon=True)
        self._thread.start()
        until(lambda: self._server.started)

    def stop(self) -> None:
        self._server.should_exit = True
        self._server.force_exit = True
        self._thread.join()


def until(condition: Callable[[], Any], timeout: float = WAIT) -> Any:
    """Poll until `condition` holds, and return what it gave."""
    deadline = time.monotonic() + timeout
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)
    return found


class Engine:
    """An engine in vLLM's shape whose answer depends on seed and messages alone.

    `mode`: ok | no_ids | die (mid-answer) | error_500 | error_400 | busy | bad_json | bad_shape | wait (for `proceed`,
    after the first tokens of a stream, before a plain answer) | end_early (a stream without an end)
    """

    def __init__(self) -> None:
        self.reset()
        self.model = "scripted-model"
        self.server = Server(
            [
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/v1/models", self.models),
                Route("/health", self.health),
            ]
        )
        self.url = self.server.url

    def reset(self) -> None:
        self.mode = "ok"
        self.version = 7
        self.tokens = 6
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.proceed = threading.Event()
        self.waiting = 0
        self.left = 0
        """Clients that left before their answer was complete."""

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok", "model_version": self.version})

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": self.model, "object": "model"}]})

    async def chat(self, request: Request) -> Response:
        body = json.loads(await request.body())
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        refusals = {
            "error_500": (500, "out of order", None),
            "error_400": (400, "This model's maximum context length is 8 tokens.", "context_length_exceeded"),
            "busy": (503, "queue full", None),
        }
        if self.mode in refusals:
            status, message, code = refusals[self.mode]
            return JSONResponse(
                {"error": {"message": message, "type": "x", "param": None, "code": code}}, status
            )
        if self.mode == "bad_json":
            return Response(
                b'data: {"choices": [\n\n' if body.get("stream") else b'{"choices": [', media_type="x"
            )
        if self.mode == "bad_shape":
            return (
                Response(b'data: {"object": "x"}\n\n', media_type="text/event-stream")
                if body.get("stream")
                else JSONResponse({"object": "x"})
            )
        if body.get("stream"):
            return StreamingResponse(self.stream(request, body), media_type="text/event-stream")
        if self.mode == "die":
            return StreamingResponse(self.broken(request), headers={"content-length": "1000"})
        if self.mode == "wait":
            await self.pause(request)
        return JSONResponse(self.plain(body))

    async def pause(self, request: Request) -> None:
        self.waiting += 1
        try:
            while not self.proceed.is_set():
                if await request.is_disconnected():
                    self.left += 1
                    return
                await asyncio.sleep(0.005)
        except asyncio.CancelledError:  # Starlette watches streams itself
            self.left += 1
            raise
        finally:
            self.waiting -= 1

    async def broken(self, request: Request) -> Any:
        yield b'{"choices": '
        raise ConnectionError("scripted death")

    def choices(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """What each choice will be: tokens (text, id, log-probability), tool call or not."""
        made = []
        for index in range(body.get("n") or 1):
            seed = json.dumps([body.get("seed"), body["messages"], index], sort_keys=True)
            digest = hashlib.sha256(seed.encode()).digest()
            tokens = [
                (f"w{digest[i % 32]} ", digest[i % 32] + 1000 * index, -digest[i % 32] / 256)
                for i in range(self.tokens)
            ]
            made.append({"index": index, "tokens": tokens, "tool": bool(body.get("tools"))})
        return made

    def entry(self, token: tuple[str, int, float]) -> dict[str, Any]:
        return {"token": token[0], "logprob": token[2], "bytes": list(token[0].encode()), "top_logprobs": []}

    def prompt_ids(self, body: dict[str, Any]) -> list[int]:
        return [len(str(message)) for message in body["messages"]]

    def usage(self, body: dict[str, Any]) -> dict[str, Any]:
        made = self.tokens * (body.get("n") or 1)
        prompt = len(body["messages"])
        return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}

    def answer_id(self, body: dict[str, Any]) -> str:
        return "chatcmpl-" + hashlib.sha256(json.dumps(body["messages"]).encode()).hexdigest()[:12]

    def plain(self, body: dict[str, Any]) -> dict[str, Any]:
        choices = []
        for made in self.choices(body):
            text = "".join(token[0] for token in made["tokens"])
            message: dict[str, Any] = {
                "role": "assistant",
                "content": text,
                "refusal": None,
                "tool_calls": [],
            }
            if made["tool"]:
                message["content"] = None
                message["tool_calls"] = [
                    {
                        "id": "tool-1",
                        "type": "function",
                        "function": {"name": "add", "arguments": json.dumps({"text": text})},
                    }
                ]
            choice = {"index": made["index"], "message": message, "stop_reason": None}
            choice["finish_reason"] = "tool_calls" if made["tool"] else "stop"
            if self.mode != "no_ids":
                choice["token_ids"] = [token[1] for token in made["tokens"]]
                choice["logprobs"] = {"content": [self.entry(token) for token in made["tokens"]]}
            choices.append(choice)
        answer = {
            "id": self.answer_id(body),
            "object": "chat.completion",
            "created": 1,
            "model": body["model"],
        }
        answer |= {"choices": choices, "usage": self.usage(body), "model_version": self.version}
        if self.mode != "no_ids":
            answer["prompt_token_ids"] = self.prompt_ids(body)
        return answer

    async def stream(self, request: Request, body: dict[str, Any]) -> Any:
        head = {
            "id": self.answer_id(body),
            "object": "chat.completion.chunk",
            "created": 1,
            "model": body["model"],
        }

        def event(data: dict[str, Any]) -> bytes:
            return b"data: " + json.dumps({**head, **data}).encode() + b"\n\n"

        first = {"model_version": self.version, "prompt_token_ids": self.prompt_ids(body)}
        choices = self.choices(body)
        for made in choices:
            delta: dict[str, Any] = {"role": "assistant", "content": None if made["tool"] else ""}
            yield event(
                {**first, "choices": [{"index": made["index"], "delta": delta, "finish_reason": None}]}
            )
        for position in range(self.tokens):
            if position == 2 and self.mode == "wait":
                await self.pause(request)
            if position == 3 and self.mode == "die":
                raise ConnectionError("scripted death")
            if position == 4 and self.mode == "end_early":
                return
            for made in choices:
                token = made["tokens"][position]
                delta = {"content": token[0]}
                if made["tool"]:
                    delta = self.tool_delta(made, position)
                choice = {"index": made["index"], "delta": delta, "finish_reason": None}
                choice |= {"token_ids": [token[1]], "logprobs": {"content": [self.entry(token)]}}
                yield event({"choices": [choice]})
        for made in choices:
            reason = "tool_calls" if made["tool"] else "stop"
            yield event({"choices": [{"index": made["index"], "delta": {}, "finish_reason": reason}]})
        if (body.get("stream_options") or {}).get("include_usage"):
            yield event({"choices": [], "usage": self.usage(body)})
        yield b"data: [DONE]\n\n"

    def tool_delta(self, made: dict[str, Any], position: int) -> dict[str, Any]:
        """The call's text is held back until it is complete, as real parsers do; its ids come anyhow."""
        if position == 0:
            return {
                "tool_calls": [{"index": 0, "id": "tool-1", "type": "function", "function": {"name": "add"}}]
            }
        if position < self.tokens - 2:
            return {}
        arguments = json.dumps({"text": "".join(token[0] for token in made["tokens"])})
        half = len(arguments) // 2
        part = arguments[:half] if position == self.tokens - 2 else arguments[half:]
        return {"tool_calls": [{"index": 0, "function": {"arguments": part}}]}


class Sink:
    """An OTLP/HTTP receiver. `mode`: ok | hang (until `proceed`) | busy (503) | refuse (400) | picky (400 for poison)."""

    def __init__(self) -> None:
        self.reset()
        self.server = Server([Route("/v1/traces", self.traces, methods=["POST"])])
        self.url = self.server.url

    def reset(self) -> None:
        self.mode = "ok"
        self.proceed = threading.Event()
        self.waiting = 0
        self.posts = 0
        self.spans: list[dict[str, Any]] = []
        self.bodies: list[bytes] = []
        """Of the requests, as they came."""

    async def traces(self, request: Request) -> Response:
        body = await request.body()
        self.bodies.append(body)
        message = ExportTraceServiceRequest.FromString(body)
        self.posts += 1
        self.waiting += 1
        if self.mode == "hang" or (self.mode == "picky" and self.posts <= 2):
            await asyncio.to_thread(self.proceed.wait)
        self.waiting -= 1
        if self.mode == "busy":
            return Response(status_code=503)
        if self.mode == "refuse" or (self.mode == "picky" and "poison" in str(message)):
            return Response(status_code=400)
        for resource in message.resource_spans:
            for scope in resource.scope_spans:
                self.spans += [flat(span, scope.scope.name) for span in scope.spans]
        return Response(ExportTraceServiceResponse().SerializeToString(), media_type="application/x-protobuf")

    def calls(self, rollout_id: str) -> list[dict[str, Any]]:
        return [span for span in self.of(rollout_id) if "agentlightning.call.id" in span]

    def of(self, rollout_id: str) -> list[dict[str, Any]]:
        return [span for span in list(self.spans) if span.get("agentlightning.rollout.id") == rollout_id]


def flat(span: Any, scope: str) -> dict[str, Any]:
    """A span as one dictionary, attributes and fields alike."""
    made: dict[str, Any] = {"name": span.name, "scope": scope, "kind": span.kind, "status": span.status.code}
    made |= {
        "trace_id": span.trace_id.hex(),
        "span_id": span.span_id.hex(),
        "parent_id": span.parent_span_id.hex(),
    }
    made |= {
        "message": span.status.message,
        "start": span.start_time_unix_nano,
        "end": span.end_time_unix_nano,
    }
    for item in span.attributes:
        made[item.key] = value_of(item.value)
    return made


def value_of(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [value_of(item) for item in value.array_value.values]
    return getattr(value, kind) if kind else None


class Gateway:
    """The gateway's process."""

    def __init__(self, folder: Path, collector: str, options: list[str], tokens: bool) -> None:
        self.folder = folder
        self.tokens = TOKENS if tokens else {}
        self._command = [sys.executable, "-m", "agentlightning.gateway.cli", "--state", str(folder / "state")]
        self._command += ["--collector", collector, "--ready-file", str(folder / "ready.json")]
        self._command += ["--engine-wait-s", "0.3", *options]
        if tokens:
            path = folder / "tokens.json"
            path.write_text(json.dumps(TOKENS))
            path.chmod(0o600)
            self._command += ["--token-file", str(path)]
        self.port = 0
        self.start()

    def start(self) -> None:
        """Start, or start again on the same port."""
        ready = self.folder / "ready.json"
        ready.unlink(missing_ok=True)
        self._log = (self.folder / "log").open("ab")
        self.process = subprocess.Popen([*self._command, "--port", str(self.port)], stderr=self._log)
        until(lambda: ready.exists() or self.process.poll() is not None)
        assert self.process.poll() is None, self.log()
        self.url = json.loads(ready.read_text())["addresses"]["http"]
        self.port = int(self.url.rpartition(":")[2])
        self.http = httpx.Client(base_url=self.url, timeout=60)

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> int:
        self.http.close()
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        self.process.kill()
        return self.process.wait()

    def send(
        self, method: str, path: str, body: Any = None, *, role: str = "trainer", key: str | None = None
    ) -> httpx.Response:
        key = key or self.tokens.get(role)
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        content = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        response = self.http.request(method, path, content=content, headers=headers)
        check_documented(method, path, response)
        return response

    def ask(
        self, method: str, path: str, body: Any = None, *, role: str = "trainer", key: str | None = None
    ) -> Any:
        """As `send`, for requests that must succeed."""
        response = self.send(method, path, body, role=role, key=key)
        assert response.status_code == 200, response.text
        return response.json()

    def enqueue(self, *rollouts: dict[str, Any]) -> Any:
        return self.ask("POST", "/api/rollouts", {"rollouts": [task(**rollout) for rollout in rollouts]})

    def claim(
        self, limit: int = 1, *, controller: str = "c1", lease: float = 60, wait: float = 0
    ) -> list[dict[str, Any]]:
        body = {"controller_id": controller, "limit": limit, "lease_s": lease, "wait_s": wait}
        return self.ask("POST", "/api/rollouts/claim", body, role="controller")["rollouts"]

    def begin(self, rollout_id: str, **fields: Any) -> dict[str, Any]:
        """Enqueue one rollout and claim it."""
        self.enqueue({"rollout_id": rollout_id, **fields})
        (claimed,) = self.claim()
        assert claimed["rollout_id"] == rollout_id, "the queue was not empty"
        return claimed

    def finish(
        self, rollout_id: str, attempt: int = 0, state: str = "succeeded", **fields: Any
    ) -> httpx.Response:
        body = {"attempt": attempt, "controller_id": "c1", "state": state, **fields}
        return self.send("POST", f"/api/rollouts/{rollout_id}/finish", body, role="controller")

    def row(self, rollout_id: str) -> dict[str, Any]:
        return self.ask("GET", f"/api/rollouts/{rollout_id}")["rollouts"][0]

    def counters(self, run_id: str | None = None) -> dict[str, int]:
        return self.ask("GET", "/api/stats" + (f"?run_id={run_id}" if run_id else ""))["counters"]

    def chat(self, key: str | None, **fields: Any) -> httpx.Response:
        body = {"model": "default", "messages": [{"role": "user", "content": "hello"}], **fields}
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return self.http.post("/v1/chat/completions", json=body, headers=headers)


def check_documented(method: str, path: str, response: httpx.Response) -> None:
    """Every answer of the control API is what its OpenAPI document says."""
    asked = path.partition("?")[0]
    fixed_first = sorted(OPERATIONS, key=lambda operation: "{" in operation.path)
    for operation in fixed_first:
        pattern = re.sub(r"{\w+}", "[^/]+", operation.path)
        if operation.method == method and re.fullmatch(pattern, asked):
            if response.status_code == 200 and response.headers["content-type"] == "application/json":
                operation.answer.model_validate(response.json())
            elif response.status_code >= 400:
                assert set(response.json()["error"]) >= {"message", "code"}
            return


def task(**fields: Any) -> dict[str, Any]:
    made = {"run_id": "run", "group_id": "group", "task_id": "task", "split": "train", "policy": "default"}
    return {**made, "input": {"question": "6 × 7?"}, "reference": {"answer": 42}, **fields}


@pytest.fixture(scope="session")
def _servers() -> Iterator[tuple[Engine, Sink]]:
    engine, sink = Engine(), Sink()
    yield engine, sink
    engine.server.stop()
    sink.server.stop()


@pytest.fixture
def engine(_servers: tuple[Engine, Sink]) -> Iterator[Engine]:
    _servers[0].reset()
    yield _servers[0]
    _servers[0].proceed.set()


@pytest.fixture
def sink(_servers: tuple[Engine, Sink]) -> Iterator[Sink]:
    _servers[1].reset()
    yield _servers[1]
    _servers[1].proceed.set()


StartGateway = Callable[..., Gateway]
NewDatabase = Callable[[], list[str]]
_numbers = itertools.count()


@pytest.fixture(scope="session")
def _postgresql() -> Iterator[postgresql_server.Server]:
    with postgresql_server.serving() as server:
        yield server


@pytest.fixture(scope="session")
def database(request: pytest.FixtureRequest) -> NewDatabase:
    """`database()`: the options of a gateway with a new database. SQLite, unless a test asks for PostgreSQL, too:
    `BOTH = pytest.mark.parametrize("database", ["sqlite", "postgresql"], indirect=True, scope="session")`."""
    if getattr(request, "param", "sqlite") == "sqlite":
        return lambda: []
    server = request.getfixturevalue("_postgresql")
    return lambda: ["--database", server.create(f"test_{next(_numbers)}")]


@pytest.fixture
def start_gateway(
    tmp_path: Path, engine: Engine, sink: Sink, database: NewDatabase
) -> Iterator[StartGateway]:
    """`start_gateway(*options, tokens=True)` starts a gateway of the test's own."""
    started: list[Gateway] = []

    def start(*options: str, tokens: bool = True, engines: bool = True) -> Gateway:
        folder = tmp_path / f"gateway-{len(started)}"
        folder.mkdir()
        given = ["--engine", engine.url] if engines else []
        stored = [] if "--database" in options else database()
        started.append(Gateway(folder, sink.url, [*given, *stored, *options], tokens))
        return started[-1]

    yield start
    for gateway in started:
        gateway.stop()


@pytest.fixture(scope="module")
def start_shared(
    tmp_path_factory: pytest.TempPathFactory, _servers: tuple[Engine, Sink]
) -> Iterator[Callable[..., Gateway]]:
    """`start_shared(*options)` starts a gateway that the tests of a module share."""
    started: list[Gateway] = []

    def start(*options: str) -> Gateway:
        folder = tmp_path_factory.mktemp("gateway")
        options = ("--engine", _servers[0].url, *options)
        started.append(Gateway(folder, _servers[1].url, list(options), tokens=True))
        return started[-1]

    yield start
    for gateway in started:
        assert gateway.stop() == 0, gateway.log()
        assert "Traceback" not in gateway.log(), gateway.log()


@pytest.fixture(scope="session")
def _shared(
    tmp_path_factory: pytest.TempPathFactory, _servers: tuple[Engine, Sink], database: NewDatabase
) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("gateway")
    options = [
        *database(),
        "--engine-failures",
        "1000",
        "--engine",
        _servers[0].url,
        "--collector-timeout-s",
        "2",
        "--max-body-mib",
        "1",
    ]
    gateway = Gateway(folder, _servers[1].url, options, tokens=True)
    yield gateway
    code = gateway.stop()
    assert code == 0, gateway.log()
    assert "Traceback" not in gateway.log(), gateway.log()


@pytest.fixture
def gateway(_shared: Gateway, engine: Engine, sink: Sink) -> Iterator[Gateway]:
    """A gateway that tests share; its queue is empty."""
    yield _shared
    engine.mode, sink.mode = "ok", "ok"
    engine.proceed.set()
    sink.proceed.set()
    _shared.ask("POST", "/api/rollouts/cancel", {"run_id": "run"})


@pytest.fixture(scope="session")
def _pair(
    tmp_path_factory: pytest.TempPathFactory, _servers: tuple[Engine, Sink], database: NewDatabase
) -> Iterator[tuple[Gateway, Gateway]]:
    options = ["--engine", _servers[0].url, *database()]
    first, second = (
        Gateway(tmp_path_factory.mktemp("pair"), _servers[1].url, options, tokens=True) for _ in range(2)
    )
    yield first, second
    for gateway in (first, second):
        assert gateway.stop() == 0, gateway.log()
        assert "Traceback" not in gateway.log(), gateway.log()


@pytest.fixture
def pair(_pair: tuple[Gateway, Gateway], engine: Engine, sink: Sink) -> Iterator[tuple[Gateway, Gateway]]:
    """Two gateways on one database, shared by tests; the queue is empty."""
    yield _pair
    engine.mode, sink.mode = "ok", "ok"
    engine.proceed.set()
    sink.proceed.set()
    _pair[0].ask("POST", "/api/rollouts/cancel", {"run_id": "run"})


@pytest.fixture(name="until")
def _until() -> Callable[..., Any]:
    return until
