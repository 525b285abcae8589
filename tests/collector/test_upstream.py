"""Behind another OpenTelemetry collector: what its file exporter writes is read, and what it fans out arrives."""

import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pyarrow as pa
import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from otlp_clients import spans, to_json

from agentlightning.collector.inputs import read_file
from agentlightning.proto.dataset import open_dataset

ROTEL = "rotel==0.0.1a15"


def packed(message: bytes) -> bytes:
    """As the file exporter writes with `compression: zstd`: a length of four bytes, and a frame."""
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(message)
    frame = sink.getvalue().to_pybytes()
    return len(frame).to_bytes(4, "big") + bytes(frame)


def framed(message: bytes) -> bytes:
    return len(message).to_bytes(4, "big") + message


@pytest.mark.parametrize(
    "form",
    ["json lines", "proto", "json, zstd", "proto, zstd", "zstd file of json lines", "many, proto, zstd"],
)
def test_what_a_collectors_file_exporter_writes_is_read(tmp_path: Path, form: str) -> None:
    requests = [spans(1, name=f"s{n}", size=100) for n in range(300 if "many" in form else 3)]
    documents = [to_json(request) for request in requests]
    messages = [request.SerializeToString() for request in requests]
    path = tmp_path / "traces"
    match form:
        case "json lines":
            path.write_bytes(b"\n".join(documents) + b"\n")
        case "proto":
            path.write_bytes(b"".join(map(framed, messages)))
        case "json, zstd":
            path.write_bytes(b"".join(map(packed, documents)))
        case "zstd file of json lines":
            path.write_bytes(packed(b"\n".join(documents))[4:])
        case _:
            path.write_bytes(b"".join(map(packed, messages)))
    refused: list[str] = []
    found = [span.name for span in read_file(path, Counter(), refused.append)]
    assert found == [f"s{n}" for n in range(len(requests))]
    assert refused == []


def test_damage_costs_the_message_and_not_the_file(tmp_path: Path) -> None:
    good = [spans(1, name=name).SerializeToString() for name in ("a", "b", "c")]
    damaged = bytearray(packed(good[1]))
    damaged[12:] = b"\x00" * len(damaged[12:])
    path = tmp_path / "traces"
    path.write_bytes(packed(good[0]) + bytes(damaged) + packed(good[2]) + packed(good[0])[:-5])
    refused: list[str] = []
    assert [span.name for span in read_file(path, Counter(), refused.append)] == ["a", "c"]
    assert len(refused) == 2
    assert "message 2" in refused[0]
    assert "cut off" in refused[1]


@pytest.fixture(scope="session")
def rotel() -> Path:
    """A compiled OpenTelemetry collector from the package index, put into a cache once."""
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "agentlightning" / ROTEL
    program = folder / "rotel" / "rotel-agent"
    if not program.exists():
        done = subprocess.run(
            [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), ROTEL],
            capture_output=True,
            text=True,
        )
        if done.returncode != 0:
            pytest.skip(f"{ROTEL} cannot be had here: {done.stderr.strip()[-200:]}")
        for wheel in folder.glob("*.whl"):
            with ZipFile(wheel) as content:
                content.extractall(folder)
        program.chmod(0o755)
    return program


def test_an_upstream_collector_fans_out_to_ours_and_nothing_is_lost_or_doubled(
    collectors: Any, rotel: Path, tmp_path: Path
) -> None:
    """The collector is killed while spans come; the upstream tries again until it is back."""
    import socket

    collector = collectors().start("--idle-timeout", "1")
    port = collector.http.rsplit(":", 1)[1]
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    http, grpc = (probe.getsockname()[1] for probe in probes)
    for probe in probes:
        probe.close()
    options = {
        "otlp-http-endpoint": f"127.0.0.1:{http}",
        "otlp-grpc-endpoint": f"127.0.0.1:{grpc}",
        "exporter": "otlp",
        "otlp-exporter-protocol": "http",
        "otlp-exporter-endpoint": collector.http,
        "otlp-exporter-retry-max-elapsed-time": "60s",
        "otlp-exporter-retry-max-backoff": "1s",
        "batch-timeout": "100ms",
    }
    words = [word for key, value in options.items() for word in (f"--{key}", value)]
    log = tmp_path / "rotel.log"
    with open(log, "wb") as out:
        upstream = subprocess.Popen([str(rotel), "start", *words], stdout=out, stderr=out)
    try:
        deadline = time.monotonic() + 20
        while True:
            try:
                socket.create_connection(("127.0.0.1", http)).close()
                break
            except OSError:
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.05)
        provider = TracerProvider()
        exporter = OTLPSpanExporter(f"http://127.0.0.1:{http}/v1/traces")
        provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=50))
        tracer = provider.get_tracer("agent")

        def work() -> None:
            for n in range(60):
                with tracer.start_as_current_span(f"chat {n}"):
                    time.sleep(0.02)

        thread = threading.Thread(target=work)
        thread.start()
        time.sleep(0.4)
        collector.kill()
        time.sleep(0.4)
        collector.start("--idle-timeout", "1", "--http-port", port)
        thread.join()
        provider.shutdown()

        def names() -> list[str]:
            return open_dataset(collector.data).table("spans", columns=["name"])["name"].to_pylist()

        deadline = time.monotonic() + 60
        while len(names()) < 60:
            assert time.monotonic() < deadline, (names(), log.read_text())
            time.sleep(0.1)
        assert Counter(names()) == Counter(f"chat {n}" for n in range(60))
    finally:
        upstream.terminate()
        upstream.wait(20)


def test_the_documented_configuration_is_yaml_and_names_what_exists() -> None:
    import yaml

    page = (Path(__file__).parents[2] / "docs" / "collector.md").read_text()
    text = page.split("```yaml\n", 1)[1].split("```", 1)[0]
    config = yaml.safe_load(text)
    for pipeline in config["service"]["pipelines"].values():
        for kind in ("receivers", "processors", "exporters"):
            assert set(pipeline.get(kind, [])) <= set(config.get(kind) or {})
    balancer = config["exporters"]["load_balancing"]
    assert balancer["routing_attributes"] == ["agentlightning.rollout.id"]
    assert json.dumps(config)
