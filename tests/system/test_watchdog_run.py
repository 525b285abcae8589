"""Stages that stop moving: each is named, helped, and the run goes on to its end."""

import json
import os
import signal
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from running import Run, assert_exact, wait_for

from agentlightning.proto.dataset import open_dataset

Make = Callable[..., Run]


def converter_of(collector: int) -> int:
    """The collector's child that converts."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
            if parent == collector and b"converter" in (folder / "cmdline").read_bytes():
                return int(folder.name)
        except (FileNotFoundError, ProcessLookupError):
            continue
    raise AssertionError("the collector has no converter")


def hold_forgotten(run: Run) -> None:
    """As a trainer that died long ago might have left it."""
    gateway = json.loads((run.root / "state" / "ready" / "gateway.json").read_text())["addresses"]["http"]
    token = json.loads((run.root / "state" / "tokens" / "gateway.json").read_text())["trainer"]
    request = urllib.request.Request(
        gateway + "/api/hold",
        json.dumps({"policy": "tiny", "ttl_s": 3000, "drain_s": 0}).encode(),
        {"authorization": f"Bearer {token}", "content-type": "application/json"},
    )
    urllib.request.urlopen(request).close()


@pytest.mark.slow
def test_what_stops_moving_is_named_and_helped_and_the_run_goes_on(
    make_run: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STALL_FILE", str(tmp_path / "stall"))
    run = make_run(
        agent={
            "target": "stalling:solve",
            "evaluator": "stalling:evaluate",
            "env": ["STALL_FILE"],
            "timeout_s": 60,
        },
        train={"steps": 200},
        evaluate={"tasks": 0},
        watchdog={"stall_s": 6},
    )
    run.start()

    def said(sentence: str) -> None:
        steps = len(run.events("step"))
        wait_for(lambda: sentence in run.output.read_text(), why=lambda: run.output.read_text() + run.logs())
        # And it moves again.
        wait_for(lambda: len(run.events("step")) > steps, why=lambda: run.output.read_text() + run.logs())

    wait_for(lambda: len(run.events("step")) >= 1, why=lambda: run.output.read_text() + run.logs())
    hold_forgotten(run)
    said("makes calls wait, though no weights are being changed")
    os.kill(run.pid("engine"), signal.SIGSTOP)
    said("The engine is started again.")
    os.kill(converter_of(run.pid("collector")), signal.SIGSTOP)
    said("The collector is started again.")
    (tmp_path / "stall").touch()  # its controller will end this one, at its time limit
    wait_for(lambda: "1 agents; the first, rollout run." in run.output.read_text(), why=run.output.read_text)

    assert run.process is not None
    run.process.send_signal(signal.SIGTERM)
    run.wait()
    waited_on = [event["waits_on"] for event in run.events("stalled")]
    assert [name for name in waited_on if name != "engine"] == ["hold", "collector", "agents"]
    assert_exact(run, steps=max(open_dataset(run.root).table("samples").column("step").to_pylist()))
