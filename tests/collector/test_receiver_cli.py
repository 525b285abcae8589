"""`agl collector` as a command: a user's mistake is one sentence."""

import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = [
    sys.executable,
    "-c",
    "import sys; from agentlightning.collector.cli import main; sys.exit(main())",
]


def run(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *options], capture_output=True, text=True, timeout=30)


def test_help_says_what_it_does_and_gives_an_example() -> None:
    done = run("--help")
    assert done.returncode == 0
    assert "Parquet" in done.stdout
    assert "agl collector --data" in done.stdout


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        (["--host", "0.0.0.0"], "without a token"),
        (["--token-file", "{tmp}/none"], "cannot be read"),
        (["--token-file", "{tmp}/open"], "chmod 600"),
        (["--state", "{tmp}/open"], "cannot use {tmp}/open"),
        (["--http-port", "70000"], "not a port"),
        (["--durability", "maybe"], "fsync"),
        (["--idle-timeout", "0"], "above 0"),
    ],
)
def test_mistakes_are_one_sentence_and_exit_2(tmp_path: Path, options: list[str], hint: str) -> None:
    (tmp_path / "open").write_text("secret\n")
    (tmp_path / "open").chmod(0o644)
    options = [option.format(tmp=tmp_path) for option in options]
    places = ["--data", str(tmp_path / "data"), "--state", str(tmp_path / "state")]
    done = run(*places, "--http-port", "0", "--grpc-port", "0", *options)
    assert done.returncode == 2
    assert hint.format(tmp=tmp_path) in done.stderr
    assert "Traceback" not in done.stderr
    assert "secret" not in done.stderr
