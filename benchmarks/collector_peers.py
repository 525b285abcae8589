"""The collector beside other receivers of OpenTelemetry spans, in one run.

    make bench-collector                                  # all peers; some ten minutes
    python benchmarks/collector_peers.py --peers rotel    # only some
    python benchmarks/collector_peers.py --rounds 9 --rollouts 72 --json figures.json

Peers, each in an environment of its own that `benchmarks/peers.py` makes: rotel (a compiled collector), the store of
agentlightning 0.3, MLflow and Phoenix, all with their defaults. Every round sends the same spans to each, one after the
other; rotel gzips what it forwards, also where it is told not to. Counted is the CPU of the server with all its children, never the sender's. The collector answers when a request
is synced to disk; of the peers none does.
"""

import argparse
import base64
import contextlib
import functools
import gzip
import http.client
import json
import os
import platform
import shutil
import signal
import socket
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import peers
from agent_spans import Rollout, make_rollouts
from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from agentlightning.proto import transitions_pb2 as pb
from agentlightning.proto.process import read_ready
from agentlightning.proto.transitions_pb2_grpc import TransitionsStub

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
    with _running([sys.executable, __file__, "--serve-sink", str(port), str(count)], port):
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


def _until(what: Callable[[], int], wanted: int, name: str, limit_s: float = 300) -> None:
    deadline = time.monotonic() + limit_s
    while (seen := what()) < wanted:
        if time.monotonic() > deadline:
            raise SystemExit(f"{name} keeps {seen} of {wanted} spans after {limit_s:.0f} s")
        time.sleep(0.02)


def _rows(database: Path, table: str) -> int:
    if not database.exists():
        return 0
    with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=30)) as connection:
        try:
            return int(connection.execute(f"select count(*) from {table}").fetchone()[0])
        except sqlite3.OperationalError:
            return 0


def _old_identities(server: Server, count: int) -> list[tuple[str, str]]:
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


def _old_spans(server: Server, identities: Sequence[tuple[str, str]]) -> int:
    total = 0
    for rollout_id, _ in identities:
        url = f"http://{server.http}/v1/agl/spans?rollout_id={rollout_id}&limit=1"
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=30) as answer:
            total += int(json.load(answer)["total"])
    return total


# ---- measurements -------------------------------------------------------------------------------------


@dataclass
class Figure:
    """CPU seconds per 1000 spans and seconds to the acknowledgement, one entry per round."""

    cpu: list[float] = field(default_factory=list)
    acks: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.cpu)

    def p99_ms(self) -> float:
        return sorted(self.acks)[int(0.99 * (len(self.acks) - 1))] * 1e3


Figures = dict[str, Figure]


