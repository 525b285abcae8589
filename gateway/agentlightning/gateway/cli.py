"""`agl gateway`: serve the model proxy and the rollout queue."""

import argparse
import asyncio
import contextlib
import gc
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import uvicorn

from agentlightning.gateway.app import create_app
from agentlightning.gateway.connections import Limits, guarded
from agentlightning.gateway.gateway import Gateway
from agentlightning.gateway.settings import Settings
from agentlightning.proto.errors import ConfigError
from agentlightning.proto.ids import check_id
from agentlightning.proto.process import (
    die_with_parent,
    lock_directory,
    require_token,
    run_main,
    setup_logging,
    stop_event,
    write_ready,
)

__all__ = ["main"]

STOP_SECONDS = 5
"""How long calls in flight may go on after SIGTERM."""

EXAMPLE = """example:
  agl gateway --state runs/gateway --collector http://127.0.0.1:4318 --engine http://127.0.0.1:8000
  Then point any agent at it: OPENAI_BASE_URL=http://127.0.0.1:8080/v1 OPENAI_API_KEY=none, model "default".
"""


def main(argv: list[str] | None = None) -> int:
    die_with_parent()
    return run_main(lambda: _run(_parser().parse_args(argv)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="agl gateway",
        description="Serve models to agents, recording every call exactly before its last byte is handed over; "
        "and keep the queue of rollouts.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--state", type=Path, required=True, metavar="DIR", help="folder of the database; made if absent")
    add(
        "--database",
        metavar="URL",
        help="postgresql://USER@HOST/NAME, which several gateways may share (its password: in ~/.pgpass or "
        "PGPASSWORD), or sqlite:///FILE (default: DIR/gateway.db)",
    )
    add(
        "--durability",
        choices=["process", "power"],
        default="process",
        help="what is committed to SQLite outlives the death of the process (default), or a power cut, too: every "
        "commit is then synced to disk",
    )
    add("--collector", required=True, metavar="URL", help="the collector's OTLP/HTTP address")
    add("--collector-token-file", type=Path, metavar="FILE", help="file with the collector's token")
    add(
        "--engine",
        action="append",
        default=[],
        metavar="[POLICY=]URL",
        help='an engine, and the policy it serves (default: "default"); may be given several times',
    )
    add("--engine-token-file", type=Path, metavar="FILE", help="file with the token of these engines")
    add(
        "--token-file",
        type=Path,
        metavar="FILE",
        help='JSON file, mode 0600, {"admin": …, "trainer": …, "controller": …}; without it all is open, on loopback only',
    )
    add(
        "--capture",
        choices=["required", "best_effort"],
        default="required",
        help="what to do with an answer that the collector does not take: fail the call (default), or let it through and count",
    )
    add("--tls-cert", type=Path, metavar="FILE", help="certificate chain (PEM): serve HTTPS only")
    add("--tls-key", type=Path, metavar="FILE", help="its key (PEM)")
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=int, default=8080, help="port, 0 for a free one (default: %(default)s)")
    add(
        "--max-body-mib",
        type=float,
        default=16,
        metavar="N",
        help="largest request body (default: %(default)s)",
    )
    add(
        "--max-header-kib",
        type=float,
        default=64,
        metavar="N",
        help="largest request line and headers together (default: %(default)s)",
    )
    add(
        "--client-timeout-s",
        type=float,
        default=60,
        metavar="S",
        help="how long a client may take to send its headers, to begin its body, and to read what it is sent "
        "(default: %(default)s)",
    )
    add(
        "--engine-timeout-s",
        type=float,
        default=600,
        metavar="S",
        help="how long an engine may be silent (default: %(default)s)",
    )
    add(
        "--engine-failures",
        type=int,
        default=5,
        metavar="N",
        help="failed calls in a row after which an engine gets none for a while (default: %(default)s)",
    )
    add(
        "--engine-wait-s",
        type=float,
        default=30,
        metavar="S",
        help="how long a call waits for an engine that is away, as during a restart (default: %(default)s)",
    )
    add(
        "--collector-timeout-s",
        type=float,
        default=10,
        metavar="S",
        help="how long a call may wait to be recorded (default: %(default)s)",
    )
    add(
        "--token-ttl-s",
        type=float,
        default=86400,
        metavar="S",
        help="life of a rollout's token (default: %(default)s)",
    )
    add(
        "--keep-days",
        type=float,
        default=30,
        metavar="D",
        help="forget ended rollouts of a run to which nothing was added for so long; 0: never (default: %(default)s)",
    )
    add(
        "--keep-rollouts",
        type=int,
        default=0,
        metavar="N",
        help="keep so many ended rollouts of runs that are idle, the newest runs'; 0: all (default)",
    )
    add("--ready-file", type=Path, metavar="PATH", help="written when serving: process id and addresses")
    add("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    return parser


def _run(options: argparse.Namespace) -> int:
    setup_logging("gateway", options.log_level)
    require_token(options.host, options.token_file, "The gateway")
    for name in (
        "max_body_mib",
        "max_header_kib",
        "client_timeout_s",
        "engine_timeout_s",
        "engine_failures",
        "engine_wait_s",
        "collector_timeout_s",
        "token_ttl_s",
    ):
        if not getattr(options, name) > 0:
            raise ConfigError(f"--{name.replace('_', '-')} must be above zero.")
    if options.keep_days < 0 or options.keep_rollouts < 0:
        raise ConfigError("--keep-days and --keep-rollouts must be zero or above.")
    for url in (options.collector, *(url for _, url in map(_engine, options.engine))):
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"The address {url!r} must begin with http:// or https://.")
    _check_certificate(options.tls_cert, options.tls_key)
    settings = Settings(
        state=options.state,
        database=options.database,
        collector=options.collector,
        collector_token_file=options.collector_token_file,
        token_file=options.token_file,
        capture=options.capture,
        engines=[_engine(text) for text in options.engine],
        engine_token_file=options.engine_token_file,
        max_body_bytes=int(options.max_body_mib * (1 << 20)),
        max_header_bytes=int(options.max_header_kib * (1 << 10)),
        client_timeout_s=options.client_timeout_s,
        tls_cert=options.tls_cert,
        tls_key=options.tls_key,
        durability=options.durability,
        engine_timeout_s=options.engine_timeout_s,
        engine_failures=options.engine_failures,
        engine_wait_s=options.engine_wait_s,
        collector_timeout_s=options.collector_timeout_s,
        token_ttl_s=options.token_ttl_s,
        keep_days=options.keep_days,
        keep_rollouts=options.keep_rollouts,
    )
    with (
        _listen(options.host, options.port) as listener,
        lock_directory(options.state, "The gateway's state"),
        asyncio.Runner(loop_factory=_loop_factory()) as runner,
    ):
        return runner.run(_serve(settings, listener, options.ready_file))


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # Windows has none
        return None
    return uvloop.Loop


