"""The data set: Parquet files that numbered manifests name, in a folder or an object store.

    data/{transitions,rollouts,spans,samples}/NAME.parquet
    data/manifests/00000001.json, 00000002.json, …

The one idea: only what a manifest names exists. A writer puts whole files in place, then creates the
next manifest if it is absent; a crash between the two leaves a file that nobody reads. Each manifest
says which attempts its files hold; of an attempt that stands in several, only the newest counts.
"""

import datetime
import hashlib
import io
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from agentlightning.proto.errors import DataError
from agentlightning.proto.manifests import (
    CHECKPOINTS,
    MANIFESTS,
    AttemptEntry,
    FileEntry,
    Follower,
    History,
    Key,
    Manifest,
    commit_manifest,
)
from agentlightning.proto.schemas import TABLES, conform, parquet_writer
from agentlightning.proto.stores import Location, Store, open_store

__all__ = [
    "CHECKPOINTS",
    "MANIFESTS",
    "AttemptEntry",
    "Dataset",
    "FileEntry",
    "Manifest",
    "Selection",
    "commit_manifest",
    "describe_file",
    "is_dataset",
    "open_dataset",
    "read_rows",
    "write_files",
    "write_pieces",
]


@dataclass(frozen=True)
class Selection:
    """A part of the data set."""

    run: str | None = None
    split: str | None = None
    rollouts: Collection[str] | None = None
    agent: str | None = None
    """Of transitions only the calls of this agent; of the other tables the attempts that have one."""
    since: datetime.datetime | None = None
    """Attempts that began then or later; UTC if it names no zone."""
    until: datetime.datetime | None = None
    """Attempts that began before then."""
    sealed: bool = False
    """No attempt that was written only because nothing more came."""

    @property
    def reads_rollouts(self) -> bool:
        """Whether the manifests alone do not know which attempts are meant."""
        return self.split is not None or self.since is not None or self.until is not None


def open_dataset(
    path: Location,
    *,
    run: str | None = None,
    split: str | None = None,
    rollouts: Collection[str] | None = None,
    agent: str | None = None,
    since: datetime.datetime | None = None,
    until: datetime.datetime | None = None,
    sealed: bool = False,
) -> "Dataset":
    """Open a data set, or a part of it, for reading; see `Selection` for the parts.

    Args:
        path: its folder, the folder of a run, or the URL of an object store.

    Raises:
        DataError: there is none at `path`.
    """
    selection = Selection(run, split, rollouts, agent, since, until, sealed)
    for place in (path, f"{path}/data"):
        store = open_store(place)
        if is_dataset(store):
            return Dataset(store, selection)
    raise DataError(f"{path} is not a data set: it has no {MANIFESTS}/ folder.")


def is_dataset(store: Store) -> bool:
    """Whether there is a data set, be it an empty one."""
    if isinstance(store.location, Path):
        return (store.location / MANIFESTS).is_dir()
    return bool(store.list(MANIFESTS) or store.list(CHECKPOINTS))


