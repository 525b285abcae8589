"""Kill -9, again and again: every acknowledged span must be in the data set exactly once.

    python tests/support/torture.py --kills 200 [--seed N]

A collector gets the spans of many rollouts in shuffled order, a tenth of the bodies twice, while now
its receiver, now its converter is killed at a random moment; the sender repeats what was not
acknowledged. Seals, some of them too early, come in between, and compaction runs. At the end of each
round everything is sealed, and the rows of each table are compared with what was sent.
"""

import argparse
import contextlib
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import httpx
import spans

from agentlightning.proto import ids
from agentlightning.proto import transitions_pb2 as pb
from agentlightning.proto.dataset import open_dataset
from agentlightning.proto.process import read_ready
from agentlightning.proto.transitions_pb2_grpc import TransitionsStub

__all__ = ["Outcome", "torture"]

KILLS_PER_ROUND = 10
ROLLOUTS = 40
"""Of a round."""
CALLS = 4
PATIENCE = 120.0
"""Seconds until a collector that does not recover fails the test."""
CODE = "import sys; from agentlightning.collector.cli import main; sys.exit(main())"


@dataclass
class Outcome:
    """What came of it."""

    kills: Counter[str] = field(default_factory=Counter)
    acknowledged: int = 0
    """Spans."""
    bodies_twice: int = 0
    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        killed = ", ".join(f"{count} of the {name}" for name, count in sorted(self.kills.items()))
        return (
            f"{sum(self.kills.values())} kills ({killed}), {self.acknowledged:,} spans acknowledged, "
            f"{self.bodies_twice:,} bodies sent twice: {len(self.lost)} lost, {len(self.doubled)} doubled"
        )


