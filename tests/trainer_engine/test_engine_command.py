"""`agl engine` as a process: it says when it is ready, stops gracefully, and a user's mistake is one sentence."""

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from agentlightning.proto.process import read_ready
from agentlightning.trainer.engine.cli import main


@pytest.fixture(autouse=True)
def keep_logging() -> Iterator[None]:
    """`main` in this process points the log at a stderr that pytest closes."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


COMMAND = [sys.executable, "-m", "agentlightning.trainer.engine.cli"]


def test_it_serves_published_weights_and_stops_gracefully(
    tiny_folder: Path, other_folder: Path, tmp_path: Path
) -> None:
    ready, token = tmp_path / "ready.json", tmp_path / "token"
    token.write_text("secret\n")
    token.chmod(0o600)
    options = ["--model", str(tiny_folder), "--port", "0", "--ready-file", str(ready), "--token-file", str(token),
               "--load-weights", str(other_folder), "--version", "3", "--name", "policy", "--dtype", "float32"]  # fmt: skip
    process = subprocess.Popen([*COMMAND, *options], stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while (addresses := read_ready(ready)) is None:
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        url = addresses["http"]
        body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
        answer = httpx.post(
            url + "/v1/chat/completions", json=body, headers={"authorization": "Bearer secret"}, timeout=30
        )
        assert answer.json()["model_version"] == 3
        # An answer in the making does not hold up the end.
        with httpx.stream(
            "POST", url + "/v1/chat/completions", json=body | {"max_tokens": 450, "stream": True, "ignore_eos": True},
            headers={"authorization": "Bearer secret"}, timeout=30,
        ) as response:  # fmt: skip
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            assert "shutting down" in "".join(lines)
        assert process.wait(20) == 0
    finally:
        process.kill()
        _, log = process.communicate()
    assert "in float32 (as asked)" in log
    assert "secret" not in log


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--model", "nowhere"], "There is no model 'nowhere'"),
        (["--model", "nowhere", "--host", "0.0.0.0"], "without a token"),
        (["--model", "nowhere", "--token-file", "missing"], "cannot be read"),
        (["--model", "nowhere", "--device", "abacus"], "Unknown device"),
    ],
)
def test_a_mistake_is_one_sentence(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*options, "--port", "0"]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("agl: error:")]
    assert len(errors) == 1
    assert said in errors[0]


def test_a_port_in_use_is_told(tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["--model", str(tiny_folder), "--port", str(taken.getsockname()[1])]) == 2
    assert "Address already in use" in capsys.readouterr().err


def test_help_says_what_it_does_without_loading_torch() -> None:
    code = "import sys; from agentlightning.trainer.engine.cli import main\ntry: main(['--help'])\nfinally: assert 'torch' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=True
    )
    assert "agl engine --model smollm2-135m" in done.stdout
