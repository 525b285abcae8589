"""One running collector: receivers, journal and transition service in this process, the rest in children.

The order matters. Ports are taken before any file is touched; what is acknowledged is in the journal
before a child hears of it; at the end nothing new is taken, what is here is answered, and only then the
children finish. The journal keeps a segment until the data set, and the forwarder, need it no more.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import orjson
from prometheus_client import CONTENT_TYPE_LATEST

from agentlightning.collector.access import Tls, Tokens
from agentlightning.collector.forward import Cursor
from agentlightning.collector.http_server import HttpServer
from agentlightning.collector.intake import Intake
from agentlightning.collector.journal import Durability, Journal, JournalUnavailable, Kind, identity
from agentlightning.collector.logs import LogFormat
from agentlightning.collector.metrics import Snapshot, exposition, status
from agentlightning.collector.receiver_grpc import GrpcServer, handlers
from agentlightning.collector.receiver_http import HttpReceiver, listen
from agentlightning.collector.service import REFRESH_SECONDS, Commits, TransitionService, pending_of
from agentlightning.collector.supervise import Supervisor
from agentlightning.collector.upkeep_settings import UpkeepSettings
from agentlightning.proto.process import stop_event, write_ready
from agentlightning.proto.stores import Location
from agentlightning.proto.transitions_pb2_grpc import add_TransitionsServicer_to_server

__all__ = ["Collector", "Settings"]

log = logging.getLogger(__name__)

_PROBE: Final = b'{"attempts":[]}'
"""A seal of nothing: tells whether a journal that could not be written can be written again."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the command line says."""

    data: Location
    state: Path
    host: str
    grpc_port: int
    http_port: int
    durability: Durability
    body_bytes: int
    journal_bytes: int
    idle_timeout: float | None = None
    upkeep: UpkeepSettings = field(default_factory=UpkeepSettings)
    ready_file: Path | None = None
    log_level: str = "info"
    log_format: LogFormat = "text"
    forward: str | None = None
    """URL of another OTLP backend."""
    forward_headers: Path | None = None
    forward_bytes: int = 0
    """What the journal keeps for a backend that is down; older records are skipped, and counted."""


