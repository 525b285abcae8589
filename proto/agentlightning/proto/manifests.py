"""Manifests: the numbered commits of a data set, and what they add up to.

A manifest names files that exist from now on, files that no longer do, and the attempts whose rows stand
in its files, whole. The number is taken by put-if-absent, so that writers need no other agreement. Now
and then a checkpoint says what all manifests up to one add up to; a reader begins there.

    manifests/00000001.json, 00000002.json, …
    checkpoints/00000064.json          what manifests 1 to 64 add up to

Of an attempt that stands in several manifests the highest generation counts, of equal ones the newest.
"""

import json
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from agentlightning.proto.errors import DataError
from agentlightning.proto.stores import Location, Store, open_store

__all__ = [
    "CHECKPOINTS",
    "GRACE_SECONDS",
    "MANIFESTS",
    "SCHEMA_VERSION",
    "AttemptEntry",
    "FileEntry",
    "Follower",
    "History",
    "Key",
    "Manifest",
    "commit_manifest",
    "last_number",
    "newest_checkpoint",
    "put_manifest",
    "read_checkpoint",
    "read_manifest",
    "write_checkpoint",
]

SCHEMA_VERSION: Final = 2
"""Of manifests and tables. 2: `spans.in_transitions`; manifests may take files away."""
MANIFESTS: Final = "manifests"
CHECKPOINTS: Final = "checkpoints"
CHECKPOINT_SECONDS: Final = 60.0
"""A reader looks this often whether it was left behind a checkpoint."""
GRACE_SECONDS: Final = 900.0
"""So long a manifest, or a file, stays after it is of no use any more: somebody may be reading it."""

Key = tuple[str, int]  # rollout id, attempt


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
    truncated: bool = False
    """It was written because nothing more came, not because anybody said that it was whole."""
    since: int = 0
    """The manifest that first held this generation; 0: this one."""
    place: int = 0
    """Its place among that manifest's attempts."""

    @property
    def key(self) -> Key:
        return (self.rollout_id, self.attempt)


@dataclass(frozen=True)
class Manifest:
    """One commit."""

    number: int
    writer: str
    """`collector`, `convert`, `trainer`, `compact`, `retain`, …"""
    files: tuple[FileEntry, ...] = ()
    attempts: tuple[AttemptEntry, ...] = ()
    journal: Mapping[str, Any] = field(default_factory=dict)
    """The collector's low-watermark and counters; empty for other writers."""
    created: float = 0.0
    schema_version: int = SCHEMA_VERSION
    removes: tuple[str, ...] = ()
    """Paths of files that no longer exist for readers."""
    expired: tuple[Key, ...] = ()
    """Attempts that retention has taken away."""
    data_time: float = 0.0
    """When the newest of its rows were first written: compaction does not make data younger."""


