"""The converter's process: the work of `conversion`, told by the receiver when there is some.

python -m agentlightning.collector.converter --data DIR --state DIR --link-fd N
"""

import argparse
import logging
import signal
import time
from pathlib import Path
from typing import Final

import pyarrow as pa

from agentlightning.collector.assemble import assemble
from agentlightning.collector.conversion import Converter
from agentlightning.collector.logs import FORMATS, setup_logs
from agentlightning.collector.records import JournalReader
from agentlightning.collector.supervise import Link
from agentlightning.collector.tables import tables
from agentlightning.collector.upkeep import Upkeep
from agentlightning.collector.upkeep_settings import UpkeepSettings
from agentlightning.proto.process import die_with_parent, lock_directory, run_main
from agentlightning.proto.stores import location

__all__ = ["main"]

log = logging.getLogger(__name__)

PROGRESS_SECONDS: Final = 1.0
TICK_SECONDS: Final = 0.25
RETRY_SECONDS: Final = 1.0


def main(argv: list[str] | None = None) -> int:
    """The process. Returns its exit code."""
    return run_main(lambda: _main(argv))


def _main(argv: list[str] | None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m agentlightning.collector.converter",
        description="The collector's second process: journal to data set. `agl collector` starts it.",
    )
    parser.add_argument("--data", type=location, required=True, help="the data set's place")
    parser.add_argument("--state", type=Path, required=True, help="the collector's state, with its journal")
    parser.add_argument("--link-fd", type=int, required=True, help="socket to the receiver")
    parser.add_argument(
        "--idle-timeout",
        type=float,
        default=300.0,
        metavar="S",
        help="write an attempt after S quiet seconds (default 300)",
    )
    UpkeepSettings.add_arguments(parser)
    parser.add_argument("--log-level", default="info")
    parser.add_argument("--log-format", default="text", choices=FORMATS)
    arguments = parser.parse_args(argv)
    die_with_parent()
    setup_logs("converter", arguments.log_level, arguments.log_format)
    pa.set_memory_pool(pa.system_memory_pool())  # the default one gives back little of what it took
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the receiver, which closes the link
    stopping: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stopping.append(number))
    link = Link(arguments.link_fd)
    with lock_directory(arguments.state / "converter", "The converter's state"):
        converter = _start(arguments, link, stopping)
        if converter is not None:
            upkeep = Upkeep(converter.dataset, UpkeepSettings.from_arguments(arguments))
            _run(converter, upkeep, link, stopping)
    return 0


def _start(arguments: argparse.Namespace, link: Link, stopping: list[int]) -> Converter | None:
    """The converter, when the data set can be reached; None if the process shall end before."""
    reader = JournalReader(arguments.state / "journal")
    while not stopping and link.wait(0.0):
        try:
            return Converter(
                arguments.data,
                reader,
                link,
                idle_timeout=arguments.idle_timeout,
                scratch=arguments.state / "converter",
            )
        except OSError as error:
            log.error("The data set at %s cannot be reached: %s. Trying again.", arguments.data, error)
            time.sleep(RETRY_SECONDS)
    return None


def _run(converter: Converter, upkeep: Upkeep, link: Link, stopping: list[int]) -> None:
    tables([assemble("", 0, [])])  # the libraries load parts on first use; no trainer shall wait for that
    link.send(converter.progress())  # ready
    told = time.monotonic()
    busy = True
    while not stopping:
        alive = link.wait(0.0 if busy else TICK_SECONDS)
        was_busy, failed = busy, False
        try:
            busy = converter.step()
            if not busy:
                upkeep.run_if_due()
        except OSError as error:
            # A full disk: the journal keeps everything meanwhile.
            log.error(
                "The data set at %s cannot be written: %s. Trying again.", converter.dataset.root, error
            )
            busy, failed = False, True
            if alive:
                time.sleep(RETRY_SECONDS)
        now = time.monotonic()
        if (was_busy and not busy) or now - told >= PROGRESS_SECONDS:
            link.send(converter.progress())
            told = now
        if not alive and (failed or (converter.caught_up and not busy)):
            return


if __name__ == "__main__":
    raise SystemExit(main())
