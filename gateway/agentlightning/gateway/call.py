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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import orjson
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from sqlalchemy.exc import SQLAlchemyError
from starlette.types import Receive, Send

from agentlightning.gateway import http
from agentlightning.gateway.chat import (
    DONE,
    Answer,
    BadAnswer,
    ChatRequest,
    Choice,
    encode_event,
    sampling_attributes,
)
from agentlightning.gateway.collector import CaptureFailed
from agentlightning.gateway.engines import Engine
from agentlightning.gateway.errors import ModelError
from agentlightning.gateway.ledger import CallRow
from agentlightning.gateway.policies import Policy
from agentlightning.gateway.spans import make_span, set_error
from agentlightning.gateway.sse import EventParser
from agentlightning.proto import attributes as names
from agentlightning.proto import ids
from agentlightning.proto.packed import pack_ids

if TYPE_CHECKING:
    from agentlightning.gateway.gateway import Gateway
    from agentlightning.gateway.proxy import Caller

__all__ = ["ChatCall", "Given"]

logger = logging.getLogger(__name__)
ABORTED: Final = "aborted"
ENGINE_PAUSE: Final = 0.2
"""Seconds between two looks for an engine that is well."""
_REFUSALS: Final = frozenset({400, 413, 422})
"""An engine's statuses that are the request's fault: passed on as they are."""
_TRY_ANOTHER: Final = frozenset({429, 503})
_numbers = itertools.count()
"""Tells calls of one process apart; its boot id tells the processes apart."""


@dataclass(frozen=True, slots=True)
class Given:
    """What a client was given: enough to give it again."""

    call_id: str
    body: bytes
    answers: list[bytes]

    @property
    def size(self) -> int:
        return len(self.body) + sum(map(len, self.answers))


class _Declined(Exception):
    """This engine did not take the call; nothing was sampled, so another may be asked."""


