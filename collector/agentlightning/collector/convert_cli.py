"""`agl convert`: recorded spans become a data set, without a collector."""

import argparse
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from agentlightning.collector.assemble import assemble
from agentlightning.collector.inputs import find_files, fingerprint, read_file
from agentlightning.collector.linking import TraceLinks
from agentlightning.collector.progress import Progress
from agentlightning.collector.spool import Key, Spool
from agentlightning.collector.tables import tables
from agentlightning.proto.dataset import (
    MANIFESTS,
    AttemptEntry,
    Dataset,
    FileEntry,
    commit_manifest,
    write_files,
)
from agentlightning.proto.errors import ConfigError, DataError
from agentlightning.proto.process import run_main

__all__ = ["Report", "convert", "main"]

BYTES_PER_FILE: Final = 16 << 20
"""Of spans per set of files: bounds memory, and the files stay of a size that readers like."""
WRITER: Final = "convert"
SHOWN: Final = 10
"""Sentences about refused input on the terminal."""

DESCRIPTION = """\
Turn recorded OpenTelemetry spans into a data set of transitions: one row per model call, with messages,
token ids, rewards and the agent that called, as the collector would have written it.

INPUT is OTLP JSON (a document, JSON lines, the OpenTelemetry collector's file exporter), OTLP protobuf, a
Parquet file of a `spans` table, or a folder: of such files, or a data set, whose transitions are then
derived again. The output is deterministic: converting again gives the same rows.
"""
EXAMPLE = """\
example:
  agl convert traces.jsonl --out data
  agl inspect data
exit code: 0; 1 if some input was refused (the rest is converted); 2 if nothing could be read
"""


@dataclass
class Report:
    """What was read and written."""

    files: int = 0
    spans: int = 0
    calls: int = 0
    """Answered calls, as the gateway's ledger counts them."""
    transitions: int = 0
    rollouts: int = 0
    counters: Counter[str] = field(default_factory=Counter)
    """Fidelity: what was duplicate, late, left out, refused, by name."""
    refused: list[str] = field(default_factory=list)
    """A sentence for each part of the input that could not be read."""


def main(argv: list[str] | None = None) -> int:
    """The command. Returns its exit code."""
    return run_main(lambda: _main(argv))


def convert(inputs: Sequence[Path], out: Path, *, progress: Progress | None = None) -> Report:
    """Convert files and folders into a new data set at `out`.

    The spans go over a file on disk: memory holds an attempt, and a few words per span and call.

    Raises:
        ConfigError: `out` holds something else.
        DataError: nothing could be read.
    """
    report = Report()
    with Spool() as spool, progress or Progress(shown=False) as bar:
        name = _spool(inputs, report, spool, bar)
        if not len(spool):
            raise DataError(
                "Nothing could be read. "
                + (" ".join(report.refused) or "The input holds no spans and no log records.")
            )
        again = _check_out(out, name)
        _link(spool, bar)
        files: list[FileEntry] = []
        entries: list[AttemptEntry] = []
        written = 0
        for part, batch in enumerate(_batches(spool)):
            attempts = []
            for key in batch:
                made = assemble(*key, spool.load([key]))
                attempts.append(made)
                report.counters.update(made.counters)
                report.transitions += len(made.transitions)
                report.calls += made.calls_stored
                entries.append(AttemptEntry(made.rollout_id, made.attempt, made.run_id, made.calls_stored))
            files.extend(write_files(out, f"{name}-{part:04d}", tables(attempts)))
            written += len(batch)
            bar.update("writing", written, len(spool))
    report.rollouts = len(entries)
    if not again:
        counters = {name: count for name, count in sorted(report.counters.items()) if count}
        commit_manifest(out, WRITER, files, attempts=entries, journal={"counters": counters})
    return report


