"""Leases, cancelling, and a gateway that is away, restarted, or of another opinion."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

SLEEPER = """
import os, sys, time
def solve(seconds, then="ok"):
    open(os.environ["AGENTLIGHTNING_ROLLOUT_ID"] + ".started", "w").close()
    time.sleep(seconds)
    if then == "crash":
        raise RuntimeError("no answer from the model")
    return then
"""


@pytest.fixture
def sleeper(start: Any, module: Any) -> Any:
    """A controller whose agents sleep as long as their task says."""
    module("sleeper", SLEEPER)
    return start("--agent", "sleeper:solve", "--kill-grace", "0.5", "--lease", "0.9")


def wait_started(controller: Any, rollout: str) -> None:
    deadline = time.monotonic() + 30
    while not (controller.folder / f"{rollout}.started").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_leases_are_kept_while_agents_run(gateway: Any, sleeper: Any) -> None:
    rollout = gateway.add(seconds=1.2)
    gateway.outcome(rollout)
    beats = [
        beat for beat in gateway.heartbeats if beat["attempts"] == [{"rollout_id": rollout, "attempt": 0}]
    ]
    assert len(beats) >= 3
    assert {beat["lease_s"] for beat in beats} == {0.9}
    assert len({beat["controller_id"] for beat in gateway.heartbeats}) == 1


def test_no_more_is_claimed_than_there_is_room_for(gateway: Any, start: Any, module: Any) -> None:
    module("sleeper", SLEEPER)
    start("--agent", "sleeper:solve", "--concurrency", "2")
    rollouts = [gateway.add(seconds=0.2) for _ in range(5)]
    for rollout in rollouts:
        gateway.outcome(rollout)
    running = most = 0
    for event in gateway.events:
        running += {"claim": 1, "finish": -1}[event.split()[0]]
        most = max(most, running)
    assert most == 2


def test_a_cancelled_rollout_is_stopped(gateway: Any, sleeper: Any) -> None:
    rollout = gateway.add(seconds=1000)
    wait_started(sleeper, rollout)
    gateway.cancelled.add(rollout)
    outcome = gateway.outcome(rollout)
    assert (outcome["state"], outcome["cause"]) == ("cancelled", "cancelled")


def test_a_lost_attempt_is_stopped_and_not_reported(gateway: Any, sleeper: Any) -> None:
    rollout = gateway.add(seconds=1000)
    wait_started(sleeper, rollout)
    gateway.lost.add(rollout)
    gateway.wait_for(lambda: any(beat["attempts"] for beat in gateway.heartbeats), "a heartbeat")
    assert sleeper.stop() == 0
    assert rollout not in gateway.finished
    assert json.loads((sleeper.folder / "state" / "counters.json").read_text())["lost"] == 1


def test_a_stale_report_is_dropped_and_counted(gateway: Any, sleeper: Any) -> None:
    gateway.stale.add("ro-stale")
    gateway.add("ro-stale", seconds=0)
    gateway.wait_for(lambda: "stale ro-stale" in gateway.events, "the report")
    gateway.outcome(gateway.add(seconds=0))
    sleeper.stop()
    assert json.loads((sleeper.folder / "state" / "counters.json").read_text())["finish_conflict"] == 1


def test_agents_go_on_while_the_gateway_is_away_and_are_reported_when_it_is_back(
    gateway: Any, sleeper: Any
) -> None:
    rollout = gateway.add(seconds=1.0)
    wait_started(sleeper, rollout)
    port = gateway.port
    gateway.stop()
    while not (
        sleeper.agents / rollout / "0" / "result.json"
    ).exists():  # the agent has ended, and nobody knows
        time.sleep(0.02)
    gateway.boot_id = "boot-2"
    gateway.start(port)
    outcome = gateway.outcome(rollout)
    assert (outcome["state"], outcome["output"]) == ("succeeded", "ok")


def test_a_failure_across_a_restart_of_the_gateway_is_not_the_agents(gateway: Any, sleeper: Any) -> None:
    before = gateway.outcome(gateway.add(seconds=0, then="crash"))
    assert before["cause"] == "agent_error"
    rollout = gateway.add(seconds=0.5, then="crash")
    wait_started(sleeper, rollout)
    port = gateway.port
    gateway.stop()
    gateway.boot_id = "boot-2"
    gateway.start(port)
    outcome = gateway.outcome(rollout)
    assert (outcome["state"], outcome["cause"]) == ("failed", "infra_error")
    assert outcome["error"].startswith(
        "The gateway was restarted while the agent ran. The agent exited with code 1: RuntimeError"
    )


def test_an_overloaded_gateway_is_asked_again(gateway: Any, sleeper: Any) -> None:
    rollout = gateway.add(seconds=0.3)
    wait_started(sleeper, rollout)
    gateway.refuse_with = 503
    while not (sleeper.agents / rollout / "0" / "result.json").exists():
        time.sleep(0.02)
    gateway.refuse_with = None
    assert gateway.outcome(rollout)["state"] == "succeeded"
    assert "The collector is down." in sleeper.text()


def test_the_successor_of_a_killed_controller_reports_what_it_ran(
    gateway: Any, sleeper: Any, start: Any
) -> None:
    rollouts = [gateway.add(seconds=1000) for _ in range(2)]
    for rollout in rollouts:
        wait_started(sleeper, rollout)
    sleeper.process.kill()
    sleeper.process.wait()
    start("--agent", "sleeper:solve")
    for rollout in rollouts:
        outcome = gateway.outcome(rollout)
        assert (outcome["cause"], outcome["attempt"]) == ("infra_error", 0)
        assert outcome["error"] == "The controller was killed while the agent ran."
    assert (
        len({outcome["controller_id"] for outcomes in gateway.finished.values() for outcome in outcomes}) == 1
    )


def test_the_token_opens_the_gateway_and_a_wrong_one_ends_the_controller(
    gateway: Any, start: Any, refuse: Any, tmp_path: Path
) -> None:
    gateway.token = "right"
    token_file = tmp_path / "token"
    token_file.write_text("right\n")
    token_file.chmod(0o644)
    assert "can be read by others" in refuse("--agent", "env", "--token-file", str(token_file))
    token_file.chmod(0o600)
    controller = start("--agent", "env", "--token-file", str(token_file))
    assert "right" not in gateway.outcome(gateway.add(question="x"))["output"]
    controller.stop()
    token_file.write_text("wrong")
    said = refuse("--agent", "env", "--token-file", str(token_file))
    assert "agl: error: The gateway answered 401 to claim: Wrong key." in said
    assert "Traceback" not in said


def test_unreadable_rollouts_are_counted_and_harm_no_other(gateway: Any, sleeper: Any) -> None:
    gateway.add("../../escape", seconds=0)
    assert gateway.outcome(gateway.add(seconds=0))["state"] == "succeeded"
    sleeper.stop()
    assert json.loads((sleeper.folder / "state" / "counters.json").read_text())["claim_unreadable"] == 1
    assert not os.path.exists(sleeper.folder.parent / "escape")