def measure_acks(options: argparse.Namespace, folder: Path, figures: Figures) -> None:
    """T1, T2, T4, T5: from the request to its acknowledgement. Ours: the receiving process, disk included."""
    with collector(folder / "ours") as ours, rotel(folder) as theirs:
        for turn in range(-1, options.rounds):  # the first one warms up
            batches = make_rollouts(f"ack{turn}", options.rollouts, 50, packed=False)
            singles = make_rollouts(f"one{turn}", max(4, options.rollouts // 4), 1, packed=False)
            batch, single = bodies_of(batches, 4), bodies_of(singles)
            text, zipped = as_json(batch), [gzip.compress(body, 6) for body in batch]
            shapes: list[tuple[str, int, str, Sequence[bytes], dict[str, str]]] = [
                ("HTTP protobuf, batches", _total(batches), "http", batch, PROTOBUF),
                ("gRPC, batches", _total(batches), "grpc", batch, {}),
                ("HTTP JSON, batches", _total(batches), "http", text, {"content-type": "application/json"}),
                (
                    "HTTP gzip, batches",
                    _total(batches),
                    "http",
                    zipped,
                    {**PROTOBUF, "content-encoding": "gzip"},
                ),
                ("HTTP protobuf, single spans", _total(singles), "http", single, PROTOBUF),
                ("gRPC, single spans", _total(singles), "grpc", single, {}),
            ]
            for case, spans, way, bodies, headers in shapes:
                for who, server in (("ours", ours), ("rotel", theirs)):
                    before = server.cpu(children=False)
                    acks = (
                        send_grpc(server, bodies, options.connections)
                        if way == "grpc"
                        else send_http(server, bodies, options.connections, headers)
                    )
                    if turn >= 0:
                        figure = figures.setdefault(f"{case} | {who}", Figure())
                        figure.cpu.append((server.cpu(children=False) - before) / spans * 1000)
                        figure.acks += acks
            seal(ours, [*batches, *singles])


def _total(rollouts: Sequence[Rollout]) -> int:
    return sum(rollout.spans for rollout in rollouts)


def measure_to_the_end(options: argparse.Namespace, folder: Path, figures: Figures, who: str) -> None:
    """T3: from the request to where the spans stay; ours to Parquet, rotel to another server, the others to their store."""
    place = folder / f"end-{who}"
    place.mkdir()
    with contextlib.ExitStack() as stack:
        if who in ("ours", "ours, packed ids"):
            server = stack.enter_context(collector(place))
        elif who == "rotel":
            url, counted = stack.enter_context(sink(place))
            server = stack.enter_context(rotel(place, url))
        elif who == "agentlightning 0.3":
            server = stack.enter_context(old_store(place))
        elif who == "MLflow":
            server = stack.enter_context(mlflow(place))
        else:
            server = stack.enter_context(phoenix(place))
        sent = 0
        slow = who in ("agentlightning 0.3", "MLflow", "Phoenix")
        count = max(4, options.rollouts // 4) if slow else options.rollouts
        for turn in range(-1, options.rounds):
            given = _old_identities(server, count) if who == "agentlightning 0.3" else None
            rollouts = make_rollouts(
                f"end{turn}", count, 50, packed=who.endswith("packed ids"), identities=given
            )
            sent += _total(rollouts)
            before = server.cpu()
            acks = send_http(server, bodies_of(rollouts, 4), options.connections)
            if who.startswith("ours"):
                seal(server, rollouts)
            elif who == "rotel":
                _until(lambda: int(counted.read_text() or 0) if counted.exists() else 0, sent, who)
            elif given:
                cpu = server.cpu()  # before asking, which costs it too
                if (kept := _old_spans(server, given)) < _total(rollouts):
                    raise SystemExit(f"agentlightning 0.3 keeps {kept} of {_total(rollouts)} spans")
            elif who == "MLflow":
                _until(functools.partial(_rows, place / "mlflow.db", "spans"), sent, who)
            else:
                _until(functools.partial(_rows, place / "phoenix" / "phoenix.db", "spans"), sent, who)
            if turn >= 0:
                used = (cpu if given else server.cpu()) - before
                figure = figures.setdefault(f"to the end | {who}", Figure())
                figure.cpu.append(used / _total(rollouts) * 1000)
                figure.acks += acks


def measure_kill(options: argparse.Namespace, folder: Path) -> dict[str, tuple[int, int]]:
    """What is left of acknowledged spans after `kill -9` right after the last acknowledgement: (kept, acknowledged)."""
    left = {}
    for who in ("ours", *options.peers):
        place = folder / f"kill-{who}"
        place.mkdir()
        rollouts = make_rollouts("kill", 16, 50, packed=False)
        with contextlib.ExitStack() as stack:
            if who == "ours":
                server = stack.enter_context(collector(place))
            elif who == "rotel":
                url, counted = stack.enter_context(sink(place))
                server = stack.enter_context(rotel(place, url))
            elif who == "agentlightning-0.3":
                server = stack.enter_context(old_store(place))
                rollouts = make_rollouts(
                    "kill", 16, 50, packed=False, identities=(given := _old_identities(server, 16))
                )
            elif who == "mlflow":
                server = stack.enter_context(mlflow(place))
            else:
                server = stack.enter_context(phoenix(place))
            send_http(server, bodies_of(rollouts), options.connections)
            server.kill()
            if who == "rotel":
                time.sleep(1)  # what is on its way to the sink may arrive
                kept = int(counted.read_text()) if counted.exists() else 0
        if who == "ours":
            with collector(place) as server:
                seal(server, rollouts)
            kept = _parquet_spans(place / "data")
        elif who == "agentlightning-0.3":
            with old_store(place) as server:
                kept = _old_spans(server, given)
        elif who == "mlflow":
            kept = _rows(place / "mlflow.db", "spans")
        elif who == "phoenix":
            kept = _rows(place / "phoenix" / "phoenix.db", "spans")
        left[who] = (kept, _total(rollouts))
    return left


def _parquet_spans(data: Path) -> int:
    from agentlightning.proto.dataset import open_dataset

    return int(open_dataset(data).table("spans").num_rows)


def measure_size(options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """T9: the token columns of the data set, and reading and writing them, beside gzipped JSON lines."""
    import pyarrow.parquet as pq

    from agentlightning.proto.dataset import open_dataset

    rollouts = make_rollouts("size", 4 * options.rollouts, 50, packed=True)
    with collector(folder / "size") as server:
        send_http(server, bodies_of(rollouts), options.connections)
        seal(server, rollouts)
    columns = ["prompt_token_ids", "response_token_ids", "response_logprobs"]
    dataset = open_dataset(folder / "size" / "data")
    tokens = sum(rollout.tokens for rollout in rollouts)
    size = 0
    for path in (folder / "size" / "data").rglob("*.parquet"):
        meta = pq.ParquetFile(path).metadata
        for group in range(meta.num_row_groups):
            for column in range(meta.num_columns):
                chunk = meta.row_group(group).column(column)
                if chunk.path_in_schema.split(".")[0] in columns:
                    size += chunk.total_compressed_size
    began = time.process_time()
    table = dataset.table("transitions", columns=columns)
    read = time.process_time() - began
    rows = table.to_pylist()
    began = time.process_time()
    with gzip.open(folder / "rows.jsonl.gz", "wt", compresslevel=6) as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")
    written_lines = time.process_time() - began
    began = time.process_time()
    with gzip.open(folder / "rows.jsonl.gz", "rt") as file:
        assert sum(1 for line in file if json.loads(line)) == len(rows)
    read_lines = time.process_time() - began
    return {
        "bytes per token": size / tokens,
        "JSONL.gz bytes per token": (folder / "rows.jsonl.gz").stat().st_size / tokens,
        "read": read_lines / read,
        "JSONL.gz write, s per million tokens": written_lines / tokens * 1e6,
    }


# ---- the table ----------------------------------------------------------------------------------------

TARGETS = {
    "HTTP protobuf, batches": "T1 ≤ 0.40",
    "gRPC, batches": "T2 ≤ 0.50",
    "HTTP JSON, batches": "T4 ≤ 0.20",
    "HTTP gzip, batches": "T4 ≤ 0.45",
    "HTTP protobuf, single spans": "T5 ≤ 1.0",
    "gRPC, single spans": "T5 ≤ 2.0",
}
ENDS = {
    "rotel": ("T3 ≤ 0.5", 0.5),
    "agentlightning 0.3": ("T3 ≤ 1/15", 1 / 15),
    "MLflow": ("T3 ≤ 1/18", 1 / 18),
    "Phoenix": ("T3 ≤ 1/50", 1 / 50),
}
PEER_NAMES = {
    "rotel": "rotel",
    "agentlightning-0.3": "agentlightning 0.3",
    "mlflow": "MLflow",
    "phoenix": "Phoenix",
}


def report(figures: Figures) -> None:
    print(
        f"\n{'CPU s per 1000 spans, medians':34}{'ours':>9}{'rotel':>9}{'ratio':>8}   {'target':12}{'p99 ack, ms':>16}"
    )
    for case, target in TARGETS.items():
        ours, theirs = figures.get(f"{case} | ours"), figures.get(f"{case} | rotel")
        if ours and theirs:
            print(
                f"{case:34}{ours.median:9.4f}{theirs.median:9.4f}{ours.median / theirs.median:7.2f}×   {target:12}"
                f"{f'{ours.p99_ms():.1f} / {theirs.p99_ms():.1f}':>16}"
            )
    ours = figures.get("to the end | ours")
    if not ours:
        return
    print(
        f"\n{'all the way, integer arrays':34}{'CPU':>9}{'ours to it':>12}   {'target':12}{'p99 ack, ms':>12}"
    )
    print(f"{'ours, to Parquet':34}{ours.median:9.4f}{'':15}{'':12}{ours.p99_ms():12.1f}")
    if packed := figures.get("to the end | ours, packed ids"):
        print(f"{'ours, to Parquet, packed ids':34}{packed.median:9.4f}{'':15}{'':12}{packed.p99_ms():12.1f}")
    for who, (target, _) in ENDS.items():
        if figure := figures.get(f"to the end | {who}"):
            ratio = ours.median / figure.median
            shown = f"{ratio:.2f}×" if ratio > 0.2 else f"1/{1 / ratio:.0f}"
            print(f"{who:34}{figure.median:9.4f}{shown:>12}   {target:12}{figure.p99_ms():12.1f}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--rollouts", type=int, default=72, help="of 14 spans, 6 of them model calls; per round"
    )
    parser.add_argument("--connections", type=int, default=4)
    parser.add_argument(
        "--peers", nargs="*", default=list(PEER_NAMES), choices=list(PEER_NAMES), metavar="PEER"
    )
    parser.add_argument("--dir", help="where to write (default: the system's temporary directory)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here too")
    parser.add_argument("--serve-sink", nargs=2, metavar=("PORT", "FILE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve_sink:
        serve_sink(int(options.serve_sink[0]), options.serve_sink[1])
        return 0
    options.peers = [name for name in options.peers if peers.environment(name)]
    figures: Figures = {}
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {options.rounds} rounds"
    )
    folder = Path(tempfile.mkdtemp(dir=options.dir))
    try:
        if "rotel" in options.peers:
            _progress("acknowledgements, ours and rotel")
            measure_acks(options, folder, figures)
        for who in ("ours", "ours, packed ids", *(PEER_NAMES[name] for name in options.peers)):
            _progress(f"all the way: {who}")
            measure_to_the_end(options, folder, figures, who)
        report(figures)
        _progress("kill -9 after the last acknowledgement")
        for who, (kept, sent) in measure_kill(options, folder).items():
            print(
                f"after kill -9: {PEER_NAMES.get(who, who):22}{kept:6} of {sent} acknowledged spans are left"
            )
        for what, value in (sizes := measure_size(options, folder)).items():
            print(f"{what:40}{value:8.2f}")
        if options.json:
            raw = {name: vars(figure) for name, figure in figures.items()}
            options.json.write_text(json.dumps({"figures": raw, "sizes": sizes}, indent=1) + "\n")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def _progress(what: str) -> None:
    print(f"… {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