class Collector:
    """Everything of one collector, from start to end."""

    def __init__(self, settings: Settings, tokens: Tokens | None = None, tls: Tls | None = None) -> None:
        self.settings = settings
        self.tokens = tokens
        self.tls = tls
        self._started = time.time()
        self._progress: Mapping[str, Any] = {}
        self._heard = time.monotonic()
        self._forwarded: Mapping[str, Any] = {}
        self._forwarder: Supervisor | None = None
        self._removed = 0  # below this position, nothing of the journal is needed

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT. Raises ConfigError if it cannot begin."""
        settings = self.settings
        stop = stop_event()
        folder = settings.state / "journal"
        context = self.tls.context() if self.tls is not None else None
        sock = listen(settings.host, settings.http_port, "The collector's HTTP server")
        grpc_server = GrpcServer(
            settings.host, settings.grpc_port, body_bytes=settings.body_bytes, tls=self.tls
        )
        self._commits = Commits(settings.data, identity(folder))
        self._journal = Journal(
            folder, durability=settings.durability, start=self._commits.low, on_commit=self._on_commit
        )
        self._intake = Intake(
            self._journal, body_bytes=settings.body_bytes, journal_bytes=settings.journal_bytes
        )
        self._intake.low = max(self._intake.low, self._commits.low)
        self._converter = Supervisor("converter", self._child_arguments("converter"), self._on_converter)
        self._converter.start()
        if settings.forward is not None:
            self._forwarded = {"cursor": Cursor.load(settings.state, self._journal.id).position}
            self._forwarder = Supervisor("forwarder", self._child_arguments("forwarder"), self._on_forwarder)
            self._forwarder.start()

        pages = {"/metrics": self._metrics_page, "/status": self._status_page}
        receiver = HttpReceiver(self._intake, tokens=self.tokens, pages=pages)
        self._http = HttpServer(receiver, sock, tls=context)
        grpc_server.server.add_generic_rpc_handlers(handlers(self._intake, self.tokens))
        service = TransitionService(self._commits, self._intake, tokens=self.tokens, counters=self._counters)
        add_TransitionsServicer_to_server(service, grpc_server.server)
        await self._http.start()
        await grpc_server.start()
        refresh = asyncio.create_task(self._refresh_forever())

        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        scheme = "http" if context is None else "https"
        http, grpc = f"{scheme}://{host}:{sock.getsockname()[1]}", f"{host}:{grpc_server.port}"
        write_ready(settings.ready_file, {"http": http, "grpc": grpc})
        log.info("OTLP/HTTP at %s, OTLP/gRPC and transitions at %s, data in %s", http, grpc, settings.data)
        await stop.wait()

        log.info("stopping: no new requests; what is acknowledged is being converted")
        self._commits.close()
        await asyncio.gather(self._http.stop(), grpc_server.stop())
        await asyncio.to_thread(self._journal.close)
        await asyncio.gather(*(child.stop() for child in self._children()))
        refresh.cancel()

    # ---- what it says about itself ----

    def snapshot(self) -> Snapshot:
        """The collector now."""
        journal, history = self._journal, self._commits.history
        forward = None
        if self._forwarder is not None:
            said = self._forwarded
            forward = {
                "url": self.settings.forward,
                "up": bool(said.get("up")),
                "restarts": self._forwarder.restarts,
                "lag_bytes": max(0, journal.end - int(said["cursor"])),
                "error": said.get("error", ""),
                "counters": said.get("counters", {}),
            }
        return Snapshot(
            ready=not self._intake.unready,
            message=self._intake.unready,
            started=self._started,
            accepted=dict(self._intake.accepted),
            refused=dict(self._intake.refused),
            fidelity=dict(history.counters),
            converter=self._progress.get("counters", {}),
            sealed_attempts=len(history.entries),
            open_attempts=self._progress.get("open_attempts", 0),
            pending_seals=len(self._commits.pending),
            journal_end_bytes=journal.end,
            journal_stored_bytes=journal.end - journal.begin,
            journal_unconverted_bytes=self._intake.unconverted,
            journal_unread_bytes=max(0, journal.end - self._progress.get("read", self._intake.low)),
            journal_commits=journal.commits,
            converter_up=self._converter.pid is not None,
            converter_restarts=self._converter.restarts,
            converter_silent_seconds=round(time.monotonic() - self._heard, 3),
            connections=len(self._http.connections),
            forward=forward,
        )

    def _metrics_page(self) -> tuple[str, bytes]:
        return CONTENT_TYPE_LATEST, exposition(self.snapshot(), self._intake.latency)

    def _status_page(self) -> tuple[str, bytes]:
        return "application/json", orjson.dumps(status(self.snapshot(), self._intake.latency))

    def _counters(self) -> dict[str, int]:
        """What is counted outside the data set, since this process began."""
        names = {f"accepted.{name}": count for name, count in self._intake.accepted.items()}
        names |= {f"refused.{name}": count for name, count in self._intake.refused.items()}
        names["converter.restarts"] = self._converter.restarts
        names |= {f"forward.{name}": count for name, count in self._forwarded.get("counters", {}).items()}
        return names

    # ---- its children ----

    def _children(self) -> list[Supervisor]:
        return [self._converter] + ([self._forwarder] if self._forwarder is not None else [])

    def _child_arguments(self, name: str) -> list[str]:
        settings = self.settings
        arguments = ["--state", str(settings.state)]
        arguments += ["--log-level", settings.log_level, "--log-format", settings.log_format]
        if name == "converter":
            arguments += ["--data", str(settings.data), *settings.upkeep.arguments()]
            if settings.idle_timeout is not None:
                arguments += ["--idle-timeout", str(settings.idle_timeout)]
        else:
            arguments += ["--to", str(settings.forward)]
            if settings.forward_headers is not None:
                arguments += ["--header-file", str(settings.forward_headers)]
        return arguments

    def _on_commit(self, end: int) -> None:
        for child in self._children():
            child.notify()

    def _on_converter(self, message: Mapping[str, Any]) -> None:
        self._heard = time.monotonic()
        match message.get("type"):
            case "commit":
                self._refresh()
            case "pending":
                self._commits.pending.update(pending_of(message))
            case "progress":
                self._progress = message

    def _on_forwarder(self, message: Mapping[str, Any]) -> None:
        self._forwarded = message

    # ---- upkeep ----

    def _refresh(self) -> None:
        self._commits.refresh()
        self._intake.low = max(self._intake.low, self._commits.low)
        needed = self._commits.low
        if self._forwarder is not None:
            kept = self._journal.end - self.settings.forward_bytes
            needed = min(needed, max(int(self._forwarded["cursor"]), kept))
        if needed > self._removed:
            self._removed = needed
            self._journal.remove_below(needed)

    async def _refresh_forever(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_SECONDS)
            self._refresh()
            if self._journal.failed:
                with contextlib.suppress(JournalUnavailable):
                    await self._journal.append(Kind.SEAL, _PROBE)
