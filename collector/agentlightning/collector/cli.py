"""`agl collector`: receivers, journal and transition service in this process, the converter in a child."""

import argparse
import asyncio
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from agentlightning.collector.intake import BODY_BYTES, JOURNAL_BYTES, Intake
from agentlightning.collector.journal import Durability, Journal, identity
from agentlightning.collector.receiver_grpc import GrpcServer, handlers
from agentlightning.collector.receiver_http import HttpReceiver, HttpServer, listen
from agentlightning.collector.service import REFRESH_SECONDS, Commits, TransitionService, pending_of
from agentlightning.collector.supervise import Supervisor
from agentlightning.proto.errors import ConfigError
from agentlightning.proto.process import (
    die_with_parent,
    lock_directory,
    read_token,
    require_token,
    run_main,
    setup_logging,
    stop_event,
    write_ready,
)
from agentlightning.proto.transitions_pb2_grpc import add_TransitionsServicer_to_server

__all__ = ["main"]

log = logging.getLogger(__name__)

DESCRIPTION = """\
Receive OpenTelemetry spans of agents, keep each on disk before it is acknowledged, and turn them into
training data: a data set of Parquet files that pyarrow, DuckDB and Polars open.

Agents send OTLP over HTTP (POST /v1/traces, /v1/logs) or gRPC. Trainers seal and fetch attempts through
the transition service on the gRPC port. GET /healthz, /readyz and /metrics say how it is doing.
"""
EXAMPLE = """\
example:
  agl collector --data runs/demo/data --state runs/demo/state/collector
  OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:4318 python my_agent.py
  agl inspect runs/demo/data
"""


def main(argv: list[str] | None = None) -> int:
    """The command. Returns its exit code."""
    return run_main(lambda: _main(argv))


def _main(argv: list[str] | None) -> int:
    arguments = _parser().parse_args(argv)
    die_with_parent()
    setup_logging("collector", arguments.log_level)
    require_token(arguments.host, arguments.token_file, "The collector")
    token = read_token(arguments.token_file) if arguments.token_file else None
    try:
        arguments.data.mkdir(parents=True, exist_ok=True)
        with lock_directory(arguments.state, "The collector's state"):
            _run(_Collector(arguments, token).run())
    except OSError as error:
        place = error.filename or f"{arguments.data} or {arguments.state}"
        raise ConfigError(f"The collector cannot use {place}: {error.strerror or error}.") from None
    return 0


def _run(coroutine: Any) -> None:
    try:
        import uvloop  # absent on Windows alone
    except ImportError:
        asyncio.run(coroutine)
    else:
        uvloop.run(coroutine)


