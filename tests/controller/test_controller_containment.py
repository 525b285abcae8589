"""No process outlives its attempt, whatever it does, and whoever is killed."""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# An agent that leaves a daemon (its own session, its parent gone, its streams closed, deaf to SIGTERM) and a child.
LEAVER = """
import os, signal, subprocess, sys, time

def daemon(name):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            for fd in range(3):
                os.close(fd)
            with open(name, "w") as file:
                file.write(str(os.getpid()))
            time.sleep(1000)
        os._exit(0)
    os.wait()
    while not (os.path.exists(name) and open(name).read()):
        time.sleep(0.01)

def solve(name, then):
    daemon(name)
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    open(name + ".ready", "w").close()
    if then == "crash":
        os.abort()
    if then == "hang":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(1000)
    return "left"
"""


@pytest.fixture
def hanging(gateway: Any, start: Any, module: Any, tmp_path: Path) -> Callable[..., tuple[Any, list[str]]]:
    """A controller with hanging agents that have daemons, so many."""

    def begin(count: int, *options: str) -> tuple[Any, list[str]]:
        module("leaver", LEAVER)
        controller = start("--agent", "leaver:solve", *options)
        rollouts = [gateway.add(f"ro-{n}", name=str(tmp_path / f"d{n}"), then="hang") for n in range(count)]
        for n in range(count):
            await_file(tmp_path / f"d{n}.ready")
        return controller, rollouts

    return begin


def await_file(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.01)


def alive(path: Path) -> bool:
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):
        os.kill(int(path.read_text()), 0)
        return True
    return False


@pytest.mark.parametrize("then", ["return", "crash"])
def test_what_an_agent_leaves_behind_is_killed_when_it_ends(
    gateway: Any, start: Any, module: Any, tmp_path: Path, then: str
) -> None:
    module("leaver", LEAVER)
    controller = start("--agent", "leaver:solve")
    outcome = gateway.outcome(gateway.add(name=str(tmp_path / "daemon"), then=then))
    assert outcome["state"] == {"return": "succeeded", "crash": "failed"}[then]
    assert not alive(tmp_path / "daemon")
    assert len(controller.living()) == 2  # the controller and its launcher
    controller.stop()
    assert '"leftover_processes_killed": 2' in (tmp_path / "state" / "counters.json").read_text()


def test_the_end_of_one_agent_spares_the_daemons_of_another(
    gateway: Any, hanging: Any, tmp_path: Path
) -> None:
    controller, _ = hanging(1, "--kill-grace", "0.3")
    gateway.outcome(gateway.add("ro-short", name=str(tmp_path / "short"), then="return"))
    assert alive(tmp_path / "d0")
    assert not alive(tmp_path / "short")
    assert controller.stop() == 0
    assert not alive(tmp_path / "d0")


def test_a_hanging_agent_is_killed_with_all_it_started_at_its_time_limit(
    gateway: Any, hanging: Any, tmp_path: Path
) -> None:
    controller, rollouts = hanging(1, "--timeout", "3", "--kill-grace", "0.3")
    outcome = gateway.outcome(rollouts[0])
    assert (outcome["state"], outcome["cause"]) == ("failed", "timeout")
    assert outcome["error"].startswith("The agent was stopped: it ran longer than its time limit of 3 s.")
    assert not alive(tmp_path / "d0")
    assert len(controller.living()) == 2


def test_a_command_is_killed_with_its_background_jobs(gateway: Any, start: Any) -> None:
    controller = start(
        "--agent", "sh -c 'sleep 1000 & setsid sleep 1000 & trap : TERM; while :; do sleep 0.1; done'",
        "--timeout", "0.5", "--kill-grace", "0.3",
    )  # fmt: skip
    assert gateway.outcome(gateway.add(question="x"))["cause"] == "timeout"
    assert len(controller.living()) == 2


def test_no_orphan_after_the_controller_is_killed(hanging: Any) -> None:
    controller, _ = hanging(3)
    assert len(controller.living()) == 2 + 3 * 3
    controller.process.kill()
    controller.wait_until_gone()


def test_no_orphan_and_a_retry_after_the_launcher_is_killed(
    gateway: Any, hanging: Any, tmp_path: Path
) -> None:
    controller, rollouts = hanging(3)
    os.kill(controller.launchers()[0], signal.SIGKILL)
    for rollout in rollouts:
        outcome = gateway.outcome(rollout)
        assert (outcome["state"], outcome["cause"]) == ("failed", "infra_error")
        assert "launcher ended (signal 9)" in outcome["error"]
    assert not any(alive(tmp_path / f"d{n}") for n in range(3))
    # It works on, with a new launcher.
    assert gateway.outcome(gateway.add(name=str(tmp_path / "next"), then="return"))["state"] == "succeeded"
    assert len(controller.living()) == 2
    assert '"launcher_deaths": 1' not in controller.text()
    controller.stop()
    assert '"launcher_deaths": 1' in (tmp_path / "state" / "counters.json").read_text()


def test_no_agent_survives_both_being_killed_at_once(hanging: Any, tmp_path: Path) -> None:
    controller, _ = hanging(1)
    launcher = controller.launchers()[0]
    first = [pid for pid in controller.living() if pid not in (launcher, controller.process.pid)]
    os.kill(launcher, signal.SIGSTOP)  # so that it cannot clean up
    controller.process.kill()
    os.kill(launcher, signal.SIGKILL)
    controller.process.wait()
    agent = min(first)
    deadline = time.monotonic() + 5
    while agent in controller.living():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for pid in controller.living():  # what had daemonised itself is the one thing that nobody is left to kill
        os.kill(pid, signal.SIGKILL)


def test_interrupt_stops_agents_reports_them_and_leaves_nothing(
    gateway: Any, hanging: Any, tmp_path: Path
) -> None:
    controller, rollouts = hanging(2, "--kill-grace", "0.5")
    began = time.monotonic()
    controller.process.send_signal(signal.SIGINT)
    assert controller.process.wait(30) == 0
    assert time.monotonic() - began < 0.5 + 2
    for rollout in rollouts:
        outcome = gateway.outcome(rollout)
        assert (outcome["cause"], outcome["error"]) == (
            "infra_error",
            "The controller was stopped while the agent ran.",
        )
    assert not controller.living()
    assert not any(alive(tmp_path / f"d{n}") for n in range(2))


def test_a_module_that_hangs_while_imported_holds_nobody_up(
    gateway: Any, module: Any, tmp_path: Path
) -> None:
    import subprocess
    import sys

    module("endless", f"import time\nopen({str(tmp_path / 'importing')!r}, 'w').close()\ntime.sleep(1000)\n")
    command = [sys.executable, "-m", "agentlightning.controller.cli", "--gateway", gateway.url]
    command += ["--state", str(tmp_path / "state"), "--cwd", str(tmp_path), "--agent", "endless:solve"]
    for number in (signal.SIGTERM, signal.SIGKILL):
        (tmp_path / "importing").unlink(missing_ok=True)
        mark = f"mark-{number}-{os.getpid()}"
        process = subprocess.Popen(command, env={**os.environ, "PYTHONMARK": mark}, stderr=subprocess.DEVNULL)
        await_file(tmp_path / "importing")
        process.send_signal(number)
        assert process.wait(10) == (0 if number == signal.SIGTERM else -9)
        deadline = time.monotonic() + 5
        while marked := _marked(mark):
            assert time.monotonic() < deadline, marked
            time.sleep(0.01)


def _marked(mark: str) -> list[int]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if mark.encode() in Path(f"/proc/{name}/environ").read_bytes():
                found.append(int(name))
    return found
