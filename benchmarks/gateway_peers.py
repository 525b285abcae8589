"""The gateway beside other proxies that agents call, in one run: CPU, throughput, memory.

    make bench-gateway                                        # some ten minutes
    python benchmarks/gateway_peers.py --peers litellm --rounds 3

Peers, each in an environment of its own that `benchmarks/peers.py` makes: the server of agentlightning 1.0 and LiteLLM's
proxy, with their defaults; and a bare Starlette pass-through that records nothing. The gateway syncs each call to disk
before its last byte. Engine, sink and load are those of `benchmarks/gateway.py`; the slow peers get fewer requests per round.
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peers

import gateway as base


class Process(base.Process):
    """A server that runs in a peer's environment."""

    def __init__(self, command: list[str], port: int, folder: Path, **environment: str) -> None:
        self.url = f"http://127.0.0.1:{port}"
        with (folder / f"{port}.log").open("wb") as log:
            self.process = subprocess.Popen(
                command, cwd=folder, env={**os.environ, **environment}, stdout=log, stderr=subprocess.STDOUT
            )
        deadline = time.monotonic() + 240
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                return
            if self.process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"{command[0]} did not start:\n{(folder / f'{port}.log').read_text()[-2000:]}")
            time.sleep(0.1)


def agentlightning(engine: str, folder: Path) -> Process:
    home, port = peers.environment("agentlightning-1.0"), base.free_port()
    assert home is not None
    command = [str(home / "bin" / "python"), "-m", "agentlightning.server", "host=127.0.0.1", f"port={port}"]
    server = Process([*command, f"hydra.run.dir={folder}"], port, folder)
    _post(f"{server.url}/api/models", [{"model": "Qwen/Qwen2.5-7B-Instruct", "endpoint": f"{engine}/v1"}])
    rollout = _post(f"{server.url}/api/rollouts", [{"rollout_id": "bench", "input": {}}])
    rollout_id = rollout[0]["rollout_id"] if isinstance(rollout, list) else rollout["rollout_id"]
    server.url += f"/proxy/rollout/{rollout_id}/attempt/0/mode/train/openai"
    return server


