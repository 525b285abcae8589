"""What the collector costs: CPU seconds per 1000 agent spans, against a bare peer in the same run.

    python benchmarks/collector.py                 # two minutes; prints a table
    python benchmarks/collector.py --rounds 9 --json collector.json

The peer is the least that anybody would write: a Starlette app under uvicorn that parses each body with
opentelemetry-proto and appends it to a file, without fsync. It keeps no promise; the collector syncs
before it answers, and writes Parquet. Absolute figures belong to the machine, the ratios less so.
Only the servers' CPU is counted, never the sender's.
"""

import argparse
import contextlib
import functools
import http.client
import json
import os
import platform
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from agent_spans import WORDS
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue

from agentlightning.proto import attributes as names
from agentlightning.proto import ids
from agentlightning.proto import transitions_pb2 as pb
from agentlightning.proto.packed import pack_floats, pack_ids
from agentlightning.proto.process import read_ready
from agentlightning.proto.transitions_pb2_grpc import TransitionsStub

CALLS = 20
"""Model calls per rollout; the prompt grows with each."""
EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"


# ---- what is sent -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Load:
    """Export requests, and the attempts that they are about."""

    bodies: list[bytes]
    rollouts: list[str]
    spans: int

    @property
    def bytes(self) -> int:
        return sum(len(body) for body in self.bodies)


def make_load(name: str, spans: int, per_request: int, *, packed: bool) -> Load:
    """LLM spans of rollouts as the gateway sends them, about 10 kB each."""
    draw = random.Random(name)
    rollouts = [f"{name}-{n}" for n in range(max(1, spans // CALLS))]
    bodies = []
    pending: list[tuple[str, int]] = [(rollout, call) for rollout in rollouts for call in range(CALLS)]
    for first in range(0, len(pending), per_request):
        request = ExportTraceServiceRequest()
        resource = request.resource_spans.add()
        resource.resource.attributes.append(text(names.RUN_ID, name))
        scope = resource.scope_spans.add()
        scope.scope.name = "agentlightning.gateway"
        for rollout, call in pending[first : first + per_request]:
            add_call(scope.spans.add(), rollout, call, draw, packed=packed)
        bodies.append(request.SerializeToString())
    return Load(bodies, rollouts, len(pending))


def add_call(span: Any, rollout: str, call: int, draw: random.Random, *, packed: bool) -> None:
    prompt = [draw.randrange(150_000) for _ in range(300 + 60 * call)]
    answer = [draw.randrange(150_000) for _ in range(60)]
    content = " ".join(draw.choice(WORDS) for _ in range(400 + 40 * call))
    start = 1_700_000_000_000_000_000 + call * 1_000_000_000
    span.trace_id = bytes.fromhex(ids.derived_trace_id(rollout, 0))
    span.span_id = bytes.fromhex(ids.derived_span_id("bench", rollout, str(call)))
    span.parent_span_id = bytes.fromhex(ids.rollout_span_id(rollout, 0))
    span.name, span.kind = "chat policy", 3
    span.start_time_unix_nano, span.end_time_unix_nano = start, start + 400_000_000
    request = {"model": "policy", "messages": [{"role": "user", "content": content}], "temperature": 1.0}
    response = {"choices": [{"message": {"role": "assistant", "content": content[:300]}}]}
    span.attributes.extend(
        [
            text(names.ROLLOUT_ID, rollout),
            number(names.ATTEMPT, 0),
            text(names.CALL_ID, ids.call_id(rollout, 0, str(call))),
            text(names.SOURCE, "gateway"),
            text(names.POLICY, "policy"),
            number(names.MODEL_VERSION, 3),
            text(names.OPERATION_NAME, "chat"),
            text(names.REQUEST_MODEL, "policy"),
            text(names.RESPONSE_ID, f"chatcmpl-{call}"),
            number(names.USAGE_INPUT, len(prompt)),
            number(names.USAGE_OUTPUT, len(answer)),
            text(names.REQUEST, json.dumps(request)),
            text(names.RESPONSE, json.dumps(response)),
        ]
    )
    if packed:
        span.attributes.append(raw(names.PROMPT_TOKEN_IDS, pack_ids(prompt)))
        span.attributes.append(raw(names.RESPONSE_TOKEN_IDS, pack_ids(answer)))
    else:
        span.attributes.append(array(names.PROMPT_TOKEN_IDS, prompt))
        span.attributes.append(array(names.RESPONSE_TOKEN_IDS, answer))
    span.attributes.append(raw(names.RESPONSE_LOGPROBS, pack_floats([-draw.random() for _ in answer])))


def text(key: str, value: str) -> KeyValue:
    return KeyValue(key=key, value=AnyValue(string_value=value))


def number(key: str, value: int) -> KeyValue:
    return KeyValue(key=key, value=AnyValue(int_value=value))


def raw(key: str, value: bytes) -> KeyValue:
    return KeyValue(key=key, value=AnyValue(bytes_value=value))


def array(key: str, values: Sequence[int]) -> KeyValue:
    items = ArrayValue(values=[AnyValue(int_value=value) for value in values])
    return KeyValue(key=key, value=AnyValue(array_value=items))


# ---- who receives -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Server:
    pid: int
    http: str
    grpc: str = ""

    def cpu(self) -> float:
        return cpu_seconds(self.pid)

    def cpu_of_all(self) -> float:
        """With its child, the converter."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return self.cpu() + sum(cpu_seconds(int(child)) for child in children)


def cpu_seconds(pid: int) -> float:
    """User and system time of a process with all its threads; Linux's clock for another process."""
    return time.clock_gettime((~pid << 3) | 2)


@contextlib.contextmanager
def collector(folder: Path, *options: str) -> Iterator[Server]:
    ready = folder / "ready.json"
    code = "import sys; from agentlightning.collector.cli import main; sys.exit(main())"
    places = ["--data", str(folder / "data"), "--state", str(folder / "state"), "--ready-file", str(ready)]
    ports = ["--http-port", "0", "--grpc-port", "0", "--log-level", "warning"]
    process = subprocess.Popen([sys.executable, "-c", code, *places, *ports, *options])
    try:
        while (addresses := read_ready(ready)) is None:
            if process.poll() is not None:
                raise SystemExit("The collector did not start.")
            time.sleep(0.05)
        yield Server(process.pid, addresses["http"].removeprefix("http://"), addresses["grpc"])
    finally:
        process.terminate()
        process.wait(30)


@contextlib.contextmanager
def peer(folder: Path) -> Iterator[Server]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, __file__, "--serve-peer", str(port), str(folder / "peer.bin")]
    )
    try:
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.05)
        yield Server(process.pid, f"127.0.0.1:{port}")
    finally:
        process.terminate()
        process.wait(30)


