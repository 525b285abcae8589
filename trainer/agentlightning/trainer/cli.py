"""`agl train`: train an agent's model, online or from Parquet."""

import argparse
import os
from pathlib import Path

from agentlightning.proto.errors import ConfigError
from agentlightning.proto.process import run_main

__all__ = ["main"]

DESCRIPTION = """\
Train the model behind an agent with reinforcement learning.

CONFIG.yaml says which agent to run, on which tasks, with which model; everything that it does not give
by address (collector, gateway, controller, engine) is started on this machine and stopped at the end.
Any setting can be overridden as section.key=value.

Results are in runs/NAME/: data/ (Parquet), checkpoint/ (transformers loads it), report.html."""

EPILOG = """\
examples:
  agl train config.yaml
  agl train config.yaml run.name=second train.learning_rate=2e-5 policy.lora.rank=8
  agl train config.yaml --resume                    go on after an interruption
  agl train --offline runs/first/data config.yaml   learn from recorded rollouts alone
  agl train --offline data config.yaml offline.method=rft offline.min_reward=1   imitate the good ones"""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="agl train",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", type=Path, metavar="CONFIG.yaml")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--resume", action="store_true", help="go on with the run of that name")
    parser.add_argument(
        "--offline", metavar="DATA", help="train from this data set (a folder, or s3://…); start no agents"
    )
    parser.add_argument("--log-level", default="warning", choices=["debug", "info", "warning", "error"])
    options = parser.parse_intermixed_args(argv)

    def command() -> int:
        from agentlightning.trainer.config import OfflineConfig, load_config

        config = load_config(options.config, options.overrides)
        # Heavy imports wait until the configuration is known to be good.
        # Waiting threads must not spin: agents and engine need the same cores (torch reads this at import).
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        if options.offline is not None:
            from agentlightning.trainer.offline import train_offline

            return train_offline(config, options.offline, resume=options.resume, log_level=options.log_level)
        if config.offline != OfflineConfig():
            raise ConfigError("The settings under `offline` need --offline DATA: nothing would honour them.")
        from agentlightning.trainer.run import train

        return train(config, resume=options.resume, log_level=options.log_level)

    return run_main(command)


if __name__ == "__main__":
    raise SystemExit(main())
