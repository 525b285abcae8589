"""Policies: what they are called, how a run samples from them, and holding their calls while weights change.

During a hold calls wait instead of failing. A hold ends by release or after its time to live: a trainer that died
cannot hold for ever. It is kept in the database, so a gateway that restarts in the middle still holds.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import orjson
from sqlalchemy import Connection, select

from agentlightning.gateway.database import Database, upsert
from agentlightning.gateway.errors import ApiError
from agentlightning.gateway.tables import policies
from agentlightning.proto.ids import new_id

__all__ = ["Policies", "Policy"]

Sampling = dict[str, Any]  # Any: numbers, by name


@dataclass(slots=True, eq=False)
class Policy:
    """One policy, and the gate that its calls pass."""

    name: str
    base_model: str | None = None
    sampling: dict[str, Sampling] = field(default_factory=dict)
    version: int | None = None
    """What the trainer said at its last release: the version of answers whose engine says none."""
    hold_id: str | None = None
    hold_expires: float = 0.0
    in_flight: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set, and replaced, whenever a waiter should look again."""

    @property
    def held(self) -> bool:
        return self.hold_id is not None and time.time() < self.hold_expires

    def notify(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    async def wait(self, timeout: float) -> None:
        """Until something changed, at most `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout):
                await self.changed.wait()
        except TimeoutError:
            pass


class Policies:
    """All policies of this gateway."""

    def __init__(self, database: Database, count: Callable[[str], None]) -> None:
        self._database = database
        self._count = count
        self._policies: dict[str, Policy] = {}

    async def load(self) -> None:
        for row in await self._database.read(_rows):
            self._policies[row["policy"]] = Policy(
                row["policy"],
                row["base_model"],
                orjson.loads(row["sampling"] or "{}"),
                row["version"],
                row["hold_id"],
                row["hold_expires"] or 0.0,
            )

    def __iter__(self) -> Any:
        return iter(self._policies.values())

    def get(self, name: str) -> Policy | None:
        return self._policies.get(name)

    async def put(
        self, name: str, *, base_model: str | None = None, sampling: dict[str, Sampling] | None = None
    ) -> Policy:
        """Create a policy, or change what is given of it."""
        policy = self._policies.setdefault(name, Policy(name))
        if base_model is not None:
            policy.base_model = base_model
        if sampling is not None:
            policy.sampling = sampling
        await self._store(policy)
        return policy

    async def hold(self, name: str, ttl: float, drain: float) -> dict[str, Any]:
        """Let no further call begin; wait until none is in flight, at most `drain` seconds.

        A trainer that was restarted takes over the hold of its predecessor.
        """
        policy = self._known(name)
        hold_id = policy.hold_id = new_id("hold")
        policy.hold_expires = time.time() + ttl
        await self._store(policy)
        deadline = time.monotonic() + drain
        while policy.in_flight and policy.hold_id == hold_id and (left := deadline - time.monotonic()) > 0:
            await policy.wait(left)
        return {"hold_id": hold_id, "drained": policy.in_flight == 0, "in_flight": policy.in_flight}

    async def release(self, name: str, hold_id: str, version: int | None) -> dict[str, Any]:
        """End a hold. Raises ApiError 409 if another has taken over."""
        policy = self._known(name)
        expired = not policy.held
        if policy.hold_id is not None and policy.hold_id != hold_id and not expired:
            self._count("stale_release")
            raise ApiError(409, "stale_hold", f"Policy {name} is held by {policy.hold_id}, not by {hold_id}.")
        if expired:
            self._count("hold_expired")
        policy.hold_id = None
        policy.version = version if version is not None else policy.version
        await self._store(policy)
        policy.notify()
        return {"policy": name, "version": policy.version, "expired": expired}

    def _known(self, name: str) -> Policy:
        if (policy := self._policies.get(name)) is None:
            raise ApiError(
                404, "unknown_policy", f"There is no policy {name!r}: register it, or an engine for it."
            )
        return policy

    async def _store(self, policy: Policy) -> None:
        row = {
            "policy": policy.name,
            "base_model": policy.base_model,
            "sampling": orjson.dumps(policy.sampling).decode(),
            "version": policy.version,
            "hold_id": policy.hold_id,
            "hold_expires": policy.hold_expires,
        }
        await self._database.write(upsert, policies, [row])


def _rows(connection: Connection) -> list[Any]:
    return list(connection.execute(select(policies)).mappings())
