"""Engines that misbehave, a collector that is away, and a gateway that is killed under load, with a real collector.

No answer reaches an agent unrecorded, none is recorded twice, and the ledger's counts agree with the data set. CI runs a
short form; `make torture-gateway` kills 200 times.
"""

import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentlightning.proto.dataset import open_dataset
from agentlightning.proto.process import read_ready

KILLS = int(os.environ.get("TORTURE_KILLS", "10"))
OUTAGE_SECONDS = float(os.environ.get("TORTURE_OUTAGE_S", "2"))
MISCHIEF = ("die", "error_500", "bad_json", "bad_shape", "end_early", "busy")
WORKERS = 6

pytestmark = [pytest.mark.slow, pytest.mark.timeout(max(300, 15 * KILLS))]


class Collector:
    """A real collector, which keeps its address when it is started again."""

    def __init__(self, root: Path) -> None:
        self.data = root / "data"
        self._root, self._port = root, 0
        self.start()

    def start(self) -> None:
        ready = self._root / "collector.json"
        ready.unlink(missing_ok=True)
        code = "import sys; from agentlightning.collector.cli import main; sys.exit(main())"
        command = [
            sys.executable,
            "-c",
            code,
            "--data",
            str(self.data),
            "--state",
            str(self._root / "collector"),
        ]
        command += ["--ready-file", str(ready), "--http-port", str(self._port), "--grpc-port", "0"]
        with open(self._root / "collector.log", "ab") as log:
            self._process = subprocess.Popen(command, stderr=log)
        deadline = time.monotonic() + 60
        while (addresses := read_ready(ready)) is None:
            assert self._process.poll() is None, (self._root / "collector.log").read_text()
            assert time.monotonic() < deadline, "the collector does not start"
            time.sleep(0.02)
        self.url = addresses["http"]
        self._port = int(self.url.rpartition(":")[2])

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


