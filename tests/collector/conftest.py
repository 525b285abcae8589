"""A real `agl collector` in its own process, on free ports of loopback."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agentlightning.collector.journal import JournalReader, Record
from agentlightning.proto.process import read_ready

COMMAND = [
    sys.executable,
    "-c",
    "import sys; from agentlightning.collector.cli import main; sys.exit(main())",
]


class Collector:
    """One collector's directories, and its process while there is one."""

    def __init__(self, root: Path) -> None:
        self.data = root / "data"
        self.state = root / "state"
        self.log = root / "collector.log"
        self._ready = root / "ready.json"
        self._process: subprocess.Popen[bytes] | None = None
        self.http = self.grpc = ""
        self.mark = 0
        """The journal's end when the test began."""

    def start(self, *options: str) -> "Collector":
        self._ready.unlink(missing_ok=True)
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                [
                    *COMMAND,
                    *("--data", str(self.data), "--state", str(self.state), "--ready-file", str(self._ready)),
                    *("--http-port", "0", "--grpc-port", "0", *options),
                ],
                stderr=log,
            )
        deadline = time.monotonic() + 30
        while (addresses := read_ready(self._ready)) is None:
            assert self._process.poll() is None, f"the collector ended: {self.log.read_text()}"
            assert time.monotonic() < deadline, f"the collector is not ready: {self.log.read_text()}"
            time.sleep(0.02)
        self.http, self.grpc = addresses["http"], addresses["grpc"]
        return self

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def journal(self) -> list[Record]:
        """What has been acknowledged since the test began."""
        reader = JournalReader(self.state / "journal")
        try:
            return list(reader.read_from(self.mark))
        finally:
            reader.close()

    def converter_pid(self) -> int:
        """The converter's process id; waits until there is one."""
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
            if children:
                return int(children[0])
            time.sleep(0.02)
        raise AssertionError("there is no converter")

    def kill(self) -> None:
        """kill -9 of the receiver; the converter ends by itself."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> int:
        """SIGTERM; returns the exit code."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(20)

    def end(self) -> None:
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.stop()
                return
            os.kill(self.pid, signal.SIGKILL)
            self._process.wait()


@pytest.fixture
def collectors(tmp_path: Path) -> Iterator[Callable[[str], Collector]]:
    """Makes collectors by name; each ends with the test."""
    made: dict[str, Collector] = {}

    def make(name: str = "collector") -> Collector:
        (tmp_path / name).mkdir(exist_ok=True)
        return made.setdefault(name, Collector(tmp_path / name))

    yield make
    for collector in made.values():
        collector.end()


@pytest.fixture
def collector(collectors: Callable[[str], Collector]) -> Collector:
    """One collector, serving with the default settings."""
    return collectors("collector").start()


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Collector]:
    collector = Collector(tmp_path_factory.mktemp("shared"))
    yield collector.start()
    collector.end()


@pytest.fixture
def shared(started: Collector) -> Collector:
    """A collector that the tests of one file share, for those that leave it as it was."""
    reader = JournalReader(started.state / "journal")
    started.mark = reader.committed()
    reader.close()
    return started
