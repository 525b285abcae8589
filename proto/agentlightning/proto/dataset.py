"""The data set on disk: Parquet files that numbered manifests name.

    data/{transitions,rollouts,spans,samples}/NAME.parquet
    data/manifests/00000001.json, 00000002.json, …

The one idea: only what a manifest names exists. A writer puts whole files in place, then creates the
next manifest if it is absent; a crash between the two leaves a file that nobody reads. Each manifest
says which attempts its files hold; of an attempt that stands in several, only the newest counts.
"""

import contextlib
import hashlib
import io
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from agentlightning.proto.errors import DataError
from agentlightning.proto.schemas import SCHEMA_VERSION, TABLES, conform, write_parquet

__all__ = [
    "AttemptEntry",
    "Dataset",
    "FileEntry",
    "Manifest",
    "commit_manifest",
    "describe_file",
    "open_dataset",
    "write_files",
]

MANIFESTS = "manifests"


@dataclass(frozen=True)
class FileEntry:
    """One Parquet file of a manifest."""

    table: str
    path: str
    """Relative to the data set's root."""
    rows: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class AttemptEntry:
    """One attempt whose rows stand in this manifest's files, whole."""

    rollout_id: str
    attempt: int
    run_id: str | None
    calls_stored: int
    generation: int = 0
    """0 when first written; a late span makes the next one."""


@dataclass(frozen=True)
class Manifest:
    """One commit."""

    number: int
    writer: str
    """`collector`, `convert` or `trainer`."""
    files: tuple[FileEntry, ...] = ()
    attempts: tuple[AttemptEntry, ...] = ()
    journal: Mapping[str, Any] = field(default_factory=dict)
    """The collector's low-watermark and counters; empty for other writers."""
    created: float = 0.0
    schema_version: int = SCHEMA_VERSION


def open_dataset(path: Path | str) -> "Dataset":
    """Open a data set for reading. Raises DataError if there is none at `path`."""
    root = Path(path)
    if not (root / MANIFESTS).is_dir():
        nested = root / "data"
        if (nested / MANIFESTS).is_dir():  # a run's directory was given
            root = nested
        else:
            raise DataError(f"{path} is not a data set: it has no {MANIFESTS}/ folder.")
    return Dataset(root)


