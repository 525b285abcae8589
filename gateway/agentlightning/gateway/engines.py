"""Engines: registered by the admin, probed in the background, chosen by load.

An engine that fails is set aside, with the reason, until a probe finds it well again.
"""

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp
import orjson
from sqlalchemy import Connection, select

from agentlightning.gateway.breaker import Breaker
from agentlightning.gateway.database import Database, upsert
from agentlightning.gateway.errors import ApiError, ModelError
from agentlightning.gateway.tables import engines
from agentlightning.proto.errors import ConfigError
from agentlightning.proto.process import read_token

__all__ = ["Declined", "Engine", "Engines"]

logger = logging.getLogger(__name__)
PROBE_SECONDS: Final = 2.0
PROBE_SECONDS_ILL: Final = 0.5
PROBE_TIMEOUT: Final = aiohttp.ClientTimeout(total=10)
FAILURES: Final = 5
SLACK: Final = 4
"""Calls more than the least busy engine has, with which an engine still keeps its rollouts."""
PATIENCE: Final = 3
"""Probes in a row that may time out: an engine on a loaded machine is slow, not gone."""


class Declined(Exception):
    """An engine did not take a call: it is busy, or away. Nothing was sampled, so another may be asked."""


@dataclass(slots=True, eq=False)
class Engine:
    """One server that samples from a policy."""

    engine_id: str
    policy: str
    url: str
    model: str | None
    """The name by which the server knows its model; learnt from it if not given."""
    token_file: str | None = None
    reason: str | None = "not probed yet"
    """Why it is set aside; None if it is well."""
    model_version: int | None = None
    in_flight: int = 0
    probed: float | None = None
    timeouts: int = 0
    headers: dict[str, str] = field(default_factory=dict, repr=False)
    """What the engine wants of its callers; read anew with every probe."""
    breaker: Breaker = field(default_factory=lambda: Breaker(FAILURES))

    @property
    def trouble(self) -> str | None:
        """Why no call is sent to it now; None if one may be."""
        if self.reason is None and self.model is None:
            return "its model's name is not known yet"
        return self.reason or self.breaker.why

    def describe(self) -> dict[str, Any]:
        return {
            "engine_id": self.engine_id,
            "policy": self.policy,
            "url": self.url,
            "model": self.model,
            "healthy": self.reason is None,
            "reason": self.reason,
            "model_version": self.model_version,
            "in_flight": self.in_flight,
            "probed": self.probed,
            "breaker": self.breaker.describe(),
        }


