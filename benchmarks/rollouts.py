"""The rollout queue over HTTP: create → claim → finish, beside agentlightning 0.3's store in the same run.

    python benchmarks/rollouts.py [--rollouts 3000] [--rounds 3] [--stored 1000000] [--postgresql]

One load generator, the same work for both: rollouts are created 32 at a time, claimed 16 at a time, and finished as
many at a time as the API takes (ours 16, the peer's 1), by 16 workers. Ours keeps every change in SQLite (with --postgresql in PostgreSQL) and sends a span for each end
to a collector (a stub here, that says yes); the peer, `agl store`, keeps all in memory. The peer is installed from PyPI
into a virtual environment of its own under ~/.cache. Then the same queue with so many ended rollouts in its database: what
a claim takes, beside an empty one's.
"""

import argparse
import asyncio
import contextlib
import os
import shutil
import socket
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

PEER = "agentlightning==0.3.0"
ENQUEUED, CLAIMED, WORKERS = 32, 16, 16
TASK = {"question": "A shelf holds 3 boxes of 14 pens each. How many pens are there? " * 4}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rollouts", type=int, default=3000, help="per round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--stored", type=int, default=1_000_000, help="ended rollouts, for the second table")
    parser.add_argument("--postgresql", action="store_true", help="ours on PostgreSQL instead of SQLite")
    parser.add_argument("--without-peer", action="store_true")
    asyncio.run(measure(parser.parse_args()))


async def measure(options: argparse.Namespace) -> None:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=".")))
        sink = await start_sink()
        database = []
        if options.postgresql:
            sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))
            import postgresql_server

            server = stack.enter_context(postgresql_server.serving(durable=True))
            database = ["--database", server.create("bench")]
        rates: dict[str, list[float]] = {}
        costs: dict[str, list[float]] = {}
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            queues: dict[str, Queue] = {}
            port = free_port()
            command = [sys.executable, "-m", "agentlightning.gateway.cli", "--state", str(folder / "state")]
            command += ["--collector", sink, "--port", str(port), "--log-level", "error", *database]
            pid = stack.enter_context(running(command, port))
            queues["ours"] = Ours(session, f"http://127.0.0.1:{port}", pid)
            if not options.without_peer:
                port = free_port()
                command = [str(peer_python().parent / "agl"), "store", "--host", "127.0.0.1"]
                command += ["--port", str(port), "--log-level", "ERROR"]
                pid = stack.enter_context(running(command, port))
                queues["peer"] = Peer(session, f"http://127.0.0.1:{port}/v1/agl", pid)
            for round_ in range(options.rounds):
                for name, queue in queues.items():
                    before = queue.cpu()
                    took = await round_trip(queue, options.rollouts, f"{name}-{round_}")
                    costs.setdefault(name, []).append((queue.cpu() - before) / options.rollouts * 1e3)
                    rates.setdefault(name, []).append(options.rollouts / took)
                    print(
                        f"round {round_}: {name} {rates[name][-1]:.0f} rollouts/s, "
                        f"{costs[name][-1]:.2f} ms of CPU each",
                        flush=True,
                    )
            ours = statistics.median(rates["ours"])
            cost = {name: statistics.median(values) for name, values in costs.items()}
            print(
                f"\ncreate → claim → finish: {ours:.0f} rollouts/s (target: ≥ 500), {cost['ours']:.2f} ms of CPU each"
            )
            if "peer" in rates:
                peer = statistics.median(rates["peer"])
                print(
                    f"{PEER}'s store: {peer:.0f} rollouts/s, {cost['peer']:.2f} ms of CPU each; "
                    f"ratio {ours / peer:.1f}× (target: ≥ 10×), of CPU {cost['peer'] / cost['ours']:.1f}×"
                )
            if not options.postgresql:
                await claims_beside(queues["ours"], folder / "state" / "gateway.db", options.stored)


class Queue:
    """A rollout queue behind HTTP."""

    def __init__(self, session: aiohttp.ClientSession, url: str, pid: int) -> None:
        self._session, self._url, self._pid = session, url, pid

    def cpu(self) -> float:
        """Seconds that its process has computed."""
        fields = Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    async def post(self, path: str, body: Any) -> Any:
        async with self._session.post(self._url + path, json=body) as response:
            if response.status >= 300:
                sys.exit(f"{self._url}{path} answered {response.status}: {await response.text()}")
            return await response.json()

    async def create(self, names: list[str]) -> None:
        raise NotImplementedError

    async def claim(self, limit: int) -> list[Any]:
        raise NotImplementedError

    async def finish(self, claimed: list[Any]) -> None:
        raise NotImplementedError


