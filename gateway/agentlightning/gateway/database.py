"""Access to the database from asyncio: transactions run in threads, and writes that wait together commit together.

`write` takes a function over a Connection. One writer thread runs what has gathered as one transaction, each function
behind a savepoint of its own, so that one that refuses undoes only itself; nobody hears of a result before it is
committed. Reads run beside it. On PostgreSQL several gateways share a database; a transaction that loses a deadlock
there runs again, so a function may run more than once and must touch nothing but its Connection.
"""

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Concatenate, Final, Generic, Literal, NamedTuple, ParamSpec, TypeVar

from sqlalchemy import Connection, Engine, create_engine, event, make_url, select, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError
from sqlalchemy.sql.schema import Table

from agentlightning.gateway.tables import SCHEMA_VERSION, meta, metadata
from agentlightning.proto.errors import ConfigError

__all__ = ["Database", "Durability", "Gathering", "insert_ignore", "upsert"]

logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")
Item = TypeVar("Item")
Result = TypeVar("Result")

Durability = Literal["process", "power"]
"""What a commit outlives: the death of the process, or a power cut as well (as PostgreSQL's always does)."""
BATCH: Final = 128
"""Writes in one transaction, at most."""
GATHERED: Final = 512
"""Items of a Gathering in one write, at most."""
READERS: Final = 2
TRIES: Final = 5
_AGAIN: Final = frozenset({"40001", "40P01", "23505"})
"""PostgreSQL's states of a transaction that another one stopped: serialisation, deadlock, and a key that was not there
when the transaction looked."""
_PREPARE_LOCK: Final = (
    0x616765  # any number of ours: replicas that start together create the tables one by one
)


class _Write(NamedTuple):
    function: Callable[..., Any]
    args: Any
    kwargs: Any
    done: "asyncio.Future[Any]"


