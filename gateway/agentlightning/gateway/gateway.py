"""The gateway as a whole: its parts, and what they do in the background."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Coroutine
from typing import Any, Final

import aiohttp
from sqlalchemy.exc import SQLAlchemyError

from agentlightning.gateway import outcomes, rollouts
from agentlightning.gateway.collector import Exporter
from agentlightning.gateway.counters import Counters
from agentlightning.gateway.database import Database, Gathering
from agentlightning.gateway.engines import Engines
from agentlightning.gateway.ledger import Ledger
from agentlightning.gateway.live import Live
from agentlightning.gateway.memory import Recollections
from agentlightning.gateway.outbox import Outbox
from agentlightning.gateway.policies import Policies
from agentlightning.gateway.replays import Replays
from agentlightning.gateway.replicas import Replicas
from agentlightning.gateway.retention import Keep, Retention
from agentlightning.gateway.settings import Settings
from agentlightning.gateway.tokens import Claims, Roles, Signer, signing_key
from agentlightning.proto.ids import new_id
from agentlightning.proto.process import read_token

__all__ = ["Gateway", "Signal"]

logger = logging.getLogger(__name__)
CONNECT_SECONDS: Final = 5.0
SWEEP_SECONDS: Final = 0.5
POOL_SECONDS: Final = 3.0
"""How long an idle connection is kept: less than uvicorn's five seconds at the other end, which would otherwise close
it just when a request is sent on it."""


class Signal:
    """Wakes everybody who waits for the next occurrence of something."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def fire(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    def next(self) -> asyncio.Event:
        """The next occurrence. Take it before looking, wait for it after."""
        return self._event


class Gateway:
    """Open it with `async with Gateway.open(settings) as gateway`."""

    def __init__(
        self, settings: Settings, database: Database, session: aiohttp.ClientSession, key: bytes
    ) -> None:
        token = None if settings.collector_token_file is None else read_token(settings.collector_token_file)
        self.settings = settings
        self.database = database
        self.session = session
        self.engine_timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=CONNECT_SECONDS, sock_read=settings.engine_timeout_s
        )
        self.boot_id = new_id("boot")
        self.signer = Signer(key)
        self.roles = Roles.read(settings.token_file)
        self.counters = Counters(database)
        self.exporter = Exporter(
            session, settings.collector, token=token, timeout=settings.collector_timeout_s
        )
        self.ledger = Ledger(database)
        self.reports = Gathering(database, outcomes.finish)
        self.live = Live(database)
        self.policies = Policies(database, self.counters.add)
        self.engines = Engines(database, session, settings.engine_failures)
        self.replays = Replays()
        self.replicas = Replicas(database, self.boot_id, self.policies, self.engines, self.live)
        self.recollections = Recollections()
        keep = Keep(
            settings.keep_days * 86_400 if settings.keep_days else None, settings.keep_rollouts or None
        )
        self.retention = Retention(database, keep, self.counters.add)
        self.queued = Signal()
        self.finished = Signal()
        self.outbox = Outbox(database, self.boot_id, self.exporter, self.counters.add, self.finished.fire)
        self.stopping = asyncio.Event()
        self.broken: BaseException | None = None
        """What ended a background task: the gateway must not go on without it."""

    @property
    def epoch(self) -> str:
        """What controllers know as the boot id."""
        return self.replicas.epoch

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, settings: Settings) -> AsyncIterator["Gateway"]:
        """A gateway that works; it stops when the block ends."""
        database = (
            Database.at(settings.state, durability=settings.durability)
            if settings.database is None
            else Database(settings.database, durability=settings.durability)
        )
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=POOL_SECONDS)
        async with aiohttp.ClientSession(
            connector=connector, auto_decompress=True, cookie_jar=aiohttp.DummyCookieJar()
        ) as session:
            try:
                database.prepare()
                gateway = cls(settings, database, session, await database.write(signing_key))
                await gateway._start()
                jobs = [
                    gateway._background(job)
                    for job in (
                        gateway.counters.run(),
                        gateway.outbox.run(),
                        gateway.engines.run(),
                        gateway.replicas.run(),
                        gateway.retention.run(),
                        gateway._sweep(),
                    )
                ]
                try:
                    yield gateway
                finally:
                    gateway.stop()
                    for job in jobs:
                        job.cancel()
                    await asyncio.gather(*jobs, return_exceptions=True)
                    await gateway.exporter.close()
                    await gateway.counters.flush()
                    await gateway.replicas.leave()
            finally:
                database.close()

    def stop(self) -> None:
        """Wake whoever waits, so that they end."""
        self.stopping.set()
        self.queued.fire()
        self.finished.fire()
        for policy in self.policies:
            policy.notify()

    def rollout_token(self, row: dict[str, Any], rights: list[str]) -> str:
        """The token of an attempt that was just claimed."""
        return self.signer.sign(
            Claims(
                row["rollout_id"],
                row["attempt"],
                row["run_id"],
                row["group_id"],
                row["task_id"],
                row["split"],
                row["policy"],
                time.time() + self.settings.token_ttl_s,
                tuple(rights),
            )
        )

    def ended(self, *ends: outcomes.Ended) -> None:
        """Attempts were ended, and committed so: everybody concerned is told."""
        for end in ends:
            self.live.end(end.rollout_id, end.attempt)
            outcome = "attempts_retried" if end.will_retry else f"rollouts_{end.state}"
            self.counters.add(outcome, end.run_id)
            if end.cause is not None:
                self.counters.add(f"attempts_{end.cause}", end.run_id)
        if ends:
            self.outbox.wake()
            self.queued.fire()
            self.finished.fire()  # those that were never tried are final already

    async def _start(self) -> None:
        await self.policies.load()
        await self.engines.load()
        await self.replicas.join()
        await self.database.write(rollouts.extend_leases, self.settings.lease_grace_s)
        for number, (policy, url) in enumerate(self.settings.engines):
            await self.policies.put(policy)
            token_file = self.settings.engine_token_file
            await self.engines.put(
                f"{policy}-{number}",
                policy=policy,
                url=url,
                token_file=None if token_file is None else str(token_file),
            )

    def _background(self, job: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(job)
        task.add_done_callback(self._job_ended)
        return task

    def _job_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.critical("a background task ended, the gateway stops", exc_info=error)
            self.broken = error
            self.stop()

    async def _sweep(self) -> None:
        """End attempts whose controller has gone."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            try:
                ends = await self.database.write(rollouts.sweep)
            except SQLAlchemyError as error:
                self.counters.add("database_failed")
                logger.error("the database cannot be written: %s", error)
                continue
            for end in ends:
                logger.warning("attempt %d of rollout %s is lost", end.attempt, end.rollout_id)
            self.ended(*ends)
