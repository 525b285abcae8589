"""Several gateways on one database: what one is told, all know within a moment.

Each says four times a second that it is there, which holds it has seen and how many calls of those policies it has in
flight; and reads policies, engines, and how its attempts are. So a hold waits for the calls of all gateways, and an
attempt that ended at another one stops here. A gateway that is silent for ten seconds is taken for dead. A gateway
whose database is its own (SQLite) does none of this.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson
from sqlalchemy import Connection, bindparam, delete, select
from sqlalchemy.exc import SQLAlchemyError

from agentlightning.gateway.database import Database, upsert
from agentlightning.gateway.engines import Engines
from agentlightning.gateway.listing import chunks
from agentlightning.gateway.live import Live
from agentlightning.gateway.policies import Policies
from agentlightning.gateway.tables import engines, meta, policies, replicas, rollouts
from agentlightning.proto.ids import new_id

__all__ = ["Replicas"]

logger = logging.getLogger(__name__)
TICK: Final = 0.25
SILENT: Final = 10.0
EPOCH: Final = "epoch"
_GONE: Final = (
    select(rollouts.c.rollout_id, rollouts.c.state, rollouts.c.attempt, rollouts.c.revoked)
).where(rollouts.c.rollout_id.in_(bindparam("ids", expanding=True)))

Key = tuple[str, int]


@dataclass(frozen=True, slots=True)
class _News:
    epoch: str
    died: list[str]
    policies: list[Any]
    engines: list[Any]
    holds: list[dict[str, Any]]
    """Of each other gateway: by policy, which hold it has seen and how many calls it has in flight."""
    ended: list[Key]


class Replicas:
    """This gateway among the others."""

    def __init__(
        self, database: Database, boot_id: str, policies: Policies, engines: Engines, live: Live
    ) -> None:
        self.epoch = boot_id
        """Changes when any of the gateways starts or dies: calls may have failed for that."""
        self.others = 0
        self._database = database
        self._boot_id = boot_id
        self._policies = policies
        self._engines = engines
        self._live = live

    async def join(self) -> None:
        """Tell the others that a gateway has started."""
        if self._database.shared:
            await self._database.write(_set_epoch, self._boot_id)
            await self.exchange()

    async def leave(self) -> None:
        """Stop in good order: nobody has to wait for this gateway any more."""
        if self._database.shared:
            await self._database.write(_remove, self._boot_id)

    async def run(self) -> None:
        """Exchange news for ever."""
        while self._database.shared:
            await asyncio.sleep(TICK)
            try:
                await self.exchange()
            except SQLAlchemyError as error:  # whoever needs the database now says so louder
                logger.warning("the other gateways cannot be heard: %s", type(error).__name__)

    async def exchange(self) -> None:
        """Say how this gateway is, and take in what is new."""
        holds = {
            policy.name: [policy.hold_id, policy.in_flight]
            for policy in self._policies
            if policy.hold_id is not None
        }
        news = await self._database.write(_exchange, self._boot_id, holds, self._live.keys())
        for boot_id in news.died:
            logger.warning("gateway %s has been silent for %g s: it is taken for dead", boot_id, SILENT)
        self.epoch = news.epoch
        self._policies.others = len(news.holds)
        self._policies.refresh(news.policies, news.holds)
        self._engines.refresh(news.engines)
        for rollout_id, attempt in news.ended:
            self._live.end(rollout_id, attempt)


def _exchange(connection: Connection, boot_id: str, holds: dict[str, Any], live: Sequence[Key]) -> _News:
    now = time.time()
    upsert(
        connection,
        replicas,
        [{"boot_id": boot_id, "seen": now, "holds": orjson.dumps(holds).decode()}],
    )
    dead = delete(replicas).where(replicas.c.seen < now - SILENT).returning(replicas.c.boot_id)
    died = list(connection.execute(dead).scalars())
    if died:
        _set_epoch(connection, new_id("boot"))
    epoch = connection.execute(select(meta.c.value).where(meta.c.key == EPOCH)).scalar_one()
    others = select(replicas.c.holds).where(replicas.c.boot_id != boot_id)
    found: dict[str, Any] = {}
    for chunk in chunks([rollout_id for rollout_id, _ in live]):
        for row in connection.execute(_GONE, {"ids": chunk}):
            found[row.rollout_id] = row
    return _News(
        epoch,
        died,
        [dict(row) for row in connection.execute(select(policies)).mappings()],
        [dict(row) for row in connection.execute(select(engines)).mappings()],
        [orjson.loads(text) for text in connection.execute(others).scalars()],
        [(rollout_id, attempt) for rollout_id, attempt in live if _ended(found.get(rollout_id), attempt)],
    )


def _ended(row: Any, attempt: int) -> bool:
    return row is None or row.state != "running" or row.attempt != attempt or row.revoked >= attempt


def _set_epoch(connection: Connection, epoch: str) -> None:
    upsert(connection, meta, [{"key": EPOCH, "value": epoch}])


def _remove(connection: Connection, boot_id: str) -> None:
    connection.execute(delete(replicas).where(replicas.c.boot_id == boot_id))
