"""Spans that belong to a committed change: kept in the database until the collector has acknowledged them.

Whoever commits a change puts its span here in the same transaction (`post`); the `Outbox` sends what lies there, also
what a gateway that was killed left behind. When the span of a rollout's terminal state is acknowledged, the rollout
gets its `change` number: only then do followers see it, so that what they ask the collector for is there.
"""

import asyncio
import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Final

from sqlalchemy import Connection, bindparam, or_, select, update
from sqlalchemy.exc import SQLAlchemyError

from agentlightning.gateway.collector import CaptureFailed, Exporter
from agentlightning.gateway.database import Database, insert_ignore
from agentlightning.gateway.tables import meta, outbox, replicas, rollouts

__all__ = ["Outbox", "next_changes", "post"]

logger = logging.getLogger(__name__)
BATCH: Final = 256
PAUSE_AFTER_FAILURE: Final = 1.0
LOOK_AGAIN: Final = 0.5
"""Seconds between two looks at what other gateways did."""
_CHANGE: Final = select(meta.c.value).where(meta.c.key == "change")
_FINISH: Final = (
    update(rollouts)
    .where(rollouts.c.rollout_id == bindparam("b_rollout"), rollouts.c.change.is_(None))
    .values(change=bindparam("b_change"))
)


def post(connection: Connection, entries: Sequence[tuple[str, bytes, str | None]]) -> None:
    """Leave spans to be sent: each with its key, and the rollout whose terminal state it tells, if it does."""
    if entries:
        rows = [{"key": key, "span": span, "finishes": finishes} for key, span, finishes in entries]
        connection.execute(outbox.insert(), rows)


def next_changes(connection: Connection, count: int) -> list[int]:
    """The next numbers for finished rollouts. Their row is locked until commit, so numbers appear in order."""
    if not count:
        return []
    insert_ignore(connection, meta, [{"key": "change", "value": "0"}])
    last = int(connection.execute(_CHANGE.with_for_update()).scalar_one())
    connection.execute(update(meta).where(meta.c.key == "change").values(value=str(last + count)))
    return list(range(last + 1, last + count + 1))


class Outbox:
    """Sends the outbox's spans, in order, for ever.

    Args:
        count: called with a counter's name.
        delivered: called when rollouts got their change number.
    """

    def __init__(
        self,
        database: Database,
        boot_id: str,
        exporter: Exporter,
        count: Callable[[str], None],
        delivered: Callable[[], None],
    ) -> None:
        self._database = database
        self._boot_id = boot_id
        self._exporter = exporter
        self._count = count
        self._delivered = delivered
        self._wake = asyncio.Event()
        self._waiters: defaultdict[str, set[asyncio.Future[bool]]] = defaultdict(set)

    def wake(self) -> None:
        """Look again: something was posted."""
        self._wake.set()

    async def delivery(self, key: str, timeout: float) -> bool:
        """Whether the span posted under `key` was acknowledged within `timeout` seconds."""
        waiter: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiters[key].add(waiter)
        try:
            if not await self._database.read(_waiting, key):
                return True
            self.wake()
            if not self._database.shared:
                async with asyncio.timeout(timeout):
                    return await waiter
            return await self._anywhere(waiter, key, timeout)
        except TimeoutError:
            return False
        finally:
            self._waiters[key].discard(waiter)
            if not self._waiters[key]:
                del self._waiters[key]

    async def _anywhere(self, waiter: asyncio.Future[bool], key: str, timeout: float) -> bool:
        """As `delivery`, where another gateway may be the one that sends."""
        deadline = time.monotonic() + timeout
        while (left := deadline - time.monotonic()) > 0:
            done, _ = await asyncio.wait([waiter], timeout=min(left, LOOK_AGAIN))
            if done:
                return waiter.result()
            if not await self._database.read(_waiting, key):
                return True
        return False

    async def run(self) -> None:
        while True:
            self._wake.clear()
            try:
                while await self.drain():
                    pass
            except (CaptureFailed, SQLAlchemyError) as error:
                self._count("outbox_delayed")
                logger.warning("the outbox is delayed: %s", error)
                await asyncio.sleep(PAUSE_AFTER_FAILURE)
                continue
            with contextlib.suppress(TimeoutError):
                # What a gateway that died was sending becomes ours when its silence is noticed.
                async with asyncio.timeout(LOOK_AGAIN if self._database.shared else None):
                    await self._wake.wait()

    async def drain(self) -> int:
        """Send one batch. Returns how many spans it had. Raises CaptureFailed."""
        if self._database.shared:
            rows = await self._database.write(_take, self._boot_id)
        else:
            rows = await self._database.read(_batch)
        if not rows:
            return 0
        try:
            await self._exporter.send([row["span"] for row in rows])
            refused: set[int] = set()
        except CaptureFailed as error:
            if error.retryable:
                raise
            refused = await self._one_by_one(rows)
        finished = await self._database.write(_settle, [(row["id"], row["finishes"]) for row in rows])
        for row in rows:
            for waiter in self._waiters.get(row["key"], ()):
                if not waiter.done():
                    waiter.set_result(row["id"] not in refused)
        if finished:
            self._delivered()
        return len(rows)

    async def _one_by_one(self, rows: list[Any]) -> set[int]:
        """Send each span alone. Returns the ids of those that the collector refuses for ever."""
        refused = set()
        for row in rows:
            try:
                await self._exporter.send([row["span"]])
            except CaptureFailed as error:
                if error.retryable:
                    raise
                logger.error("the collector refused the span of %s: %s", row["key"], error)
                refused.add(row["id"])
        for _ in refused:
            self._count("outbox_refused")
        return refused


def _batch(connection: Connection) -> list[Any]:
    return list(connection.execute(select(outbox).order_by(outbox.c.id).limit(BATCH)).mappings())


def _take(connection: Connection, boot_id: str) -> list[Any]:
    """Spans that no other living gateway is sending."""
    free = or_(
        outbox.c.taken_by.is_(None),
        outbox.c.taken_by == boot_id,
        outbox.c.taken_by.not_in(select(replicas.c.boot_id)),
    )
    some = (
        select(outbox.c.id).where(free).order_by(outbox.c.id).limit(BATCH).with_for_update(skip_locked=True)
    )
    taken = update(outbox).where(outbox.c.id.in_(some)).values(taken_by=boot_id).returning(outbox)
    return sorted(map(dict, connection.execute(taken).mappings()), key=lambda row: row["id"])


def _waiting(connection: Connection, key: str) -> bool:
    return connection.execute(select(outbox.c.id).where(outbox.c.key == key).limit(1)).first() is not None


def _settle(connection: Connection, sent: list[tuple[int, str | None]]) -> int:
    """Delete what was sent, and number the rollouts that it finishes. A refused span finishes its rollout, too:
    waiting for ever would not bring it."""
    connection.execute(outbox.delete().where(outbox.c.id.in_([number for number, _ in sent])))
    finished = sorted({rollout_id for _, rollout_id in sent if rollout_id is not None})
    if finished:
        changes = next_changes(connection, len(finished))
        rows = [
            {"b_rollout": rollout_id, "b_change": change}
            for rollout_id, change in zip(finished, changes, strict=True)
        ]
        connection.execute(_FINISH, rows)
    return len(finished)