class Engines:
    """The engines of this gateway."""

    def __init__(self, database: Database, session: aiohttp.ClientSession, failures: int = FAILURES) -> None:
        self._database = database
        self._session = session
        self._failures = failures
        self._engines: dict[str, Engine] = {}

    async def load(self) -> None:
        for row in await self._database.read(_rows):
            self._engines[row["engine_id"]] = self._make(**row)

    def refresh(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Take over what another gateway registered or removed; new engines are probed soon."""
        known = {row["engine_id"]: row for row in rows}
        for engine_id, engine in list(self._engines.items()):
            row = known.get(engine_id)
            if row is None:
                del self._engines[engine_id]
            elif (row["policy"], row["url"], row["token_file"]) != (
                engine.policy,
                engine.url,
                engine.token_file,
            ):
                self._engines[engine_id] = self._make(**row)
        for engine_id, row in known.items():
            if engine_id not in self._engines:
                self._engines[engine_id] = self._make(**row)

    def __iter__(self) -> Iterator[Engine]:
        return iter(list(self._engines.values()))

    def of(self, policy: str) -> list[Engine]:
        return [engine for engine in self._engines.values() if engine.policy == policy]

    def choose(self, policy: str, affinity: str, *, without: set[str]) -> Engine | None:
        """The engine that a rollout always gets, for its prefix cache, unless it has clearly more in flight than the
        least busy one. The same at every gateway, and moved for few rollouts when an engine comes or goes."""
        well = [e for e in self.of(policy) if e.trouble is None and e.engine_id not in without]
        least = min((e.in_flight for e in well), default=0)
        near = [e for e in well if e.in_flight <= least + SLACK]
        return max(near, key=lambda e: _weight(affinity, e.engine_id), default=None)

    @contextlib.contextmanager
    def use(self, engine: Engine) -> Iterator[None]:
        """Around a call: counts it, and lets the engine's breaker know how it ended."""
        breaker = engine.breaker
        breaker.begin()
        engine.in_flight += 1
        try:
            yield
        except Declined:
            breaker.left()
            raise
        except ModelError as error:
            if not error.fault:  # refused for what was asked: an answer
                breaker.succeeded()
            elif breaker.failed(str(error)):
                self._say_opened(engine)
            raise
        except Exception as error:  # an answer that cannot be read
            if breaker.failed(str(error) or type(error).__name__):
                self._say_opened(engine)
            raise
        except BaseException:
            breaker.left()
            raise
        else:
            breaker.succeeded()
        finally:
            engine.in_flight -= 1

    def _say_opened(self, engine: Engine) -> None:
        logger.warning("engine %s (%s) is %s", engine.engine_id, engine.url, engine.breaker.why)

    async def put(
        self,
        engine_id: str,
        *,
        policy: str,
        url: str,
        model: str | None = None,
        token_file: str | None = None,
    ) -> Engine:
        """Register an engine, or change where it is, and probe it."""
        if not url.startswith(("http://", "https://")):
            raise ApiError(
                400, "bad_request", f"The engine's url {url!r} must begin with http:// or https://."
            )
        if token_file is not None:
            try:
                read_token(Path(token_file))
            except ConfigError as error:
                raise ApiError(400, "bad_request", str(error)) from None
        url = url.rstrip("/").removesuffix("/v1")
        engine = self._make(engine_id=engine_id, policy=policy, url=url, model=model, token_file=token_file)
        row = {"engine_id": engine_id, "policy": policy, "url": url, "model": model, "token_file": token_file}
        await self._database.write(upsert, engines, [row])
        self._engines[engine_id] = engine
        await self.probe(engine)
        return engine

    def _make(self, **row: Any) -> Engine:
        return Engine(**row, breaker=Breaker(self._failures))

    async def remove(self, engine_id: str) -> None:
        """Calls that are on it end; no further one begins."""
        self.get(engine_id)
        await self._database.write(_delete, engine_id)
        self._engines.pop(engine_id, None)

    def get(self, engine_id: str) -> Engine:
        """Raises ApiError 404."""
        if (engine := self._engines.get(engine_id)) is None:
            raise ApiError(404, "unknown_engine", f"There is no engine {engine_id!r}.")
        return engine

    async def probe(self, engine: Engine) -> None:
        """Ask an engine how it is; afterwards its `reason` says."""
        before = engine.reason
        url, headers = f"{engine.url}/health", engine.headers
        try:
            if engine.token_file is not None:
                headers["authorization"] = f"Bearer {read_token(engine.token_file)}"
            async with self._session.get(url, headers=headers, timeout=PROBE_TIMEOUT) as response:
                content = await response.read()
                engine.reason = None if response.status == 200 else f"/health answered {response.status}"
            if engine.reason is None:
                health = orjson.loads(content) if content.startswith(b"{") else {}  # vLLM's is empty
                if isinstance(version := health.get("model_version"), int):
                    engine.model_version = version
                if engine.model is None:
                    engine.model = await self._model_of(engine)
            engine.timeouts = 0
        except TimeoutError:
            engine.timeouts += 1
            if engine.reason is not None or engine.timeouts >= PATIENCE:
                engine.reason = f"/health did not answer {engine.timeouts} times"
        except (aiohttp.ClientError, OSError, ValueError, KeyError, IndexError, ConfigError) as error:
            engine.reason = f"{type(error).__name__}: {error}"
        engine.probed = time.time()
        if engine.reason != before:
            self._say(engine)

    def set_aside(self, engine: Engine, reason: str) -> None:
        """Send nothing more to an engine until a probe finds it well."""
        if engine.reason is None:
            engine.reason = reason
            self._say(engine)

    async def run(self) -> None:
        """Probe for ever: the well every two seconds, the ill more often."""
        while True:
            now = time.time()
            due = [
                engine
                for engine in self
                if now - (engine.probed or 0)
                >= (PROBE_SECONDS if engine.reason is None else PROBE_SECONDS_ILL)
            ]
            await asyncio.gather(*map(self.probe, due))
            await asyncio.sleep(PROBE_SECONDS_ILL)

    async def _model_of(self, engine: Engine) -> str:
        url = f"{engine.url}/v1/models"
        async with self._session.get(url, headers=engine.headers, timeout=PROBE_TIMEOUT) as response:
            return str(orjson.loads(await response.read())["data"][0]["id"])

    def _say(self, engine: Engine) -> None:
        if engine.reason is None:
            logger.info("engine %s (%s) serves %s", engine.engine_id, engine.url, engine.policy)
        else:
            logger.warning("engine %s (%s) is set aside: %s", engine.engine_id, engine.url, engine.reason)


def _weight(affinity: str, engine_id: str) -> bytes:
    return hashlib.blake2b(f"{affinity} {engine_id}".encode(), digest_size=8).digest()


def _rows(connection: Connection) -> list[Any]:
    return [dict(row) for row in connection.execute(select(engines)).mappings()]


def _delete(connection: Connection, engine_id: str) -> None:
    connection.execute(engines.delete().where(engines.c.engine_id == engine_id))
