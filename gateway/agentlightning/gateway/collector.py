"""Sends spans to the collector and returns when it has acknowledged them.

Concurrent spans share a request: while a few requests are under way, further spans gather for the next one; an idle
exporter sends at once. A span is acknowledged, or its sender gets `CaptureFailed`: never neither.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import aiohttp
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceResponse,
)

from agentlightning.gateway.otlp import encode_request

__all__ = ["CaptureFailed", "Exporter"]

logger = logging.getLogger(__name__)
CONCURRENT_REQUESTS: Final = 2
"""So that one gathers while another is being synced to disk; more would carry less each."""
MAX_BATCH_BYTES: Final = 4 << 20
"""A span larger than this travels alone."""
RETRYABLE: Final = frozenset({429, 502, 503, 504})


class CaptureFailed(Exception):
    """The collector did not acknowledge a span. `retryable`: it may later."""

    def __init__(self, message: str, *, retryable: bool) -> None:
        super().__init__(message)
        self.retryable = retryable


@dataclass(slots=True, eq=False)
class _Parcel:
    """Spans that are acknowledged together."""

    spans: Sequence[bytes]
    size: int
    deadline: float
    done: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Exporter:
    """One collector's OTLP/HTTP endpoint.

    Args:
        url: `http://HOST:PORT` of the collector; `/v1/traces` is added.
        timeout: seconds that a span may wait for its acknowledgement, retries included.
    """

    def __init__(
        self, session: aiohttp.ClientSession, url: str, *, token: str | None, timeout: float
    ) -> None:
        self._session = session
        self._url = url.rstrip("/") + "/v1/traces"
        self._headers = {"content-type": "application/x-protobuf"}
        if token is not None:
            self._headers["authorization"] = f"Bearer {token}"
        self._timeout = timeout
        self._waiting: deque[_Parcel] = deque()
        self._requests: set[asyncio.Task[None]] = set()
        self.answered: bool | None = None
        """Whether the collector's last answer was an acknowledgement; None before the first."""

    async def send(self, spans: Sequence[bytes]) -> None:
        """Return when the collector has all of `spans`, each an encoded one. Raises CaptureFailed."""
        size = sum(map(len, spans))
        parcel = _Parcel(spans, size, asyncio.get_running_loop().time() + self._timeout)
        self._waiting.append(parcel)
        self._dispatch()
        await parcel.done

    async def forward(self, body: bytes) -> None:
        """Send an agent's own export request on, as it is. Raises CaptureFailed; the agent's exporter tries again."""
        try:
            async with self._session.post(
                self._url,
                data=body,
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(total=self._timeout),
            ) as response:
                answer = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise CaptureFailed(
                f"The collector could not be reached ({type(error).__name__}).", retryable=True
            ) from None
        if response.status != 200:
            raise CaptureFailed(
                f"The collector answered {response.status}.", retryable=response.status in RETRYABLE
            )
        _check_partial(answer)

    async def close(self) -> None:
        """Wait for what is under way."""
        while self._requests:
            await asyncio.wait(self._requests)

    def _dispatch(self) -> None:
        while self._waiting and len(self._requests) < CONCURRENT_REQUESTS:
            batch = [self._waiting.popleft()]
            size = batch[0].size
            while self._waiting and size + self._waiting[0].size <= MAX_BATCH_BYTES:
                size += self._waiting[0].size
                batch.append(self._waiting.popleft())
            request = asyncio.get_running_loop().create_task(self._deliver(batch))
            self._requests.add(request)
            request.add_done_callback(self._delivered)

    def _delivered(self, request: asyncio.Task[None]) -> None:
        self._requests.discard(request)
        self._dispatch()

    async def _deliver(self, batch: list[_Parcel]) -> None:
        try:
            await self._post(batch)
        except CaptureFailed as error:
            if error.retryable:  # those that came later have time left: they go again
                late = [parcel for parcel in batch if parcel.deadline <= batch[0].deadline]
                self._waiting.extendleft(reversed([parcel for parcel in batch if parcel not in late]))
                _settle(late, error)
            elif len(batch) == 1:
                _settle(batch, error)
            else:  # one of them is to blame: the others must not suffer
                for parcel in batch:
                    await self._deliver([parcel])
        except BaseException:
            _settle(
                batch, CaptureFailed("The gateway stopped before the collector answered.", retryable=True)
            )
            raise
        else:
            _settle(batch, None)

    async def _post(self, batch: list[_Parcel]) -> None:
        """Post until acknowledged, refused, or past the first deadline."""
        loop = asyncio.get_running_loop()
        body = _encode(batch)
        deadline = batch[0].deadline  # the first to come, hence the earliest
        pause = 0.05
        while True:
            wait: float | None = None
            try:
                async with self._session.post(
                    self._url,
                    data=body,
                    headers=self._headers,
                    timeout=aiohttp.ClientTimeout(total=max(0.05, deadline - loop.time())),
                ) as response:
                    answer = await response.read()
                    self.answered = response.status == 200
                    if response.status == 200:
                        return _check_partial(answer)
                    problem = f"answered {response.status}"
                    if response.status not in RETRYABLE:
                        raise CaptureFailed(f"The collector refused a span: it {problem}.", retryable=False)
                    wait = _retry_after(response)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                self.answered = False
                problem = f"could not be reached ({type(error).__name__})"
            pause = min(2 * pause, 1.0)
            if loop.time() + (wait := pause if wait is None else wait) >= deadline:
                raise CaptureFailed(f"The collector {problem}.", retryable=True)
            await asyncio.sleep(wait)


def _settle(batch: list[_Parcel], error: CaptureFailed | None) -> None:
    for parcel in batch:
        if not parcel.done.done():  # a sender may have gone
            if error is None:
                parcel.done.set_result(None)
            else:
                parcel.done.set_exception(CaptureFailed(str(error), retryable=error.retryable))


def _encode(batch: list[_Parcel]) -> bytes:
    spans = (span for parcel in batch for span in parcel.spans)
    return encode_request("agentlightning-gateway", "agentlightning.gateway", spans)


def _check_partial(answer: bytes) -> None:
    if answer:
        try:
            response = ExportTraceServiceResponse.FromString(answer)
        except DecodeError:
            raise CaptureFailed(
                "The collector's answer cannot be read: is it one?", retryable=False
            ) from None
        if response.partial_success.rejected_spans:
            raise CaptureFailed(
                f"The collector rejected a span: {response.partial_success.error_message}", retryable=False
            )


def _retry_after(response: aiohttp.ClientResponse) -> float | None:
    text = response.headers.get("retry-after", "")
    return min(float(text), 5.0) if text.isdigit() else None