class ChatCall:
    """Serves one request. `given` is what the client got, None if it got no answer."""

    def __init__(
        self, gateway: "Gateway", caller: "Caller", request: ChatRequest, policy: Policy, send: Send
    ) -> None:
        self.settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.given: Given | None = None
        self._gateway = gateway
        self._caller = caller
        self._request = request
        self._policy = policy
        self._send = send
        self._answer = Answer()
        self._answers: list[bytes] = []
        """The record's answers, one per choice."""
        self._nonce = f"{gateway.boot_id} {next(_numbers)}"
        self._call_ids: dict[int, str] = {}
        self._body: dict[str, Any] = {}
        self._started_ns = time.time_ns()
        self._response_started = False
        self._held: list[bytes] = []
        """The end of a stream, from the first finish reason on, until it may be sent."""
        self._task: asyncio.Task[Any] | None = None
        self._interruptible = False
        self._interrupted: str | None = None

    async def run(self, receive: Receive) -> None:
        self._task = asyncio.current_task()
        attempt = self._caller.attempt
        if attempt is not None:
            attempt.calls.add(self)
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
            records = self._records()
            await self._commit(*records)
        except ModelError as error:
            await self._fail(error)
        except BadAnswer as error:
            await self._fail(ModelError(502, "bad_engine_answer", str(error), fault=True))
        except Exception as error:  # the boundary: an agent gets an answer whatever happens here
            logger.exception("a model call failed inside the gateway")
            await self._fail(ModelError(500, "internal_error", f"The gateway failed: {error!r}.", fault=True))
        else:
            self._gateway.counters.add("calls_recorded", self._caller.identity.run_id)
            await self._finish(body)

    # ---------------------------------------------------------------- sampling

    async def _sample(self) -> bytes:
        """Get the whole answer, relaying a stream up to its end. Returns the body of a plain answer."""
        await self._pass_gate()
        policy, version = self._policy, self._policy.version
        policy.in_flight += 1
        try:
            body = await self._ask_engines()
        finally:
            policy.in_flight -= 1
            if policy.held:
                policy.notify()
        if (
            self._answer.version is None
        ):  # the engine does not say: it is the trainer's, if that did not change
            self._answer.version = version if version == policy.version else None
        return body

    async def _pass_gate(self) -> None:
        """Wait while the policy is held; a stream is told that it is not forgotten."""
        gateway, policy = self._gateway, self._policy
        if policy.held:
            gateway.counters.add("calls_held", self._caller.identity.run_id)
        while policy.held and not gateway.stopping.is_set():
            await policy.wait(
                min(gateway.settings.keep_alive_s, max(0.01, policy.hold_expires - time.time()))
            )
            if policy.held and self._request.stream:
                await self._relay(b": keep-alive\n\n")
        if gateway.stopping.is_set():
            raise ModelError(503, "stopping", "The gateway is stopping.", fault=True, retry_after=1)

    async def _ask_engines(self) -> bytes:
        gateway, policy = self._gateway, self._policy
        asked: dict[str, str] = {}
        deadline = time.monotonic() + gateway.settings.engine_wait_s
        while True:
            engine = gateway.engines.choose(policy.name, self._caller.identity.rollout_id, without=set(asked))
            if engine is None:
                registered = gateway.engines.of(policy.name)
                if registered and time.monotonic() < deadline and not gateway.stopping.is_set():
                    # An engine that is restarted comes back within seconds: to wait costs the agent less than to fail.
                    asked.clear()
                    await asyncio.sleep(ENGINE_PAUSE)
                    continue
                ill = {e.engine_id: e.reason for e in registered if e.reason}
                reasons = "; ".join(f"{name}: {reason}" for name, reason in {**ill, **asked}.items())
                raise ModelError(
                    503,
                    "no_engine",
                    f"No engine can serve policy {policy.name} now ({reasons or 'none is registered'}).",
                    fault=True,
                    retry_after=1,
                )
            engine.in_flight += 1
            try:
                return await self._ask(engine)
            except _Declined as declined:
                gateway.counters.add("engine_declined", self._caller.identity.run_id)
                asked[engine.engine_id] = str(declined)
            finally:
                engine.in_flight -= 1

    async def _ask(self, engine: Engine) -> bytes:
        """Send the request to one engine and take in its answer."""
        gateway, caller = self._gateway, self._caller
        sampling = caller.attempt.sampling if caller.attempt is not None else None
        sampling = sampling or self._policy.sampling.get(caller.identity.split)
        assert engine.model is not None, "an engine whose model is unknown is not chosen"
        self._body = self._request.for_engine(engine.model, sampling)
        try:
            async with gateway.session.post(
                f"{engine.url}/v1/chat/completions",
                data=orjson.dumps(self._body),
                headers={"content-type": http.JSON, **engine.headers},
                timeout=gateway.engine_timeout,
            ) as response:
                if response.status != 200:
                    raise self._refusal(response, await response.read())
                if self._request.stream:
                    await self._take_stream(response)
                    return b""
                return self._take_plain(await response.read())
        except aiohttp.SocketTimeoutError:
            raise ModelError(
                504, "engine_timeout", "The engine did not answer in time.", fault=True
            ) from None
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            gateway.engines.set_aside(engine, f"{type(error).__name__}: {error}")
            raise _Declined("cannot be reached") from None
        except (aiohttp.ClientError, OSError) as error:
            raise ModelError(
                502,
                "engine_failed",
                f"The engine broke off ({type(error).__name__}).",
                fault=True,
                retry_after=1,
            ) from None

    def _refusal(self, response: aiohttp.ClientResponse, content: bytes) -> Exception:
        """What an engine's error status means to the client."""
        try:
            error = orjson.loads(content)
            error = error.get("error", error)
            message, code, param = error.get("message"), error.get("code"), error.get("param")
        except (ValueError, AttributeError):
            message, code, param = content[:500].decode(errors="replace"), None, None
        status = response.status
        if status in _REFUSALS:
            return ModelError(
                status,
                code if isinstance(code, str) else "invalid_request",
                str(message),
                param=param if isinstance(param, str) else None,
            )
        if status in _TRY_ANOTHER:
            return _Declined(f"answered {status}: {message}")
        return ModelError(
            502, "engine_failed", f"The engine answered {status}: {message}", fault=True, retry_after=1
        )

    def _take_plain(self, content: bytes) -> bytes:
        try:
            data = orjson.loads(content)
        except ValueError:
            raise BadAnswer("The engine's answer is not JSON.") from None
        self._answer.read_plain(data)
        return orjson.dumps(self._request.hide(data))

    async def _take_stream(self, response: aiohttp.ClientResponse) -> None:
        """Relay chunk by chunk; hold back what ends a choice or the stream."""
        parser = EventParser()
        async for content in response.content.iter_any():
            ready: list[bytes] = []
            for event in parser.feed(content):
                if event == b"[DONE]":
                    if ready:
                        await self._relay(b"".join(ready))
                    self._answer.check_complete()
                    return
                self._take_chunk(event, ready)
            if ready:
                await self._relay(b"".join(ready))
        self._answer.check_complete()  # an engine that says no [DONE], but finished every choice, has answered

    def _take_chunk(self, event: bytes, ready: list[bytes]) -> None:
        try:
            data = orjson.loads(event)
        except ValueError:
            raise BadAnswer("A chunk of the engine's stream is not JSON.") from None
        self._answer.read_chunk(data)
        choices = data["choices"]
        if not self._request.wants_usage:
            data.pop("usage", None)
            if not choices:
                return
        ends = not choices or any(choice.get("finish_reason") for choice in choices)
        (self._held if ends else ready).append(encode_event(self._request.hide(data)))

    # ---------------------------------------------------------------- recording

    async def _commit(self, spans: list[Span], rows: list[CallRow]) -> None:
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

    def _records(self) -> tuple[list[Span], list[CallRow]]:
        """Spans and ledger rows of an answer, one each per choice."""
        counters, run_id = self._gateway.counters, self._caller.identity.run_id
        spans, rows = [], []
        ended = time.time_ns()
        for choice in sorted(self._answer.choices.values(), key=lambda choice: choice.index):
            try:
                logprobs = choice.logprobs()
            except BadAnswer as error:
                counters.add("logprobs_mismatch", run_id)
                logger.warning("the log-probabilities of a call are dropped: %s", error)
                logprobs = None
            if choice.token_ids is None or self._answer.prompt_ids is None:
                counters.add("no_token_ids", run_id)
            answer = orjson.dumps(
                self._answer.plain(self._request.model, choice, logprobs=self._request.wants_logprobs)
            )
            self._answers.append(answer)
            spans.append(self._span(choice, ended, logprobs, answer))
            rows.append(self._row(choice.index))
        return spans, rows

    def _span(self, choice: Choice | None, ended: int, logprobs: bytes | None, answer: bytes | None) -> Span:
        request, caller, got = self._request, self._caller, self._answer
        index = 0 if choice is None else choice.index
        call_id = self._call_id(index)
        attributes = caller.identity.attributes()
        attributes |= {
            names.CALL_ID: call_id,
            names.POLICY: self._policy.name,
            names.SOURCE: "gateway",
            names.CHOICE: index,
            names.OPERATION_NAME: "chat",
            names.PROVIDER_NAME: "agentlightning",
            names.REQUEST_MODEL: request.model,
            names.REQUEST: request.text(caller.token),
            **sampling_attributes(self._body or request.body),
        }
        if isinstance(model := got.head.get("model"), str):
            attributes[names.RESPONSE_MODEL] = model
        if isinstance(response_id := got.head.get("id"), str):
            attributes[names.RESPONSE_ID] = response_id
        version, versions = got.versions_of(choice) if choice is not None else (got.version, None)
        if version is not None:
            attributes[names.MODEL_VERSION] = version
        if versions is not None:
            attributes[names.MODEL_VERSIONS] = versions
        try:
            if got.prompt_ids is not None:
                attributes[names.PROMPT_TOKEN_IDS] = pack_ids(got.prompt_ids)
                attributes[names.USAGE_INPUT] = len(got.prompt_ids)
            if choice is not None and choice.token_ids is not None:
                attributes[names.RESPONSE_TOKEN_IDS] = pack_ids(choice.token_ids)
                attributes[names.USAGE_OUTPUT] = len(choice.token_ids)
        except (TypeError, OverflowError) as error:
            raise BadAnswer(f"The engine's token ids cannot be read ({error}).") from None
        if logprobs is not None:
            attributes[names.RESPONSE_LOGPROBS] = logprobs
        if choice is not None and choice.finish_reason is not None:
            attributes[names.FINISH_REASONS] = [choice.finish_reason]
        if answer is not None:
            text = answer.decode()
            attributes[names.RESPONSE] = (
                text if caller.token is None else text.replace(caller.token, "[removed]")
            )
        return make_span(
            name=f"chat {request.model}",
            trace_id=caller.trace_id,
            span_id=ids.derived_span_id("call", call_id),
            parent_id=caller.parent_id,
            start_ns=self._started_ns,
            end_ns=ended,
            attributes=attributes,
            kind=Span.SPAN_KIND_CLIENT,
        )

    def _row(self, index: int, error: str | None = None, *, fault: bool = False) -> CallRow:
        caller, call_id = self._caller, self._call_id(index)
        response_id = self._answer.head.get("id")
        return CallRow(
            call_id=call_id,
            rollout_id=caller.identity.rollout_id,
            attempt=caller.identity.attempt,
            digest=self._request.digest,
            trace_id=caller.trace_id,
            span_id=ids.derived_span_id("call", call_id),
            response_id=response_id if isinstance(response_id, str) else None,
            started=self._started_ns / 1e9,
            error=error,
            fault=fault,
            fenced=caller.attempt is not None,
        )

    def _call_id(self, index: int) -> str:
        if index not in self._call_ids:
            identity = self._caller.identity
            self._call_ids[index] = ids.call_id(
                identity.rollout_id, identity.attempt, f"{self._nonce} {index}"
            )
        return self._call_ids[index]

    # ---------------------------------------------------------------- answering

    async def _finish(self, body: bytes) -> None:
        """Send what was held back: from here on the answer is the client's."""
        call_id = self._call_id(0)
        self.given = Given(call_id, body, self._answers if self._request.stream else [])
        if self._interrupted is not None:
            self._gateway.counters.add("calls_undelivered", self._caller.identity.run_id)
        if not self._request.stream:
            await http.respond(self._send, 200, body, x_agentlightning_call_id=call_id)
            return
        await self._relay(b"".join([*self._held, DONE]), last=True)

    async def _fail(self, error: ModelError) -> None:
        """Record a call that got no answer, then say so to the client, if it is still there."""
        gateway, run_id = self._gateway, self._caller.identity.run_id
        code = error.code
        gateway.counters.add("calls_aborted" if code == ABORTED else "calls_failed", run_id)
        gateway.counters.add(code, run_id)
        try:
            await gateway.ledger.add([self._row(0, code, fault=error.fault)])
        except SQLAlchemyError:
            gateway.counters.add("failure_unrecorded", run_id)
        if code not in ("capture_failed", "attempt_ended"):
            await self._record_failure(code, str(error))
        if code == ABORTED:
            return
        with contextlib.suppress(OSError):
            if self._response_started:
                await self._relay(b"data: " + error.body() + b"\n\n", last=True)
            else:
                headers = {} if error.retry_after is None else {"retry_after": str(error.retry_after)}
                await http.respond(self._send, error.status, error.body(), **headers)

    async def _record_failure(self, code: str, message: str) -> None:
        """A span of the call with what there is of its answer, if the collector takes it."""
        choice = next(iter(self._answer.choices.values()), None)
        try:
            answer, logprobs = None, None
            if choice is not None:
                with contextlib.suppress(BadAnswer):
                    logprobs = choice.logprobs()
                answer = orjson.dumps(self._answer.plain(self._request.model, choice, logprobs=False))
            try:
                span = self._span(choice, time.time_ns(), logprobs, answer)
            except BadAnswer:  # what came cannot be told; that it failed can
                self._answer = Answer()
                span = self._span(None, time.time_ns(), None, None)
            set_error(span, code, message)
            await self._gateway.exporter.send([span])
        except CaptureFailed:
            self._gateway.counters.add("failure_unrecorded", self._caller.identity.run_id)

    async def _relay(self, data: bytes, *, last: bool = False) -> None:
        if not self._response_started:
            self._response_started = True
            headers = [
                (b"content-type", http.EVENTS.encode()),
                (b"cache-control", b"no-cache"),
                (b"x-agentlightning-call-id", self._call_id(0).encode()),
            ]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
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
