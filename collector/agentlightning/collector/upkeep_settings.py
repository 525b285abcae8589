"""When a data set's upkeep does what; apart from it, as a command line should not load Arrow."""

import argparse
from dataclasses import dataclass
from typing import Final

from agentlightning.proto.manifests import GRACE_SECONDS

__all__ = ["TARGET_BYTES", "UpkeepSettings"]

TARGET_BYTES: Final = 64 << 20


@dataclass(frozen=True)
class UpkeepSettings:
    """When what is done."""

    compact_files: int = 64
    """So many small commits become one; 0: never."""
    target_bytes: int = TARGET_BYTES
    """What is smaller than half of it is small."""
    keep_seconds: float | None = None
    keep_bytes: int | None = None
    grace_seconds: float = GRACE_SECONDS
    """A file that no longer exists for readers is deleted after so long."""

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add(
            "--compact-files",
            type=int,
            default=64,
            metavar="N",
            help="make one file of N small commits, when idle (default 64; 0: never)",
        )
        add(
            "--keep-days",
            type=float,
            metavar="D",
            help="remove what is older than D days (default: keep all)",
        )
        add(
            "--keep-gib",
            type=float,
            metavar="G",
            help="remove the oldest beyond G GiB of Parquet (default: keep all)",
        )

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace) -> "UpkeepSettings":
        days, gib = arguments.keep_days, arguments.keep_gib
        return cls(
            compact_files=arguments.compact_files,
            keep_seconds=None if days is None else days * 86400,
            keep_bytes=None if gib is None else int(gib * 2**30),
        )

    def arguments(self) -> list[str]:
        """The reverse, for a child's command line."""
        given = ["--compact-files", str(self.compact_files)]
        if self.keep_seconds is not None:
            given += ["--keep-days", repr(self.keep_seconds / 86400)]
        if self.keep_bytes is not None:
            given += ["--keep-gib", repr(self.keep_bytes / 2**30)]
        return given
