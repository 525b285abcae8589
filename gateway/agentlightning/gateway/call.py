"""One model call, from the engine's first byte to the client's last.

The order is the promise: the engine has answered → the collector has the span on disk → the ledger has the row →
the client gets the last byte. Whatever goes wrong on the way, the client is told, and a span says what happened.
"""

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import orjson
from sqlalchemy.exc import SQLAlchemyError
from starlette.types import Receive, Send

from agentlightning.gateway import http, upstream
from agentlightning.gateway.answer import Answer, BadAnswer
from agentlightning.gateway.collector import CaptureFailed
from agentlightning.gateway.engines import Engine
from agentlightning.gateway.errors import ModelError
from agentlightning.gateway.ledger import CallRow
from agentlightning.gateway.memory import Memory
from agentlightning.gateway.policies import Policy
from agentlightning.gateway.record import Recorder
from agentlightning.gateway.replays import Given
from agentlightning.gateway.request import ModelRequest, call_seed
from agentlightning.gateway.rules import Json
from agentlightning.gateway.sse import EventParser

if TYPE_CHECKING:
    from agentlightning.gateway.gateway import Gateway
    from agentlightning.gateway.proxy import Caller

__all__ = ["ModelCall"]

logger = logging.getLogger(__name__)
ABORTED: Final = "aborted"
_numbers = itertools.count()
"""Tells calls of one process apart; its boot id tells the processes apart."""


