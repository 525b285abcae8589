"""`agl convert`: recorded spans become a data set, without a collector."""

import argparse
import hashlib
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from agentlightning.collector.assemble import assemble
from agentlightning.collector.inputs import find_files, fingerprint, read_file
from agentlightning.collector.span import Span
from agentlightning.collector.tables import tables
from agentlightning.proto.dataset import MANIFESTS, AttemptEntry, FileEntry, commit_manifest, write_files
from agentlightning.proto.errors import ConfigError, DataError
from agentlightning.proto.process import run_main

__all__ = ["Report", "convert", "main"]

ROWS_PER_FILE: Final = 50_000
"""Spans per set of files: bounds memory, and the files stay of a size that readers like."""
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


def convert(inputs: Sequence[Path], out: Path) -> Report:
    """Convert files and folders into a new data set at `out`.

    Raises:
        ConfigError: `out` holds something else.
        DataError: nothing could be read.
    """
    report = Report()
    by_attempt: dict[tuple[str, int], list[Span]] = defaultdict(list)
    fingerprints: list[str] = []
    for path in _files(inputs, report):
        report.files += 1
        fingerprints.append(fingerprint(path))
        for span in read_file(path, report.counters, report.refused.append):
            if not span.rollout_id:  # a log record outside of every rollout and trace
                report.counters["unattributed"] += 1
                continue
            report.spans += 1
            by_attempt[span.key].append(span)
    if not by_attempt:
        raise DataError(
            "Nothing could be read. "
            + (" ".join(report.refused) or "The input holds no spans and no log records.")
        )
    # Of the content alone, so that converting again writes the same files.
    name = f"convert-{hashlib.sha256(''.join(sorted(fingerprints)).encode()).hexdigest()[:16]}"
    again = _check_out(out, name)
    files: list[FileEntry] = []
    entries: list[AttemptEntry] = []
    for part, batch in enumerate(_batches(by_attempt)):
        attempts = [
            assemble(rollout_id, attempt, by_attempt[rollout_id, attempt]) for rollout_id, attempt in batch
        ]
        for made in attempts:
            report.counters.update(made.counters)
            report.transitions += len(made.transitions)
            report.calls += made.calls_stored
            entries.append(AttemptEntry(made.rollout_id, made.attempt, made.run_id, made.calls_stored))
        files.extend(write_files(out, f"{name}-{part:04d}", tables(attempts)))
    report.rollouts = len(entries)
    if not again:
        counters = {name: count for name, count in sorted(report.counters.items()) if count}
        commit_manifest(out, WRITER, files, attempts=entries, journal={"counters": counters})
    return report


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
    report = convert(arguments.inputs, arguments.out)
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
    manifests = sorted((out / MANIFESTS).glob("*.json")) if out.exists() else []
    if not manifests:
        return False
    first = json.loads(manifests[0].read_bytes())
    same = len(manifests) == 1 and all(Path(entry["path"]).name.startswith(name) for entry in first["files"])
    if not same:
        raise ConfigError(f"{out} holds another data set: choose a new folder for --out.")
    return True


def _batches(by_attempt: Mapping[tuple[str, int], list[Span]]) -> Iterable[list[tuple[str, int]]]:
    batch: list[tuple[str, int]] = []
    size = 0
    for key in sorted(by_attempt):
        batch.append(key)
        size += len(by_attempt[key])
        if size >= ROWS_PER_FILE:
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
