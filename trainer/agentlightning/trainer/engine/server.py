"""The engine over HTTP: OpenAI's chat completions, weights in, scores out.

One asyncio loop speaks to the clients and one thread runs the model; between them go sequences one way and events,
one batch for each step, the other. A client that leaves is noticed at once, and its sequences with it.
"""

import asyncio
import contextlib
import hmac
import logging
from collections.abc import AsyncGenerator, MutableMapping
from pathlib import Path
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentlightning.proto.errors import DataError
from agentlightning.trainer.engine.answers import Answer
from agentlightning.trainer.engine.chat import ChatRequest, Template, parse_chat
from agentlightning.trainer.engine.errors import RequestError, too_long
from agentlightning.trainer.engine.grammar import Grammars
from agentlightning.trainer.engine.runner import Runner, read_weights
from agentlightning.trainer.engine.scheduler import Event, Scheduler
from agentlightning.trainer.engine.sequence import Emitted, Sequence
from agentlightning.trainer.engine.text import TokenNames

__all__ = ["Engine", "create_app"]

log = logging.getLogger(__name__)

MAX_BODY = 32 * 2**20
"""Bytes of a request body."""
MAX_PAUSE = 3600
"""Seconds."""


class Engine:
    """A served model: what the HTTP routes need, in one place."""

    def __init__(
        self,
        runner: Runner,
        tokenizer: Any,
        *,
        name: str,
        template: Template,
        context: int,
        end_tokens: frozenset[int],
        tool_parser: bool = True,
        **limits: Any,  # those of Scheduler
    ) -> None:
        self.name, self.template, self.context, self.tool_parser = name, template, context, tool_parser
        self.names = TokenNames(tokenizer)
        self.grammars = Grammars(tokenizer, vocabulary=runner.vocabulary, end_tokens=end_tokens)
        self.runner = runner
        self.scheduler = Scheduler(runner, self._deliver, **limits)
        self._tokenizer = tokenizer
        self._end_tokens = end_tokens
        self._loop: asyncio.AbstractEventLoop | None = None
        self._publishing = asyncio.Lock()

    def start(self) -> None:
        """Begin to serve, from the running event loop."""
        self._loop = asyncio.get_running_loop()
        self.scheduler.start()

    def parse(self, body: Any) -> ChatRequest:
        return parse_chat(
            body,
            template=self.template,
            grammars=self.grammars,
            model=self.name,
            context=self.context,
            tool_parser=self.tool_parser,
        )

    async def generate(self, request: ChatRequest) -> AsyncGenerator[tuple[Sequence, list[Emitted]]]:
        """The tokens of all choices as they come. Leaving the iteration cancels what is unfinished."""
        client: asyncio.Queue[Event] = asyncio.Queue()
        sequences = [
            Sequence.start(
                request.prompt,
                request.sampling,
                tokenizer=self._tokenizer,
                end_tokens=self._end_tokens,
                client=client,
                choice=choice,
                constraint=request.constraint,
            )
            for choice in range(request.choices)
        ]
        self.scheduler.submit(sequences)
        unfinished = set(sequences)
        try:
            while unfinished:
                events = [await client.get()]
                while not client.empty():
                    events.append(client.get_nowait())
                for sequence in sequences:
                    batch: list[Emitted] = []
                    for whose, event in events:
                        if isinstance(event, RequestError):
                            raise event
                        if whose is sequence:
                            batch.append(event)
                    if batch:
                        if batch[-1].finish:
                            unfinished.discard(sequence)
                        yield sequence, batch
        finally:
            self.scheduler.cancel(list(unfinished))

    async def publish(self, path: Path, version: int) -> None:
        """Put new weights in place, between two steps. Raises RequestError if they do not fit; the old ones stay."""
        async with self._publishing:  # two sets of weights in memory at once are enough
            try:
                weights = await asyncio.to_thread(read_weights, path, self.runner.model)
            except DataError as error:
                raise RequestError(str(error), code="bad_weights", param="path") from error
            await asyncio.wrap_future(self.scheduler.call(lambda: self.scheduler.load(weights, version)))

    async def score(
        self, sequences: list[list[int]], temperature: float
    ) -> tuple[int, list[list[float | None]]]:
        def run() -> tuple[int, list[list[float | None]]]:
            return self.runner.version, [[None, *self.runner.score(s, temperature)] for s in sequences]

        return await asyncio.wrap_future(self.scheduler.call(run))

    async def pause(self, seconds: float) -> None:
        """Sample nothing for so long; when this returns, the step that was under way has ended."""
        await asyncio.wrap_future(self.scheduler.call(lambda: self.scheduler.pause(seconds)))

    def _deliver(self, events: list[Event]) -> None:
        """From the engine's thread to the loop, once for each step."""
        if events and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has closed: nobody is left to tell
                self._loop.call_soon_threadsafe(_hand_out, events)


