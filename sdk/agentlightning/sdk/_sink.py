"""Sends spans through OpenTelemetry's own OTLP/HTTP exporter, and says what became of them.

The official exporter encodes, compresses, and reads the `OTEL_EXPORTER_OTLP_*` variables. Its retries
and its log lines are replaced: the queue keeps what failed for as long as the process lives, and the
program that is being traced should not read about our network troubles line by line.
"""

import logging
import threading
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from agentlightning.proto.process import is_loopback
from agentlightning.sdk._losses import count
from agentlightning.sdk._queue import Outcome
from agentlightning.sdk._secrets import scrubbed

if TYPE_CHECKING:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import ReadableSpan
    from requests import Session

__all__ = ["OtlpSink"]

_HOPELESS = frozenset(
    {
        HTTPStatus.BAD_REQUEST,
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
        HTTPStatus.UNPROCESSABLE_ENTITY,
    }
)
"""Answers about the very bytes sent. Others (401, 404, 5xx) tell of the server and may pass."""


class OtlpSink:
    """Delivers batches to one OTLP/HTTP address. Used by one thread at a time."""

    def __init__(self, url: str, headers: Mapping[str, str] | None) -> None:
        self.url = url
        self._headers = dict(headers) if headers else None
        self._exporter: OTLPSpanExporter | None = None
        self._outcome = Outcome.REFUSED
        self._rejected = 0

    def __call__(self, spans: Sequence["ReadableSpan"]) -> tuple[Outcome, int]:
        """Deliver a batch; how many spans of a delivered one were rejected. Never raises."""
        try:
            if self._exporter is None:
                self._exporter = self._open()
            self._outcome, self._rejected = Outcome.REFUSED, 0  # unless it can be encoded and sent
            self._exporter.export([scrubbed(span) for span in spans])
        except Exception:  # noqa: BLE001 - the sending thread must outlive any fault of the exporter
            count("export_errors")
            return Outcome.RETRY, 0
        return self._outcome, self._rejected

    def renew(self) -> None:
        """Forget the connection: after a fork it belongs to the parent."""
        self._exporter = None

    def _open(self) -> "OTLPSpanExporter":
        from opentelemetry.exporter.otlp.proto.http import trace_exporter

        quiet = logging.getLogger(trace_exporter.__name__)
        if not any(isinstance(present, _NotFromThisThread) for present in quiet.filters):
            quiet.addFilter(_NotFromThisThread())
        return trace_exporter.OTLPSpanExporter(
            endpoint=self.url, headers=self._headers, session=self._session()
        )

    def _session(self) -> "Session":
        import requests

        sink = self

        class Reporting(requests.Session):
            def request(self, *args: Any, **kwargs: Any) -> requests.Response:
                sink._outcome = Outcome.RETRY
                try:
                    response = super().request(*args, **kwargs)
                except requests.RequestException as error:
                    raise _Undelivered(
                        str(error)
                    ) from error  # a type that the exporter does not retry itself
                if response.ok:
                    sink._outcome = Outcome.DELIVERED
                    sink._rejected = _rejected(response.content)
                elif response.status_code in _HOPELESS:
                    sink._outcome = Outcome.REFUSED
                else:
                    raise _Undelivered(f"HTTP status {response.status_code}")
                return response

        session = Reporting()
        # A proxy of the environment is not meant for a collector on this machine.
        session.trust_env = not is_loopback(urlsplit(self.url).hostname or "")
        return session


class _Undelivered(Exception):
    """Ends an attempt of the official exporter."""


class _NotFromThisThread(logging.Filter):
    """Drops the exporter's log lines about our batches; those of the user's own exporter pass."""

    def filter(self, record: logging.LogRecord) -> bool:
        return threading.current_thread().name != "agentlightning-export"


def _rejected(answer: bytes) -> int:
    if not answer:  # as the protocol wants it when all was accepted
        return 0
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

    rejected = ExportTraceServiceResponse.FromString(answer).partial_success.rejected_spans
    if rejected:
        count("spans_rejected_by_collector", rejected)
    return rejected