def serve_peer(port: int, path: str) -> None:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    file = open(path, "ab", buffering=0)  # noqa: SIM115

    async def export(request: Request) -> Response:
        body = await request.body()
        message = ExportTraceServiceRequest.FromString(body)
        assert message.resource_spans
        file.write(body)
        return Response(b"", media_type="application/x-protobuf")

    app = Starlette(routes=[Route("/v1/traces", export, methods=["POST"])])
    uvicorn.run(app, port=port, log_level="warning", http="httptools", loop="uvloop")


# ---- how it is sent, and measured ----------------------------------------------------------------------


def send_http(server: Server, load: Load, connections: int) -> None:
    def work(bodies: Sequence[bytes]) -> None:
        connection = http.client.HTTPConnection(server.http, timeout=60)
        for body in bodies:
            connection.request("POST", "/v1/traces", body, {"content-type": "application/x-protobuf"})
            answer = connection.getresponse()
            if answer.read() or answer.status != 200:
                raise SystemExit(f"Refused: {answer.status}.")
        connection.close()

    in_parallel(work, load.bodies, connections)


def send_grpc(server: Server, load: Load, connections: int) -> None:
    def work(bodies: Sequence[bytes]) -> None:
        with grpc.insecure_channel(server.grpc) as channel:
            export: Any = channel.unary_unary(EXPORT)  # bytes in, bytes out
            for body in bodies:
                export(body, timeout=60)

    in_parallel(work, load.bodies, connections)


