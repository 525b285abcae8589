"""The official exporters against the collector: Python over gRPC and HTTP, JavaScript over JSON.

`docs/conformance.md` lists the cases. The JavaScript packages are installed by npm, once, into a cache.
"""

import hashlib
import json
import os
import shutil
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from otlp_clients import export, spans

from agentlightning.collector.open_attempts import decode

HERE = Path(__file__).parent / "javascript"


def stored(collector: Any) -> list[Any]:
    counters: Counter[str] = Counter()
    return [span for record in collector.journal() for span in decode(record, counters)]


def python_exporter(collector: Any, transport: str, *, gzip: bool = False, timeout: float = 30) -> Any:
    if transport == "http":
        compression = Compression.Gzip if gzip else Compression.NoCompression
        return HttpExporter(collector.http + "/v1/traces", compression=compression, timeout=timeout)
    packing = grpc.Compression.Gzip if gzip else grpc.Compression.NoCompression
    return GrpcExporter(collector.grpc, insecure=True, compression=packing, timeout=timeout)


def trace(exporter: Any, *, count: int = 20, size: int = 0) -> None:
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(exporter))
    tracer = provider.get_tracer("python", "1.0")
    for n in range(count):
        with tracer.start_as_current_span(f"chat {n}", attributes={"n": n, "filler": "x" * size}) as span:
            span.add_event("event", {"k": "v"})
    provider.shutdown()


@pytest.fixture(scope="session")
def javascript() -> Path:
    """A folder in which `export.mjs` finds its packages."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("there is no node and npm here")
    lock = (HERE / "package-lock.json").read_bytes()
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "agentlightning" / "javascript"
    folder = cache / hashlib.sha256(lock).hexdigest()[:16]
    if not (folder / "node_modules").is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        making = cache / f"making-{os.getpid()}"
        shutil.copytree(HERE, making)
        subprocess.run([npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"], cwd=making, check=True)
        if folder.exists():
            shutil.rmtree(making)
        else:
            making.rename(folder)
    shutil.copy(HERE / "export.mjs", folder)
    return folder


def run_javascript(folder: Path, collector: Any, count: int = 20, **environment: str) -> list[int]:
    """What the exporter reported for each batch; 0 is success."""
    done = subprocess.run(
        ["node", "export.mjs"],
        cwd=folder,
        env={
            "PATH": os.environ["PATH"],
            "COUNT": str(count),
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.http,
            "OTEL_RESOURCE_ATTRIBUTES": "agentlightning.rollout.id=r1",
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return list(json.loads(done.stdout))


@pytest.mark.parametrize("transport", ["grpc", "http"])
@pytest.mark.parametrize("gzip", [False, True])
def test_e01_python_exporters_arrive(shared: Any, transport: str, gzip: bool) -> None:
    trace(python_exporter(shared, transport, gzip=gzip))
    kept = stored(shared)
    assert [(s.name, s.attributes["n"]) for s in kept] == [(f"chat {n}", n) for n in range(20)]
    assert [event.name for event in kept[0].events] == ["event"]


@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_e02_the_javascript_exporter_arrives(shared: Any, javascript: Path, compression: str) -> None:
    assert run_javascript(javascript, shared, OTEL_EXPORTER_OTLP_COMPRESSION=compression) == [0]
    kept = stored(shared)
    assert [span.name for span in kept] == [f"chat {n}" for n in range(20)]
    span = kept[3]
    assert (span.kind, span.scope, span.scope_version) == (3, "javascript", "1.0")
    assert span.attributes == {
        "text": "Zürich \U0001f642",
        "int": 7,
        "double": 0.5,
        "flag": True,
        "list": [1, 2, 3],
    }
    assert span.resource.attributes["agentlightning.rollout.id"] == "r1"
    assert span.end_ns >= span.start_ns > 1_600_000_000_000_000_000
    assert [record.kind.name for record in shared.journal()] == ["TRACES_JSON"]


def when_freed(collector: Any, work: Callable[[], Any]) -> float:
    """Run `work` against a collector that cannot write; after its first refusal it can. Returns the seconds."""
    import resource

    import httpx

    limits = resource.prlimit(collector.pid, resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    assert not export(collector, "http", spans()).ok
    thread = threading.Thread(target=work)
    began = time.monotonic()
    thread.start()
    pattern = 'refused_total{reason="journal_unavailable"} 2.0'
    while pattern not in httpx.get(collector.http + "/metrics", trust_env=False).text:
        assert time.monotonic() - began < 30
        time.sleep(0.02)
    resource.prlimit(collector.pid, resource.RLIMIT_FSIZE, limits)
    thread.join()
    return time.monotonic() - began


@pytest.mark.parametrize("transport", ["grpc", "http"])
def test_e03_python_exporters_wait_as_they_are_asked_and_lose_nothing(
    collectors: Any, transport: str
) -> None:
    collector = collectors().start()
    seconds = when_freed(collector, lambda: trace(python_exporter(collector, transport)))
    assert seconds >= 0.7  # RetryInfo and Retry-After say one second; exporters vary it a little
    assert [span.name for span in stored(collector)] == [f"chat {n}" for n in range(20)]


def test_e04_the_javascript_exporter_waits_as_it_is_asked_and_loses_nothing(
    collectors: Any, javascript: Path
) -> None:
    collector = collectors().start()
    results: list[list[int]] = []
    when_freed(collector, lambda: results.append(run_javascript(javascript, collector)))
    assert results == [[0]]
    assert [span.name for span in stored(collector)] == [f"chat {n}" for n in range(20)]


def test_e05_the_python_exporter_gives_up_at_once_what_is_too_large(collectors: Any) -> None:
    """A refusal that it took for retryable would block all that comes behind it."""
    collector = collectors().start("--max-body-mib", "1")
    exporter = python_exporter(collector, "http")
    began = time.monotonic()
    trace(exporter, count=1, size=3 << 20)
    assert time.monotonic() - began < 15  # its own limit for retries is thirty seconds
    assert stored(collector) == []


def test_e06_the_javascript_exporter_gives_up_what_is_refused_for_good(
    collectors: Any, javascript: Path, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    token.chmod(0o600)
    collector = collectors().start("--token-file", str(token))
    assert run_javascript(javascript, collector) == [1]
    header = "authorization=Bearer%20secret"
    assert run_javascript(javascript, collector, OTEL_EXPORTER_OTLP_HEADERS=header) == [0]
    assert len(stored(collector)) == 20


@pytest.mark.parametrize("transport", ["grpc", "http"])
def test_e07_exporters_go_on_when_the_collector_comes_back(collectors: Any, transport: str) -> None:
    collector = collectors().start()
    port = (collector.grpc if transport == "grpc" else collector.http).rsplit(":", 1)[1]
    exporter = python_exporter(collector, transport)
    collector.kill()
    thread = threading.Thread(target=trace, args=(exporter,))
    thread.start()
    collector.start("--grpc-port" if transport == "grpc" else "--http-port", port)
    thread.join()
    assert [span.name for span in stored(collector)] == [f"chat {n}" for n in range(20)]
