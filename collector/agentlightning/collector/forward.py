"""Another OTLP backend: where it is, how far it has been told, and what it answers.

A request ends in one of three ways. It is taken (in part, perhaps). Or it is refused for what it holds:
then a part of it may be taken, and the rest is counted. Or it should come later, which is everything
else: a backend that is down, a wrong token, a path that is not there yet. Later loses nothing.
"""

import json
import re
import stat
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, Protocol
from urllib.parse import urlsplit

import grpc
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from isal import igzip
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from agentlightning.proto.errors import ConfigError, DataError
from agentlightning.proto.process import write_private

__all__ = ["Cursor", "Outcome", "Signal", "Target", "check_target", "connect"]

Signal = Literal["traces", "logs"]
TIMEOUT_SECONDS: Final = 30.0
MAX_RETRY_AFTER: Final = 300.0
_HEADER: Final = re.compile(r"([A-Za-z0-9!#$%&'*+.^_`|~-]+):[ \t]*([ -~]*)")
_REFUSED_STATUS: Final = (400, 413, 422)
_REFUSED_CODES: Final = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)
_METHODS: Final = {
    "traces": "/opentelemetry.proto.collector.trace.v1.TraceService/Export",
    "logs": "/opentelemetry.proto.collector.logs.v1.LogsService/Export",
}


@dataclass
class Cursor:
    """How far a journal has been forwarded. On disk, so that a restart goes on there: at least once."""

    path: Path
    journal: str
    position: int = 0
    counters: Counter[str] = field(default_factory=Counter)

    @staticmethod
    def load(state: Path, journal: str) -> "Cursor":
        """The cursor of a collector's state; at the beginning if there is none for this journal."""
        path = state / "forward" / "cursor.json"
        try:
            saved = json.loads(path.read_text())
            if saved["journal"] == journal:
                return Cursor(path, journal, int(saved["position"]), Counter(saved["counters"]))
        except FileNotFoundError:
            pass
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"The forwarder's cursor {path} is damaged ({error!r}): remove it to forward from the start."
            ) from None
        return Cursor(path, journal)

    def save(self) -> None:
        document = {"journal": self.journal, "position": self.position, "counters": dict(self.counters)}
        write_private(self.path, json.dumps(document) + "\n")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a backend made of a request."""

    kind: Literal["taken", "refused", "later"]
    message: str = ""
    rejected: int = 0
    """Of what was taken, spans or records that the backend says it left out."""
    after: float | None = None
    """Seconds that the backend asks us to wait."""


class Target(Protocol):
    """A backend."""

    def send(self, signal: Signal, body: bytes) -> Outcome:
        """Export a protobuf request. Never raises for what the backend or the network does."""


def check_target(url: str, header_file: Path | None) -> None:
    """Raises ConfigError if there can be no such backend."""
    _parse(url)
    if header_file is not None:
        read_headers(header_file)


def connect(url: str, header_file: Path | None = None) -> Target:
    """A backend by its URL: `http(s)://` or `grpc(s)://`. Nothing is sent yet."""
    scheme, place = _parse(url)
    headers = read_headers(header_file) if header_file is not None else {}
    if scheme in ("grpc", "grpcs"):
        return _Grpc(place, headers, secure=scheme == "grpcs")
    return _Http(f"{scheme}://{place}", headers)


def read_headers(path: Path) -> dict[str, str]:
    """Headers of a file, as `name: value` lines. Raises ConfigError."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The header file {path} cannot be read: {error}.") from None
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise ConfigError(f"The header file {path} can be read by others: run `chmod 600 {path}`.")
    headers = {}
    for number, line in enumerate(lines, 1):
        match = _HEADER.fullmatch(line.strip())
        if match:
            headers[match[1].lower()] = match[2]
        elif line.strip():
            raise ConfigError(
                f"Line {number} of the header file {path} is not a header: write `name: value`."
            )
    return headers


