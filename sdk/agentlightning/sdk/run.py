"""`agl run -- python agent.py`: a program, traced without a line of it changed.

The command is replaced by the program, so signals, streams and the exit code are the program's own. Python
processes that it starts are traced too.
"""

import argparse
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from agentlightning.proto.errors import ConfigError
from agentlightning.proto.process import run_main

__all__ = ["environment", "main"]

SITE = Path(__file__).parent / "site"

EXAMPLE = """example:
  agl run --endpoint http://127.0.0.1:4318 -- python agent.py

All options can be given by the environment: OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_EXPORTER_OTLP_HEADERS,
OTEL_RESOURCE_ATTRIBUTES (whose rollout this is; the controller sets it), AGENTLIGHTNING_FRAMEWORKS,
AGENTLIGHTNING_OPENAI.
"""


def main(argv: list[str] | None = None) -> int:
    """Become the program; returns only if it cannot be started."""
    return run_main(lambda: _main(argv))


def _main(argv: list[str] | None) -> int:
    parser = argparse.ArgumentParser(
        prog="agl run",
        description="Run a Python program with its model calls, agents, tools and rewards traced.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--endpoint", metavar="URL", help="the collector's OTLP/HTTP address")
    parser.add_argument(
        "--frameworks", metavar="NAMES", help="langchain,openai-agents,autogen; none (default: all)"
    )
    parser.add_argument("--openai", metavar="NAME", help="genai, openllmetry, openinference or none")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the program and its arguments, after `--`")
    options = parser.parse_args(argv)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        raise ConfigError("There is no program to run: `agl run -- python agent.py`.")
    program = shutil.which(command[0])
    if program is None:
        raise ConfigError(f"There is no program {command[0]!r} on the PATH.")
    given = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": options.endpoint,
        "AGENTLIGHTNING_FRAMEWORKS": options.frameworks,
        "AGENTLIGHTNING_OPENAI": options.openai,
    }
    environ = environment({**os.environ, **{name: value for name, value in given.items() if value}})
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(program, command, environ)


def environment(base: Mapping[str, str]) -> dict[str, str]:
    """An environment in which Python programs are traced."""
    paths = [path for path in base.get("PYTHONPATH", "").split(os.pathsep) if path and path != str(SITE)]
    return {**base, "PYTHONPATH": os.pathsep.join([str(SITE), *paths])}