def _hand_out(events: list[Event]) -> None:
    for event in events:
        event[0].client.put_nowait(event)


def create_app(engine: Engine, *, token: str | None = None) -> ASGIApp:
    """The HTTP application. With a `token` every route but /health wants it as a bearer token."""
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", ChatCompletions(engine), methods=["POST"]),
            Route("/v1/models", Endpoint(engine, _models), methods=["GET"]),
            Route("/health", Endpoint(engine, _health), methods=["GET"]),
            Route("/weights", Endpoint(engine, _weights), methods=["POST"]),
            Route("/score", Endpoint(engine, _score), methods=["POST"]),
            Route("/pause", Endpoint(engine, _pause), methods=["POST"]),
            Route("/resume", Endpoint(engine, _resume), methods=["POST"]),
        ],
        exception_handlers={RequestError: _refuse, HTTPException: _refuse_http},
    )
    return app if token is None else RequireToken(app, token=token)


class RequireToken:
    """Lets through those who bear the token, and anyone to /health."""

    def __init__(self, app: ASGIApp, *, token: str) -> None:
        self.app = app
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != "/health":
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                error = RequestError(
                    "This engine wants its token, as `Authorization: Bearer …`.",
                    status=401,
                    code="invalid_api_key",
                )
                return await _json(error.body(), error.status)(scope, receive, send)
        await self.app(scope, receive, send)


class Endpoint:
    """An ASGI application around `async function(engine, request) -> Response`."""

    def __init__(self, engine: Engine, function: Any) -> None:
        self._engine, self._function = engine, function

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._function(self._engine, Request(scope, receive, send))
        await response(scope, receive, send)


