"""Real programs against the real gateway and collector, before a model whose answers are scripted."""

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from scripted import Script, ScriptedModel
from tinymodel import build_tiny_model

from agentlightning.collector.journal import JournalReader
from agentlightning.collector.records import Kind
from agentlightning.proto import attributes as names
from agentlightning.proto import transitions_pb2 as pb
from agentlightning.proto.dataset import open_dataset
from agentlightning.proto.packed import unpack_floats, unpack_ids
from agentlightning.proto.process import read_ready
from agentlightning.proto.transitions_pb2_grpc import TransitionsStub

EXAMPLES = "agentlightning.examples.frameworks"


@dataclass
class Ran:
    """What a program left behind."""

    rollout_id: str
    output: str
    errors: str
    calls: list[dict[str, Any]]
    """Transitions, in the order of the calls."""
    record: dict[str, dict[str, Any]]
    """What the gateway wrote of the same attempt, by call id."""
    spans: list[dict[str, Any]]

    def check(self) -> None:
        """Call by call and token by token, the transitions are the gateway's record."""
        assert {call["call_id"] for call in self.calls} == set(self.record)
        assert len(self.calls) == len(self.record)
        for call in self.calls:
            mine = self.record[call["call_id"]]
            for column in (
                "request",
                "response",
                "prompt_token_ids",
                "response_token_ids",
                "response_logprobs",
            ):
                assert call[column] == mine[column], column
            assert call["source"] == "gateway"
            assert call["error"] is not None or call["token_source"] == "engine"

    def agents(self) -> list[tuple[str, ...]]:
        """Each call's path, sorted: concurrent calls have no order."""
        return sorted(tuple(call["agent_path"] or ()) for call in self.calls)