class ModelCall:
    """Serves one request. `given` is what the client got, None if it got no answer."""

    def __init__(
        self,
        gateway: "Gateway",
        caller: "Caller",
        request: ModelRequest,
        policy: Policy,
        memory: Memory,
        send: Send,
    ) -> None:
        self.settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.given: Given | None = None
        self._gateway = gateway
        self._caller = caller
        self._request = request
        self._policy = policy
        self._memory = memory
        self._send = send
        self._answer = Answer()
        self._writer = request.api.writer(request)
        nonce = f"{gateway.boot_id} {next(_numbers)}"
        self._recorder = Recorder(caller, request, policy, self._writer, nonce)
        self._response_started = False
        self._sent: list[bytes] = []
        """Of a stream, for a client that will ask again."""
        self._held: list[bytes] = []
        """The end of a stream, from the first finish reason on, until it may be sent."""
        self._place = 0
        """Among its attempt's calls, by their beginning."""
        self._task: asyncio.Task[Any] | None = None
        self._interruptible = False
        self._interrupted: str | None = None

    async def run(self, receive: Receive) -> None:
        self._task = asyncio.current_task()
        attempt = self._caller.attempt
        if attempt is not None:
            attempt.calls.add(self)
            self._place = attempt.begun
            attempt.begun += 1
        watch = asyncio.get_running_loop().create_task(self._watch(receive))
        try:
            await self._serve()
        finally:
            watch.cancel()
            self.settled.set_result(None)
            if attempt is not None:
                attempt.calls.discard(self)

    def interrupt(self, reason: str) -> None:
        """Stop waiting and sampling. A call that is being recorded already is finished first."""
        self._interrupted = self._interrupted or reason
        if self._interruptible and self._task is not None:
            self._interruptible = False
            self._task.cancel()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.interrupt(ABORTED)

    async def _serve(self) -> None:
        try:
            with self._may_be_interrupted():
                body = await self._sample()
            spans, rows, missing = self._recorder.records(self._answer)
            for name in missing:
                self._gateway.counters.add(name, self._caller.identity.run_id)
            await self._commit(spans, rows)
        except ModelError as error:
            await self._fail(error)
        except BadAnswer as error:
            await self._fail(ModelError(502, "bad_engine_answer", str(error), fault=True))
        except Exception as error:  # the boundary: an agent gets an answer whatever happens here
            logger.exception("a model call failed inside the gateway")
            await self._fail(ModelError(500, "internal_error", f"The gateway failed: {error!r}.", fault=True))
        else:
            self._gateway.counters.add("calls_recorded", self._caller.identity.run_id)
            self._writer.remember(self._answer, self._memory)
            await self._finish(body)

    # ---------------------------------------------------------------- sampling

    async def _sample(self) -> bytes:
        """Get the whole answer, relaying a stream up to its end. Returns the body of a plain answer."""
        gateway, identity = self._gateway, self._caller.identity
        keep_alive = self._keep_alive if self._request.stream else None
        await upstream.pass_gate(gateway, self._policy, identity.run_id, keep_alive)
        version = self._policy.version
        with upstream.counted(self._policy):
            body = await upstream.ask_engines(
                gateway,
                self._policy,
                identity.rollout_id,
                identity.run_id,
                self._request.api.engine_path,
                self._body_for,
                self._take,
            )
        if (
            self._answer.version is None
        ):  # the engine does not say: it is the trainer's, if that did not change
            self._answer.version = version if version == self._policy.version else None
        return body

    async def _keep_alive(self) -> None:
        await self._relay(b": keep-alive\n\n")

    def _body_for(self, engine: Engine) -> Json:
        caller = self._caller
        sampling = caller.attempt.sampling if caller.attempt is not None else None
        sampling = sampling or self._policy.sampling.get(caller.identity.split)
        if sampling and sampling.get("seed") is not None:
            sampling = {**sampling, "seed": call_seed(sampling["seed"], caller.identity, self._place)}
        assert engine.model is not None, "an engine whose model is unknown is not chosen"
        self._recorder.asked = self._request.for_engine(engine.model, sampling)
        self._recorder.asked_ns = time.time_ns()
        return self._recorder.asked

    async def _take(self, response: aiohttp.ClientResponse) -> bytes:
        if self._request.stream:
            await self._take_stream(response)
            return b""
        content = await response.read()
        self._recorder.first_ns = time.time_ns()
        try:
            data = orjson.loads(content)
        except ValueError:
            raise BadAnswer("The engine's answer is not JSON.") from None
        self._answer.read_plain(data)
        return self._writer.plain(data, self._answer)

    async def _take_stream(self, response: aiohttp.ClientResponse) -> None:
        """Relay chunk by chunk; hold back what ends a choice or the stream."""
        parser, answer, writer = EventParser(), self._answer, self._writer
        async for content in response.content.iter_any():
            ready: list[bytes] = []
            done = False
            for event in parser.feed(content):
                if done := event == b"[DONE]":
                    break
                try:
                    data = orjson.loads(event)
                except ValueError:
                    raise BadAnswer("A chunk of the engine's stream is not JSON.") from None
                answer.read_chunk(data)
                now, later = writer.chunk(data, answer)
                if now:
                    ready.append(now)
                if later:
                    self._held.append(later)
            if ready:
                if self._recorder.first_ns is None:
                    self._recorder.first_ns = time.time_ns()
                await self._relay(b"".join(ready))
            if done:
                break
        answer.check_complete()  # an engine that says no [DONE], but finished every choice, has answered

    # ---------------------------------------------------------------- recording

    async def _commit(self, spans: list[bytes], rows: list[CallRow]) -> None:
        """First the collector, then the ledger. Raises ModelError if the client must not get the answer."""
        gateway, run_id = self._gateway, self._caller.identity.run_id
        try:
            await gateway.exporter.send(spans)
        except CaptureFailed as error:
            gateway.counters.add("capture_failed", run_id)
            if gateway.settings.capture == "required":
                raise ModelError(
                    503, "capture_failed", f"The call was not recorded. {error}", fault=True, retry_after=1
                ) from None
            gateway.counters.add("capture_skipped", run_id)
        try:
            accepted = await gateway.ledger.add(rows)
        except SQLAlchemyError as error:
            logger.error("the ledger cannot be written: %s", error)
            raise ModelError(
                503, "ledger_failed", "The gateway's database cannot be written.", fault=True, retry_after=1
            ) from None
        if not accepted:
            gateway.counters.add("stale_call", run_id)
            raise ModelError(403, "attempt_ended", "This attempt has ended: its answer counts no more.")

    # ---------------------------------------------------------------- answering

    async def _finish(self, body: bytes) -> None:
        """Send what was held back: from here on the answer is the client's."""
        call_id = self._recorder.call_id()
        if self._request.stream:
            end = b"".join([*self._held, self._writer.end(self._answer)])
            body = b"".join([*self._sent, end])
        self.given = Given(call_id, body, delivered=self._interrupted is None)
        if self._interrupted is not None:
            self._gateway.counters.add("calls_undelivered", self._caller.identity.run_id)
        if self._request.stream:
            await self._relay(end, last=True)
        else:
            await http.respond(self._send, 200, body, x_agentlightning_call_id=call_id)

    async def _fail(self, error: ModelError) -> None:
        """Record a call that got no answer, then say so to the client, if it is still there."""
        gateway, run_id = self._gateway, self._caller.identity.run_id
        code = error.code
        gateway.counters.add("calls_aborted" if code == ABORTED else "calls_failed", run_id)
        gateway.counters.add(code, run_id)
        try:
            await gateway.ledger.add([self._recorder.row(self._answer, 0, code, fault=error.fault)])
        except SQLAlchemyError:
            gateway.counters.add("failure_unrecorded", run_id)
        if code not in ("capture_failed", "attempt_ended"):
            try:
                await gateway.exporter.send([self._recorder.failure(self._answer, code, str(error))])
            except CaptureFailed:
                gateway.counters.add("failure_unrecorded", run_id)
        if code == ABORTED:
            return
        with contextlib.suppress(OSError):
            if self._response_started:
                await self._relay(self._writer.error(error), last=True)
            else:
                headers = {} if error.retry_after is None else {"retry_after": str(error.retry_after)}
                await http.respond(self._send, error.status, self._request.api.refusal(error), **headers)

    async def _relay(self, data: bytes, *, last: bool = False) -> None:
        if not self._response_started:
            self._response_started = True
            headers = [
                (b"content-type", http.EVENTS.encode()),
                (b"cache-control", b"no-cache"),
                (b"x-agentlightning-call-id", self._recorder.call_id().encode()),
            ]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        if self._caller.attempt is not None:
            self._sent.append(data)
        await self._send({"type": "http.response.body", "body": data, "more_body": not last})

    @contextlib.contextmanager
    def _may_be_interrupted(self) -> Iterator[None]:
        """While this is open, `interrupt` ends what runs inside; it comes out as a ModelError."""
        if self._interrupted is not None:
            raise self._interruption()
        self._interruptible = True
        try:
            yield
        except asyncio.CancelledError:
            if self._interrupted is None or self._task is None:
                raise  # the server itself is stopping
            self._task.uncancel()
            raise self._interruption() from None
        finally:
            self._interruptible = False

    def _interruption(self) -> ModelError:
        if self._interrupted == ABORTED:
            return ModelError(499, ABORTED, "The client left before the answer was complete.")
        return ModelError(403, "attempt_ended", "This attempt has ended: it gets no further answers.")