class Dataset:
    """A reader. It sees the commits that were there when it was opened or last refreshed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.manifests: list[Manifest] = []
        self._newest: dict[tuple[str, int], int] = {}  # attempt → manifest number
        self._entries: dict[tuple[str, int], AttemptEntry] = {}
        self.refresh()

    def refresh(self) -> None:
        """Read the manifests that have been added."""
        folder = self.root / MANIFESTS
        if not folder.is_dir():
            return
        last = self.manifests[-1].number if self.manifests else 0
        for path in sorted(folder.glob("[0-9]*.json")):
            if int(path.stem) > last:
                manifest = _read_manifest(path)
                self.manifests.append(manifest)
                for entry in manifest.attempts:
                    key = (entry.rollout_id, entry.attempt)
                    self._newest[key] = manifest.number
                    self._entries[key] = entry

    @property
    def attempts(self) -> Mapping[tuple[str, int], AttemptEntry]:
        """Every attempt in the data set, newest generation."""
        return self._entries

    def manifest_of(self, rollout_id: str, attempt: int) -> int | None:
        """Number of the manifest that holds the newest generation of an attempt."""
        return self._newest.get((rollout_id, attempt))

    def files(self, table: str) -> list[Path]:
        """The Parquet files of a table that exist for readers, in the order of their commits."""
        _check_table(table)
        return [self.root / entry.path for m in self.manifests for entry in m.files if entry.table == table]

    def table(
        self,
        name: str,
        *,
        attempts: Iterable[tuple[str, int]] | None = None,
        run_id: str | None = None,
        columns: Sequence[str] | None = None,
    ) -> pa.Table:
        """Rows of a table as Arrow, newest generation of each attempt only, in the order of commits.

        Args:
            attempts: only these (rollout id, attempt).
            run_id: only this run.
            columns: only these; default all.

        Raises:
            DataError: a named file is missing or damaged, or a name is unknown.
        """
        schema = _check_table(name)
        for column in columns or ():
            if column not in schema.names:
                raise DataError(f"Table {name} has no column {column!r}: it has {', '.join(schema.names)}.")
        wanted = None if attempts is None else set(attempts)
        numbers = None
        if wanted is not None and name != "samples":
            numbers = {self._newest[key] for key in wanted if key in self._newest}
        manifests = [m for m in self.manifests if numbers is None or m.number in numbers]
        return self._table(name, manifests, wanted, run_id, columns)

    def parts(self, tables: Mapping[str, Sequence[str] | None]) -> Iterator[dict[str, pa.Table]]:
        """Some tables commit by commit, newest generations only: of an attempt all rows come together.

        Args:
            tables: which columns of each; None for all.
        """
        for manifest in self.manifests:
            found = {
                name: self._table(name, [manifest], None, None, columns) for name, columns in tables.items()
            }
            if any(found.values()):
                yield found

    def counters(self) -> dict[str, int]:
        """Fidelity counters over the whole data set, by name."""
        totals: dict[str, int] = {}
        for manifest in self.manifests:
            for name, count in manifest.journal.get("counters", {}).items():
                totals[name] = totals.get(name, 0) + int(count)
        return totals

    def _table(
        self,
        name: str,
        manifests: Iterable[Manifest],
        wanted: set[tuple[str, int]] | None,
        run_id: str | None,
        columns: Sequence[str] | None,
    ) -> pa.Table:
        parts = [
            self._rows(manifest, entry, wanted, run_id, columns)
            for manifest in manifests
            for entry in manifest.files
            if entry.table == name
        ]
        if not parts:
            parts = [conform(name, TABLES[name].empty_table())]
            if columns is not None:
                parts = [parts[0].select(list(columns))]
        return pa.concat_tables(parts)

    def _rows(
        self,
        manifest: Manifest,
        entry: FileEntry,
        wanted: set[tuple[str, int]] | None,
        run_id: str | None,
        columns: Sequence[str] | None,
    ) -> pa.Table:
        path = self.root / entry.path
        try:
            # The reader's memory map would outlive a file that retention removes.
            rows = conform(entry.table, pq.read_table(path, memory_map=False))
        except (OSError, pa.ArrowException) as error:
            raise DataError(
                f"{path}, named by manifest {manifest.number}, cannot be read: {error}."
            ) from None
        stale = {
            key
            for e in manifest.attempts
            if self._newest[key := (e.rollout_id, e.attempt)] != manifest.number
        }
        if wanted is not None or (stale and entry.table != "samples"):
            keys = zip(rows.column("rollout_id").to_pylist(), rows.column("attempt").to_pylist(), strict=True)
            keep = [(wanted is None or key in wanted) and key not in stale for key in keys]
            rows = rows.filter(pa.array(keep, pa.bool_()))
        if run_id is not None and "run_id" in rows.column_names:
            rows = rows.filter(pc.equal(rows.column("run_id"), run_id))
        return rows if columns is None else rows.select(list(columns))


def write_files(root: Path, name: str, tables: Mapping[str, pa.Table]) -> tuple[FileEntry, ...]:
    """Put one Parquet file per table that has rows, named `name`, in place: whole, and on disk.

    Writing the same name again replaces the file: names must depend on the content's origin alone.
    """
    entries = []
    for table, rows in tables.items():
        if len(rows) == 0:
            continue
        buffer = io.BytesIO()
        write_parquet(table, rows, buffer)
        data = buffer.getvalue()
        relative = f"{table}/{name}.parquet"
        _put(root / relative, data)
        entries.append(FileEntry(table, relative, len(rows), len(data), hashlib.sha256(data).hexdigest()))
    return tuple(entries)


def describe_file(root: Path, table: str, relative: str) -> FileEntry:
    """The entry of a file that `write_files` has put in place, read from the file itself.

    Raises:
        DataError: the file is damaged.
    """
    path = root / relative
    try:
        data = path.read_bytes()
        rows = pq.ParquetFile(io.BytesIO(data)).metadata.num_rows
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path} cannot be read: {error}.") from None
    return FileEntry(table, relative, rows, len(data), hashlib.sha256(data).hexdigest())


def commit_manifest(
    root: Path,
    writer: str,
    files: Sequence[FileEntry],
    *,
    attempts: Sequence[AttemptEntry] = (),
    journal: Mapping[str, Any] | None = None,
) -> Manifest:
    """Add the next manifest: from now on readers see `files`. Safe beside other writers."""
    folder = root / MANIFESTS
    folder.mkdir(parents=True, exist_ok=True)
    numbers = [int(path.stem) for path in folder.glob("[0-9]*.json")]
    number = max(numbers, default=0) + 1
    while True:
        manifest = Manifest(number, writer, tuple(files), tuple(attempts), dict(journal or {}), time.time())
        if _put_if_absent(folder / f"{number:08d}.json", _dump(manifest)):
            return manifest
        number += 1


def _check_table(name: str) -> pa.Schema:
    if name not in TABLES:
        raise DataError(f"There is no table {name!r}: a data set has {', '.join(TABLES)}.")
    return TABLES[name]


def _dump(manifest: Manifest) -> bytes:
    document = {
        "number": manifest.number,
        "schema_version": manifest.schema_version,
        "writer": manifest.writer,
        "created": manifest.created,
        "files": [vars(entry) for entry in manifest.files],
        "attempts": [vars(entry) for entry in manifest.attempts],
        "journal": dict(manifest.journal),
    }
    return json.dumps(document, separators=(",", ":")).encode() + b"\n"


def _read_manifest(path: Path) -> Manifest:
    try:
        document = json.loads(path.read_bytes())
        if document["schema_version"] > SCHEMA_VERSION:
            raise DataError(
                f"{path} was written by a newer agentlightning (schema {document['schema_version']}): upgrade."
            )
        return Manifest(
            number=document["number"],
            writer=document["writer"],
            files=tuple(FileEntry(**entry) for entry in document["files"]),
            attempts=tuple(AttemptEntry(**entry) for entry in document["attempts"]),
            journal=document["journal"],
            created=document["created"],
            schema_version=document["schema_version"],
        )
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"The manifest {path} is damaged: {error}.") from None


def _put(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    _write_synced(temporary, data)
    os.replace(temporary, path)
    _sync_folder(path.parent)


def _put_if_absent(path: Path, data: bytes) -> bool:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    _write_synced(temporary, data)
    try:
        os.link(temporary, path)  # atomic, and fails if the name is taken
    except FileExistsError:
        return False
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
    _sync_folder(path.parent)
    return True


def _write_synced(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