def _spool(inputs: Sequence[Path], report: Report, spool: Spool, bar: Progress) -> str:
    """Read everything, once; the name of the files to write, of the content alone."""
    fingerprints: list[str] = []
    paths = _files(inputs, report)
    whole = sum(path.stat().st_size for path in paths if path.is_file())
    done = 0

    def advance(size: int) -> None:
        nonlocal done
        done += size
        bar.update("reading", done, whole)

    for path in paths:
        report.files += 1
        fingerprints.append(fingerprint(path))
        for span in read_file(path, report.counters, report.refused.append, advance):
            if not span.rollout_id:  # a log record outside of every rollout and trace
                report.counters["unattributed"] += 1
                continue
            report.spans += 1
            spool.add(span)
    # So that converting again writes the same files.
    return f"convert-{hashlib.sha256(''.join(sorted(fingerprints)).encode()).hexdigest()[:16]}"


def _link(spool: Spool, bar: Progress) -> None:
    """Traces without a rollout that tell of the same calls become one attempt."""
    links = TraceLinks()
    keys = list(spool)
    for index, key in enumerate(keys):
        home = spool.home(key)
        if home is not None and home != key:
            spool.merge(key, home)
        elif spool.is_trace(key):
            links.add(key[0], spool.load([key]))
        bar.update("linking", index + 1, len(keys))
    for trace, head in links.heads().items():
        spool.merge((trace, 0), (head, 0))


def _main(argv: list[str] | None) -> int:
    parser = argparse.ArgumentParser(
        prog="agl convert",
        description=DESCRIPTION,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("inputs", metavar="INPUT", type=Path, nargs="+", help="a file or a folder")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the data set is made")
    parser.add_argument("--json", action="store_true", help="print the counts as JSON")
    arguments = parser.parse_args(argv)
    report = convert(arguments.inputs, arguments.out, progress=Progress())
    for sentence in report.refused[:SHOWN]:
        print(f"agl convert: {sentence}", file=sys.stderr)
    if len(report.refused) > SHOWN:
        print(f"agl convert: … and {len(report.refused) - SHOWN} more; --json shows all.", file=sys.stderr)
    print(json.dumps(_document(report), indent=2) if arguments.json else _text(report, arguments.out))
    return 1 if report.refused else 0


def _files(inputs: Iterable[Path], report: Report) -> list[Path]:
    """Every file once, in an order that does not depend on how the inputs were given."""
    found: set[Path] = set()
    for path in inputs:
        try:
            found.update(find_files(path))
        except DataError as error:
            report.refused.append(str(error))
    return sorted(found)


def _check_out(out: Path, name: str) -> bool:
    """Whether this very conversion is in `out` already. Raises ConfigError if something else is."""
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is a file: --out must name a folder.")
    if not (out / MANIFESTS).is_dir():
        return False
    dataset = Dataset(out)
    if dataset.history.last == 0:
        return False
    files = [entry for manifest in dataset.manifests for entry in manifest.files]
    same = dataset.history.last == 1 and all(Path(entry.path).name.startswith(name) for entry in files)
    if not same:
        raise ConfigError(f"{out} holds another data set: choose a new folder for --out.")
    return True


def _batches(spool: Spool) -> Iterable[list[Key]]:
    batch: list[Key] = []
    size = 0
    for key in spool:
        batch.append(key)
        size += spool.size(key)
        if size >= BYTES_PER_FILE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _document(report: Report) -> dict[str, Any]:
    return {
        "files": report.files,
        "spans": report.spans,
        "calls": report.calls,
        "transitions": report.transitions,
        "rollouts": report.rollouts,
        "counters": dict(sorted(report.counters.items())),
        "refused": report.refused,
    }


def _text(report: Report, out: Path) -> str:
    lines = [f"Converted {report.files} files into {out}:"]
    rows = [
        ("spans", report.spans),
        ("calls answered", report.calls),
        ("transitions", report.transitions),
        ("rollouts", report.rollouts),
    ]
    rows += sorted((name, count) for name, count in report.counters.items() if count)
    rows += [("refused", len(report.refused))] if report.refused else []
    lines += [f"  {name:<36} {count:>12,}" for name, count in rows]
    return "\n".join(lines)
