"""Policies: what they are called, how a run samples from them, and holding their calls while weights change.

During a hold calls wait instead of failing. A hold ends by release or after its time to live: a trainer that died
cannot hold for ever. It is kept in the database, so a gateway that restarts in the middle still holds.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
from sqlalchemy import Connection, select, update

from agentlightning.gateway.database import Database, insert_ignore
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
    elsewhere: int = 0
    """During a hold: calls in flight at other gateways, of which one that has not yet heard of the hold counts as one."""
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
        self.others = 0
        """How many other gateways there are on this database."""

    async def load(self) -> None:
        self.refresh(await self._database.read(_rows), [])

    def refresh(self, rows: Sequence[Mapping[str, Any]], holds: Sequence[Mapping[str, Any]]) -> None:
        """Take over what other gateways were told. `holds`: by policy, the hold that each other gateway has seen, and
        its calls in flight."""
        for row in rows:
            policy = self._policies.setdefault(row["policy"], Policy(row["policy"]))
            before = policy.hold_id, policy.elsewhere
            policy.base_model, policy.version = row["base_model"], row["version"]
            policy.sampling = orjson.loads(row["sampling"] or "{}")
            policy.hold_id, policy.hold_expires = row["hold_id"], row["hold_expires"] or 0.0
            policy.elsewhere = sum(_elsewhere(other.get(policy.name), policy.hold_id) for other in holds)
            if before != (policy.hold_id, policy.elsewhere):
                policy.notify()

    def __iter__(self) -> Any:
        return iter(self._policies.values())

    def get(self, name: str) -> Policy | None:
        return self._policies.get(name)

    async def put(
        self, name: str, *, base_model: str | None = None, sampling: dict[str, Sampling] | None = None
    ) -> Policy:
        """Create a policy, or change what is given of it."""
        changes: dict[str, Any] = {}
        if base_model is not None:
            changes["base_model"] = base_model
        if sampling is not None:
            changes["sampling"] = orjson.dumps(sampling).decode()
        await self._database.write(_change, name, changes)
        policy = self._policies.setdefault(name, Policy(name))
        if base_model is not None:
            policy.base_model = base_model
        if sampling is not None:
            policy.sampling = sampling
        return policy

    async def hold(self, name: str, ttl: float, drain: float) -> dict[str, Any]:
        """Let no further call begin; wait until none is in flight at any gateway, at most `drain` seconds.

        A trainer that was restarted takes over the hold of its predecessor.
        """
        policy = await self._known(name)
        hold_id, expires = new_id("hold"), time.time() + ttl
        await self._database.write(_change, name, {"hold_id": hold_id, "hold_expires": expires})
        policy.hold_id, policy.hold_expires = hold_id, expires
        policy.elsewhere = self.others  # none of them has heard of it
        policy.notify()
        deadline = time.monotonic() + drain
        while (
            (policy.in_flight or policy.elsewhere)
            and policy.hold_id == hold_id
            and (left := deadline - time.monotonic()) > 0
        ):
            await policy.wait(left)
        left_over = policy.in_flight + policy.elsewhere
        return {"hold_id": hold_id, "drained": left_over == 0, "in_flight": left_over}

    async def release(self, name: str, hold_id: str, version: int | None) -> dict[str, Any]:
        """End a hold. Raises ApiError 409 if another has taken over."""
        policy = await self._known(name)
        try:
            policy.version, expired = await self._database.write(_release, name, hold_id, version)
        except ApiError:
            self._count("stale_release")
            raise
        if expired:
            self._count("hold_expired")
        policy.hold_id = None
        policy.notify()
        return {"policy": name, "version": policy.version, "expired": expired}

    async def _known(self, name: str) -> Policy:
        if name not in self._policies:
            await self.load()  # another gateway may have been told a moment ago
        if (policy := self._policies.get(name)) is None:
            raise ApiError(
                404, "unknown_policy", f"There is no policy {name!r}: register it, or an engine for it."
            )
        return policy


def _change(connection: Connection, name: str, changes: Mapping[str, Any]) -> None:
    insert_ignore(connection, policies, [{"policy": name}])
    if changes:
        connection.execute(update(policies).where(policies.c.policy == name).values(changes))


def _release(connection: Connection, name: str, hold_id: str, version: int | None) -> tuple[int | None, bool]:
    """Returns the version that holds now, and whether the hold had ended by itself. Raises ApiError 409."""
    row = connection.execute(select(policies).where(policies.c.policy == name).with_for_update()).one()
    held = row.hold_id is not None and time.time() < row.hold_expires
    if held and row.hold_id != hold_id:
        raise ApiError(409, "stale_hold", f"Policy {name} is held by {row.hold_id}, not by {hold_id}.")
    version = row.version if version is None else version
    connection.execute(
        update(policies).where(policies.c.policy == name).values(hold_id=None, version=version)
    )
    return version, not held


def _elsewhere(seen: Sequence[Any] | None, hold_id: str | None) -> int:
    """Another gateway's calls in flight, at least one while it has not seen the hold."""
    if hold_id is None:
        return 0
    known, in_flight = seen or (None, 0)
    return int(in_flight) if known == hold_id else max(1, int(in_flight))


def _rows(connection: Connection) -> list[Any]:
    return list(connection.execute(select(policies)).mappings())