def in_parallel(work: Callable[[Sequence[bytes]], None], bodies: list[bytes], connections: int) -> None:
    threads = [
        threading.Thread(target=work, args=(bodies[first::connections],)) for first in range(connections)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def seal(server: Server, load: Load) -> float:
    """Seal everything; returns the seconds that it took."""
    attempts = [pb.Attempt(rollout_id=rollout, attempt=0) for rollout in load.rollouts]
    began = time.monotonic()
    with grpc.insecure_channel(server.grpc) as channel:
        answer = TransitionsStub(channel).Seal(pb.SealRequest(attempts=attempts, timeout_s=120), timeout=150)
    if answer.incomplete or sum(attempt.calls_stored for attempt in answer.sealed) != load.spans:
        raise SystemExit("Spans were lost.")
    return time.monotonic() - began


@dataclass
class Row:
    """One line of the table: CPU seconds per 1000 spans, one per round."""

    what: str
    cpu: list[float]
    wall: list[float]


def measure(options: argparse.Namespace) -> list[Row]:
    rows: dict[str, Row] = {}

    def note(what: str, spans: int, cpu: float, wall: float) -> None:
        row = rows.setdefault(what, Row(what, [], []))
        row.cpu.append(1000 * cpu / spans)
        row.wall.append(spans / wall)

    shapes = (("batches of 50", 50, options.spans), ("single spans", 1, max(CALLS, options.spans // 4)))
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        here = Path(folder)
        with collector(here) as ours, peer(here) as theirs:
            for turn in range(-1, options.rounds):  # the first one warms up
                for shape, per_request, spans in shapes:
                    made = {
                        way: make_load(
                            f"{way}{turn}-{per_request}", spans, per_request, packed=options.ids == "packed"
                        )
                        for way in ("http", "grpc")
                    }
                    senders: dict[str, Callable[[], None]] = {
                        f"peer, HTTP, no fsync, no Parquet; {shape}": functools.partial(
                            send_http, theirs, made["http"], options.connections
                        ),
                        f"HTTP, fsynced ack; {shape}": functools.partial(
                            send_http, ours, made["http"], options.connections
                        ),
                        f"gRPC, fsynced ack; {shape}": functools.partial(
                            send_grpc, ours, made["grpc"], options.connections
                        ),
                    }
                    for what, sender in senders.items():
                        server = theirs if what.startswith("peer") else ours
                        way = "grpc" if what.startswith("gRPC") else "http"
                        load = made[way]
                        cpu, all_cpu = server.cpu(), server.cpu_of_all()
                        began = time.monotonic()
                        sender()
                        wall = time.monotonic() - began
                        if turn >= 0:
                            note(what, load.spans, server.cpu() - cpu, wall)
                        if server is ours:
                            seal(ours, load)
                            if turn >= 0:
                                note(
                                    f"{way.upper().replace('GRPC', 'gRPC')}, to Parquet; {shape}",
                                    load.spans,
                                    server.cpu_of_all() - all_cpu,
                                    time.monotonic() - began,
                                )
        size = sum(path.stat().st_size for path in (here / "data").rglob("*.parquet"))
        print(f"data set: {size / 1e6:.1f} MB", file=sys.stderr)
    return list(rows.values())


def report(rows: list[Row], options: argparse.Namespace) -> None:
    example = make_load("size", CALLS, 1, packed=options.ids == "packed")
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}; {options.rounds} rounds, medians; spans of "
        f"{example.bytes / example.spans / 1000:.1f} kB with {options.ids} token ids, "
        f"{options.connections} connections"
    )
    print(f"\n{'':52}{'CPU s per':>12}{'':>9}{'spread':>16}{'spans/s':>10}")
    print(f"{'':52}{'1000 spans':>12}{'to peer':>9}{'min–max':>16}{'wall':>10}")
    for row in sorted(rows, key=lambda row: (row.what.split("; ")[1], not row.what.startswith("peer"))):
        shape = row.what.split("; ")[1]
        base = next(r for r in rows if r.what.startswith("peer") and r.what.endswith(shape))
        cpu = statistics.median(row.cpu)
        print(
            f"{row.what:52}{cpu:12.4f}{cpu / statistics.median(base.cpu):8.2f}×"
            f"{f'{min(row.cpu):.4f}–{max(row.cpu):.4f}':>16}{statistics.median(row.wall):10.0f}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--spans", type=int, default=2000, help="per round, in batches; a quarter singly")
    parser.add_argument("--connections", type=int, default=4)
    parser.add_argument("--ids", choices=("packed", "array"), default="packed")
    parser.add_argument("--dir", help="where to write (default: the system's temporary directory)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here too")
    parser.add_argument("--serve-peer", nargs=2, metavar=("PORT", "FILE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve_peer:
        serve_peer(int(options.serve_peer[0]), options.serve_peer[1])
        return 0
    rows = measure(options)
    report(rows, options)
    if options.json:
        options.json.write_text(json.dumps([vars(row) for row in rows], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
