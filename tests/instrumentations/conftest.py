"""Programs in processes of their own: what is imported, patched and undone is seen there and nowhere else."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HEAD = """
import os, sys
from scripted import Reply, ScriptedModel
model = ScriptedModel(lambda body: "hello")
os.environ.update(OPENAI_BASE_URL=model.url + "/v1", OPENAI_API_KEY="none-none-none")
os.environ.setdefault("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
import agentlightning.sdk as agl
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
exporter = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)

def spans():
    found = [(span.instrumentation_scope.name.split(".")[-1], span.name) for span in exporter.get_finished_spans()]
    exporter.clear()
    return found

def ask(client=None):
    import openai
    client = client or openai.OpenAI()
    client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
"""


@pytest.fixture
def program(tmp_path: Path) -> Callable[..., list[str]]:
    """Runs a program after HEAD; returns the lines that it printed. It must end by itself, without a complaint."""

    def run(source: str, *, code: int = 0, complaint: str | None = None, **variables: str) -> list[str]:
        path = tmp_path / "program.py"
        path.write_text(HEAD + source + "\nsys.stdout.flush(); os._exit(0)\n")
        support = str(Path(__file__).parents[1] / "support")
        paths = os.pathsep.join(filter(None, [support, os.environ.get("PYTHONPATH")]))
        done = subprocess.run(
            [sys.executable, str(path)],
            env={**os.environ, "PYTHONPATH": paths, **variables},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        if complaint is not None:
            assert done.stderr.count(complaint) == 1, done.stderr
        return done.stdout.splitlines()

    return run
