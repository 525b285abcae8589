"""`agl quickstart`: the whole path once, on this machine: an AutoGen agent learns to use its calculator."""

import argparse
import importlib.resources
import os
from pathlib import Path

from agentlightning.proto.errors import ConfigError
from agentlightning.proto.process import run_main

__all__ = ["main"]

EXAMPLE = "agentlightning.examples.calculator"
DESCRIPTION = """\
Train a real AutoGen agent on this machine, without a GPU, in a few minutes.

A 135M-parameter language model answers arithmetic word problems through an agent that has a calculator.
At first it hardly manages to call the tool; group-relative policy optimisation on the recorded calls
teaches it. Held-out problems are answered before and after, and the rewards printed with their intervals.

Everything is left in runs/NAME/: data/ (Parquet), checkpoint/, report.html."""

ADVICE = """
What to try next:
  agl inspect {root}                                  what was recorded, call by call
  agl train --offline {root} {root}/config.yaml run.name=offline    the same data, without agents
  agl quickstart --seed 1                             another seed
  docs/own-agent.md                                   train an agent of your own"""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="agl quickstart", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="as for `agl train`")
    parser.add_argument("--name", help="the run's name (default: quickstart, or the next free quickstart-N)")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument(
        "--resume", action="store_true", help="go on with the newest quickstart, or with --name"
    )
    parser.add_argument("--log-level", default="warning", choices=["debug", "info", "warning", "error"])
    options = parser.parse_intermixed_args(argv)

    def command() -> int:
        from agentlightning.trainer.config import load_config

        with importlib.resources.as_file(importlib.resources.files(EXAMPLE) / "config.yaml") as path:
            config = load_config(path, options.overrides)
            name = options.name or _name(config.run.root, resume=options.resume)
            config = load_config(path, [*options.overrides, f"run.name={name}", f"run.seed={options.seed}"])
        # Waiting threads must not spin: agents and engine need the same cores (torch reads this at import).
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        from agentlightning.trainer.run import train

        advice = ADVICE.format(root=config.directory)
        return train(config, resume=options.resume, log_level=options.log_level, advice=advice)

    return run_main(command)


def _name(root: Path, *, resume: bool) -> str:
    """The newest quickstart to go on with, or the first name that is free."""
    taken = sorted(
        (path.parent for path in root.glob("quickstart*/config.yaml")), key=lambda path: path.stat().st_mtime
    )
    if resume:
        if not taken:
            raise ConfigError(f"There is no quickstart to resume under {root}/.")
        return taken[-1].name
    number, name = 1, "quickstart"
    while (root / name).exists():
        number += 1
        name = f"quickstart-{number}"
    return name


if __name__ == "__main__":
    raise SystemExit(main())