class _Collector:
    """Everything of one collector, from start to end."""

    def __init__(self, arguments: argparse.Namespace, token: str | None) -> None:
        self.arguments = arguments
        self.token = token
        self.progress: Mapping[str, Any] = {}

    async def run(self) -> None:
        arguments = self.arguments
        logging.getLogger("uvicorn").setLevel(logging.WARNING)  # we say ourselves when we start and stop
        stop = stop_event()
        folder = arguments.state / "journal"
        # Ports first: a mistake in them should not touch any file.
        sock = listen(arguments.host, arguments.http_port, "The collector's HTTP server")
        grpc_server = GrpcServer(arguments.host, arguments.grpc_port, body_bytes=arguments.max_body_mib << 20)
        self.commits = Commits(arguments.data, identity(folder))
        self.journal = Journal(
            folder,
            durability=arguments.durability,
            start=self.commits.low,
            on_commit=lambda end: self.supervisor.notify(),
        )
        self.intake = Intake(
            self.journal,
            body_bytes=arguments.max_body_mib << 20,
            journal_bytes=arguments.journal_limit_mib << 20,
        )
        self.intake.low = max(self.intake.low, self.commits.low)
        self.supervisor = Supervisor(self._converter_arguments(), self._on_message)
        self.supervisor.start()

        http_server = HttpServer(HttpReceiver(self.intake, token=self.token, metrics=self.metrics), sock)
        grpc_server.server.add_generic_rpc_handlers(handlers(self.intake, self.token))
        service = TransitionService(self.commits, self.intake, token=self.token, counters=self.counters)
        add_TransitionsServicer_to_server(service, grpc_server.server)
        await http_server.start()
        await grpc_server.start()
        refresh = asyncio.create_task(self._refresh_forever())

        host = f"[{arguments.host}]" if ":" in arguments.host else arguments.host
        http, grpc = f"http://{host}:{sock.getsockname()[1]}", f"{host}:{grpc_server.port}"
        write_ready(arguments.ready_file, {"http": http, "grpc": grpc})
        log.info("OTLP/HTTP at %s, OTLP/gRPC and transitions at %s, data in %s", http, grpc, arguments.data)
        await stop.wait()

        log.info("stopping: no new requests; what is acknowledged is being converted")
        self.commits.close()
        await asyncio.gather(http_server.stop(), grpc_server.stop())
        await asyncio.to_thread(self.journal.close)
        await self.supervisor.stop()
        refresh.cancel()

    def counters(self) -> dict[str, int]:
        """What is counted outside the data set, since this process began."""
        names = {f"accepted.{name}": count for name, count in self.intake.accepted.items()}
        names |= {f"refused.{name}": count for name, count in self.intake.refused.items()}
        names["converter.restarts"] = self.supervisor.restarts
        return names

    def metrics(self) -> str:
        """Prometheus text."""
        lines: list[str] = []

        def add(name: str, kind: str, values: Mapping[str, float], label: str = "") -> None:
            full = f"agentlightning_collector_{name}"
            lines.append(f"# TYPE {full} {kind}")
            for key, value in sorted(values.items()):
                lines.append(f'{full}{{{label}="{key}"}} {value:g}' if label else f"{full} {value:g}")

        def add_one(name: str, kind: str, value: float) -> None:
            add(name, kind, {"": value})

        dataset = self.commits.dataset
        add("accepted_total", "counter", self.intake.accepted, "unit")
        add("refused_total", "counter", self.intake.refused, "reason")
        add("fidelity_total", "counter", dataset.counters(), "name")
        add_one("sealed_attempts", "gauge", len(dataset.attempts))
        add_one("open_attempts", "gauge", self.progress.get("open_attempts", 0))
        add_one("pending_seals", "gauge", len(self.commits.pending))
        add_one("journal_end_bytes", "counter", self.journal.end)
        add_one("journal_unconverted_bytes", "gauge", self.intake.unconverted)
        add_one(
            "journal_unread_bytes", "gauge", self.journal.end - self.progress.get("read", self.intake.low)
        )
        add_one("journal_commits_total", "counter", self.journal.commits)
        add_one("converter_restarts_total", "counter", self.supervisor.restarts)
        add_one("converter_up", "gauge", self.supervisor.pid is not None)
        return "\n".join(lines) + "\n"

    def _on_message(self, message: Mapping[str, Any]) -> None:
        match message.get("type"):
            case "commit":
                self._refresh()
            case "pending":
                self.commits.pending.update(pending_of(message))
            case "progress":
                self.progress = message

    def _refresh(self) -> None:
        self.commits.refresh()
        if self.commits.low > self.intake.low:
            self.intake.low = self.commits.low
            self.journal.remove_below(self.commits.low)

    async def _refresh_forever(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_SECONDS)
            self._refresh()

    def _converter_arguments(self) -> list[str]:
        arguments = self.arguments
        settings = ["--data", str(arguments.data), "--state", str(arguments.state)]
        settings += ["--log-level", arguments.log_level]
        if arguments.idle_timeout is not None:
            settings += ["--idle-timeout", str(arguments.idle_timeout)]
        return settings


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="agl collector",
        description=DESCRIPTION,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--data", type=Path, required=True, metavar="DIR", help="the data set; created if absent")
    add("--state", type=Path, required=True, metavar="DIR", help="journal and lock; created if absent")
    add("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    add("--grpc-port", type=_port, default=4317, metavar="PORT", help="default %(default)s; 0: a free one")
    add("--http-port", type=_port, default=4318, metavar="PORT", help="default %(default)s; 0: a free one")
    add(
        "--durability",
        choices=get_args(Durability),
        default="fsync",
        help="acknowledge when spans are on disk (fsync, the default), written but not synced (os: survives "
        "a killed process, not a power cut), or in memory (none: for experiments)",
    )
    add(
        "--token-file",
        metavar="FILE",
        help="callers must bring the bearer token in this file (mode 0600); needed unless on loopback",
    )
    add("--ready-file", type=Path, metavar="FILE", help="write process id and addresses here when serving")
    add("--max-body-mib", type=_positive, default=BODY_BYTES >> 20, metavar="N", help="default %(default)s")
    add(
        "--journal-limit-mib",
        type=_positive,
        default=JOURNAL_BYTES >> 20,
        metavar="N",
        help="with more than this unconverted, senders are asked to wait (default %(default)s)",
    )
    add(
        "--idle-timeout",
        type=_seconds,
        metavar="SECONDS",
        help="write an attempt as it is when nobody sealed it and nothing came for so long",
    )
    add("--log-level", default="info", choices=["debug", "info", "warning", "error"], help="default info")
    return parser


def _port(text: str) -> int:
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: give a number from 0 to 65535")
    return int(text)


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value
