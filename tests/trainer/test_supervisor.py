import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agentlightning.trainer.supervisor import Child, ChildFailed, Supervisor

SERVER = """
import sys, time
from agentlightning.proto.process import die_with_parent, write_ready
die_with_parent()
write_ready(sys.argv[1], {"http": "http://127.0.0.1:1"})
time.sleep(600)
"""


def wait_for(condition: Callable[[], bool], *, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    supervisor = Supervisor()
    yield supervisor
    supervisor.stop()


def start(supervisor: Supervisor, folder: Path, code: str = SERVER) -> Child:
    ready = folder / "ready.json"
    return supervisor.start("thing", lambda: ["-c", code, str(ready)], log=folder / "thing.log", ready=ready)


def test_a_child_that_dies_is_started_again(supervisor: Supervisor, tmp_path: Path) -> None:
    child = start(supervisor, tmp_path)
    assert supervisor.wait_ready(child, timeout=20) == {"http": "http://127.0.0.1:1"}
    assert child.process is not None
    first = child.process.pid
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: supervisor.restarts() == {"thing": 1})
    wait_for(lambda: child.process is not None and child.process.pid != first and alive(child.process.pid))


def test_a_child_that_cannot_start_is_reported_with_its_own_words(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    child = start(supervisor, tmp_path, "import sys; sys.exit('agl: error: The port 1 is taken.')")
    with pytest.raises(ChildFailed, match=r"The thing did not start: The port 1 is taken\."):
        supervisor.wait_ready(child, timeout=20)


def test_a_child_that_keeps_dying_is_given_up_with_a_sentence(supervisor: Supervisor, tmp_path: Path) -> None:
    code = SERVER.replace("time.sleep(600)", "sys.exit('out of luck')")
    child = start(supervisor, tmp_path, code)
    wait_for(lambda: child.failure is not None, seconds=60)
    with pytest.raises(ChildFailed, match=r"The thing died 6 times in .*: out of luck"):
        supervisor.check()


def test_children_end_when_their_starter_is_killed(tmp_path: Path) -> None:
    script = f"""
import sys, time
from pathlib import Path
from agentlightning.trainer.supervisor import Supervisor
supervisor = Supervisor()
ready = Path({str(tmp_path)!r}) / "ready.json"
child = supervisor.start("thing", lambda: ["-c", {SERVER!r}, str(ready)], log=ready.with_suffix(".log"), ready=ready)
supervisor.wait_ready(child, timeout=20)
print(child.process.pid, flush=True)
time.sleep(600)
"""
    starter = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    pid = int(starter.stdout.readline())
    assert alive(pid)
    starter.kill()
    starter.wait()
    starter.stdout.close()
    wait_for(lambda: not alive(pid))
