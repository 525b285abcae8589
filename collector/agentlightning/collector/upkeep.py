"""What a data set needs now and then: many small files become few, the old goes, checkpoints.

Each is a manifest first: readers see the old files or the new ones, never both, and a file is deleted
only when nobody can be reading it any more. Whoever commits first wins: work on files that another
writer has taken away meanwhile is dropped.
"""

import logging
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

import pyarrow as pa

from agentlightning.collector.upkeep_settings import TARGET_BYTES, UpkeepSettings
from agentlightning.proto.dataset import Dataset, read_rows, write_pieces
from agentlightning.proto.errors import DataError
from agentlightning.proto.manifests import (
    GRACE_SECONDS,
    FileEntry,
    Manifest,
    newest_checkpoint,
    put_manifest,
    write_checkpoint,
)

__all__ = ["Upkeep", "clean", "compact", "retain"]

log = logging.getLogger(__name__)

TABLES: Final = ("transitions", "rollouts", "spans")
"""What is compacted. The trainer's samples are one file per step, and named by it."""
MERGED: Final = "m"
"""Begins the names of files that compaction makes."""
ROW_GROUP_BYTES: Final = 32 << 20
"""In memory; what is merged goes through it in such pieces."""
CHECKPOINT_EVERY: Final = 64
INTERVAL_SECONDS: Final = 10.0


class Upkeep:
    """Does what is due; beside a converter when that has nothing to do."""

    def __init__(self, dataset: Dataset, settings: UpkeepSettings) -> None:
        self._dataset = dataset
        self._settings = settings
        self._next = time.monotonic() + INTERVAL_SECONDS
        self._checkpoint = newest_checkpoint(dataset.store)

    def run_if_due(self) -> None:
        """One round, if it is time."""
        if time.monotonic() < self._next:
            return
        try:
            self.run()
        except DataError as error:
            log.error("The data set's upkeep stops until this is repaired: %s", error)
        self._next = time.monotonic() + INTERVAL_SECONDS

    def run(self) -> None:
        """One round. Raises OSError if the place cannot be written, DataError if a file cannot be read."""
        dataset, settings = self._dataset, self._settings
        dataset.refresh()
        retain(dataset, max_age=settings.keep_seconds, max_bytes=settings.keep_bytes)
        if settings.compact_files:
            compact(dataset, least=settings.compact_files, target_bytes=settings.target_bytes, exact=False)
        clean(dataset, grace=settings.grace_seconds)
        if dataset.history.last - self._checkpoint >= CHECKPOINT_EVERY:
            clean(dataset, grace=settings.grace_seconds, orphans=True)
            write_checkpoint(dataset.store, dataset.history)
            self._checkpoint = dataset.history.last


def compact(dataset: Dataset, *, least: int = 2, target_bytes: int = TARGET_BYTES, exact: bool = True) -> int:
    """Make few files of many small ones, without the rows that no longer count; returns how many went.

    Args:
        least: where fewer commits than this could become one, they stay.
        target_bytes: of what becomes one; a commit larger than half of it is left as it is.
        exact: files that hold older generations are written anew in any case, so that every reader of
            the named files sees the newest alone.
    """
    removed = 0
    for group in _groups(dataset, max(2, least), target_bytes, exact):
        removed += _merge(dataset, group)
    return removed


def retain(
    dataset: Dataset, *, max_age: float | None = None, max_bytes: int | None = None, now: float | None = None
) -> int:
    """Take the oldest commits away, attempts and samples alike; returns how many.

    Args:
        max_age: seconds since a commit's newest rows were first written.
        max_bytes: of all Parquet files together.
    """
    now = time.time() if now is None else now
    going: list[Manifest] = []
    left = sum(entry.bytes for manifest in dataset.manifests for entry in manifest.files)
    for manifest in sorted(dataset.manifests, key=lambda manifest: manifest.data_time):
        if not manifest.files:
            continue
        old = max_age is not None and manifest.data_time < now - max_age
        large = max_bytes is not None and left > max_bytes
        if not old and not large:
            break
        going.append(manifest)
        left -= sum(entry.bytes for entry in manifest.files)
    if not going:
        return 0
    numbers = {manifest.number for manifest in going}
    expired = tuple(key for key, home in dataset.history.home.items() if home in numbers)
    manifest = Manifest(
        0,
        "retain",
        removes=tuple(entry.path for manifest in going for entry in manifest.files),
        expired=expired,
        created=now,
    )
    if not _commit(dataset, manifest, going):
        return 0
    log.info("Retention took %d commits away, with %d attempts.", len(going), len(expired))
    return len(going)