class Database:
    """`await database.write(function, …)` runs `function(connection, …)` in a transaction.

    Raises whatever the function raises, or SQLAlchemyError if the database cannot be used.
    """

    def __init__(self, url: str, *, durability: Durability = "process") -> None:
        self.url = url
        self._engine = _connect(url, durability)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="database-writer")
        self._reader = ThreadPoolExecutor(READERS, thread_name_prefix="database-reader")
        self._waiting: list[_Write] = []
        self._writing: asyncio.Task[None] | None = None

    @classmethod
    def at(cls, state: Path, *, durability: Durability = "process") -> "Database":
        """The SQLite database of a state directory."""
        return cls(f"sqlite:///{state / 'gateway.db'}", durability=durability)

    @property
    def shared(self) -> bool:
        """Whether other gateways may use it, too."""
        return self._engine.dialect.name == "postgresql"

    def prepare(self) -> None:
        """Create what is missing. Raises ConfigError if another version's gateway has written here."""
        try:
            with self._engine.begin() as connection:
                if self.shared:
                    connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _PREPARE_LOCK})
                metadata.create_all(connection)
                insert_ignore(connection, meta, [{"key": "schema", "value": str(SCHEMA_VERSION)}])
                found = connection.execute(select(meta.c.value).where(meta.c.key == "schema")).scalar_one()
        except SQLAlchemyError as error:
            raise ConfigError(f"The gateway's database cannot be opened: {_short(error)}.") from error
        if int(found) != SCHEMA_VERSION:
            raise ConfigError(
                f"The gateway's database has schema {found}, this gateway reads {SCHEMA_VERSION}: "
                "use the version that wrote it, or another --state or --database."
            )

    async def write(
        self, function: Callable[Concatenate[Connection, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()
        self._waiting.append(_Write(function, args, kwargs, done))
        if self._writing is None:
            self._writing = loop.create_task(self._write())
        return await done

    async def read(
        self, function: Callable[Concatenate[Connection, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        def transaction() -> T:
            with (
                self._engine.connect() as connection,
                connection.execution_options(agl_readonly=True).begin(),
            ):
                return function(connection, *args, **kwargs)

        return await asyncio.get_running_loop().run_in_executor(self._reader, transaction)

    def close(self) -> None:
        """Wait for what is running, then close."""
        self._writer.shutdown()
        self._reader.shutdown()
        self._engine.dispose()

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._waiting:
                batch, self._waiting = self._waiting[:BATCH], self._waiting[BATCH:]
                try:
                    outcomes = await loop.run_in_executor(self._writer, self._commit, batch)
                except Exception as error:  # noqa: BLE001  whatever it is, it is for those who wait
                    outcomes = [error] * len(batch)
                for write, outcome in zip(batch, outcomes, strict=True):
                    if write.done.done():  # whoever asked has gone; it is committed all the same
                        continue
                    if isinstance(outcome, Exception):
                        write.done.set_exception(outcome)
                    else:
                        write.done.set_result(outcome[0])
        finally:
            self._writing = None

    def _commit(self, batch: list[_Write]) -> list[tuple[Any] | Exception]:
        """Run a batch as one transaction; again, if another gateway's transaction stopped it."""
        for left in reversed(range(TRIES)):
            try:
                with self._engine.begin() as connection:
                    return [_run(connection, write, alone=len(batch) == 1) for write in batch]
            except DBAPIError as error:
                if left == 0 or getattr(error.orig, "sqlstate", None) not in _AGAIN:
                    raise
                logger.info("a transaction runs again: %s", _short(error))
                time.sleep(0.01 * (TRIES - left))
        raise AssertionError("the last try returns or raises")


def _run(connection: Connection, write: _Write, *, alone: bool) -> tuple[Any] | Exception:
    """One write's result, or what it raised, undone. A database that failed raises: the whole batch is undone."""
    if alone:  # what it raises undoes the transaction, which is its own
        return (write.function(connection, *write.args, **write.kwargs),)
    connection.exec_driver_sql("SAVEPOINT one")
    try:
        result = write.function(connection, *write.args, **write.kwargs)
    except DBAPIError as error:
        if error.connection_invalidated or getattr(error.orig, "sqlstate", None) in _AGAIN:
            raise
        connection.exec_driver_sql("ROLLBACK TO SAVEPOINT one")
        return error
    except Exception as error:  # noqa: BLE001  it is for the one who asked
        connection.exec_driver_sql("ROLLBACK TO SAVEPOINT one")
        return error
    connection.exec_driver_sql("RELEASE SAVEPOINT one")
    return (result,)


class Gathering(Generic[Item, Result]):
    """Items that come one by one, and are written many at a time: `function(connection, items)` returns one result
    for each, or an exception for its sender. An idle gathering writes at once."""

    def __init__(
        self, database: Database, function: Callable[[Connection, list[Item]], Sequence[Result | Exception]]
    ) -> None:
        self._database = database
        self._function = function
        self._waiting: list[tuple[Item, asyncio.Future[Result]]] = []
        self._writer: asyncio.Task[None] | None = None

    async def add(self, item: Item) -> Result:
        """Write an item, and return when that is committed."""
        done: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, done))
        if self._writer is None:
            self._writer = asyncio.get_running_loop().create_task(self._write())
        return await done

    async def _write(self) -> None:
        try:
            while self._waiting:
                batch, self._waiting = self._waiting[:GATHERED], self._waiting[GATHERED:]
                results: Sequence[Result | Exception]
                try:
                    results = await self._database.write(self._function, [item for item, _ in batch])
                except Exception as error:  # noqa: BLE001  whatever it is, it is for those who wait
                    results = [error] * len(batch)
                for (_, done), result in zip(batch, results, strict=True):
                    if done.done():
                        continue
                    if isinstance(result, Exception):
                        done.set_exception(result)
                    else:
                        done.set_result(result)
        finally:
            self._writer = None


def insert_ignore(connection: Connection, table: Table, rows: list[dict[str, Any]]) -> None:
    """Insert the rows whose primary key is not there yet."""
    connection.execute(_insert(connection)(table).on_conflict_do_nothing(), rows)


def upsert(connection: Connection, table: Table, rows: list[dict[str, Any]]) -> None:
    """Insert rows, or replace all their other columns."""
    keys = [column.name for column in table.primary_key]
    statement = _insert(connection)(table)
    changes = {name: statement.excluded[name] for name in rows[0] if name not in keys}
    connection.execute(statement.on_conflict_do_update(index_elements=keys, set_=changes), rows)


def _insert(connection: Connection) -> Any:  # the two dialects' inserts share their methods, not a type
    return postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert


def _connect(url: str, durability: Durability) -> Engine:
    try:
        parsed = make_url(url)
        if parsed.drivername in ("postgresql", "postgres"):  # the driver that the extra `postgres` brings
            parsed = parsed.set(drivername="postgresql+psycopg")
        if parsed.get_backend_name() not in ("sqlite", "postgresql"):
            raise ConfigError(f"The database must be SQLite or PostgreSQL, not {parsed.get_backend_name()}.")
        if parsed.password is not None:
            raise ConfigError(
                "The database URL holds a password, which every user of this machine could read in the list of "
                "processes: leave it out, and give it in ~/.pgpass (or PGPASSFILE, or PGPASSWORD)."
            )
        engine = create_engine(parsed, pool_pre_ping=parsed.get_backend_name() == "postgresql")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"The database's driver is missing ({error.name}): install `agentlightning[postgres]`."
        ) from None
    except ArgumentError as error:
        raise ConfigError(f"The database URL cannot be used: {error}.") from None
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", _configure_sqlite(durability))
        event.listen(engine, "begin", _begin_sqlite)
    return engine


def _configure_sqlite(durability: Durability) -> Callable[[sqlite3.Connection, object], None]:
    def configure(connection: sqlite3.Connection, _record: object) -> None:
        connection.isolation_level = None  # the driver's own begin comes too late to lock: see below
        synchronous = "FULL" if durability == "power" else "NORMAL"
        for pragma in (
            "journal_mode=WAL",
            f"synchronous={synchronous}",
            "busy_timeout=10000",
            "cache_size=-65536",  # 64 MiB: with a million rollouts, the indices' inner pages
            "wal_autocheckpoint=8000",  # pages, 32 MB: a checkpoint is what syncs, and what writers wait for
        ):
            connection.execute(f"PRAGMA {pragma}")

    return configure


def _begin_sqlite(connection: Connection) -> None:
    # Take the write lock at once: a transaction that reads before it writes could not be upgraded safely.
    readonly = connection.get_execution_options().get("agl_readonly")
    connection.exec_driver_sql("BEGIN" if readonly else "BEGIN IMMEDIATE")


def _short(error: SQLAlchemyError) -> str:
    """What the database said, without the statement and its values."""
    said = getattr(error, "orig", None) or error
    return " ".join(str(said).split()).rstrip(".")