class Ours(Queue):
    async def create(self, names: list[str]) -> None:
        rows = [{"rollout_id": name, "run_id": "bench", "policy": "default", "input": TASK} for name in names]
        await self.post("/api/rollouts", {"rollouts": rows})

    async def claim(self, limit: int) -> list[Any]:
        body = {"controller_id": "bench", "limit": limit, "lease_s": 600}
        return (await self.post("/api/rollouts/claim", body))["rollouts"]

    async def finish(self, claimed: list[Any]) -> None:
        ended = {"controller_id": "bench", "state": "succeeded"}
        reports = [{"rollout_id": c["rollout_id"], "attempt": c["attempt"], **ended} for c in claimed]
        results = (await self.post("/api/rollouts/finish", {"reports": reports}))["results"]
        assert all("finished" in result for result in results), results


class Peer(Queue):
    async def create(self, names: list[str]) -> None:
        rows = [{"input": TASK, "mode": "train", "metadata": {"name": name}} for name in names]
        await self.post("/queues/rollouts/enqueue", {"rollouts": rows})

    async def claim(self, limit: int) -> list[Any]:
        return await self.post("/queues/rollouts/dequeue", {"limit": limit, "worker_id": "bench"})

    async def finish(self, claimed: list[Any]) -> None:
        for row in claimed:  # it takes one at a time
            path = f"/rollouts/{row['rollout_id']}/attempts/{row['attempt']['attempt_id']}"
            await self.post(path, {"status": "succeeded"})


async def round_trip(queue: Queue, count: int, prefix: str) -> float:
    """Seconds until so many rollouts have been created, claimed and finished."""
    left = iter(range(0, count, ENQUEUED))

    async def create() -> None:
        for start in left:
            await queue.create([f"{prefix}-{start + n}" for n in range(min(ENQUEUED, count - start))])

    async def work() -> None:
        while rows := await queue.claim(CLAIMED):
            await queue.finish(rows)

    start = time.perf_counter()
    await asyncio.gather(*(create() for _ in range(WORKERS)))
    await asyncio.gather(*(work() for _ in range(WORKERS)))
    return time.perf_counter() - start


async def claims_beside(queue: Queue, database: Path, stored: int) -> None:
    """What claims take before and after `stored` more rollouts have ended."""

    async def claims(prefix: str) -> float:
        took = []
        for number in range(200):
            await queue.create([f"{prefix}-{number}-{n}" for n in range(16)])
            start = time.perf_counter()
            rows = await queue.claim(16)
            took.append((time.perf_counter() - start) * 1e3)
            await queue.finish(rows)
        return statistics.median(took)

    before = await claims("few")
    start = time.perf_counter()
    fill(database, stored)
    print(f"\n{stored:,} ended rollouts written in {time.perf_counter() - start:.0f} s")
    after = await claims("many")
    print(
        f"claim of 16: {before:.2f} ms before, {after:.2f} ms after; ratio {after / before:.2f} (target: ≤ 1.2)"
    )


def fill(database: Path, count: int) -> None:
    """Copies of a rollout that has ended, with its attempt, straight into SQLite."""
    connection = sqlite3.connect(database, timeout=60)
    for table, where in (("rollouts", "state = 'succeeded'"), ("attempts", "state = 'succeeded'")):
        names = [row[1] for row in connection.execute(f"PRAGMA table_info({table})") if row[1] != "seq"]
        values = ", ".join("'filled-' || value" if name == "rollout_id" else name for name in names)
        for start in range(0, count, 50_000):
            with connection:
                connection.execute(
                    f"WITH RECURSIVE n(value) AS (SELECT ? UNION ALL SELECT value + 1 FROM n WHERE value + 1 < ?) "
                    f"INSERT INTO {table} ({', '.join(names)}) "
                    f"SELECT {values} FROM n, (SELECT * FROM {table} WHERE {where} LIMIT 1)",
                    (start, min(start + 50_000, count)),
                )
    connection.close()


async def start_sink() -> str:
    """A collector that says yes."""

    async def traces(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(content_type="application/x-protobuf")

    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/v1/traces", traces)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    return f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def running(command: list[str], port: int) -> Iterator[int]:
    process = subprocess.Popen(command)
    try:
        deadline = time.monotonic() + 120
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            if process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"{command[0]} did not start")
            time.sleep(0.05)
        yield process.pid
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(15)
        process.kill()


def peer_python() -> Path:
    """The peer's own interpreter; made on first use."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "agentlightning" / "benchmarks"
    python = cache / PEER / "bin" / "python"
    if not python.exists():
        print(f"installing {PEER} into {python.parent.parent} …", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(python.parent.parent)], check=True)
        uv = shutil.which("uv")
        install = (
            [uv, "pip", "install", "-q", "--python", str(python)]
            if uv
            else [str(python), "-m", "pip", "install", "-q"]
        )
        subprocess.run([*install, PEER], check=True)
    return python


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