class Storm:
    """Agents that go on whatever happens, and remember which answers they got whole."""

    def __init__(self, gateway: Any) -> None:
        self.gateway = gateway
        self.answers: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
        self.answered = self.failed = 0
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._work, args=(n,)) for n in range(WORKERS)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _work(self, number: int) -> None:
        dice = random.Random(number)
        with httpx.Client(base_url=self.gateway.url, timeout=15) as client:
            while not self._stop.is_set():
                self._rollout(client, dice, f"c{number}")

    def _rollout(self, client: httpx.Client, dice: random.Random, controller: str) -> None:
        name = f"storm-{controller}-{dice.getrandbits(48):x}"
        row = {"rollout_id": name, "run_id": "storm", "policy": "default", "input": {}, "max_attempts": 9}
        self._insist(client, "trainer", "/api/rollouts", {"rollouts": [row]})
        claim = {"controller_id": controller, "limit": 1, "lease_s": 120}
        for claimed in self._insist(client, "controller", "/api/rollouts/claim", claim).json()["rollouts"]:
            key = claimed["rollout_id"], claimed["attempt"]
            for turn in range(dice.randint(1, 4)):
                self._call(client, dice, claimed["token"], key, turn)
            state = dice.choice(["succeeded", "succeeded", "failed"])
            report = {"attempt": key[1], "controller_id": controller, "state": state}
            report["cause"] = "agent_error" if state == "failed" else None
            ended = self._insist(client, "controller", f"/api/rollouts/{key[0]}/finish", report)
            assert ended.status_code == 200, ended.text

    def _call(
        self, client: httpx.Client, dice: random.Random, token: str, key: tuple[str, int], turn: int
    ) -> None:
        stream = dice.random() < 0.5
        messages = [{"role": "user", "content": f"{key} {turn}"}]
        body = {"model": "default", "messages": messages, "stream": stream}
        for retry in range(3):
            headers = {"authorization": f"Bearer {token}", "x-stainless-retry-count": str(retry)}
            try:
                answer = client.post("/v1/chat/completions", json=body, headers=headers)
            except httpx.HTTPError:
                self.failed += 1
                time.sleep(0.02)
                continue
            if answer.status_code == 200 and (not stream or "[DONE]" in answer.text):
                self.answers[key].add(answer.headers["x-agentlightning-call-id"])
                self.answered += 1
                return
            self.failed += 1

    def _insist(self, client: httpx.Client, role: str, path: str, body: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {self.gateway.tokens[role]}"}
        while True:
            try:
                answer = client.post(path, json=body, headers=headers)
                if answer.status_code < 500:
                    return answer
            except httpx.HTTPError:
                pass
            time.sleep(0.02)


@pytest.fixture
def collector(tmp_path: Path) -> Iterator[Collector]:
    made = Collector(tmp_path)
    yield made
    made.kill()


@pytest.fixture
def gateway(start_gateway: Any, collector: Collector) -> Any:
    limits = ["--collector-timeout-s", "2", "--engine-timeout-s", "5", "--engine-failures", "1000000"]
    return start_gateway("--collector", collector.url, *limits)


def check(gateway: Any, collector: Collector, storm: Storm, until: Any) -> Counter[str]:
    """Every promise, over all attempts. Returns what there was."""
    gateway.ask("POST", "/api/rollouts/cancel", {"run_id": "storm"})  # those whose claim was lost on the way

    def ended() -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        cursor: int | None = 0
        while cursor is not None:
            page = gateway.ask("GET", f"/api/rollouts?run_id=storm&cursor={cursor}")
            rows, cursor = [*rows, *page["rollouts"]], page["next_cursor"]
        return rows if all(row["change"] for row in rows) else []

    rows = {row["rollout_id"]: row for row in until(ended, 60) if row["attempt"] is not None}
    current = {(name, row["attempt"]) for name, row in rows.items()}
    until(lambda: collector.data.exists() and current <= set(open_dataset(collector.data).attempts), 120)
    dataset = open_dataset(collector.data)
    attempts = {(r["rollout_id"], r["attempt"]): r for r in dataset.table("rollouts").to_pylist()}
    columns = ["rollout_id", "attempt", "call_id", "error"]
    calls = dataset.table("transitions", columns=columns).to_pylist()
    recorded = Counter(call["call_id"] for call in calls)
    assert max(recorded.values()) == 1, "a call is recorded twice"
    good: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
    for call in calls:
        if call["error"] is None:
            good[call["rollout_id"], call["attempt"]].add(call["call_id"])
    for key, answers in storm.answers.items():
        assert answers <= good[key], f"an answer of {key} is not on record"
    for key, attempt in attempts.items():
        assert attempt["calls_stored"] == attempt["calls_expected"] == len(good[key]), key
        if key in current:
            assert rows[key[0]]["calls"] == attempt["calls_expected"], key
    errors = Counter(call["error"].partition(":")[0] for call in calls if call["error"] is not None)
    return Counter({"attempts": len(attempts), "calls": len(calls)}) + errors


def test_a_gateway_killed_under_load_with_engines_that_misbehave(gateway, collector, engine, until):
    dice = random.Random(7)
    storm = Storm(gateway)
    calm = threading.Event()

    def misbehave() -> None:
        while not calm.wait(dice.uniform(0.02, 0.1)):
            engine.mode = dice.choice(["ok"] * 8 + list(MISCHIEF))

    mischief = threading.Thread(target=misbehave)
    mischief.start()
    try:
        for _ in range(KILLS):
            before = storm.answered
            until(lambda before=before: storm.answered > before + 5, 60)
            time.sleep(dice.uniform(0, 0.1))  # somewhere in the middle of something
            gateway.kill()
            gateway.start()
    finally:
        calm.set()
        mischief.join()
        engine.mode = "ok"
        storm.end()
    found = check(gateway, collector, storm, until)
    print(f"{KILLS} kills, {storm.answered} answers, {storm.failed} failures; recorded: {dict(found)}")
    assert storm.answered > 5 * KILLS
    assert storm.failed > 0


def test_a_collector_that_is_away_costs_time_and_no_call(gateway, collector, engine, until):
    storm = Storm(gateway)
    until(lambda: storm.answered > 20, 60)
    collector.kill()
    time.sleep(0.3)  # what was acknowledged before is answered
    before = storm.answered
    time.sleep(OUTAGE_SECONDS)
    assert storm.answered == before, "an answer was given that nobody recorded"
    collector.start()
    until(lambda: storm.answered > before + 20, 60)
    storm.end()
    check(gateway, collector, storm, until)
