"""The controller against `agl gateway` itself, with a collector that only says yes."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

AGENT = """
import os, signal, time
def solve(do):
    if do == "crash":
        raise RuntimeError("no idea")
    open(os.environ["AGENTLIGHTNING_ROLLOUT_ID"] + ".started", "a").close()
    time.sleep({"answer": 0, "slow": 1.5, "hang": 1000}[do])
    return do
"""
JUDGE = """
def evaluate(task, output):
    return float(task["reference"]["value"])
"""
WAIT = 40.0


class RealGateway:
    """`agl gateway` as a process on a port that stays the same."""

    def __init__(self, folder: Path, collector: str) -> None:
        self.folder = folder
        self.collector = collector
        self.port = "0"
        self.start()

    def start(self) -> None:
        ready = self.folder / "ready.json"
        ready.unlink(missing_ok=True)
        command = [sys.executable, "-m", "agentlightning.gateway.cli", "--state", str(self.folder)]
        command += ["--collector", self.collector, "--port", self.port, "--ready-file", str(ready)]
        self.process = subprocess.Popen([*command, "--log-level", "warning"])
        deadline = time.monotonic() + WAIT
        while not ready.exists():
            assert time.monotonic() < deadline
            assert self.process.poll() is None
            time.sleep(0.02)
        self.url = json.loads(ready.read_text())["addresses"]["http"]
        self.port = self.url.rpartition(":")[2]

    def post(self, path: str, body: Any) -> Any:
        request = urllib.request.Request(
            f"{self.url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=WAIT) as answer:
            return json.load(answer)

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self.url}{path}", timeout=WAIT) as answer:
            return json.load(answer)

    def add(self, rollout_id: str, do: str, value: str = "1", max_attempts: int = 3) -> None:
        row = {"rollout_id": rollout_id, "run_id": "run", "group_id": "g", "task_id": "t", "split": "train"}
        row |= {"policy": "default", "input": {"do": do}, "reference": {"value": value}}  # type: ignore[dict-item]
        self.post("/api/rollouts", {"rollouts": [row | {"max_attempts": max_attempts}]})

    def row(self, rollout_id: str) -> Any:
        with contextlib.suppress(OSError):  # it is being restarted
            return self.post("/api/rollouts/query", {"rollout_ids": [rollout_id]})["rollouts"][0]
        return {"state": "unknown"}

    def ended(self, rollout_id: str) -> Any:
        deadline = time.monotonic() + WAIT
        while (row := self.row(rollout_id))["state"] not in ("succeeded", "failed", "cancelled"):
            assert time.monotonic() < deadline, row
            time.sleep(0.05)
        return row


@pytest.fixture
def real(tmp_path: Path) -> Iterator[RealGateway]:
    """A gateway whose collector acknowledges everything."""
    (address, stop) = _collector()
    server = RealGateway(tmp_path / "gateway", address)
    yield server
    server.process.terminate()
    server.process.wait(WAIT)
    stop()


def _collector() -> tuple[str, Any]:
    ready = threading.Event()
    found: dict[str, Any] = {}

    async def serve() -> None:
        async def acknowledge(request: web.Request) -> web.Response:
            await request.read()
            return web.Response(content_type="application/x-protobuf")

        app = web.Application()
        app.router.add_post("/v1/traces", acknowledge)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        found["port"] = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        found["loop"], found["stop"] = asyncio.get_running_loop(), asyncio.Event()
        ready.set()
        await found["stop"].wait()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert ready.wait(WAIT)

    def stop() -> None:
        found["loop"].call_soon_threadsafe(found["stop"].set)
        thread.join(WAIT)

    return f"http://127.0.0.1:{found['port']}", stop


@pytest.fixture
def controller(real: RealGateway, start: Any, module: Any) -> Any:
    module("agent", AGENT)
    module("judge", JUDGE)
    return start(
        "--agent", "agent:solve", "--evaluator", "judge:evaluate", "--lease", "2", "--kill-grace", "0.5",
        gateway_url=real.url,
    )  # fmt: skip


def test_rollouts_end_as_they_should(real: RealGateway, controller: Any) -> None:
    real.add("ro-right", "answer")
    real.add("ro-crash", "crash")
    real.add("ro-nan", "answer", value="nan", max_attempts=2)
    real.add("ro-hang", "hang")
    right = real.ended("ro-right")
    assert (right["state"], right["output"], right["attempt"]) == ("succeeded", "answer", 0)
    crash = real.ended("ro-crash")
    assert (crash["state"], crash["cause"]) == ("failed", "agent_error")
    assert crash["error"].startswith("The agent exited with code 1: RuntimeError: no idea")
    nan = real.ended("ro-nan")
    assert (nan["state"], nan["cause"], nan["attempt"]) == ("failed", "infra_error", 1)
    assert nan["error"].startswith("The reward 'reward' = nan was refused")
    while real.row("ro-hang")["state"] != "running":
        time.sleep(0.05)
    real.post("/api/rollouts/cancel", {"rollout_ids": ["ro-hang"]})
    assert real.ended("ro-hang")["state"] == "cancelled"
    deadline = time.monotonic() + WAIT
    while len(controller.living()) > 3:  # the controller and its two launchers
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_killed_gateway_loses_no_outcome(real: RealGateway, controller: Any) -> None:
    for number in range(4):
        real.add(f"ro-{number}", "slow")
    while not all((controller.folder / f"ro-{number}.started").exists() for number in range(4)):
        time.sleep(0.02)
    real.process.kill()
    real.process.wait()
    time.sleep(0.5)
    real.start()
    for number in range(4):
        row = real.ended(f"ro-{number}")
        assert (row["state"], row["attempt"], row["output"]) == ("succeeded", 0, "slow")


def test_a_killed_launcher_and_a_killed_controller_cost_attempts_and_no_rollout(
    real: RealGateway, controller: Any, start: Any
) -> None:
    for number in range(2):
        real.add(f"ro-{number}", "slow")
    while not all((controller.folder / f"ro-{number}.started").exists() for number in range(2)):
        time.sleep(0.02)
    os.kill(controller.launchers()[0], 9)
    for number in range(2):
        row = real.ended(f"ro-{number}")
        assert (row["state"], row["attempt"]) == ("succeeded", 1)
    real.add("ro-next", "slow")
    while not (controller.folder / "ro-next.started").exists():
        time.sleep(0.02)
    controller.process.kill()
    controller.wait_until_gone()
    start("--agent", "agent:solve", gateway_url=real.url)
    row = real.ended("ro-next")
    assert (row["state"], row["attempt"]) == ("succeeded", 1)
