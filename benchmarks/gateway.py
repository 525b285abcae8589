"""What recording costs: CPU of the gateway per model call, against a bare pass-through in the same run.

    python benchmarks/gateway.py [--requests 1000] [--streams 100] [--rounds 3] [--memory 20000]

Engine, OTLP sink, peer and gateway are processes of their own on loopback; the load comes from this one. The engine
answers 33 kB with 2,200 token ids at once, or streams 200 chunks. The sink syncs every request to disk before its
acknowledgement. The peer is Starlette and an aiohttp client that relay the bytes and record nothing. CPU is the
process's own, user and system, from /proc. Rounds alternate, and medians are shown.
"""

import argparse
import asyncio
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp

TOKENS = 2200
CHUNKS = 200
TOKEN = "none"
"""The key of every call; the gateway's rollout token once there is one."""
REQUEST = {
    "model": "default",
    "messages": [{"role": "user", "content": "How many pens? " * 20}],
    "max_tokens": 4096,
}


def plain_answer() -> bytes:
    content = [{"token": "pen", "logprob": -0.125, "bytes": None, "top_logprobs": []}] * 200
    choice = {"index": 0, "message": {"role": "assistant", "content": "pen " * 200}, "finish_reason": "stop"}
    choice |= {"token_ids": list(range(200)), "logprobs": {"content": content}}
    answer = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [choice],
    }
    answer |= {"prompt_token_ids": list(range(10_000, 10_000 + TOKENS - 200)), "model_version": 1}
    return json.dumps(answer, separators=(",", ":")).encode()


def stream_events() -> list[bytes]:
    events = []
    for number in range(CHUNKS):
        entry = {"token": "pen", "logprob": -0.125, "bytes": None, "top_logprobs": []}
        choice: dict[str, Any] = {"index": 0, "delta": {"content": f"pen{number} "}, "finish_reason": None}
        choice |= {"token_ids": [number], "logprobs": {"content": [entry]}}
        data = {
            "id": "chatcmpl-1",
            "object": "chat.completion.chunk",
            "created": 1,
            "model": "m",
            "choices": [choice],
        }
        if number == 0:
            data |= {"prompt_token_ids": list(range(TOKENS)), "model_version": 1}
        if number == CHUNKS - 1:
            choice["finish_reason"] = "stop"
        events.append(b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n")
    return [*events, b"data: [DONE]\n\n"]


# -------------------------------------------------------------------- the servers


def serve(what: str, port: int, target: str) -> None:
    import uvicorn

    app = {"engine": engine_app, "sink": sink_app, "peer": peer_app}[what](target)
    uvicorn.run(
        app,
        host="127.0.0.1",
        port=port,
        lifespan="off",
        log_level="error",
        access_log=False,
        timeout_keep_alive=600,
    )


async def read(receive: Callable[[], Awaitable[Any]]) -> bytes:
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            return body


def engine_app(_target: str) -> Any:
    plain, events = plain_answer(), stream_events()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = await read(receive)
        if scope["path"] != "/v1/chat/completions":
            answer = b'{"data": [{"id": "m"}]}' if scope["path"] == "/v1/models" else b"{}"
            await reply(send, answer)
            return
        request = json.loads(body)
        if delay := request.get("seed"):  # a field that every proxy passes on
            await asyncio.sleep(delay / 1000)
        if not request.get("stream"):
            await reply(send, plain)
            return
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"content-type", b"text/event-stream")],
            }
        )
        for event in events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
            await asyncio.sleep(0.0005)  # so that chunks travel one by one, as they do from an engine
        await send({"type": "http.response.body", "body": b""})

    return app


def sink_app(target: str) -> Any:
    handle = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    async def app(_scope: Any, receive: Any, send: Any) -> None:
        os.write(handle, await read(receive))
        await asyncio.to_thread(os.fdatasync, handle)
        await reply(send, b"")

    return app