class History:
    """What a sequence of manifests adds up to."""

    def __init__(self) -> None:
        self.last = 0
        """Number of the newest manifest."""
        self.manifests: list[Manifest] = []
        """Those that count still, ascending, with the files that exist."""
        self.entries: dict[Key, AttemptEntry] = {}
        self.home: dict[Key, int] = {}
        """Of each attempt, the manifest whose files hold its rows."""
        self.counters: dict[str, int] = {}
        self.journals: dict[str, dict[str, Any]] = {}
        """By journal id the newest `low`, `high` and `commit`."""
        self.joins: dict[str, dict[str, dict[str, list[Any]]]] = {}
        """By journal id, what its manifests say of `traces` and `logs` that became part of other attempts."""
        self.highs: dict[int, tuple[str, int]] = {}
        """Of a collector's manifest, by number: the journal, and the position below which it holds everything."""
        self.expired: dict[Key, float] = {}
        """Attempts that retention has taken away, and when."""
        self.removed: dict[str, float] = {}
        """Files that are to be deleted, and since when."""

    def apply(self, manifest: Manifest) -> None:
        """The next manifest."""
        self.last = manifest.number
        if manifest.removes:
            gone = set(manifest.removes)
            self.removed.update(dict.fromkeys(gone, manifest.created))
            self.manifests = [_without(known, gone) for known in self.manifests]
        for place, entry in enumerate(manifest.attempts):
            known = self.entries.get(entry.key)
            if known is not None and known.generation > entry.generation:
                continue  # another writer was faster with something newer
            if known is None and entry.since and entry.key in self.expired:
                continue  # moved while it expired
            first = entry.since == 0
            self.entries[entry.key] = replace(entry, since=manifest.number, place=place) if first else entry
            self.home[entry.key] = manifest.number
            self.expired.pop(entry.key, None)
        for key in manifest.expired:
            if self.entries.pop(key, None) is not None:
                del self.home[key]
            self.expired[key] = manifest.created
        journal = manifest.journal
        for name, count in journal.get("counters", {}).items():
            self.counters[name] = self.counters.get(name, 0) + int(count)
        if "id" in journal:
            self.journals[journal["id"]] = {name: int(journal[name]) for name in ("low", "high", "commit")}
            self.highs[manifest.number] = (journal["id"], int(journal["high"]))
            for name in ("traces", "logs"):
                if name in journal:
                    self.joins.setdefault(journal["id"], {}).setdefault(name, {}).update(journal[name])
        self.manifests.append(manifest)

    def stale(self, manifest: Manifest) -> set[Key]:
        """Attempts whose rows in this manifest's files do not count: newer ones stand elsewhere."""
        return {entry.key for entry in manifest.attempts if self.home.get(entry.key) != manifest.number}

    def dump(self) -> bytes:
        """As a checkpoint's content."""
        firsts = {entry.since for entry in self.entries.values()}
        document = {
            "schema_version": SCHEMA_VERSION,
            "last": self.last,
            "manifests": [
                _document(manifest)
                for manifest in self.manifests
                if manifest.files or any(self.home.get(e.key) == manifest.number for e in manifest.attempts)
            ],
            "entries": [vars(entry) for entry in self.entries.values()],
            "home": [[*key, number] for key, number in self.home.items()],
            "counters": self.counters,
            "journals": self.journals,
            "joins": self.joins,
            "highs": [[number, *high] for number, high in self.highs.items() if number in firsts],
            "expired": [[*key, moment] for key, moment in self.expired.items()],
            "removed": self.removed,
        }
        return json.dumps(document, separators=(",", ":")).encode() + b"\n"

    @classmethod
    def load(cls, name: str, data: bytes) -> "History":
        """From a checkpoint. Raises DataError if it is damaged."""
        history = cls()
        try:
            document = json.loads(data)
            _check_version(name, document)
            history.last = document["last"]
            history.manifests = [_manifest(item) for item in document["manifests"]]
            for item in document["entries"]:
                entry = AttemptEntry(**item)
                history.entries[entry.key] = entry
            history.home = {(rollout, attempt): number for rollout, attempt, number in document["home"]}
            history.counters = document["counters"]
            history.journals = document["journals"]
            history.joins = document.get("joins", {})
            history.highs = {number: (journal, high) for number, journal, high in document["highs"]}
            history.expired = {(rollout, attempt): moment for rollout, attempt, moment in document["expired"]}
            history.removed = document["removed"]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"The checkpoint {name} is damaged: {error}.") from None
        return history


class Follower:
    """The manifests of a place as they come. Light: it needs no Arrow."""

    def __init__(self, root: Location | Store) -> None:
        self.store = open_store(root)
        self.history = History()
        self._looked: float | None = None
        self.refresh()

    def refresh(self, *, look: bool = False) -> None:
        """Read the manifests that have been added. Raises DataError if one is damaged.

        Args:
            look: for a checkpoint in any case; who takes the next number must.
        """
        if look:
            self._looked = None
        while True:
            manifest = read_manifest(self.store, self.history.last + 1)
            if manifest is not None:
                self.history.apply(manifest)
                continue
            # Nothing; or it was deleted, because a checkpoint holds it.
            if self._looked is not None and time.monotonic() - self._looked < CHECKPOINT_SECONDS:
                return
            self._looked = time.monotonic()
            checkpoint = newest_checkpoint(self.store)
            if checkpoint <= self.history.last:
                return
            try:
                self.history = read_checkpoint(self.store, checkpoint)
            except FileNotFoundError:  # a newer one has come meanwhile
                self._looked = None


def commit_manifest(
    root: Location | Store,
    writer: str,
    files: Sequence[FileEntry],
    *,
    attempts: Sequence[AttemptEntry] = (),
    journal: Mapping[str, Any] | None = None,
    after: int | None = None,
) -> Manifest:
    """Add the next manifest: from now on readers see `files`. Safe beside other writers.

    Args:
        after: a number that is known to be taken; then manifests are not listed.
    """
    store = open_store(root)
    if (
        after is None or newest_checkpoint(store) > after
    ):  # behind a checkpoint numbers look free that are not
        after = last_number(store)
    manifest = Manifest(after + 1, writer, tuple(files), tuple(attempts), dict(journal or {}), time.time())
    while not put_manifest(store, manifest):
        manifest = replace(manifest, number=manifest.number + 1)
    return manifest


