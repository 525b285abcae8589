"""A run around a tiny random model, as a process that tests can watch, kill and start again."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from agentlightning.proto.dataset import open_dataset

AGENTS = Path(__file__).parent


class Run:
    """One `agl train` process and what it leaves behind."""

    def __init__(self, root: Path, config: dict[str, Any]) -> None:
        self.root = root / config["run"]["name"]
        self.config = root / "config.yaml"
        self.config.write_text(yaml.safe_dump(config))
        self.output = root / "output.txt"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *arguments: str) -> None:
        paths = os.pathsep.join([str(AGENTS), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
        with open(self.output, "ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "agentlightning.trainer.cli", str(self.config), *arguments],
                stdout=output,
                stderr=output,
                env=environment,
                cwd=self.config.parent,
                start_new_session=True,
            )

    def wait(self, seconds: float = 180) -> int:
        assert self.process is not None
        return self.process.wait(seconds)

    def finish(self, *arguments: str) -> str:
        """Run to the end, and return what was printed."""
        self.start(*arguments)
        code = self.wait()
        text = self.output.read_text()
        assert code == 0, text + self.logs()
        return text

    def logs(self) -> str:
        return "".join(
            f"\n--- {path.name}\n{path.read_text()[-3000:]}" for path in (self.root / "logs").glob("*")
        )

    def pid(self, component: str) -> int:
        return int(json.loads((self.root / "state" / "ready" / f"{component}.json").read_text())["pid"])

    def kill(self, component: str) -> None:
        """`kill -9` of a component, or of the trainer itself."""
        if component == "trainer":
            assert self.process is not None
            self.process.kill()
            self.process.wait()
        else:
            os.kill(self.pid(component), signal.SIGKILL)

    def events(self, name: str) -> list[dict[str, Any]]:
        path = self.root / "metrics.jsonl"
        if not path.exists():
            return []
        lines = path.read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == name]

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def assert_exact(run: Run, *, steps: int) -> None:
    """Every transition trained at most once, none that was acknowledged lost, and the chain of tokens whole."""
    dataset = open_dataset(run.root)
    rows = dataset.table("transitions").to_pylist()
    calls = Counter(row["call_id"] for row in rows)
    assert max(calls.values()) == 1
    samples = dataset.table("samples").to_pylist()
    assert sorted({sample["step"] for sample in samples}) == list(range(1, steps + 1))
    trained = Counter(call for sample in samples for call in sample["call_ids"])
    assert max(trained.values()) == 1
    assert set(trained) <= set(calls)
    by_call = {row["call_id"]: row for row in rows}
    for sample in samples:
        tokens, mask = sample["token_ids"], sample["mask"]
        sampled = [token for token, flag in zip(tokens, mask, strict=True) if flag]
        assert sampled == [
            token for call in sample["call_ids"] for token in by_call[call]["response_token_ids"]
        ]
    # The gateway's ledger and the data set agree, for every attempt that ended well.
    for attempt in dataset.table("rollouts").to_pylist():
        if attempt["state"] == "succeeded":
            assert attempt["calls_stored"] == attempt["calls_expected"]


def wait_for(condition: Callable[[], bool], *, seconds: float = 120, why: Callable[[], str] = str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, why()
        time.sleep(0.02)
