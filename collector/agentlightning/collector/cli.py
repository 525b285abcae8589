"""`agl collector`: start one, or ask a running one how it is."""

import argparse
import asyncio
import math
import sys
from pathlib import Path
from typing import Any, get_args

from agentlightning.collector import status_cli
from agentlightning.collector.access import TOKENS_VARIABLE, Tls, read_tokens
from agentlightning.collector.collector import Collector, Settings
from agentlightning.collector.forward import check_target
from agentlightning.collector.intake import BODY_BYTES, JOURNAL_BYTES
from agentlightning.collector.journal import Durability
from agentlightning.collector.logs import FORMATS, setup_logs
from agentlightning.collector.upkeep_settings import UpkeepSettings
from agentlightning.proto.errors import ConfigError
from agentlightning.proto.process import die_with_parent, is_loopback, lock_directory, run_main
from agentlightning.proto.stores import location

__all__ = ["main"]

DESCRIPTION = """\
Receive OpenTelemetry spans of agents, keep each on disk before it is acknowledged, and turn them into
training data: a data set of Parquet files that pyarrow, DuckDB and Polars open.

Agents send OTLP over HTTP (POST /v1/traces, /v1/logs) or gRPC. Trainers seal and fetch attempts through
the transition service on the gRPC port. GET /healthz, /readyz, /metrics and /status say how it is doing;
`agl collector status` shows the last.
"""
EXAMPLE = """\
example:
  agl collector --data runs/demo/data --state runs/demo/state/collector
  OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:4318 python my_agent.py
  agl collector status
  agl inspect runs/demo/data
  agl collector compact runs/demo/data
"""


def main(argv: list[str] | None = None) -> int:
    """The command. Returns its exit code."""
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["status"]:
        return status_cli.main(words[1:])
    if words[:1] == ["compact"]:
        from agentlightning.collector import compact_cli  # loads Arrow

        return compact_cli.main(words[1:])
    return run_main(lambda: _main(words))


def _main(argv: list[str]) -> int:
    arguments = _parser().parse_args(argv)
    die_with_parent()
    setup_logs("collector", arguments.log_level, arguments.log_format)
    tokens = read_tokens(arguments.token_file)
    if tokens is None and not is_loopback(arguments.host):
        raise ConfigError(
            f"The collector would listen on {arguments.host} without a token: give --token-file, or set "
            f"{TOKENS_VARIABLE}, or listen on 127.0.0.1."
        )
    tls = _tls(arguments)
    if arguments.forward is not None:
        check_target(arguments.forward, arguments.forward_header_file)
    elif arguments.forward_header_file is not None:
        raise ConfigError("--forward-header-file is of no use without --forward.")
    try:
        if isinstance(arguments.data, Path):
            arguments.data.mkdir(parents=True, exist_ok=True)
        with lock_directory(arguments.state, "The collector's state"):
            _run(Collector(_settings(arguments), tokens, tls).run())
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


def _tls(arguments: argparse.Namespace) -> Tls | None:
    if arguments.tls_cert is None and arguments.tls_key is None:
        if arguments.tls_client_ca is not None:
            raise ConfigError("--tls-client-ca needs --tls-cert and --tls-key.")
        return None
    if arguments.tls_cert is None or arguments.tls_key is None:
        raise ConfigError("TLS needs both --tls-cert and --tls-key.")
    tls = Tls(arguments.tls_cert, arguments.tls_key, arguments.tls_client_ca)
    tls.context()  # says what is wrong before anything starts
    return tls


def _settings(arguments: argparse.Namespace) -> Settings:
    return Settings(
        data=arguments.data,
        state=arguments.state,
        host=arguments.host,
        grpc_port=arguments.grpc_port,
        http_port=arguments.http_port,
        durability=arguments.durability,
        body_bytes=arguments.max_body_mib << 20,
        journal_bytes=arguments.journal_limit_mib << 20,
        idle_timeout=arguments.idle_timeout,
        upkeep=UpkeepSettings.from_arguments(arguments),
        ready_file=arguments.ready_file,
        log_level=arguments.log_level,
        log_format=arguments.log_format,
        forward=arguments.forward,
        forward_headers=arguments.forward_header_file,
        forward_bytes=arguments.forward_limit_mib << 20,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="agl collector",
        description=DESCRIPTION,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--data",
        type=location,
        required=True,
        metavar="PLACE",
        help="the data set: a folder, created if absent, or an object store (s3://bucket/prefix, gs://, az://)",
    )
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
        help="callers must bring a bearer token of this file (mode 0600, one a line, any of them opens); else "
        f"those of the variable {TOKENS_VARIABLE}; one is needed unless on loopback",
    )
    add("--tls-cert", type=Path, metavar="FILE", help="serve HTTP and gRPC over TLS: certificate chain, PEM")
    add("--tls-key", type=Path, metavar="FILE", help="its key, PEM, mode 0600")
    add(
        "--tls-client-ca",
        type=Path,
        metavar="FILE",
        help="callers must show a certificate that this authority has signed (mutual TLS)",
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
    UpkeepSettings.add_arguments(parser)
    add(
        "--forward",
        metavar="URL",
        help="send everything on to another OTLP backend too: http(s)://HOST:PORT, or grpc(s)://HOST:PORT",
    )
    add(
        "--forward-header-file",
        type=Path,
        metavar="FILE",
        help="headers for that backend, as `name: value` lines (mode 0600), e.g. its API key",
    )
    add(
        "--forward-limit-mib",
        type=_positive,
        default=8192,
        metavar="N",
        help="what the journal keeps for a backend that is down; older is skipped, counted (default %(default)s)",
    )
    add("--log-format", default="text", choices=FORMATS, help="default text")
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