def litellm(engine: str, folder: Path) -> Process:
    home, port = peers.environment("litellm"), base.free_port()
    assert home is not None
    model = {
        "model_name": "default",
        "litellm_params": {"model": "openai/m", "api_base": f"{engine}/v1", "api_key": "none"},
    }
    config = folder / "litellm.yaml"
    config.write_text(json.dumps({"model_list": [model]}))  # JSON is YAML
    command = [
        str(home / "bin" / "litellm"),
        "--config",
        str(config),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    return Process(
        command,
        port,
        folder,
        LITELLM_LOCAL_MODEL_COST_MAP="True",
        LITELLM_LOG="ERROR",
        LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY="true",
    )


def _post(url: str, body: Any) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


@dataclass
class Figure:
    """Per round: CPU milliseconds per request, requests per second."""

    cpu: list[float] = field(default_factory=list)
    rate: list[float] = field(default_factory=list)


SLOW = {"agentlightning 1.0": 5, "LiteLLM": 10}
"""By how much fewer requests these get per round: figures are per request."""


def measure(
    servers: dict[str, base.Process], engine: base.Process, options: argparse.Namespace
) -> dict[str, dict[str, Figure]]:
    figures: dict[str, dict[str, Figure]] = {"plain": {}, "stream": {}}
    for turn in range(-1, options.rounds):  # the first one warms up
        for case, total, fields in (
            ("plain", options.requests, {}),
            ("stream", options.streams, {"stream": True}),
        ):
            for name, server in servers.items():
                if case == "stream" and name == "agentlightning 1.0":
                    continue  # it refuses them
                print(f"… round {turn + 1}: {case}, {name}", file=sys.stderr, flush=True)
                count = max(options.connections, total // SLOW.get(name, 1))
                before = server.cpu()
                wall, _ = asyncio.run(base.load(server.url, count, options.connections, **fields))
                if turn >= 0:
                    figure = figures[case].setdefault(name, Figure())
                    figure.cpu.append((server.cpu() - before) / count * 1e3)
                    figure.rate.append(count / wall)
    return figures


def waits(servers: dict[str, base.Process], engine: base.Process, name: str) -> float:
    """Median milliseconds that a proxy adds over an engine that takes 30 ms, at 32 connections."""
    _, direct = asyncio.run(base.load(engine.url, 32 * 12, 32, seed=30))
    _, through = asyncio.run(base.load(servers[name].url, 32 * 12 // SLOW.get(name, 1), 32, seed=30))
    return (statistics.median(through) - statistics.median(direct)) * 1e3


def report(
    figures: dict[str, dict[str, Figure]], added: dict[str, float], servers: dict[str, base.Process]
) -> None:
    ours, streams = figures["plain"]["gateway"], figures["stream"]["gateway"]
    print(
        f"\n{'medians':22}{'CPU ms':>9}{'ours/it':>9}{'req/s':>8}{'ours/it':>9}{'+p50 ms':>9}{'CPU ms per':>12}{'':>9}{'MiB':>7}"
    )
    print(f"{'':22}{'plain':>9}{'':>9}{'':>8}{'':>9}{'':>9}{'stream':>12}{'ours/it':>9}")
    for name, figure in figures["plain"].items():
        cpu, rate = statistics.median(figure.cpu), statistics.median(figure.rate)
        stream = figures["stream"].get(name)
        shown = f"{statistics.median(stream.cpu):12.2f}" if stream else f"{'refused':>12}"
        beside = (
            f"{_ratio(statistics.median(streams.cpu), statistics.median(stream.cpu)):>9}"
            if stream
            else " " * 9
        )
        print(
            f"{name:22}{cpu:9.2f}{_ratio(statistics.median(ours.cpu), cpu):>9}{rate:8.0f}"
            f"{statistics.median(ours.rate) / rate:8.1f}×{added[name]:9.1f}{shown}{beside}{servers[name].resident():7.0f}"
        )
    print(
        "\ntargets: gateway ≤ 0.6 ms CPU per recorded call; ≥ 8× agentlightning 1.0's requests/s; ≤ 1/30 of LiteLLM's CPU,\n"
        "≤ 1/50 on streams; p50 added at 32 connections ≤ 5 ms; first byte of a stream delayed ≤ 1 ms; memory flat"
    )


def _ratio(ours: float, theirs: float) -> str:
    return f"{ours / theirs:.2f}×" if ours / theirs > 0.2 else f"1/{theirs / ours:.0f}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = ("agentlightning-1.0", "litellm")
    parser.add_argument("--requests", type=int, default=2000, help="plain calls per round")
    parser.add_argument("--streams", type=int, default=200, help="streamed calls per round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument(
        "--flat", type=int, default=20_000, help="calls after which memory is read again (0: not)"
    )
    parser.add_argument("--peers", nargs="*", default=list(known), choices=known, metavar="PEER")
    options = parser.parse_args()
    options.peers = [name for name in options.peers if peers.environment(name)]
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {options.rounds} rounds"
    )
    running: list[base.Process] = []
    with tempfile.TemporaryDirectory() as name:
        folder, here = Path(name), str(Path(base.__file__).resolve())
        try:

            def start(what: str, target: str) -> base.Process:
                port = base.free_port()
                running.append(base.Process([here, "--serve", what, str(port), target], port))
                return running[-1]

            engine, sink = start("engine", "-"), start("sink", f"{folder}/sink")
            port = base.free_port()
            command = [
                "-m",
                "agentlightning.gateway.cli",
                "--state",
                str(folder / "gateway"),
                "--port",
                str(port),
            ]
            command += ["--collector", sink.url, "--engine", engine.url, "--log-level", "warning"]
            ours = base.Process(command, port)
            running.append(ours)
            base.TOKEN = base.claim(ours.url)
            servers = {"gateway": ours, "pass-through": start("peer", engine.url)}
            if "agentlightning-1.0" in options.peers:
                running.append(server := agentlightning(engine.url, folder))
                servers["agentlightning 1.0"] = server
            if "litellm" in options.peers:
                running.append(server := litellm(engine.url, folder))
                servers["LiteLLM"] = server
            figures = measure(servers, engine, options)
            added = {name: waits(servers, engine, name) for name in servers}
            report(figures, added, servers)
            first = {
                url: asyncio.run(base.first_bytes(url, 100))
                for url in (engine.url, servers["pass-through"].url, ours.url)
            }
            _, bare, delay = ((value - first[engine.url]) * 1e3 for value in first.values())
            print(
                f"first byte of a stream, over the engine's own: pass-through {bare:+.2f} ms, gateway {delay:+.2f} ms"
            )
            if options.flat:
                asyncio.run(base.load(ours.url, options.flat // 4, options.connections))
                before = ours.resident()
                asyncio.run(base.load(ours.url, options.flat, options.connections))
                print(f"memory over {options.flat} more calls: {before:.0f} → {ours.resident():.0f} MiB")
        finally:
            for process in reversed(running):  # who calls, before whom it calls
                process.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
