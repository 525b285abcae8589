"""Writes that commit together: each alone in what it refuses, and again when another gateway stopped them."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, select, text, update

from agentlightning.gateway.database import Database, insert_ignore
from agentlightning.gateway.tables import meta

pytestmark = pytest.mark.parametrize("database", ["sqlite", "postgresql"], indirect=True, scope="session")


def put(connection: Connection, key: str, value: str, *, refuse: bool = False) -> str:
    insert_ignore(connection, meta, [{"key": key, "value": value}])
    if refuse:
        raise LookupError(key)
    return value


def keys(connection: Connection) -> set[str]:
    return set(connection.execute(select(meta.c.key).where(meta.c.key.like("test-%"))).scalars())


@pytest.fixture
def opened(database: Any, tmp_path: Path) -> Any:
    options = database()
    made = Database(options[1]) if options else Database.at(tmp_path)
    made.prepare()
    yield made
    made.close()


def test_of_writes_that_commit_together_one_that_refuses_undoes_only_itself(opened):
    async def work() -> list[Any]:
        writes = (opened.write(put, f"test-{n}", str(n), refuse=n % 7 == 3) for n in range(300))
        return await asyncio.gather(*writes, return_exceptions=True)

    async def both() -> tuple[list[Any], set[str]]:
        return await work(), await opened.read(keys)

    results, found = asyncio.run(both())
    for number, result in enumerate(results):
        assert isinstance(result, LookupError) if number % 7 == 3 else result == str(number)
    assert found == {f"test-{n}" for n in range(300) if n % 7 != 3}


def test_a_statement_that_the_database_refuses_undoes_only_its_write(opened):
    def broken(connection: Connection) -> None:
        put(connection, "test-broken", "x")
        connection.execute(text("SELECT * FROM there_is_no_such_table"))

    async def work() -> tuple[list[Any], set[str]]:
        writes = [opened.write(put, "test-a", "1"), opened.write(broken), opened.write(put, "test-b", "2")]
        return await asyncio.gather(*writes, return_exceptions=True), await opened.read(keys)

    results, found = asyncio.run(work())
    assert (results[0], results[2]) == ("1", "2")
    assert "there_is_no_such_table" in str(results[1])
    assert found == {"test-a", "test-b"}


def test_transactions_that_lock_each_other_out_run_again(opened, database, tmp_path):
    """Two gateways that change the same rows in opposite orders: PostgreSQL stops one of them, which then runs again."""
    if not opened.shared:
        pytest.skip("SQLite has one writer")
    both_hold_one = threading.Barrier(2)
    tries: list[str] = []

    def change(connection: Connection, first: str, second: str) -> None:
        tries.append(first)
        connection.execute(update(meta).where(meta.c.key == first).values(value=first))
        if len(tries) <= 2:
            both_hold_one.wait(20)
        connection.execute(update(meta).where(meta.c.key == second).values(value=first))

    other = Database(opened.url)

    async def work() -> None:
        await opened.write(put, "test-a", "")
        await opened.write(put, "test-b", "")
        await asyncio.gather(
            opened.write(change, "test-a", "test-b"), other.write(change, "test-b", "test-a")
        )

    try:
        asyncio.run(work())
    finally:
        other.close()
    assert len(tries) == 3
