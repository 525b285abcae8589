"""Where a data set lies: a folder, or an object store. Files appear whole, and once.

    runs/demo/data                 a folder; what is put there is synced to disk before it has its name
    s3://bucket/prefix, gs://, az://   an object store; credentials as its own tools find them (environment, profile)
    file:///var/data, memory://name    the same library on local files, and in this process's memory

A name is a path relative to the data set, with forward slashes. The one operation that everything rests
on is `put_if_absent`: of two writers one gets the name.
"""

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from agentlightning.proto.errors import ConfigError

__all__ = ["FolderStore", "Listed", "Location", "ObjectStore", "Store", "is_url", "location", "open_store"]

Location = Path | str
"""A folder, or the URL of an object store."""


@dataclass(frozen=True, slots=True)
class Listed:
    """One file that is there."""

    name: str
    bytes: int
    modified: float
    """Unix time."""


class Store(Protocol):
    """What a data set needs of the place where it lies."""

    location: Location

    def put(self, name: str, data: bytes | memoryview) -> None:
        """Put a whole file in place, over what has the name."""

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """The same if the name is free; else False, and nothing changes."""

    def get(self, name: str) -> bytes:
        """A file's content. Raises FileNotFoundError."""

    def list(self, folder: str, after: str = "") -> list[Listed]:
        """The files right in a folder, those whose own names sort behind `after`, in order."""

    def delete(self, names: Iterable[str]) -> None:
        """Remove files; one that is gone already is no error."""

    def source(self, name: str) -> Any:
        """What pyarrow reads a Parquet file from. Raises FileNotFoundError."""


def is_url(place: Location) -> bool:
    """Whether a location is an object store's."""
    return isinstance(place, str) and "://" in place


def location(text: str) -> Location:
    """A location from a command line."""
    return text if is_url(text) else Path(text)


def open_store(place: "Location | Store") -> Store:
    """The store at a location. Raises ConfigError if there can be none."""
    if isinstance(place, Path):
        return FolderStore(place)
    if not isinstance(place, str):
        return place
    return ObjectStore(place) if is_url(place) else FolderStore(Path(place))


class FolderStore:
    """A folder of a file system that has links and renames whole."""

    def __init__(self, root: Path) -> None:
        self.location: Location = root
        self.root = root

    def put(self, name: str, data: bytes | memoryview) -> None:
        path = self.root / name
        temporary = self._temporary(path)
        _write_synced(temporary, data)
        os.replace(temporary, path)
        _sync_folder(path.parent)

    def put_if_absent(self, name: str, data: bytes) -> bool:
        path = self.root / name
        temporary = self._temporary(path)
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

    def get(self, name: str) -> bytes:
        return (self.root / name).read_bytes()

    def list(self, folder: str, after: str = "") -> list[Listed]:
        found = []
        try:
            with os.scandir(self.root / folder) as entries:
                for entry in entries:
                    if entry.name > after and not entry.name.startswith(".") and entry.is_file():
                        with contextlib.suppress(FileNotFoundError):  # removed while we look
                            status = entry.stat()
                            found.append(Listed(f"{folder}/{entry.name}", status.st_size, status.st_mtime))
        except FileNotFoundError:
            return []
        return sorted(found, key=lambda listed: listed.name)

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            (self.root / name).unlink(missing_ok=True)

    def source(self, name: str) -> Any:
        return self.root / name

    def _temporary(self, path: Path) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns():x}.tmp")


class ObjectStore:
    """An object store, by `obstore`."""

    def __init__(self, url: str) -> None:
        try:
            import obstore
            import obstore.exceptions
        except ImportError:
            raise ImportError(
                f"{url} is in an object store: install agentlightning[collector] or agentlightning[trainer]."
            ) from None
        self.location: Location = url.rstrip("/")
        self._obstore = obstore
        self._store = _object_store(self.location)

    def put(self, name: str, data: bytes | memoryview) -> None:
        with self._as_os_error():
            self._obstore.put(self._store, name, bytes(data))

    def put_if_absent(self, name: str, data: bytes) -> bool:
        with self._as_os_error():
            try:
                self._obstore.put(self._store, name, data, mode="create", use_multipart=False)
            except self._obstore.exceptions.AlreadyExistsError:
                return False
        return True

    def get(self, name: str) -> bytes:
        with self._as_os_error():
            return bytes(self._obstore.get(self._store, name).bytes())

    def list(self, folder: str, after: str = "") -> list[Listed]:
        prefix = f"{folder}/"
        offset = prefix + after if after else None
        found = []
        with self._as_os_error():
            for chunk in self._obstore.list(self._store, prefix, offset=offset):
                for item in chunk:
                    name = item["path"]
                    if "/" not in name[len(prefix) :] and name > prefix + after:
                        found.append(Listed(name, item["size"], item["last_modified"].timestamp()))
        return sorted(found, key=lambda listed: listed.name)

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            with self._as_os_error(), contextlib.suppress(FileNotFoundError):
                self._obstore.delete(self._store, name)

    def source(self, name: str) -> Any:
        import pyarrow as pa  # heavy; a receiver reads no Parquet until it is asked to

        return pa.BufferReader(self.get(name))

    @contextlib.contextmanager
    def _as_os_error(self) -> Iterator[None]:
        """An object store that cannot be reached is what a disk is that cannot be written."""
        try:
            yield
        except self._obstore.exceptions.BaseError as error:
            raise OSError(f"{self.location}: {error}") from None


_MEMORY: Final[dict[str, Any]] = {}
"""`memory://name` is one store in the whole process."""


def _object_store(url: str) -> Any:
    from obstore.exceptions import BaseError
    from obstore.store import LocalStore, MemoryStore, from_url

    scheme, _, rest = url.partition("://")
    if scheme == "memory":
        return _MEMORY.setdefault(rest, MemoryStore())
    try:
        if scheme == "file":
            return LocalStore.from_url(url, mkdir=True)
        return from_url(url)
    except (BaseError, ValueError, OSError) as error:
        raise ConfigError(f"{url} cannot be used as a data set's place: {error}.") from None


def _write_synced(path: Path, data: bytes | memoryview) -> None:
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
