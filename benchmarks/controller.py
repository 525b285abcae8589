"""What a rollout costs beyond its agent: forked by the controller, against starting a Python process for each.

    python benchmarks/controller.py [--rollouts 200] [--concurrency 8] [--agent module:function --field name=value]

Both sides run in this one go, on the same machine: CPU is that of every process involved (the controller, its
launcher and all agents; or the processes started), taken from the kernel. The gateway is a stub, and not counted.
"""

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from aiohttp import web

TRIVIAL = "def solve(n):\n    return n\n"


class Queue:
    """As much of a gateway as the controller needs."""

    def __init__(self, rollouts: int, fields: dict[str, str]) -> None:
        self.rollouts = rollouts
        self.fields = fields
        self.claimed = 0
        self.open = asyncio.Event()
        self.done = asyncio.Event()
        self.states: list[str] = []

    async def claim(self, request: web.Request) -> web.Response:
        body = await request.json()
        if not self.open.is_set() or self.claimed == self.rollouts:
            await asyncio.sleep(0.05)
            return web.json_response({"boot_id": "b", "rollouts": []})
        count = min(body["limit"], self.rollouts - self.claimed)
        rows = [self.row(self.claimed + n) for n in range(count)]
        self.claimed += count
        return web.json_response({"boot_id": "b", "rollouts": rows})

    async def finish(self, request: web.Request) -> web.Response:
        self.states.append((await request.json())["state"])
        if len(self.states) == self.rollouts:
            self.done.set()
        return web.json_response({"state": "succeeded", "attempt": 0, "will_retry": False})

    async def heartbeat(self, request: web.Request) -> web.Response:
        return web.json_response({"boot_id": "b", "lost": [], "cancelled": []})

    def row(self, number: int) -> dict[str, Any]:
        names = dict.fromkeys(("run_id", "group_id", "task_id", "policy"), "bench")
        return {
            "rollout_id": f"ro-{number}",
            "split": "train",
            "attempt": 0,
            "token": "t",
            "input": self.fields,
            **names,
        }


def cpu_of(pid: int) -> float:
    """CPU seconds of a process and of those of its children that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(int(field) for field in fields[11:15]) / os.sysconf("SC_CLK_TCK")


def children_of(pid: int) -> list[int]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(name))
        except FileNotFoundError:
            continue
    return found


async def forked(
    agent: str, fields: dict[str, str], rollouts: int, concurrency: int
) -> tuple[float, float, float]:
    """Seconds, CPU seconds of launcher and agents, and CPU seconds of the controller itself."""
    queue = Queue(rollouts, fields)
    app = web.Application()
    app.router.add_post("/api/rollouts/claim", queue.claim)
    app.router.add_post("/api/rollouts/heartbeat", queue.heartbeat)
    app.router.add_post("/api/rollouts/{id}/finish", queue.finish)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "trivial.py").write_text(TRIVIAL)
        command = [
            sys.executable,
            "-m",
            "agentlightning.controller.cli",
            "--gateway",
            f"http://127.0.0.1:{port}",
        ]
        command += ["--agent", agent, "--concurrency", str(concurrency), "--state", name, "--cwd", name]
        command += ["--ready-file", str(folder / "ready.json"), "--log-level", "warning"]
        controller = await asyncio.create_subprocess_exec(*command)
        while not (folder / "ready.json").exists() and controller.returncode is None:  # noqa: ASYNC110 - another process writes it
            await asyncio.sleep(0.02)
        (launcher,) = children_of(controller.pid)
        before, own_before, began = cpu_of(launcher), cpu_of(controller.pid), time.perf_counter()
        queue.open.set()
        await queue.done.wait()
        seconds = time.perf_counter() - began
        cpu, own = cpu_of(launcher) - before, cpu_of(controller.pid) - own_before
        controller.terminate()
        await controller.wait()
    await runner.cleanup()
    assert set(queue.states) == {"succeeded"}, queue.states
    return seconds, cpu, own


def spawned(agent: str, fields: dict[str, str], rollouts: int, concurrency: int) -> tuple[float, float]:
    """Seconds and CPU seconds of one fresh interpreter for each rollout."""
    module, function = agent.split(":")
    code = (
        "import asyncio, inspect, json, sys\n"
        f"from {module} import {function} as f\n"
        "value = f(**json.loads(sys.argv[1]))\n"
        "print(json.dumps(asyncio.run(value) if inspect.iscoroutine(value) else value))\n"
    )
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "trivial.py").write_text(TRIVIAL)
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        running: list[subprocess.Popen[bytes]] = []
        for _ in range(rollouts):
            if len(running) == concurrency:
                running.pop(0).wait()
            command = [sys.executable, "-c", code, json.dumps(fields)]
            running.append(subprocess.Popen(command, cwd=name, stdout=subprocess.DEVNULL))
        for process in running:
            process.wait()
        seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rollouts", type=int, default=200)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument(
        "--agent", default="trivial:solve", help="module:function (default: one that returns its input)"
    )
    parser.add_argument(
        "--field", action="append", default=[], metavar="NAME=VALUE", help="of the task's input"
    )
    options = parser.parse_args()
    fields = dict(field.split("=", 1) for field in options.field) or {"n": "1"}
    count = options.rollouts
    seconds, cpu, own = asyncio.run(forked(options.agent, fields, count, options.concurrency))
    other = max(1, count // 10)  # slow, and steady
    other_seconds, other_cpu = spawned(options.agent, fields, other, options.concurrency)
    print(f"{options.agent}, {count} rollouts, {options.concurrency} at a time\n")
    print("| a process per rollout           | CPU ms per rollout | rollouts/s |")
    print("|---------------------------------|--------------------|------------|")
    print(f"| forked: launcher and agents     | {1000 * cpu / count:18.2f} | {count / seconds:10.1f} |")
    print(
        f"| forked: with the controller     | {1000 * (cpu + own) / count:18.2f} | {count / seconds:10.1f} |"
    )
    print(
        f"| `python -c`, importing the same | {1000 * other_cpu / other:18.2f} | {other / other_seconds:10.1f} |"
    )
    print(f"\nratio of CPU, spawned to forked: {other_cpu / other / ((cpu + own) / count):.1f}")


if __name__ == "__main__":
    main()
