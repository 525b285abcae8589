"""Where a run's events go beside metrics.jsonl."""

import struct
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from running import wait_for

from agentlightning.proto.errors import ConfigError
from agentlightning.proto.process import read_ready
from agentlightning.trainer.config import TrainConfig, config_from
from agentlightning.trainer.sinks import open_sinks, scalars

STEP = {
    "event": "step",
    "step": 3,
    "reward": 0.5,
    "groups": {"sampled": 4, "informative": 2},
    "seconds": {"rollouts": 2.0, "update": 1.0, "publish": 0.0, "total": 3.25},
    "update": {"entropy": 1.25, "loss": float("nan")},
    "probe": None,
    "counters": {},
}
EVALUATION = {"event": "evaluate", "step": 3, "mean": 0.75, "n": 4, "seconds": 0.5, "rollouts": ["a"]}
ALARM = {"event": "alarm", "step": 3, "alarm": "entropy_collapses", "text": "Entropy has collapsed."}


def telemetry(**settings: Any) -> TrainConfig:
    return config_from({"run": {"name": "watched"}, "telemetry": settings})


def send(config: TrainConfig, root: Path, *events: dict[str, Any]) -> None:
    with open_sinks(config, root) as sinks:
        assert len(sinks) == 1
        for event in events:
            sinks[0](event)


def test_every_number_of_an_event_has_a_name_and_nothing_else_has() -> None:
    flat = scalars(STEP)
    assert flat["train/reward"] == 0.5
    assert flat["train/groups/informative"] == 2.0
    assert flat["train/update/entropy"] == 1.25
    assert "train/update/loss" not in flat  # not finite
    assert scalars(EVALUATION) == {"held_out/mean": 0.75, "held_out/n": 4.0, "held_out/seconds": 0.5}
    assert scalars(ALARM) == {}


def test_tensorboard_files_hold_the_scalars_and_the_alarm(tmp_path: Path) -> None:
    from tensorboardX.proto.event_pb2 import Event

    send(telemetry(tensorboard=True), tmp_path, STEP, EVALUATION, ALARM)
    (path,) = (tmp_path / "tensorboard").glob("events.out.*")
    data, events = path.read_bytes(), []
    while data:  # TFRecord: length, its checksum, data, its checksum
        (length,) = struct.unpack("<Q", data[:8])
        events.append(Event.FromString(data[12 : 12 + length]))
        data = data[16 + length :]
    values = {value.tag: value.simple_value for event in events for value in event.summary.value}
    assert values["train/reward"] == 0.5
    assert values["held_out/mean"] == 0.75
    assert any(tag.startswith("alarm/entropy_collapses") for tag in values)
    assert {event.step for event in events[1:]} == {3}


@pytest.fixture
def receiver() -> Iterator[tuple[str, dict[str, list[bytes]]]]:
    """An OTLP/HTTP endpoint that keeps what it is sent."""
    bodies: dict[str, list[bytes]] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            bodies.setdefault(self.path, []).append(body)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", bodies
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_step_is_a_span_its_phases_are_below_it_and_its_numbers_are_gauges(
    receiver: tuple[str, dict[str, list[bytes]]], tmp_path: Path
) -> None:
    address, bodies = receiver
    send(telemetry(otlp=address), tmp_path, STEP, EVALUATION, ALARM)
    traces = [ExportTraceServiceRequest.FromString(body) for body in bodies["/v1/traces"]]
    spans = {
        s.name: s for t in traces for r in t.resource_spans for scope in r.scope_spans for s in scope.spans
    }
    assert set(spans) == {"train step", "rollouts", "update", "evaluate", "alarm entropy_collapses"}
    step, rollouts, update = spans["train step"], spans["rollouts"], spans["update"]
    assert rollouts.parent_span_id == update.parent_span_id == step.span_id
    assert step.end_time_unix_nano - step.start_time_unix_nano == 3_250_000_000
    assert rollouts.start_time_unix_nano == step.start_time_unix_nano
    assert update.start_time_unix_nano == rollouts.end_time_unix_nano
    assert spans["alarm entropy_collapses"].status.message == ALARM["text"]
    resource = {a.key: a.value.string_value for a in traces[0].resource_spans[0].resource.attributes}
    assert resource["agentlightning.run.id"] == "watched"
    metrics = [ExportMetricsServiceRequest.FromString(body) for body in bodies["/v1/metrics"]]
    gauges = {
        m.name: m.gauge.data_points[0].as_double
        for request in metrics
        for r in request.resource_metrics
        for scope in r.scope_metrics
        for m in scope.metrics
    }
    assert gauges["agentlightning.train.update.entropy"] == 1.25
    assert gauges["agentlightning.held_out.mean"] == 0.75