class Victim:
    """A collector that is started again whenever it was killed."""

    def __init__(self, root: Path) -> None:
        self.data = root / "data"
        self._root = root
        self._process: subprocess.Popen[bytes] | None = None
        self.http = self.grpc = ""
        self.up = threading.Event()
        self.start()

    def start(self) -> None:
        ready = self._root / "ready.json"
        ready.unlink(missing_ok=True)
        places = ["--data", str(self.data), "--state", str(self._root / "state"), "--ready-file", str(ready)]
        options = ["--http-port", "0", "--grpc-port", "0", "--compact-files", "4"]
        with open(self._root / "collector.log", "ab") as log:
            self._process = subprocess.Popen([sys.executable, "-c", CODE, *places, *options], stderr=log)
        deadline = time.monotonic() + PATIENCE
        while (addresses := read_ready(ready)) is None:
            assert self._process.poll() is None, (self._root / "collector.log").read_text()[-2000:]
            assert time.monotonic() < deadline, "the collector does not start"
            time.sleep(0.01)
        self.http, self.grpc = addresses["http"], addresses["grpc"]
        self.up.set()

    def kill(self, what: str) -> bool:
        """Kill one of its processes; whether it was there."""
        assert self._process is not None
        if what == "receiver":
            self.up.clear()
            self._process.kill()
            self._process.wait()
            self.start()
            return True
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        with contextlib.suppress(ProcessLookupError, FileNotFoundError, IndexError):
            os.kill(int(children.read_text().split()[0]), 9)
            return True
        return False

    def end(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self._process.kill()


def torture(root: Path, *, kills: int, seed: int) -> Outcome:
    """Kill so often; raises AssertionError if a collector does not recover at all."""
    draw = random.Random(seed)
    outcome = Outcome()
    victim = Victim(root)
    sent: set[tuple[str, str]] = set()
    calls: set[tuple[str, str]] = set()
    try:
        turn = 0
        while sum(outcome.kills.values()) < kills:
            _round(
                victim,
                draw,
                turn,
                min(KILLS_PER_ROUND, kills - sum(outcome.kills.values())),
                outcome,
                sent,
                calls,
            )
            turn += 1
        _compare(victim.data, sent, calls, outcome)
    finally:
        victim.end()
    return outcome


def _round(
    victim: Victim,
    draw: random.Random,
    turn: int,
    kills: int,
    outcome: Outcome,
    sent: set[tuple[str, str]],
    calls: set[tuple[str, str]],
) -> None:
    rollouts = [f"t{turn}-{n}" for n in range(ROLLOUTS)]
    pieces = [
        piece
        for rollout in rollouts
        for piece in (
            *(spans.gateway_call(rollout, n) for n in range(CALLS)),
            spans.rollout_span(rollout, CALLS),
            spans.evaluation(ids.derived_span_id("verdict", rollout), 1.0, resource=spans.identity(rollout)),
        )
    ]
    draw.shuffle(pieces)
    bodies = []
    while pieces:
        size = draw.randint(1, 4)
        bodies.append(spans.body(*pieces[:size]))
        sent.update((made.trace_id.hex(), made.span_id.hex()) for _, _, made in pieces[:size])
        outcome.acknowledged += len(pieces[:size])
        pieces = pieces[size:]
    calls.update((rollout, ids.call_id(rollout, 0, str(n))) for rollout in rollouts for n in range(CALLS))
    copies = draw.choices(bodies, k=max(1, len(bodies) // 10))
    outcome.bodies_twice += len(copies)
    bodies += copies
    draw.shuffle(bodies)
    early = draw.sample(rollouts, 10)
    failed: list[BaseException] = []
    moments = [threading.Event() for _ in bodies]
    sender = threading.Thread(target=_send, args=(victim, bodies, early, draw.random(), moments, failed))
    sender.start()
    for number in sorted(draw.sample(range(len(bodies)), kills)):  # each in the midst of the sending
        what = draw.choice(["receiver", "converter"])
        assert moments[number].wait(PATIENCE), "nothing is acknowledged any more"
        time.sleep(draw.random() * 0.05)
        while not victim.kill(what):
            time.sleep(0.05)  # it is being started
        outcome.kills[what] += 1
    sender.join(PATIENCE)
    assert not sender.is_alive(), "the sender found nobody"
    assert not failed, failed
    _seal(victim, dict.fromkeys(rollouts, CALLS), PATIENCE)


def _send(
    victim: Victim,
    bodies: list[bytes],
    early: list[str],
    share: float,
    moments: list[threading.Event],
    failed: list[BaseException],
) -> None:
    """Each body until it is acknowledged; `moments` tell when each is begun."""
    try:
        with httpx.Client(trust_env=False, timeout=10) as client:
            for number, (body, moment) in enumerate(zip(bodies, moments, strict=True)):
                moment.set()
                _until_acknowledged(victim, client, body)
                if number == int(len(bodies) * share):
                    with contextlib.suppress(grpc.RpcError):  # it may have died
                        _ask(victim, dict.fromkeys(early), 0.2)
    except BaseException as error:  # noqa: BLE001 - told to the test's thread
        failed.append(error)
        for moment in moments:
            moment.set()


def _until_acknowledged(victim: Victim, client: httpx.Client, body: bytes) -> None:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        victim.up.wait(PATIENCE)
        try:
            headers = {"content-type": "application/x-protobuf"}
            answer = client.post(f"{victim.http}/v1/traces", content=body, headers=headers)
        except httpx.TransportError:
            time.sleep(0.02)
            continue
        if answer.status_code == 200:
            return
        assert answer.status_code == 503, answer.text
        time.sleep(0.05)
    raise AssertionError("nothing is acknowledged any more")


def _ask(victim: Victim, attempts: dict[str, int | None], timeout: float) -> int:
    wanted = [pb.Attempt(rollout_id=r, attempt=0, calls_expected=n) for r, n in attempts.items()]
    with grpc.insecure_channel(victim.grpc) as channel:
        request = pb.SealRequest(attempts=wanted, timeout_s=timeout)
        return len(TransitionsStub(channel).Seal(request, timeout=timeout + 5).sealed)


def _seal(victim: Victim, attempts: dict[str, int], patience: float) -> None:
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        with contextlib.suppress(grpc.RpcError):
            if _ask(victim, dict(attempts), 5.0) == len(attempts):
                return
        time.sleep(0.1)
    raise AssertionError("the attempts are not sealed")


def _compare(data: Path, sent: set[tuple[str, str]], calls: set[tuple[str, str]], outcome: Outcome) -> None:
    deadline = time.monotonic() + 30  # a late verdict makes one more generation, which nobody has sealed
    while True:
        dataset = open_dataset(data)
        rows = dataset.table("spans", columns=["trace_id", "span_id"])
        keys = list(zip(*(rows.column(name).to_pylist() for name in rows.column_names), strict=True))
        found = Counter(keys)
        if set(found) >= sent or time.monotonic() > deadline:
            break
        time.sleep(0.5)
    rows = dataset.table("transitions", columns=["rollout_id", "call_id"])
    made = Counter(zip(*(rows.column(name).to_pylist() for name in rows.column_names), strict=True))
    attempts = Counter(dataset.table("rollouts", columns=["rollout_id"]).column("rollout_id").to_pylist())
    outcome.lost += [f"span {key}" for key in sent - set(found)] + [
        f"call {key}" for key in calls - set(made)
    ]
    for what, counts, known in (("span", found, sent), ("call", made, calls)):
        outcome.doubled += [f"{what} {key}" for key, count in counts.items() if count > 1 or key not in known]
    outcome.doubled += [f"rollout {key}" for key, count in attempts.items() if count > 1]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        outcome = torture(Path(folder), kills=options.kills, seed=options.seed)
    print(outcome)
    for sentence in [*outcome.lost, *outcome.doubled][:20]:
        print(sentence)
    return 1 if outcome.lost or outcome.doubled else 0


if __name__ == "__main__":
    sys.exit(main())
