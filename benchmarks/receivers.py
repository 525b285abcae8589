"""Receivers of spans as servers under test, and what sends to them. Used by `collector_peers.py`."""

import base64
import contextlib
import gzip
import http.client
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import peers
from agent_spans import Rollout
from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from agentlightning.proto import transitions_pb2 as pb
from agentlightning.proto.process import read_ready
from agentlightning.proto.transitions_pb2_grpc import TransitionsStub

__all__ = [
    "PROTOBUF",
    "Server",
    "as_json",
    "bodies_of",
    "collector",
    "mlflow",
    "old_identities",
    "old_spans",
    "old_store",
    "phoenix",
    "rotel",
    "rows",
    "seal",
    "send_grpc",
    "send_http",
    "sink",
    "until",
]

EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
PROTOBUF = {"content-type": "application/x-protobuf"}
TICK = os.sysconf("SC_CLK_TCK")


# ---- servers ------------------------------------------------------------------------------------------


@dataclass
class Server:
    """A receiver under test, with all its child processes."""

    process: subprocess.Popen[bytes]
    http: str
    grpc: str = ""
    headers: dict[str, str] = field(default_factory=dict)

    def cpu(self, *, children: bool = True) -> float:
        """User and system seconds so far, of threads and living children too."""
        pids = _tree(self.process.pid) if children else [self.process.pid]
        return sum(_cpu(pid) for pid in pids)

    def kill(self) -> None:
        for pid in reversed(_tree(self.process.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def _tree(pid: int) -> list[int]:
    found = [pid]
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += _tree(int(child))
    return found


def _cpu(pid: int) -> float:
    """From the scheduler's nanoseconds where it tells them: ticks of 10 ms are too coarse for one round."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        own = time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return 0.0
    return own + (int(fields[13]) + int(fields[14])) / TICK  # and of children that have ended


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def _running(
    command: list[str], port: int, environment: dict[str, str] | None = None, log: Path | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    with contextlib.ExitStack() as stack:
        out: Any = stack.enter_context(log.open("ab")) if log else subprocess.DEVNULL
        process = subprocess.Popen(
            command, env={**os.environ, **(environment or {})}, stdout=out, stderr=subprocess.STDOUT
        )
        try:
            deadline = time.monotonic() + 180
            while True:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                    break
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"{command[0]} did not start; see {log}")
                time.sleep(0.1)
            yield process
        finally:
            process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextlib.contextmanager
def collector(folder: Path) -> Iterator[Server]:
    folder.mkdir(parents=True, exist_ok=True)
    ready = folder / "ready.json"
    ready.unlink(missing_ok=True)
    command = [
        sys.executable,
        "-c",
        "import sys; from agentlightning.collector.cli import main; sys.exit(main())",
    ]
    command += ["--data", str(folder / "data"), "--state", str(folder / "state"), "--ready-file", str(ready)]
    command += ["--http-port", "0", "--grpc-port", "0", "--log-level", "warning"]
    process = subprocess.Popen(command)
    try:
        while (addresses := read_ready(ready)) is None:
            if process.poll() is not None:
                raise SystemExit("The collector did not start.")
            time.sleep(0.05)
        yield Server(process, addresses["http"].removeprefix("http://"), addresses["grpc"])
    finally:
        process.terminate()
        process.wait(60)


@contextlib.contextmanager
def rotel(folder: Path, forward_to: str | None = None) -> Iterator[Server]:
    home = peers.environment("rotel")
    assert home is not None
    agent = next(home.glob("lib/python*/site-packages/rotel/rotel-agent"))
    ports = _free_port(), _free_port()
    command = [str(agent), "start", "--otlp-http-endpoint", f"127.0.0.1:{ports[0]}"]
    command += ["--otlp-grpc-endpoint", f"127.0.0.1:{ports[1]}", "--otlp-grpc-max-recv-msg-size-mib", "64"]
    if forward_to:
        command += [
            "--exporter",
            "otlp",
            "--otlp-exporter-endpoint",
            forward_to,
            "--otlp-exporter-protocol",
            "http",
        ]
    else:
        command += ["--exporter", "blackhole"]
    with _running(command, ports[0], log=folder / "rotel.log") as process:
        yield Server(process, f"127.0.0.1:{ports[0]}", f"127.0.0.1:{ports[1]}")


@contextlib.contextmanager
def old_store(folder: Path) -> Iterator[Server]:
    home, port = peers.environment("agentlightning-0.3"), _free_port()
    assert home is not None
    command = [str(home / "bin" / "python"), "-m", "agentlightning.cli.store"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--log-level", "ERROR"]
    with _running(command, port, log=folder / "agentlightning-0.3.log") as process:
        yield Server(process, f"127.0.0.1:{port}")


@contextlib.contextmanager
def mlflow(folder: Path) -> Iterator[Server]:
    home, port = peers.environment("mlflow"), _free_port()
    assert home is not None
    command = [
        str(home / "bin" / "python"),
        "-m",
        "mlflow",
        "server",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    command += ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--workers", "1"]
    command += ["--default-artifact-root", str(folder / "artifacts")]
    environment = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with _running(command, port, environment, folder / "mlflow.log") as process:
        yield Server(process, f"127.0.0.1:{port}", headers={"x-mlflow-experiment-id": "0"})


@contextlib.contextmanager
def phoenix(folder: Path) -> Iterator[Server]:
    home, port = peers.environment("phoenix"), _free_port()
    assert home is not None
    environment = {
        "PHOENIX_WORKING_DIR": str(folder / "phoenix"),
        "PHOENIX_PORT": str(port),
        "PHOENIX_GRPC_PORT": str(_free_port()),
        "PHOENIX_HOST": "127.0.0.1",
        "PHOENIX_TELEMETRY_ENABLED": "false",
        "PHOENIX_ALLOW_EXTERNAL_RESOURCES": "false",
    }
    (folder / "phoenix").mkdir(parents=True, exist_ok=True)
    command = [str(home / "bin" / "python"), "-m", "phoenix.server.main", "serve"]
    with _running(command, port, environment, folder / "phoenix.log") as process:
        yield Server(process, f"127.0.0.1:{port}")


@contextlib.contextmanager
def sink(folder: Path) -> Iterator[tuple[str, Path]]:
    """Where rotel forwards to: counts spans into a file."""
    port, count = _free_port(), folder / "sink.txt"
    with _running([sys.executable, __file__, str(port), str(count)], port):
        yield f"http://127.0.0.1:{port}", count


def serve_sink(port: int, path: str) -> None:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    total = 0

    async def export(request: Request) -> Response:
        nonlocal total
        body = await request.body()
        total += _count(gzip.decompress(body) if request.headers.get("content-encoding") == "gzip" else body)
        Path(path).write_text(str(total))
        return Response(b"", media_type="application/x-protobuf")

    app = Starlette(routes=[Route("/v1/traces", export, methods=["POST"])])
    uvicorn.run(app, port=port, log_level="warning", http="httptools", loop="uvloop")


def _count(body: bytes) -> int:
    message = ExportTraceServiceRequest.FromString(body)
    return sum(len(scope.spans) for resource in message.resource_spans for scope in resource.scope_spans)


# ---- senders ------------------------------------------------------------------------------------------


def send_http(
    server: Server, bodies: Sequence[bytes], connections: int, headers: dict[str, str] = PROTOBUF
) -> list[float]:
    """Sends all; returns the seconds that each took to be acknowledged."""

    def work(mine: Sequence[bytes], took: list[float]) -> None:
        connection = http.client.HTTPConnection(server.http, timeout=120)
        for body in mine:
            began = time.perf_counter()
            connection.request("POST", "/v1/traces", body, {**headers, **server.headers})
            answer = connection.getresponse()
            text = answer.read()
            took.append(time.perf_counter() - began)
            if answer.status >= 300:
                raise SystemExit(
                    f"{server.process.args[0]} refused {headers}: {answer.status} {text[:200]!r}"
                )
        connection.close()

    return _in_parallel(work, bodies, connections)


def send_grpc(server: Server, bodies: Sequence[bytes], connections: int) -> list[float]:
    def work(mine: Sequence[bytes], took: list[float]) -> None:
        with grpc.insecure_channel(server.grpc) as channel:
            export: Any = channel.unary_unary(EXPORT)  # bytes in, bytes out
            for body in mine:
                began = time.perf_counter()
                export(body, timeout=120)
                took.append(time.perf_counter() - began)

    return _in_parallel(work, bodies, connections)


def _in_parallel(
    work: Callable[[Sequence[bytes], list[float]], None], bodies: Sequence[bytes], connections: int
) -> list[float]:
    took: list[float] = []
    errors: list[BaseException] = []

    def run(first: int) -> None:
        try:
            work(bodies[first::connections], took)
        except (OSError, http.client.HTTPException, grpc.RpcError, SystemExit) as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(first,)) for first in range(connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return took


def bodies_of(rollouts: Sequence[Rollout], together: int = 1) -> list[bytes]:
    """The requests; `together` of them joined into one, which is what joining their bytes means in protobuf."""
    requests = [request for rollout in rollouts for request in rollout.requests]
    return [b"".join(requests[first : first + together]) for first in range(0, len(requests), together)]


def as_json(bodies: Sequence[bytes]) -> list[bytes]:
    made = []
    for body in bodies:
        parsed = ExportTraceServiceRequest.FromString(body)
        message = json_format.MessageToDict(parsed, use_integers_for_enums=True)
        for resource in message["resourceSpans"]:
            for scope in resource["scopeSpans"]:
                for span in scope["spans"]:  # OTLP wants hex, protobuf's own JSON is base64
                    for key in ("traceId", "spanId", "parentSpanId"):
                        if key in span:
                            span[key] = base64.b64decode(span[key]).hex()
        made.append(json.dumps(message, separators=(",", ":")).encode())
    return made


def seal(server: Server, rollouts: Sequence[Rollout]) -> None:
    attempts = [pb.Attempt(rollout_id=rollout.rollout_id, attempt=0) for rollout in rollouts]
    with grpc.insecure_channel(server.grpc) as channel:
        answer = TransitionsStub(channel).Seal(pb.SealRequest(attempts=attempts, timeout_s=300), timeout=330)
    if answer.incomplete:
        raise SystemExit(f"Spans were lost: {len(answer.incomplete)} attempts are incomplete.")


def until(what: Callable[[], int], wanted: int, name: str, limit_s: float = 300) -> None:
    deadline = time.monotonic() + limit_s
    while (seen := what()) < wanted:
        if time.monotonic() > deadline:
            raise SystemExit(f"{name} keeps {seen} of {wanted} spans after {limit_s:.0f} s")
        time.sleep(0.02)


def rows(database: Path, table: str) -> int:
    if not database.exists():
        return 0
    with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=30)) as connection:
        try:
            return int(connection.execute(f"select count(*) from {table}").fetchone()[0])
        except sqlite3.OperationalError:
            return 0


def old_identities(server: Server, count: int) -> list[tuple[str, str]]:
    """agentlightning 0.3 keeps spans only of rollouts that it started itself."""
    made = []
    for _ in range(count):
        request = urllib.request.Request(
            f"http://{server.http}/v1/agl/rollouts",
            json.dumps({"input": "a question"}).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            rollout = json.load(answer)
        made.append((rollout["rollout_id"], rollout["attempt"]["attempt_id"]))
    return made


def old_spans(server: Server, identities: Sequence[tuple[str, str]]) -> int:
    total = 0
    for rollout_id, _ in identities:
        url = f"http://{server.http}/v1/agl/spans?rollout_id={rollout_id}&limit=1"
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=30) as answer:
            total += int(json.load(answer)["total"])
    return total


if __name__ == "__main__":
    serve_sink(int(sys.argv[1]), sys.argv[2])