def test_our_own_collector_takes_the_spans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")  # it takes traces and logs
    ready = tmp_path / "ready.json"
    ports = ["--http-port", "0", "--grpc-port", "0", "--ready-file", str(ready)]
    folders = ["--data", str(tmp_path / "data"), "--state", str(tmp_path / "state")]
    command = [sys.executable, "-m", "agentlightning.cli", "collector", *folders, *ports]
    collector = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: read_ready(ready) is not None)
        addresses = read_ready(ready)
        assert addresses is not None
        send(telemetry(otlp=addresses["http"]), tmp_path, STEP, EVALUATION, ALARM)
        with urllib.request.urlopen(f"{addresses['http']}/metrics") as answer:
            assert 'accepted_total{unit="spans"} 5.0' in answer.read().decode()
    finally:
        collector.terminate()
        collector.wait()


def test_wandb_keeps_a_run_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb is not among the development dependencies")
    monkeypatch.setenv("WANDB_MODE", "offline")
    send(telemetry(wandb="project"), tmp_path, STEP, EVALUATION, ALARM)
    (log,) = (tmp_path / "wandb").glob("offline-run-*/run-watched.wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    data, logged = log.read_bytes()[7:], {}
    while data:  # LevelDB's log within its first block: checksum, length, kind, then the record
        length = int.from_bytes(data[4:6], "little")
        for item in Record.FromString(data[7 : 7 + length]).history.item:
            logged["/".join(item.nested_key) or item.key] = item.value_json
        data = data[7 + length :]
    assert logged["train/reward"] == "0.5"
    assert logged["held_out/mean"] == "0.75"


def test_mlflow_keeps_a_run_in_a_file(tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="mlflow is not among the development dependencies")
    address = f"sqlite:///{tmp_path}/mlflow.db"
    send(telemetry(mlflow=address), tmp_path, STEP, EVALUATION, ALARM)
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=address)
    experiment = client.get_experiment_by_name("agentlightning")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.metrics["train/reward"] == 0.5
    assert run.data.params["train.group_size"] == "8"
    assert "Entropy" in run.data.tags["alarm.entropy_collapses"]
    assert run.info.status == "FINISHED"


def test_a_backend_that_is_gone_neither_stops_nor_fails_a_run(tmp_path: Path) -> None:
    send(telemetry(otlp="http://127.0.0.1:9"), tmp_path, STEP)


def test_a_sink_that_fails_is_said_once_and_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_sinks(telemetry(tensorboard=True), tmp_path) as (sink,):
        sink({"event": "step", "reward": 1.0})  # without a step: TensorBoard's sink trips over it
        sink({"event": "step", "reward": 1.0})
    assert len([r for r in caplog.records if "Telemetry is left out from now on" in r.message]) == 1


@pytest.mark.parametrize(("setting", "package"), [("wandb", "wandb"), ("mlflow", "mlflow-skinny")])
def test_what_was_asked_for_and_is_not_installed_is_said_with_its_remedy(
    setting: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, setting, None)
    with (
        pytest.raises(ConfigError, match=f"needs the package {package}"),
        open_sinks(telemetry(**{setting: "x"}), tmp_path),
    ):
        pass
