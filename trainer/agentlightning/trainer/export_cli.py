"""`agl export`: write training sets that other trainers read."""

import argparse
import os
from collections import Counter
from pathlib import Path

from agentlightning.proto.dataset import open_dataset
from agentlightning.proto.errors import ConfigError, DataError
from agentlightning.proto.process import run_main
from agentlightning.trainer.export import FORMATS, Pairing, export_rows, write_jsonl, write_parquet
from agentlightning.trainer.recorded import Selection, read_index

__all__ = ["main"]

DESCRIPTION = """\
Write recorded rollouts as a training set in the conversational forms of TRL: JSON lines or Parquet, by
the ending of --out.

formats:
  sft                messages: each conversation of a rollout, to its last answer
  prompt-completion  prompt, completion: each call; only its answer is to be learnt
  dpo                prompt, chosen, rejected: the best against the worst rollout of a group, if their
                     rewards differ by more than --margin: the first answers in which they differ, to the
                     same messages. One pair a group; among equal rewards the first by id
  kto                prompt, completion, label: each call; true if its rollout's reward is at least --min-reward

Tools and tool calls are kept: in JSON lines a call's arguments are objects, as chat templates expect;
in Parquet they, and `tools`, are JSON text."""

EPILOG = """\
examples:
  agl export runs/first/data --format dpo --margin 0.5 --out pairs.jsonl
  agl export runs/first --format sft --min-reward 1 --best-of-group 1 --out sft.jsonl
  agl export runs/first --format prompt-completion --agent writer --out writer.parquet"""


def main(argv: list[str] | None = None) -> int:
    """The command. Returns its exit code."""
    return run_main(lambda: _main(argv))


def _main(argv: list[str] | None) -> int:
    parser = argparse.ArgumentParser(
        prog="agl export",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "data", metavar="DATA", help="a data set (a folder, or s3://…), or the directory of a run"
    )
    parser.add_argument("--format", required=True, choices=FORMATS, dest="form")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="ends in .jsonl or .parquet")
    parser.add_argument(
        "--run", action="append", metavar="ID", help="only rollouts of this run; may be repeated"
    )
    parser.add_argument("--split", choices=["train", "val", "all"], default="train", help="default: train")
    parser.add_argument(
        "--agent", action="append", metavar="NAME", help="only answers of this agent; may be repeated"
    )
    parser.add_argument(
        "--min-reward",
        type=float,
        metavar="R",
        help="only rollouts of at least this reward; with kto: what is desirable (default there: 0.5)",
    )
    parser.add_argument(
        "--best-of-group", type=int, metavar="N", help="at most so many rollouts of a group, the best"
    )
    parser.add_argument(
        "--margin",
        type=float,
        default=0.0,
        metavar="D",
        help="with dpo: rewards must differ by more (default: 0)",
    )
    options = parser.parse_args(argv)
    if options.out.suffix not in (".jsonl", ".parquet"):
        raise ConfigError(f"--out {options.out} must end in .jsonl or .parquet: the ending is the form.")
    if options.form in ("dpo", "kto") and options.best_of_group is not None:
        raise ConfigError(f"--best-of-group would leave out what {options.form} learns to avoid.")
    if options.form == "dpo" and options.min_reward is not None:
        raise ConfigError("--min-reward would leave out what dpo learns to avoid: use --margin.")
    chosen = options.form in ("sft", "prompt-completion")
    dataset = open_dataset(options.data)
    index = read_index(
        dataset,
        Selection(
            runs=tuple(options.run) if options.run else None,
            splits=None if options.split == "all" else (options.split,),
            min_reward=options.min_reward if chosen else None,
            best_of_group=options.best_of_group,
        ),
    )
    left_out = Counter(index.left_out)
    rows = export_rows(
        dataset,
        index.groups,
        options.form,
        agents=options.agent,
        pairing=Pairing(
            margin=options.margin, min_reward=0.5 if options.min_reward is None else options.min_reward
        ),
        left_out=left_out,
    )
    temporary = options.out.with_name(f".{options.out.name}.tmp")
    try:
        count = (
            write_jsonl(temporary, rows)
            if options.out.suffix == ".jsonl"
            else write_parquet(temporary, rows, options.form)
        )
        left = ", ".join(f"{number} {reason}" for reason, number in sorted(left_out.items()))
        if not count:
            raise DataError(f"{dataset.root} gives no row of this format (left out: {left or 'nothing'}).")
        os.replace(temporary, options.out)
    except OSError as error:
        raise ConfigError(f"{options.out} cannot be written: {error.strerror}.") from None
    finally:
        temporary.unlink(missing_ok=True)
    print(f"{count} rows in {options.out}" + (f" (left out: {left})" if left else ""))
    return 0