async def reply(send: Any, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def peer_app(target: str) -> Any:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response, StreamingResponse
    from starlette.routing import Route

    sessions: list[aiohttp.ClientSession] = []

    async def chat(request: Request) -> Response:
        if not sessions:
            sessions.append(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        body = await request.body()
        url = f"{target}/v1/chat/completions"
        response = await sessions[0].post(url, data=body, headers={"content-type": "application/json"})
        kind = response.headers["content-type"]
        if kind.startswith("text/event-stream"):

            async def relay() -> AsyncIterator[bytes]:
                async with response:
                    async for chunk in response.content.iter_any():
                        yield chunk

            return StreamingResponse(relay(), media_type=kind)
        async with response:
            return Response(await response.read(), media_type=kind)

    return Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"])])


# -------------------------------------------------------------------- the measurement


class Process:
    """A server that is measured."""

    def __init__(self, command: list[str], port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.process = subprocess.Popen([sys.executable, *command])
        deadline = time.monotonic() + 60
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return
            if self.process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"{command[0]} did not start")
            time.sleep(0.05)

    def cpu(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def resident(self) -> float:
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def claim(url: str) -> str:
    """The token of a rollout, as agents have: with it a call is fenced, remembered and counted."""

    def post(path: str, body: Any) -> Any:
        request = urllib.request.Request(
            f"{url}/api/{path}", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            return json.loads(answer.read())

    rollout = {"rollout_id": "r", "run_id": "run", "group_id": "g", "task_id": "t", "split": "train"}
    post("rollouts", {"rollouts": [{**rollout, "policy": "default", "input": {}}]})
    claimed = post("rollouts/claim", {"controller_id": "c", "limit": 1, "lease_s": 3600, "wait_s": 0})
    return str(claimed["rollouts"][0]["token"])


async def load(url: str, count: int, connections: int, **fields: Any) -> tuple[float, list[float]]:
    """Send `count` calls over `connections`. Returns wall seconds, and seconds per call."""
    body = json.dumps({**REQUEST, **fields}).encode()
    took: list[float] = []
    left = iter(range(count))

    async def work(session: aiohttp.ClientSession) -> None:
        for _ in left:
            start = time.perf_counter()
            headers = {"content-type": "application/json", "authorization": f"Bearer {TOKEN}"}
            async with session.post(f"{url}/v1/chat/completions", data=body, headers=headers) as response:
                answer = await response.read()
                if response.status != 200 or (fields.get("stream") and b"[DONE]" not in answer):
                    sys.exit(f"{url} answered {response.status}: {answer[:200]!r} … {answer[-300:]!r}")
            took.append(time.perf_counter() - start)

    start = time.perf_counter()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(work(session) for _ in range(connections)))
    return time.perf_counter() - start, took


async def first_bytes(url: str, count: int) -> float:
    """Seconds until the first byte of a stream, median."""
    body, took = json.dumps({**REQUEST, "stream": True}).encode(), []
    headers = {"content-type": "application/json", "authorization": f"Bearer {TOKEN}"}
    async with aiohttp.ClientSession() as session:
        for _ in range(count):
            start = time.perf_counter()
            async with session.post(f"{url}/v1/chat/completions", data=body, headers=headers) as response:
                await response.content.readany()
                took.append(time.perf_counter() - start)
                await response.read()
    return statistics.median(took)


def measure(servers: dict[str, Process], engine: Process, options: argparse.Namespace) -> None:
    cases: list[tuple[str, int, dict[str, Any]]] = [
        (f"plain, 33 kB, {TOKENS} ids", options.requests, {}),
        (f"stream of {CHUNKS} chunks", options.streams, {"stream": True}),
    ]
    print(f"{'':28}{'peer':>12}{'gateway':>12}{'ratio':>8}   {'peer req/s':>11}{'gateway req/s':>14}")
    for name, count, fields in cases:
        cpu: dict[str, list[float]] = {key: [] for key in servers}
        rate: dict[str, list[float]] = {key: [] for key in servers}
        for round_ in range(options.rounds + 1):
            for key, server in servers.items():
                before = server.cpu()
                wall, _ = asyncio.run(load(server.url, count, options.connections, **fields))
                if round_:  # the first round warms up
                    cpu[key].append((server.cpu() - before) / count * 1e3)
                    rate[key].append(count / wall)
        peer, ours = (statistics.median(cpu[key]) for key in ("peer", "gateway"))
        rates = (statistics.median(rate[key]) for key in ("peer", "gateway"))
        print(
            f"{name:28}{peer:9.2f} ms{ours:9.2f} ms{ours / peer:7.1f}×   {next(rates):11.0f}{next(rates):14.0f}"
        )
    waits = {}
    for key, url in {"direct": engine.url, **{k: s.url for k, s in servers.items()}}.items():
        _, took = asyncio.run(load(url, 32 * 12, 32, seed=30))
        waits[key] = statistics.median(took) * 1e3
    added = waits["gateway"] - waits["direct"]
    print(
        f"p50 over a 30 ms engine, 32 connections: direct {waits['direct']:.1f}, peer {waits['peer']:.1f}, "
        f"gateway {waits['gateway']:.1f} ms (+{added:.1f}, each answer synced to disk before its last byte)"
    )
    first = {}
    for key, server in servers.items():
        first[key] = asyncio.run(first_bytes(server.url, options.streams))
    direct = asyncio.run(first_bytes(engine.url, options.streams))
    delays = {key: (value - direct) * 1e3 for key, value in first.items()}
    print(
        f"first byte of a stream, one connection, p50: peer +{delays['peer']:.2f}, "
        f"gateway +{delays['gateway']:.2f} ms"
    )
    before = servers["gateway"].resident()
    asyncio.run(load(servers["gateway"].url, options.memory, options.connections))
    print(
        f"resident: gateway {before:.0f} MiB, after {options.memory} further calls "
        f"{servers['gateway'].resident():.0f} MiB"
    )
    print(
        f"resident: peer {servers['peer'].resident():.0f} MiB, gateway {servers['gateway'].resident():.0f} MiB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=1000, help="plain calls per round")
    parser.add_argument("--streams", type=int, default=100, help="streamed calls per round")
    parser.add_argument("--memory", type=int, default=20_000, help="calls between two looks at the memory")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--serve", nargs=3, metavar=("WHAT", "PORT", "TARGET"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve[0], int(options.serve[1]), options.serve[2])
        return
    with tempfile.TemporaryDirectory(dir=".") as folder:
        here, running = str(Path(__file__).resolve()), []
        try:

            def start(what: str, target: str) -> Process:
                port = free_port()
                running.append(Process([here, "--serve", what, str(port), target], port))
                return running[-1]

            engine, sink = start("engine", "-"), start("sink", f"{folder}/sink")
            peer, port = start("peer", engine.url), free_port()
            command = ["-m", "agentlightning.gateway.cli", "--state", folder, "--port", str(port)]
            command += ["--collector", sink.url, "--engine", engine.url, "--log-level", "warning"]
            running.append(Process(command, port))
            globals()["TOKEN"] = claim(running[-1].url)
            measure({"peer": peer, "gateway": running[-1]}, engine, options)
        finally:
            for process in running:
                process.stop()


if __name__ == "__main__":
    main()
