"""What the database forgets, and what it must not."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select, update

from agentlightning.gateway import listing, rollouts
from agentlightning.gateway.database import Database
from agentlightning.gateway.ledger import CallRow, Ledger
from agentlightning.gateway.outcomes import Report, finish
from agentlightning.gateway.retention import Keep, Retention
from agentlightning.gateway.tables import attempts, calls
from agentlightning.gateway.tables import rollouts as table

pytestmark = pytest.mark.parametrize("database", ["sqlite", "postgresql"], indirect=True, scope="session")
DAY = 86_400.0


def row(run: str, number: int) -> dict[str, Any]:
    made: dict[str, Any] = dict.fromkeys(("reference", "sampling", "rights"))
    made |= {"rollout_id": f"{run}-{number}", "run_id": run, "group_id": "g", "task_id": "t", "input": "{}"}
    return {**made, "split": "train", "policy": "p", "max_attempts": 1, "priority": 0}


async def add_run(database: Database, run: str, *, age: float, count: int = 3, left_open: int = 0) -> None:
    """A run whose rollouts have ended but for `left_open`, with one call each."""
    await database.write(rollouts.enqueue, [row(run, number) for number in range(count)])
    claimed = await database.write(rollouts.claim, "c", count - left_open, 60.0)
    for name in (entry["rollout_id"] for entry in claimed):
        call = CallRow(f"call-{name}", name, 0, "d", "t", "s", None, 0.0)
        assert await Ledger(database).add([call])
    await database.write(finish, [Report(entry["rollout_id"], 0, "c", "succeeded") for entry in claimed])

    def settle(connection: Any) -> None:
        mine = update(table).where(table.c.run_id == run)
        connection.execute(mine.values(created=table.c.created - age))
        connection.execute(mine.where(table.c.state == "succeeded").values(change=table.c.seq))

    await database.write(settle)


async def runs_left(database: Database) -> dict[str, int]:
    def count(connection: Any) -> dict[str, int]:
        return dict(connection.execute(select(table.c.run_id, func.count()).group_by(table.c.run_id)).all())

    return await database.read(count)


def forget(
    database_options: Any, tmp_path: Path, keep: Keep
) -> tuple[dict[str, int], Counter[str], int, int]:
    options = database_options()
    database = Database(options[1]) if options else Database.at(tmp_path)
    database.prepare()
    counted = Counter[str]()

    async def work() -> tuple[dict[str, int], int, int]:
        await add_run(database, "old", age=9 * DAY, count=1200)
        await add_run(database, "older-but-open", age=20 * DAY, left_open=1)
        claimed = await database.write(rollouts.claim, "c", 1, 60.0)
        assert claimed, "one was left open"
        await add_run(database, "week", age=6 * DAY)
        await add_run(database, "today", age=0)
        retention = Retention(database, keep, lambda name, run, n: counted.update({f"{name} {run}": n}))
        await retention.look()
        await retention.look()  # again: nothing is left to forget
        dependants = [
            await database.read(lambda c, t=t: c.execute(select(func.count()).select_from(t)).scalar_one())
            for t in (calls, attempts)
        ]
        rows = await database.read(listing.find, ["old-1", "week-1"])
        assert {found["rollout_id"] for found in rows} <= {"old-1", "week-1"}
        return await runs_left(database), *dependants

    try:
        left, of_calls, of_attempts = asyncio.run(work())
    finally:
        database.close()
    return left, counted, of_calls, of_attempts


def test_runs_that_are_old_and_idle_are_forgotten_whole_and_counted(database, tmp_path):
    left, counted, of_calls, of_attempts = forget(database, tmp_path, Keep(seconds=7 * DAY))
    assert left == {"older-but-open": 3, "week": 3, "today": 3}
    assert counted == {"rollouts_forgotten old": 1200}
    assert (of_calls, of_attempts) == (8, 8)


def test_beyond_the_number_the_oldest_idle_runs_go_and_what_is_resumed_stays(database, tmp_path):
    left, counted, _, _ = forget(database, tmp_path, Keep(rollouts=5))
    assert left == {"older-but-open": 3, "week": 3, "today": 3}
    assert counted == {"rollouts_forgotten old": 1200}


def test_without_limits_all_is_kept(database, tmp_path):
    left, counted, _, _ = forget(database, tmp_path, Keep())
    assert left["old"] == 1200
    assert not counted
