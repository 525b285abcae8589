"""Access to the database from asyncio: every write is one short transaction in one thread.

One writer thread keeps order and spares SQLite its lock contention; reads run beside it in another.
On SQLite the journal is a write-ahead log, synchronised at checkpoints: a killed process loses nothing. A power cut
may lose the last moments, which can only make a rollout incomplete, never give it calls that did not happen.
"""

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection, Engine, create_engine, event, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.sql.schema import Table

from agentlightning.gateway.tables import SCHEMA_VERSION, meta, metadata
from agentlightning.proto.errors import ConfigError

__all__ = ["Database", "insert_ignore", "upsert"]

P = ParamSpec("P")
T = TypeVar("T")


class Database:
    """`await database.write(function, …)` runs `function(connection, …)` in a transaction."""

    def __init__(self, url: str) -> None:
        self._engine = _connect(url)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="database-writer")
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="database-reader")

    @classmethod
    def at(cls, state: Path) -> "Database":
        """The SQLite database of a state directory."""
        return cls(f"sqlite:///{state / 'gateway.db'}")

    def prepare(self) -> None:
        """Create what is missing. Raises ConfigError if a newer gateway has written here."""
        try:
            metadata.create_all(self._engine)
            with self._engine.begin() as connection:
                insert_ignore(connection, meta, [{"key": "schema", "value": str(SCHEMA_VERSION)}])
                found = connection.execute(select(meta.c.value).where(meta.c.key == "schema")).scalar_one()
        except SQLAlchemyError as error:
            raise ConfigError(f"The gateway's database cannot be opened: {error}.") from error
        if int(found) != SCHEMA_VERSION:
            raise ConfigError(
                f"The gateway's database has schema {found}, this gateway reads {SCHEMA_VERSION}: "
                "use the version that wrote it, or another --state."
            )

    async def write(
        self, function: Callable[Concatenate[Connection, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        return await self._run(self._writer, function, args, kwargs)

    async def read(
        self, function: Callable[Concatenate[Connection, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        return await self._run(self._reader, function, args, kwargs)

    def close(self) -> None:
        """Wait for what is running, then close."""
        self._writer.shutdown()
        self._reader.shutdown()
        self._engine.dispose()

    async def _run(self, thread: ThreadPoolExecutor, function: Callable[..., T], args: Any, kwargs: Any) -> T:
        def transaction() -> T:
            options = {"agl_readonly": True} if thread is self._reader else {}
            with self._engine.connect() as connection, connection.execution_options(**options).begin():
                return function(connection, *args, **kwargs)

        return await asyncio.get_running_loop().run_in_executor(thread, transaction)


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


def _connect(url: str) -> Engine:
    try:
        engine = create_engine(url)
    except (SQLAlchemyError, ModuleNotFoundError) as error:
        raise ConfigError(f"The database URL cannot be used: {error}.") from error
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", _configure_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
    elif engine.dialect.name != "postgresql":
        raise ConfigError(f"The database must be SQLite or PostgreSQL, not {engine.dialect.name}.")
    return engine


def _configure_sqlite(connection: sqlite3.Connection, _record: object) -> None:
    connection.isolation_level = None  # the driver's own begin comes too late to lock: see below
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "busy_timeout=10000"):
        connection.execute(f"PRAGMA {pragma}")


def _begin_sqlite(connection: Connection) -> None:
    # Take the write lock at once: a transaction that reads before it writes could not be upgraded safely.
    readonly = connection.get_execution_options().get("agl_readonly")
    connection.exec_driver_sql("BEGIN" if readonly else "BEGIN IMMEDIATE")