class Stack:
    """`agl collector`, `agl gateway`, and the scripted model or, if a folder of weights is given, `agl engine`."""

    def __init__(self, folder: Path, weights: Path | None = None) -> None:
        self.folder = folder
        self.model = ScriptedModel(lambda body: "nothing was scripted")
        self.processes: list[subprocess.Popen[bytes]] = []
        self.data, self.state = folder / "data", folder / "collector"
        engine = self.model.url
        if weights is not None:
            options = [
                "--model",
                str(weights),
                "--port",
                "0",
                "--dtype",
                "float32",
                "--max-model-len",
                "1024",
            ]
            engine = self._start("engine", *options, "--threads", "1")["http"]
        addresses = self._start(
            "collector",
            "--data",
            str(self.data),
            "--state",
            str(self.state),
            "--http-port",
            "0",
            "--grpc-port",
            "0",
        )
        self.grpc = addresses["grpc"]
        gateway = ["--state", str(folder / "gateway"), "--collector", addresses["http"], "--port", "0"]
        self.url = self._start("gateway", *gateway, "--engine", engine)["http"]
        self._number = 0
        self.sampling: dict[str, Any] = {}

    def _start(self, component: str, *options: str) -> dict[str, str]:
        ready = self.folder / f"{component}.json"
        command = [
            sys.executable,
            "-m",
            "agentlightning.cli",
            component,
            *options,
            "--ready-file",
            str(ready),
        ]
        with open(self.folder / f"{component}.log", "ab") as log:
            process = subprocess.Popen(command, stderr=log)
        self.processes.append(process)
        deadline = time.monotonic() + 40
        while (addresses := read_ready(ready)) is None:
            assert process.poll() is None, (self.folder / f"{component}.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return addresses

    def post(self, path: str, body: Any) -> Any:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    def run(self, script: Script, *command: str, code: int = 0, **variables: str) -> Ran:
        """Run a Python program as a rollout, and wait until its transitions are complete."""
        self._number += 1
        rollout_id = f"ro-{self._number}"
        self.model.script = script
        row = {"rollout_id": rollout_id, "run_id": "run", "group_id": "g", "task_id": "t", "split": "train"}
        self.post(
            "/api/rollouts",
            {
                "rollouts": [
                    {**row, "policy": "default", "input": {}, "reference": None, "sampling": self.sampling}
                ]
            },
        )
        (claimed,) = self.post("/api/rollouts/claim", {"controller_id": "c", "limit": 1, "lease_s": 100})[
            "rollouts"
        ]
        identity = {
            f"agentlightning.{name.replace('_id', '.id')}": row[name] for name in row if name != "split"
        }
        identity |= {names.ATTEMPT: "0", names.SPLIT: "train"}
        environ = {
            **os.environ,
            "OPENAI_BASE_URL": self.url + "/v1",
            "OPENAI_API_KEY": claimed["token"],
            "OPENAI_MODEL": "default",
            "OTEL_EXPORTER_OTLP_ENDPOINT": self.url,
            "OTEL_EXPORTER_OTLP_HEADERS": f"authorization={quote('Bearer ' + claimed['token'])}",
            "OTEL_RESOURCE_ATTRIBUTES": ",".join(f"{name}={value}" for name, value in identity.items()),
            **variables,
        }
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=90, check=False, cwd=self.folder
        )
        assert done.returncode == code, done.stdout + done.stderr
        finish = {"attempt": 0, "controller_id": "c", "state": "succeeded"}
        self.post(f"/api/rollouts/{rollout_id}/finish", finish)
        calls = self._sealed(rollout_id)
        record = self._record(rollout_id)
        columns = ["name", "scope", "span_id", "parent_span_id", "attributes"]
        table = open_dataset(self.data).table("spans", attempts=[(rollout_id, 0)], columns=columns)
        spans = table.to_pylist()
        return Ran(rollout_id, done.stdout, done.stderr, calls, record, spans)

    def example(self, script: Script, name: str, *arguments: str, **variables: str) -> Ran:
        """One of our examples, under `agl run`."""
        launch = [sys.executable, "-m", "agentlightning.cli", "run", "--"]
        return self.run(script, *launch, sys.executable, "-m", f"{EXAMPLES}.{name}", *arguments, **variables)

    def program(self, script: Script, source: str, *, code: int = 0, **variables: str) -> Ran:
        """A program of the test's own, which calls `agl.instrument()` or not as it likes."""
        path = self.folder / f"program_{self._number}.py"
        path.write_text(source)
        return self.run(script, sys.executable, str(path), code=code, **variables)

    def _sealed(self, rollout_id: str) -> list[dict[str, Any]]:
        row = self.post("/api/rollouts/query", {"rollout_ids": [rollout_id]})["rollouts"][0]
        attempt = pb.Attempt(rollout_id=rollout_id, attempt=0, calls_expected=row["calls"])
        with grpc.insecure_channel(self.grpc) as channel:
            answer = TransitionsStub(channel).Seal(
                pb.SealRequest(attempts=[attempt], timeout_s=20), timeout=40
            )
        assert len(answer.sealed) == 1, answer
        table = open_dataset(self.data).table("transitions", attempts=[(rollout_id, 0)])
        return sorted(table.to_pylist(), key=lambda call: call["seq"])

    def _record(self, rollout_id: str) -> dict[str, dict[str, Any]]:
        """The gateway's own spans, as they lie in the journal."""
        found: dict[str, dict[str, Any]] = {}
        reader = JournalReader(self.state / "journal")
        for record in reader.read_from(0):
            if record.kind is not Kind.TRACES:
                continue
            for resource in ExportTraceServiceRequest.FromString(record.body).resource_spans:
                for scope in resource.scope_spans:
                    for span in scope.spans:
                        values = {item.key: item.value for item in span.attributes}
                        mine = names.CALL_ID in values and values[names.SOURCE].string_value == "gateway"
                        if mine and values[names.ROLLOUT_ID].string_value == rollout_id:
                            found[values[names.CALL_ID].string_value] = _row(values)
        reader.close()
        return found

    def close(self) -> None:
        for process in reversed(self.processes):
            process.terminate()
            process.wait(20)
        self.model.close()


def _row(values: dict[str, Any]) -> dict[str, Any]:
    def text(name: str) -> str | None:
        return values[name].string_value if name in values else None

    def numbers(name: str, unpack: Any) -> list[Any] | None:
        return list(unpack(values[name].bytes_value)) if name in values else None

    return {
        "request": text(names.REQUEST),
        "response": text(names.RESPONSE),
        "prompt_token_ids": numbers(names.PROMPT_TOKEN_IDS, unpack_ids),
        "response_token_ids": numbers(names.RESPONSE_TOKEN_IDS, unpack_ids),
        "response_logprobs": numbers(names.RESPONSE_LOGPROBS, unpack_floats),
    }


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    made = Stack(tmp_path_factory.mktemp("stack"))
    yield made
    made.close()


@pytest.fixture(scope="session")
def engine_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("engine")
    build_tiny_model(folder / "weights")
    made = Stack(folder, folder / "weights")
    yield made
    made.close()
