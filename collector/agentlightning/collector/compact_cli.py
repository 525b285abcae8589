"""`agl collector compact`: many small files become few, the old goes; readers notice nothing."""

import argparse

from agentlightning.collector.upkeep import clean, compact, retain
from agentlightning.collector.upkeep_settings import TARGET_BYTES
from agentlightning.proto.dataset import open_dataset
from agentlightning.proto.manifests import GRACE_SECONDS, write_checkpoint
from agentlightning.proto.process import run_main, setup_logging
from agentlightning.proto.stores import location

__all__ = ["main"]

DESCRIPTION = """\
Make few Parquet files of a data set's many small ones, and leave out the rows that late spans have
replaced: then every reader of the named files sees each call once. With --keep-days or --keep-gib the
oldest attempts and samples are taken away first. It may run beside a collector and beside readers; files
that no longer exist for readers are deleted when nobody can be reading them any more.
"""


def main(argv: list[str] | None = None) -> int:
    """The command. Returns its exit code."""
    return run_main(lambda: _main(argv))


def _main(argv: list[str] | None) -> int:
    parser = argparse.ArgumentParser(
        prog="agl collector compact",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("data", type=location, metavar="DATA", help="the data set: a folder, or s3://bucket/prefix")
    add(
        "--target-mib",
        type=int,
        default=TARGET_BYTES >> 20,
        metavar="N",
        help="files of about this size (default %(default)s)",
    )
    add("--keep-days", type=float, metavar="D", help="remove what is older than D days")
    add("--keep-gib", type=float, metavar="G", help="remove the oldest beyond G GiB of Parquet")
    add(
        "--grace",
        type=float,
        default=GRACE_SECONDS,
        metavar="SECONDS",
        help="delete a file so long after it was replaced (default %(default)s; 0: at once, if nobody reads)",
    )
    arguments = parser.parse_args(argv)
    setup_logging("compact", "warning")
    dataset = open_dataset(arguments.data)
    days, gib = arguments.keep_days, arguments.keep_gib
    expired = retain(
        dataset,
        max_age=None if days is None else days * 86400,
        max_bytes=None if gib is None else int(gib * 2**30),
    )
    replaced = compact(dataset, target_bytes=arguments.target_mib << 20)
    deleted = clean(dataset, grace=arguments.grace, orphans=True)
    write_checkpoint(dataset.store, dataset.history)
    named = sum(len(manifest.files) for manifest in dataset.manifests)
    print(
        f"{dataset.root}: {expired} commits taken away, {replaced} files replaced, {deleted} deleted; "
        f"{named} files hold {len(dataset.attempts):,} attempts."
    )
    return 0
