"""A gateway that speaks the control API over real HTTP, and real controllers that run against it."""

import asyncio
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

COMMAND = ("-m", "agentlightning.controller.cli")
WAIT = 30.0
"""Seconds after which a test gives up waiting; nothing here takes so long on a machine that works."""


class ScriptedGateway:
    """The queue of one run, in memory; with switches for what can go wrong."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.boot_id = "boot-1"
        self.queue: list[dict[str, Any]] = []
        self.attempts: dict[str, int] = {}
        self.finished: dict[str, list[dict[str, Any]]] = {}
        self.rewards: list[dict[str, Any]] = []
        self.heartbeats: list[dict[str, Any]] = []
        self.tokens_seen: set[str | None] = set()
        self.cancelled: set[str] = set()
        self.lost: set[str] = set()
        self.stale: set[str] = set()
        self.refuse_with: int | None = None
        self.token: str | None = None
        self.events: list[str] = []

    # What a test says and asks.

    def add(self, rollout_id: str = "", *, reference: Any = None, **fields: Any) -> str:
        """Queue a rollout whose task's input is `fields`."""
        rollout_id = rollout_id or f"ro-{uuid.uuid4().hex[:8]}"
        with self.changed:
            self.queue.append(
                {
                    "rollout_id": rollout_id,
                    "run_id": "run-1",
                    "group_id": "group-1",
                    "task_id": "task-1",
                    "split": "train",
                    "policy": "policy-1",
                    "input": fields,
                    "reference": reference,
                    "sampling": None,
                    "max_attempts": 3,
                    "priority": 0,
                }
            )
        self._wake()
        return rollout_id

    def outcome(self, rollout_id: str, number: int = 0) -> dict[str, Any]:
        """The body of the rollout's finish, once it has come."""
        self.wait_for(
            lambda: len(self.finished.get(rollout_id, ())) > number, f"finish {number} of {rollout_id}"
        )
        return self.finished[rollout_id][number]

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, WAIT), f"waited in vain for {what}"

    # The server.

    def start(self, port: int = 0) -> None:
        ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(port, ready)), daemon=True)
        self._thread.start()
        assert ready.wait(WAIT)

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(WAIT)

    async def _serve(self, port: int, ready: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        self._work = asyncio.Event()
        app = web.Application(client_max_size=1 << 26)
        app.add_routes(
            [
                web.post("/api/rollouts/claim", self._claim),
                web.post("/api/rollouts/heartbeat", self._heartbeat),
                web.post("/api/rollouts/{id}/finish", self._finish),
                web.post("/api/rollouts/{id}/rewards", self._reward),
            ]
        )
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port, reuse_address=True)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        self.url = f"http://127.0.0.1:{self.port}"
        ready.set()
        await self._stopping.wait()
        await runner.cleanup()

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # it is down, and will look when it is up
            self._loop.call_soon_threadsafe(self._work.set)

    def _check(self, request: web.Request) -> None:
        if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
            raise web.HTTPUnauthorized(
                text=json.dumps({"error": {"message": "Wrong key.", "code": "unauthorized"}})
            )
        if self.refuse_with:
            raise _status(self.refuse_with)

    async def _claim(self, request: web.Request) -> web.Response:
        self._check(request)
        body = await request.json()
        deadline = time.monotonic() + body["wait_s"]
        while not self.queue and time.monotonic() < deadline and not self._stopping.is_set():
            self._work.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._work.wait(), 0.5)
        with self.changed:
            rows = [self.queue.pop(0) for _ in range(min(body["limit"], len(self.queue)))]
            for row in rows:
                row["attempt"] = self.attempts.setdefault(row["rollout_id"], 0)
                row["token"] = f"alr_secret-{row['rollout_id']}-{row['attempt']}"
                row["lease_expires"] = time.time() + body["lease_s"]
                self.events.append(f"claim {row['rollout_id']}/{row['attempt']}")
            self.changed.notify_all()
        return web.json_response({"boot_id": self.boot_id, "rollouts": rows})

    async def _heartbeat(self, request: web.Request) -> web.Response:
        self._check(request)
        body = await request.json()
        with self.changed:
            self.heartbeats.append(body)
            self.changed.notify_all()
        lost = [key for key in body["attempts"] if key["rollout_id"] in self.lost]
        cancelled = [key for key in body["attempts"] if key["rollout_id"] in self.cancelled]
        return web.json_response({"boot_id": self.boot_id, "lost": lost, "cancelled": cancelled})

    async def _finish(self, request: web.Request) -> web.Response:
        self._check(request)
        body, rollout_id = await request.json(), request.match_info["id"]
        if rollout_id in self.stale:
            with self.changed:
                self.events.append(f"stale {rollout_id}")
                self.changed.notify_all()
            return web.json_response(
                {"error": {"message": "Attempt 1 is current.", "code": "stale"}}, status=409
            )
        with self.changed:
            self.finished.setdefault(rollout_id, []).append(body)
            self.events.append(f"finish {rollout_id}/{body['attempt']}")
            self.changed.notify_all()
        return web.json_response({"state": body["state"], "attempt": body["attempt"], "will_retry": False})

    async def _reward(self, request: web.Request) -> web.Response:
        self._check(request)
        body = await request.json()
        if not math.isfinite(body["value"]):
            return web.json_response(
                {"error": {"message": "Not finite.", "code": "reward_not_finite"}}, status=400
            )
        with self.changed:
            self.rewards.append({"rollout_id": request.match_info["id"], **body})
            self.events.append(f"reward {request.match_info['id']}/{body['attempt']}")
            self.changed.notify_all()
        return web.json_response({})