def _engine(text: str) -> tuple[str, str]:
    policy, separator, url = text.partition("=")
    if not separator or policy.startswith(("http://", "https://")):
        return "default", text
    try:
        return check_id(policy, "The policy"), url
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _check_certificate(cert: Path | None, key: Path | None) -> None:
    if (cert is None) != (key is None):
        raise ConfigError("--tls-cert and --tls-key are needed together.")
    if cert is not None:
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(cert, key, password="")
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"The certificate {cert} with the key {key} cannot be used: {error.strerror or error}."
            ) from None


@contextlib.contextmanager
def _listen(host: str, port: int) -> Iterator[socket.socket]:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"The gateway cannot listen on {host}:{port}: {error}. Choose another --port."
        ) from None
    with listener:
        yield listener


async def _serve(settings: Settings, listener: socket.socket, ready_file: Path | None) -> int:
    stop = stop_event()
    async with Gateway.open(settings) as gateway:
        server = _Server(
            uvicorn.Config(
                create_app(gateway),
                http=guarded(
                    Limits(settings.max_header_bytes, settings.client_timeout_s, gateway.counters.add)
                ),
                ssl_certfile=settings.tls_cert,
                ssl_keyfile=None if settings.tls_key is None else str(settings.tls_key),
                lifespan="off",
                access_log=False,  # it would hold rollout tokens given as a path
                log_config=None,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=STOP_SECONDS,
            )
        )
        host, port = listener.getsockname()[:2]
        scheme = "http" if settings.tls_cert is None else "https"
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

        async def stop_server() -> None:
            waiting = [asyncio.ensure_future(stop.wait()), asyncio.ensure_future(gateway.stopping.wait())]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in waiting:
                task.cancel()
            server.should_exit = True
            gateway.stop()

        # Answers are trees of thousands of small objects: looking through them for cycles would cost more than parsing.
        gc.freeze()
        gc.set_threshold(100_000, 20, 20)
        server.when_started = lambda: write_ready(ready_file, {"http": f"{scheme}://{address}"})
        stopper = asyncio.ensure_future(stop_server())
        await server.serve(sockets=[listener])
        stopper.cancel()
        return 0 if gateway.broken is None else 1


class _Server(uvicorn.Server):
    """uvicorn, but signals are ours, and it says when it serves."""

    when_started = staticmethod(lambda: None)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.when_started()


if __name__ == "__main__":
    raise SystemExit(main())