def put_manifest(store: Store, manifest: Manifest) -> bool:
    """Add a manifest if its number is free."""
    return store.put_if_absent(manifest_name(manifest.number), _dump(manifest))


def manifest_name(number: int) -> str:
    return f"{MANIFESTS}/{number:08d}.json"


def read_manifest(store: Store, number: int) -> Manifest | None:
    """One manifest; None if there is none. Raises DataError if it is damaged."""
    name = manifest_name(number)
    try:
        document = json.loads(store.get(name))
        _check_version(f"{store.location}/{name}", document)
        return replace(_manifest(document), number=number)  # its name is its number
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"The manifest {store.location}/{name} is damaged: {error}.") from None


def last_number(store: Store) -> int:
    """Number of the newest manifest; 0 if there is none."""
    begin = newest_checkpoint(store)
    names = [listed.name for listed in store.list(MANIFESTS, f"{begin:08d}.json" if begin else "")]
    return max([begin, *(number for name in names if (number := _number(name)) is not None)])


def newest_checkpoint(store: Store) -> int:
    """The last manifest that a checkpoint holds; 0 if there is no checkpoint."""
    return max((_number(listed.name) or 0 for listed in store.list(CHECKPOINTS)), default=0)


def read_checkpoint(store: Store, number: int) -> History:
    """Raises DataError if it is damaged, FileNotFoundError if it is gone."""
    name = f"{CHECKPOINTS}/{number:08d}.json"
    return History.load(f"{store.location}/{name}", store.get(name))


def write_checkpoint(store: Store, history: History, *, grace: float = GRACE_SECONDS) -> None:
    """Say what all manifests so far add up to; those older than `grace` seconds are then deleted.

    The grace must be longer than any writer takes from looking for the newest number to taking the next.
    """
    name = f"{CHECKPOINTS}/{history.last:08d}.json"
    store.put(name, history.dump())
    limit = time.time() - grace
    old = [
        listed.name
        for listed in (*store.list(MANIFESTS), *store.list(CHECKPOINTS))
        if (_number(listed.name) or history.last + 1) <= history.last
        and listed.modified < limit
        and listed.name != name
    ]
    store.delete(old)


def _number(name: str) -> int | None:
    stem = name.rpartition("/")[2].removesuffix(".json")
    return int(stem) if stem.isdecimal() else None


def _without(manifest: Manifest, gone: Collection[str]) -> Manifest:
    files = tuple(entry for entry in manifest.files if entry.path not in gone)
    return manifest if len(files) == len(manifest.files) else replace(manifest, files=files)


def _check_version(name: str, document: Mapping[str, Any]) -> None:
    if document["schema_version"] > SCHEMA_VERSION:
        raise DataError(
            f"{name} was written by a newer agentlightning (schema {document['schema_version']}): upgrade."
        )


def _dump(manifest: Manifest) -> bytes:
    return json.dumps(_document(manifest), separators=(",", ":")).encode() + b"\n"


def _document(manifest: Manifest) -> dict[str, Any]:
    return {
        "number": manifest.number,
        "schema_version": manifest.schema_version,
        "writer": manifest.writer,
        "created": manifest.created,
        "files": [vars(entry) for entry in manifest.files],
        "attempts": [vars(entry) for entry in manifest.attempts],
        "journal": dict(manifest.journal),
        "removes": list(manifest.removes),
        "expired": [list(key) for key in manifest.expired],
        "data_time": manifest.data_time or manifest.created,
    }


def _manifest(document: Mapping[str, Any]) -> Manifest:
    """Version 1 had neither `removes`, `expired` nor `data_time`."""
    return Manifest(
        number=document["number"],
        writer=document["writer"],
        files=tuple(FileEntry(**entry) for entry in document["files"]),
        attempts=tuple(AttemptEntry(**entry) for entry in document["attempts"]),
        journal=document["journal"],
        created=document["created"],
        schema_version=document["schema_version"],
        removes=tuple(document.get("removes", ())),
        expired=tuple((rollout, attempt) for rollout, attempt in document.get("expired", ())),
        data_time=document.get("data_time", document["created"]),
    )