class ChatCompletions:
    """POST /v1/chat/completions. While it answers, it watches whether the client is still there."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = self._engine.parse(await _read_json(receive))
        answer = Answer(request, model=self._engine.name, names=self._engine.names)
        tell = self._stream if request.stream else self._plain
        work = asyncio.create_task(tell(answer, scope, receive, send))
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, gone):
                if not task.done():
                    task.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await task
        if not work.cancelled():
            work.result()

    async def _plain(self, answer: Answer, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self._engine.generate(answer.request)) as tokens:
            async for sequence, batch in tokens:
                answer.add(sequence.choice, batch, sequence.cached)
        await _json(answer.plain())(scope, receive, send)

    async def _stream(self, answer: Answer, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self._engine.generate(answer.request)) as tokens:
            started = False
            try:
                async for sequence, batch in tokens:
                    chunk = answer.add(sequence.choice, batch, sequence.cached)
                    if not started:  # an error before the first token is still a plain one, with its status
                        await send(_STREAM_START)
                        started = True
                    await send(_event(chunk))
            except RequestError as error:
                if not started:
                    raise
                await send(_event(error.body(), more=False))
                return
        if answer.request.include_usage:
            await send(_event(answer.usage_chunk()))
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})


async def _models(engine: Engine, request: Request) -> Response:
    model = {
        "id": engine.name,
        "object": "model",
        "created": 0,
        "owned_by": "agentlightning",
        "max_model_len": engine.context,
        "model_version": engine.runner.version,
    }
    return _json({"object": "list", "data": [model]})


async def _health(engine: Engine, request: Request) -> Response:
    scheduler = engine.scheduler
    return _json(
        {
            "status": "ok",
            "model_version": engine.runner.version,
            "dtype": str(engine.runner.model.dtype).removeprefix("torch."),
            "running": scheduler.running,
            "waiting": scheduler.waiting,
            "paused": scheduler.paused,
            "counters": dict(scheduler.counts),
        }
    )


async def _weights(engine: Engine, request: Request) -> Response:
    body = await _read_json(request.receive)
    path, version = (body.get("path"), body.get("version")) if isinstance(body, dict) else (None, None)
    if not isinstance(path, str) or type(version) is not int or version < 0:
        raise RequestError('Send {"path": FOLDER, "version": a whole number of at least 0}.')
    if not Path(path).is_dir():
        raise RequestError(
            f"There is no folder {path} on this engine's machine.", code="bad_weights", param="path"
        )
    loop = asyncio.get_running_loop()
    start = loop.time()
    await engine.publish(Path(path), version)
    return _json({"version": version, "seconds": round(loop.time() - start, 4)})


async def _score(engine: Engine, request: Request) -> Response:
    body = await _read_json(request.receive)
    if not isinstance(body, dict):
        raise RequestError('Send {"token_ids": [[…], …]}.')
    sequences, temperature = body.get("token_ids"), body.get("temperature", 1.0)
    if type(temperature) not in (int, float) or not 0 < temperature <= 100:
        raise RequestError("The field temperature must be above 0.", param="temperature")
    top = engine.runner.vocabulary
    if not isinstance(sequences, list) or not all(
        isinstance(ids, list) and ids and all(type(i) is int and 0 <= i < top for i in ids)
        for ids in sequences
    ):
        raise RequestError(
            f"The field token_ids must be a list of non-empty lists of ids from 0 to {top - 1}.",
            param="token_ids",
        )
    longest = max(map(len, sequences), default=0)
    if longest > engine.context:
        raise too_long(engine.context, longest, None)
    version, logprobs = await engine.score(sequences, float(temperature))
    return _json({"version": version, "logprobs": logprobs})


async def _pause(engine: Engine, request: Request) -> Response:
    body = await _read_json(request.receive)
    seconds = body.get("ttl_s") if isinstance(body, dict) else None
    if not isinstance(seconds, int | float) or not 0 < seconds <= MAX_PAUSE:
        raise RequestError(f'Send {{"ttl_s": seconds, at most {MAX_PAUSE}}}; then the pause ends by itself.')
    await engine.pause(seconds)
    return _json({"paused": True, "running": engine.scheduler.running})


async def _resume(engine: Engine, request: Request) -> Response:
    await engine.pause(0)
    return _json({"paused": False, "running": engine.scheduler.running})


async def _read_json(receive: Receive) -> Any:
    body, more = bytearray(), True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise RequestError("The client left before its request was complete.")
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > MAX_BODY:
            raise RequestError(f"The request body is larger than {MAX_BODY >> 20} MiB.", status=413)
    try:
        return orjson.loads(bytes(body))
    except orjson.JSONDecodeError as error:
        raise RequestError(f"The request body is not JSON: {error}.") from None


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _json(
    body: MutableMapping[str, Any], status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    return Response(orjson.dumps(body), status, headers, media_type="application/json")


def _event(body: MutableMapping[str, Any], *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": b"data: " + orjson.dumps(body) + b"\n\n", "more_body": more}


_STREAM_START: Message = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")],
}


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError), "registered for RequestError"
    return _json(error.body(), error.status, {"retry-after": "1"} if error.status == 503 else None)


async def _refuse_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "registered for HTTPException"
    said = {404: f"There is no {request.url.path} here.", 405: f"{request.url.path} wants another method."}
    return _json(
        RequestError(said.get(error.status_code, error.detail), error.status_code).body(), error.status_code
    )