def _status(code: int) -> Exception:
    kind = {401: web.HTTPUnauthorized, 500: web.HTTPInternalServerError, 503: web.HTTPServiceUnavailable}[
        code
    ]
    return kind(text=json.dumps({"error": {"message": "The collector is down.", "code": "unavailable"}}))


class RunningController:
    """`agl controller` as a process, and every process that it brings forth."""

    def __init__(
        self,
        folder: Path,
        gateway: str,
        options: tuple[str, ...],
        environ: dict[str, str],
        program: tuple[str, ...],
    ) -> None:
        self.folder = folder
        self.agents = folder / "agents"
        self.mark = uuid.uuid4().hex
        ready = folder / "ready.json"
        ready.unlink(missing_ok=True)
        self.log = folder / f"controller-{self.mark[:4]}.log"
        command = [sys.executable, *program, "--gateway", gateway]
        command += ["--state", str(folder / "state"), "--agents-dir", str(self.agents), "--cwd", str(folder)]
        command += ["--ready-file", str(ready), "--env", "AGL_TEST_MARK", *options]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, env={**os.environ, **environ, "AGL_TEST_MARK": self.mark}, stderr=log, stdout=log
            )
        deadline = time.monotonic() + WAIT
        while not ready.exists() and self.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def log_of(self, rollout_id: str, name: str, attempt: int = 0) -> str:
        return (self.agents / rollout_id / str(attempt) / name).read_text(errors="replace")

    def launchers(self) -> list[int]:
        """The process ids of the agents' launcher and of the evaluator's, if there is one."""
        pids = sorted(int(name) for name in filter(str.isdigit, os.listdir("/proc")))
        return [pid for pid in pids if _parent(pid) == self.process.pid]

    def living(self) -> list[int]:
        """Every process that carries this controller's mark in its environment and has not ended."""
        # The controller itself hides its environment from all but root.
        found = [self.process.pid] if self.process.poll() is None else []
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if self.mark.encode() in Path(f"/proc/{name}/environ").read_bytes():
                    found.append(int(name))
        return sorted(set(found))

    def wait_until_gone(self, seconds: float = 10.0) -> None:
        """No process is left of this controller."""
        deadline = time.monotonic() + seconds
        while (living := self.living()) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not living, [(pid, _cmdline(pid)) for pid in living]

    def stop(self) -> int:
        """SIGTERM, and the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(WAIT)


def _cmdline(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""


def _parent(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


@pytest.fixture
def gateway() -> Iterator[ScriptedGateway]:
    """A gateway on loopback."""
    server = ScriptedGateway()
    server.start()
    yield server
    server.stop()


@pytest.fixture
def module(tmp_path: Path) -> Callable[[str, str], None]:
    """Write a Python module where the controller looks for it."""

    def write(name: str, text: str) -> None:
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))

    return write


@pytest.fixture
def start(tmp_path: Path, gateway: ScriptedGateway) -> Iterator[Callable[..., RunningController]]:
    """Start a controller; at the end of the test it stops gracefully and leaves nothing behind."""
    controllers: list[RunningController] = []

    def begin(
        *options: str,
        environ: dict[str, str] | None = None,
        program: tuple[str, ...] = COMMAND,
        gateway_url: str = gateway.url,
    ) -> RunningController:
        controller = RunningController(tmp_path, gateway_url, options, environ or {}, program)
        controllers.append(controller)
        assert controller.process.poll() is None, controller.text()
        return controller

    yield begin
    for controller in controllers:
        killed = controller.process.poll() is not None
        code = controller.stop()
        assert killed or code == 0, controller.text()
        controller.wait_until_gone()


@pytest.fixture
def refuse(tmp_path: Path, gateway: ScriptedGateway) -> Callable[..., str]:
    """Run a controller that must refuse its command line; returns what it says."""

    def begin(*options: str) -> str:
        command = [sys.executable, "-m", "agentlightning.controller.cli", "--gateway", gateway.url]
        command += ["--state", str(tmp_path / "state"), "--cwd", str(tmp_path), *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT, check=False)
        assert done.returncode == 2, done.stderr
        return done.stderr

    return begin