class Dataset:
    """A reader. It sees the commits that were there when it was opened or last refreshed."""

    def __init__(self, root: Location | Store, selection: Selection | None = None) -> None:
        self._follower = Follower(root)
        self.store = self._follower.store
        self.selection = selection or Selection()
        self._selected: tuple[int, set[Key]] | None = None

    @property
    def root(self) -> Any:
        """Where it lies: a Path, or an object store's URL."""
        return self.store.location

    @property
    def history(self) -> History:
        """What the manifests add up to."""
        return self._follower.history

    def refresh(self, *, look: bool = False) -> None:
        """Read the manifests that have been added. Raises DataError if one is damaged; see `Follower`."""
        self._follower.refresh(look=look)

    @property
    def manifests(self) -> Sequence[Manifest]:
        """The commits, oldest first; behind a checkpoint those alone that something is left of."""
        return self.history.manifests

    @property
    def attempts(self) -> Mapping[Key, AttemptEntry]:
        """Every attempt of the selection, newest generation."""
        if self.selection == Selection():
            return self.history.entries
        return {key: self.history.entries[key] for key in self._keys()}

    def manifest_of(self, rollout_id: str, attempt: int) -> int | None:
        """Number of the manifest whose files hold the newest generation of an attempt."""
        return self.history.home.get((rollout_id, attempt))

    def files(self, table: str) -> list[Path]:
        """The Parquet files of a table that exist for readers, in the order of their commits.

        All of them, whatever the selection. Where attempts have several generations, these files hold
        the older ones too, until compaction. Of an object store see `names`.
        """
        return [self.root / name for name in self.names(table)]

    def names(self, table: str) -> list[str]:
        """The same, relative to the data set's place."""
        _check_table(table)
        return [entry.path for m in self.manifests for entry in m.files if entry.table == table]

    def table(
        self,
        name: str,
        *,
        attempts: Iterable[Key] | None = None,
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
        return pa.concat_tables([*self.pieces(name, attempts=attempts, run_id=run_id, columns=columns)])

    def pieces(
        self,
        name: str,
        *,
        attempts: Iterable[Key] | None = None,
        run_id: str | None = None,
        columns: Sequence[str] | None = None,
    ) -> Iterator[pa.Table]:
        """The same file by file, so that memory holds one; at least one piece, with the columns."""
        schema = _check_table(name)
        for column in columns or ():
            if column not in schema.names:
                raise DataError(f"Table {name} has no column {column!r}: it has {', '.join(schema.names)}.")
        wanted = None if attempts is None else set(attempts)
        if self.selection != Selection():
            wanted = self._keys() if wanted is None else wanted & self._keys()
        manifests: Iterable[Manifest] = list(self.manifests)
        if wanted is not None and name != "samples":
            homes = {self.history.home[key] for key in wanted if key in self.history.home}
            manifests = [manifest for manifest in manifests if manifest.number in homes]
        none = True
        for manifest in manifests:
            for entry in manifest.files:
                if entry.table == name:
                    none = False
                    yield self._rows(manifest, entry, wanted, run_id, columns)
        if none:
            empty = conform(name, schema.empty_table())
            yield empty if columns is None else empty.select(list(columns))

    def parts(self, tables: Mapping[str, Sequence[str] | None]) -> Iterator[dict[str, pa.Table]]:
        """Some tables commit by commit, newest generations only: of an attempt all rows come together.

        Args:
            tables: which columns of each; None for all.
        """
        for manifest in list(self.manifests):
            found = {
                name: [
                    self._rows(manifest, entry, None, None, columns)
                    for entry in manifest.files
                    if entry.table == name
                ]
                for name, columns in tables.items()
            }
            if any(found.values()):
                empty = {name: conform(name, TABLES[name].empty_table()) for name in tables}
                yield {
                    name: pa.concat_tables(
                        rows or [empty[name].select(list(tables[name] or empty[name].column_names))]
                    )
                    for name, rows in found.items()
                }

    def counters(self) -> dict[str, int]:
        """Fidelity counters over the whole data set, by name."""
        return dict(self.history.counters)

    def _rows(
        self,
        manifest: Manifest,
        entry: FileEntry,
        wanted: set[Key] | None,
        run_id: str | None,
        columns: Sequence[str] | None,
    ) -> pa.Table:
        stale = self.history.stale(manifest) if entry.table != "samples" else set()
        agent = self.selection.agent if entry.table == "transitions" else None
        needed = None
        if columns is not None:
            needed = {*columns, "rollout_id", "attempt"} | ({"run_id"} if run_id is not None else set())
            needed |= {"agent"} if agent is not None else set()
        rows = read_rows(self.store, manifest, entry, needed)
        if wanted is not None or stale:
            keys = zip(rows.column("rollout_id").to_pylist(), rows.column("attempt").to_pylist(), strict=True)
            keep = [(wanted is None or key in wanted) and key not in stale for key in keys]
            if not all(keep):
                rows = rows.filter(pa.array(keep, pa.bool_()))
        if run_id is not None and "run_id" in rows.column_names:
            rows = rows.filter(pc.equal(rows.column("run_id"), run_id))
        if agent is not None:
            rows = rows.filter(pc.equal(rows.column("agent"), agent))
        return rows if columns is None else rows.select(list(columns))

    def _keys(self) -> set[Key]:
        """The attempts of the selection."""
        if self._selected is not None and self._selected[0] == self.history.last:
            return self._selected[1]
        chosen = self.selection
        keys = {
            key
            for key, entry in self.history.entries.items()
            if (chosen.run is None or entry.run_id == chosen.run)
            and (chosen.rollouts is None or entry.rollout_id in chosen.rollouts)
            and not (chosen.sealed and entry.truncated)
        }
        whole = Dataset.__new__(Dataset)  # the same commits, without the selection
        whole._follower, whole.store, whole.selection = self._follower, self.store, Selection()
        if chosen.reads_rollouts:
            columns = ["rollout_id", "attempt", "split", "start_time"]
            rows = whole.table("rollouts", attempts=keys, columns=columns)
            if chosen.split is not None:
                rows = rows.filter(pc.equal(rows.column("split"), chosen.split))
            if chosen.since is not None:
                rows = rows.filter(pc.greater_equal(rows.column("start_time"), _moment(chosen.since)))
            if chosen.until is not None:
                rows = rows.filter(pc.less(rows.column("start_time"), _moment(chosen.until)))
            keys = _keys_of(rows)
        if chosen.agent is not None:
            rows = whole.table("transitions", attempts=keys, columns=["rollout_id", "attempt", "agent"])
            keys = _keys_of(rows.filter(pc.equal(rows.column("agent"), chosen.agent)))
        self._selected = (self.history.last, keys)
        return keys


def read_rows(
    store: Store, manifest: Manifest, entry: FileEntry, columns: Collection[str] | None
) -> pa.Table:
    """A file's rows, in the current schema. Raises DataError if it cannot be read."""
    try:
        # A reader's memory map would outlive a file that retention removes.
        with pq.ParquetFile(store.source(entry.path), memory_map=False) as file:
            there = [name for name in file.schema_arrow.names if columns is None or name in columns]
            rows = conform(entry.table, file.read(there))
    except (OSError, pa.ArrowException) as error:
        raise DataError(
            f"{store.location}/{entry.path}, named by manifest {manifest.number}, cannot be read: {error}."
        ) from None
    return rows if columns is None else rows.select([name for name in rows.column_names if name in columns])


def write_files(root: Location | Store, name: str, tables: Mapping[str, pa.Table]) -> tuple[FileEntry, ...]:
    """Put one Parquet file per table that has rows, named `name`, in place: whole, and on disk.

    Writing the same name again replaces the file: names must depend on the content's origin alone.
    """
    entries = []
    for table, rows in tables.items():
        if len(rows):
            entries.append(write_pieces(root, name, table, [rows]))
    return tuple(entries)


def write_pieces(root: Location | Store, name: str, table: str, pieces: Iterable[pa.Table]) -> FileEntry:
    """The same for one table, piece by piece: memory holds one, and the compressed file."""
    sink = pa.BufferOutputStream()
    count = 0
    with parquet_writer(table, sink) as write:
        for rows in pieces:
            write(rows)
            count += len(rows)
    data = memoryview(sink.getvalue())
    relative = f"{table}/{name}.parquet"
    open_store(root).put(relative, data)
    return FileEntry(table, relative, count, len(data), hashlib.sha256(data).hexdigest())


def describe_file(root: Location | Store, table: str, relative: str) -> FileEntry:
    """The entry of a file that `write_files` has put in place, read from the file itself.

    Raises:
        DataError: the file is damaged.
    """
    store = open_store(root)
    try:
        data = store.get(relative)
        rows = pq.ParquetFile(io.BytesIO(data)).metadata.num_rows
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{store.location}/{relative} cannot be read: {error}.") from None
    return FileEntry(table, relative, rows, len(data), hashlib.sha256(data).hexdigest())


def _check_table(name: str) -> pa.Schema:
    if name not in TABLES:
        raise DataError(f"There is no table {name!r}: a data set has {', '.join(TABLES)}.")
    return TABLES[name]


def _keys_of(rows: pa.Table) -> set[Key]:
    return set(zip(rows.column("rollout_id").to_pylist(), rows.column("attempt").to_pylist(), strict=True))


def _moment(moment: datetime.datetime) -> pa.Scalar:
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.UTC)
    return pa.scalar(moment, pa.timestamp("us", tz="UTC"))