def clean(
    dataset: Dataset, *, grace: float = GRACE_SECONDS, orphans: bool = False, now: float | None = None
) -> int:
    """Delete the files that no longer exist for readers; returns how many.

    Args:
        orphans: look for what a compaction left that did not come to its manifest, too.
    """
    now = time.time() if now is None else now
    store, removed = dataset.store, dataset.history.removed
    named = {entry.path for manifest in dataset.manifests for entry in manifest.files}
    gone = {path for path, moment in removed.items() if moment < now - grace and path not in named}
    for table in TABLES if orphans else ():
        for listed in store.list(table):
            if (
                listed.name.startswith(f"{table}/{MERGED}")
                and listed.modified < now - grace
                and listed.name not in named
                and listed.name not in removed
            ):
                gone.add(listed.name)
    store.delete(sorted(gone))
    for path in gone & removed.keys():
        del removed[path]  # in memory; the next checkpoint forgets it too
    return len(gone)


def _groups(dataset: Dataset, least: int, target_bytes: int, exact: bool) -> Iterable[list[Manifest]]:
    """Commits that follow each other and become one each."""
    groups: list[list[Manifest]] = []
    group: list[Manifest] = []
    size = 0
    for manifest in dataset.manifests:
        own = sum(entry.bytes for entry in manifest.files if entry.table in TABLES)
        stale = exact and bool(dataset.history.stale(manifest))
        if not own or (own > target_bytes // 2 and not stale):
            continue
        if size + own > target_bytes and group:
            groups.append(group)
            group, size = [], 0
        group.append(manifest)
        size += own
    groups.append(group)
    return [
        group
        for group in groups
        if len(group) >= least or (exact and any(dataset.history.stale(manifest) for manifest in group))
    ]


def _merge(dataset: Dataset, group: Sequence[Manifest]) -> int:
    """Write a group's rows as one commit."""
    entries = [(manifest, entry) for manifest in group for entry in manifest.files if entry.table in TABLES]
    numbers = {manifest.number for manifest in group}
    moved = tuple(
        entry for key, entry in dataset.history.entries.items() if dataset.history.home[key] in numbers
    )
    paths = [entry.path for _, entry in entries]
    name = f"{MERGED}{min(numbers):08d}-{max(numbers):08d}-{secrets.token_hex(8)}"  # two may be at it
    files: list[FileEntry] = []
    for table in TABLES:
        parts = (_live_rows(dataset, manifest, entry) for manifest, entry in entries if entry.table == table)
        files.append(write_pieces(dataset.store, name, table, _row_groups(parts)))
    manifest = Manifest(
        0,
        "compact",
        tuple(files),
        moved,
        created=time.time(),
        removes=tuple(paths),
        data_time=max(manifest.data_time for manifest in group),
    )
    if not _commit(dataset, manifest, group):
        dataset.store.delete(entry.path for entry in files)
        return 0
    log.info("Compaction made %d files of %d.", len(files), len(paths))
    return len(paths)


def _row_groups(parts: Iterable[pa.Table]) -> Iterable[pa.Table]:
    waiting: list[pa.Table] = []
    for part in parts:
        waiting.append(part)
        if sum(rows.nbytes for rows in waiting) >= ROW_GROUP_BYTES:
            yield pa.concat_tables(waiting).combine_chunks()
            waiting = []
    if waiting:
        yield pa.concat_tables(waiting).combine_chunks()


def _live_rows(dataset: Dataset, manifest: Manifest, entry: FileEntry) -> pa.Table:
    rows = read_rows(dataset.store, manifest, entry, None)
    stale = dataset.history.stale(manifest)
    if stale:
        keys = zip(rows.column("rollout_id").to_pylist(), rows.column("attempt").to_pylist(), strict=True)
        rows = rows.filter(pa.array([key not in stale for key in keys], pa.bool_()))
    return rows


def _commit(dataset: Dataset, manifest: Manifest, group: Sequence[Manifest]) -> bool:
    """Commit, unless another writer has changed what the group's files hold, or taken them away."""
    before = {m.number: dataset.history.stale(m) for m in group}
    while True:
        dataset.refresh(look=True)
        named = {entry.path for m in dataset.manifests for entry in m.files}
        same = all(path in named for path in manifest.removes) and all(
            dataset.history.stale(m) == before[m.number] for m in group
        )
        if not same:
            return False
        manifest = replace(manifest, number=dataset.history.last + 1)
        if put_manifest(dataset.store, manifest):
            dataset.refresh()
            return True
