"""What a backlog costs: memory while the sink stands still, time to the first ack after kill -9, time to catch up.

    python benchmarks/collector_backlog.py             # 1 GB of journal; some two minutes, 3 GB of disk
    python benchmarks/collector_backlog.py --mb 100

A journal of gateway spans of 10 kB is filled; a collector is started on it whose data set cannot be
written (a file stands where a folder should be), killed, and started again; then the sink works, all
attempts are sealed, and every span must be in the data set. Memory is the peak resident set of each
process since its start, libraries included.
"""

import argparse
import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx

from agentlightning.collector.journal import Journal, Kind
from agentlightning.proto import transitions_pb2 as pb
from agentlightning.proto.dataset import open_dataset
from agentlightning.proto.process import read_ready
from agentlightning.proto.transitions_pb2_grpc import TransitionsStub
from collector import CALLS, cpu_seconds, make_load

MIB = 1 << 20
TARGET_MEMORY, TARGET_READY = 200, 2.0
"""MiB resident, and seconds."""


def fill(folder: Path, megabytes: int) -> dict[str, int]:
    """Write a journal as a receiver does; returns the attempts and their calls."""
    attempts: dict[str, int] = {}

    async def write() -> None:
        journal = Journal(folder, durability="os")
        size = number = 0
        while size < megabytes * 1_000_000:
            load = make_load(f"backlog{number}", 50 * CALLS, 50, packed=True)
            for body in load.bodies:
                await journal.append(Kind.TRACES, body)
                size += len(body)
            attempts.update(dict.fromkeys(load.rollouts, CALLS))
            number += 1
        await asyncio.to_thread(journal.close)

    asyncio.run(write())
    return attempts


@contextlib.contextmanager
def collector(place: Path) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, str], float]]:
    """A collector, its addresses, and the seconds until an export was acknowledged."""
    ready = place / "ready.json"
    ready.unlink(missing_ok=True)
    code = "import sys; from agentlightning.collector.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "--data", str(place / "data"), "--state", str(place / "state")]
    began = time.monotonic()
    process = subprocess.Popen(
        [
            *command,
            "--ready-file",
            str(ready),
            "--http-port",
            "0",
            "--grpc-port",
            "0",
            "--log-level",
            "error",
        ],
        stderr=subprocess.DEVNULL,
    )
    try:
        while (addresses := read_ready(ready)) is None:
            if process.poll() is not None:
                raise SystemExit("The collector did not start.")
            time.sleep(0.01)
        body = make_load("first", 1, 1, packed=True).bodies[0]
        headers = {"content-type": "application/x-protobuf"}
        answer = httpx.post(f"{addresses['http']}/v1/traces", content=body, headers=headers, trust_env=False)
        if answer.status_code != 200:
            raise SystemExit(f"Refused: {answer.status_code}.")
        yield process, addresses, time.monotonic() - began
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)


def child_of(pid: int) -> int:
    while True:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if children:
            return int(children[0])
        time.sleep(0.05)


def memory(pid: int) -> dict[str, int]:
    """Resident set in MiB: its peak, and what of it is now the process's own."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {name: int(fields[name].split()[0]) // 1024 for name in ("VmHWM", "RssAnon")}


def status(addresses: dict[str, str]) -> Any:
    return httpx.get(f"{addresses['http']}/status", trust_env=False, timeout=30).json()


def wait_for(addresses: dict[str, str], name: str, limit: int) -> float:
    began = time.monotonic()
    while status(addresses)[name] > limit:
        time.sleep(0.2)
    return time.monotonic() - began


def seal(address: str, attempts: dict[str, int], *, timeout: float) -> int:
    wanted = [pb.Attempt(rollout_id=rollout, attempt=0) for rollout in attempts]
    options = [("grpc.max_receive_message_length", 64 * MIB)]
    with grpc.insecure_channel(address, options) as channel:
        request = pb.SealRequest(attempts=wanted, timeout_s=timeout)
        return len(TransitionsStub(channel).Seal(request, timeout=timeout + 30).sealed)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mb", type=int, default=1000, help="of journal (default %(default)s)")
    parser.add_argument("--dir", help="where to write (default: the system's temporary directory)")
    options = parser.parse_args()
    lines: list[tuple[str, str, str]] = []
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        place = Path(folder)
        attempts = fill(place / "state" / "journal", options.mb)
        spans = sum(attempts.values())
        with collector(place) as (process, addresses, seconds):
            lines.append(("first start to first ack", f"{seconds:.2f} s", ""))
            caught = wait_for(addresses, "journal_unread_bytes", 0)
            converter = child_of(process.pid)
            lines.append(("journal read, nothing written", f"{caught:.0f} s", ""))
            (place / "data" / "transitions").touch()  # the sink stands still
            seal(addresses["grpc"], attempts, timeout=0)
            time.sleep(5)  # it tries to write
            held = (memory(process.pid), memory(converter))
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        resident = sum(part["VmHWM"] for part in held)
        lines.append(
            (f"receiver, peak resident with {options.mb} MB unconverted", f"{held[0]['VmHWM']} MiB", "")
        )
        lines.append(("converter, peak resident", f"{held[1]['VmHWM']} MiB", f"≤ {TARGET_MEMORY} MiB"))
        lines.append(("both", f"{resident} MiB", ""))
        (place / "data" / "transitions").unlink()
        with collector(place) as (process, addresses, seconds):
            lines.append(("kill -9 to first ack", f"{seconds:.2f} s", f"< {TARGET_READY:.0f} s"))
            converter = child_of(process.pid)
            began, cpu = time.monotonic(), cpu_seconds(converter)
            if seal(addresses["grpc"], attempts, timeout=600) != len(attempts):
                raise SystemExit("Attempts were lost.")
            wall, cpu = time.monotonic() - began, cpu_seconds(converter) - cpu
            lines.append(
                ("all of it in the data set", f"{wall:.0f} s, {spans / cpu:,.0f} spans per CPU s", "")
            )
            lines.append(
                ("converter, peak resident", f"{memory(converter)['VmHWM']} MiB", f"≤ {TARGET_MEMORY} MiB")
            )
        rows = open_dataset(place / "data").table("transitions", columns=["call_id"]).column("call_id")
        known = set(rows.to_pylist())
        lines.append(("spans lost, rows twice", f"{spans - len(known)}, {len(rows) - len(known)}", "0, 0"))
    print(f"{spans:,} spans of {len(attempts):,} attempts\n\n{'':52}{'measured':>32}{'target':>14}")
    for what, measured, target in lines:
        print(f"{what:52}{measured:>32}{target:>14}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
