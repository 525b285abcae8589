"""Engines: registered by the admin, probed in the background, chosen by load.

An engine that fails is set aside, with the reason, until a probe finds it well again.
"""

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp
import orjson
from sqlalchemy import Connection, select

from agentlightning.gateway.database import Database, upsert
from agentlightning.gateway.errors import ApiError
from agentlightning.gateway.tables import engines
from agentlightning.proto.errors import ConfigError
from agentlightning.proto.process import read_token

__all__ = ["Engine", "Engines"]

logger = logging.getLogger(__name__)
PROBE_SECONDS: Final = 2.0
PROBE_SECONDS_ILL: Final = 0.5
PROBE_TIMEOUT: Final = aiohttp.ClientTimeout(total=10)
PATIENCE: Final = 3
"""Probes in a row that may time out: an engine on a loaded machine is slow, not gone."""


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
        }


class Engines:
    """The engines of this gateway."""

    def __init__(self, database: Database, session: aiohttp.ClientSession) -> None:
        self._database = database
        self._session = session
        self._engines: dict[str, Engine] = {}

    async def load(self) -> None:
        for row in await self._database.read(_rows):
            self._engines[row["engine_id"]] = Engine(**row)

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
                self._engines[engine_id] = Engine(**row)
        for engine_id, row in known.items():
            if engine_id not in self._engines:
                self._engines[engine_id] = Engine(**row)

    def __iter__(self) -> Iterator[Engine]:
        return iter(list(self._engines.values()))

    def of(self, policy: str) -> list[Engine]:
        return [engine for engine in self._engines.values() if engine.policy == policy]

    def choose(self, policy: str, affinity: str, *, without: set[str]) -> Engine | None:
        """The engine with least in flight; among equals always the same for one rollout, for its prefix cache."""
        well = [e for e in self.of(policy) if e.reason is None and e.model and e.engine_id not in without]
        return min(well, key=lambda e: (e.in_flight, hash((affinity, e.engine_id))), default=None)

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
        engine = Engine(engine_id, policy, url, model, token_file)
        row = {"engine_id": engine_id, "policy": policy, "url": url, "model": model, "token_file": token_file}
        await self._database.write(upsert, engines, [row])
        self._engines[engine_id] = engine
        await self.probe(engine)
        return engine

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


def _rows(connection: Connection) -> list[Any]:
    return [dict(row) for row in connection.execute(select(engines)).mappings()]


def _delete(connection: Connection, engine_id: str) -> None:
    connection.execute(engines.delete().where(engines.c.engine_id == engine_id))