class _Http:
    def __init__(self, base: str, headers: Mapping[str, str]) -> None:
        import requests  # the forwarder alone needs it

        self._base = base
        self._errors = requests.RequestException
        self._session = requests.Session()
        self._session.headers.update(
            {**headers, "content-type": "application/x-protobuf", "content-encoding": "gzip"}
        )

    def send(self, signal: Signal, body: bytes) -> Outcome:
        try:
            answer = self._session.post(
                f"{self._base}/v1/{signal}",
                data=igzip.compress(body, 1),
                timeout=TIMEOUT_SECONDS,
                allow_redirects=False,
            )
            content = answer.content
        except self._errors as error:
            return Outcome("later", f"{type(error).__name__}: {error}")
        if answer.status_code // 100 == 2:
            # A backend may answer in JSON whatever it was asked; then it has nothing to say that we need.
            in_protobuf = "protobuf" in answer.headers.get("content-type", "")
            return Outcome("taken", rejected=_rejected(signal, content) if in_protobuf else 0)
        said = f"HTTP {answer.status_code} {_said(answer.headers.get('content-type', ''), content)}".strip()
        if answer.status_code in _REFUSED_STATUS:
            return Outcome("refused", said)
        after = answer.headers.get("retry-after", "")
        return Outcome("later", said, after=min(float(after), MAX_RETRY_AFTER) if after.isdigit() else None)


class _Grpc:
    def __init__(self, address: str, headers: Mapping[str, str], *, secure: bool) -> None:
        options = [("grpc.max_receive_message_length", 4 << 20)]
        self._channel = (
            grpc.secure_channel(address, grpc.ssl_channel_credentials(), options)
            if secure
            else grpc.insecure_channel(address, options)
        )
        self._metadata = tuple(headers.items())
        self._calls: dict[str, Any] = {  # the stubs know no method without serialisers
            signal: self._channel.unary_unary(method) for signal, method in _METHODS.items()
        }

    def send(self, signal: Signal, body: bytes) -> Outcome:
        try:
            content = self._calls[signal](body, timeout=TIMEOUT_SECONDS, metadata=self._metadata)
        except grpc.RpcError as error:
            code, said = error.code(), f"{error.code().name} {error.details() or ''}".strip()
            after = _retry_info(error)
            if code in _REFUSED_CODES and after is None:
                return Outcome("refused", said)
            return Outcome("later", said, after=after)
        return Outcome("taken", rejected=_rejected(signal, content))


def _parse(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    try:
        port = parts.port
        over_http = parts.scheme in ("http", "https")
        over_grpc = parts.scheme in ("grpc", "grpcs") and bool(port) and parts.path in ("", "/")
        clean = not (parts.query or parts.fragment or parts.username)
        good = bool(parts.hostname) and clean and (over_http or over_grpc)
    except ValueError:  # a port that is none
        good = False
    if not good:
        raise ConfigError(
            f"{url!r} is no OTLP backend to forward to: give one as http://HOST:4318 or grpc://HOST:4317 "
            "(https, grpcs for TLS). Keys belong into --forward-header-file."
        )
    return parts.scheme, (parts.netloc + parts.path).rstrip("/")


def _rejected(signal: Signal, content: bytes) -> int:
    try:
        if signal == "traces":
            return int(ExportTraceServiceResponse.FromString(content).partial_success.rejected_spans)
        return int(ExportLogsServiceResponse.FromString(content).partial_success.rejected_log_records)
    except DecodeError:
        return 0


def _said(media: str, content: bytes) -> str:
    """What a backend says about its refusal, briefly."""
    if "protobuf" in media:
        try:
            return Status.FromString(content).message[:300]
        except DecodeError:
            return ""
    return content[:300].decode(errors="replace")


def _retry_info(error: Any) -> float | None:
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            try:
                details = Status.FromString(value).details
            except DecodeError:
                continue
            for detail in details:
                info = RetryInfo()
                if detail.Is(RetryInfo.DESCRIPTOR) and detail.Unpack(info):
                    return min(info.retry_delay.ToNanoseconds() / 1e9, MAX_RETRY_AFTER)
    return None
