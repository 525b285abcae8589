"""What the components say of themselves, for the watchdog: gathered at once, with short patience."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from agentlightning.proto.errors import ServiceError
from agentlightning.trainer.clients import EngineClient, GatewayClient, TransitionClient
from agentlightning.trainer.rollouts import TERMINAL, Collector
from agentlightning.trainer.watchdog import Facts

__all__ = ["Survey"]

T = TypeVar("T")
GRACE = 15.0
"""Seconds beyond its limit in which a controller may end an attempt and report it."""


class Survey:
    """Asks gateway, engine and collector."""

    def __init__(
        self,
        gateway: GatewayClient,
        engine: EngineClient,
        transitions: TransitionClient,
        collector: Collector,
        *,
        policy: str,
        timeout_s: float,
        agent_timeout_s: float,
    ) -> None:
        """`timeout_s`: how long an answer may take. `agent_timeout_s`: how long an attempt may."""
        self._gateway, self._engine, self._transitions = gateway, engine, transitions
        self._collector = collector
        self._policy = policy
        self._timeout_s = timeout_s
        self._agent_timeout_s = agent_timeout_s

    async def look(self) -> Facts:
        waited_for = self._collector.pending()
        rows, policies, health, stats = await asyncio.gather(
            self._ask(lambda: self._gateway.peek(waited_for)),
            self._ask(self._gateway.policies),
            self._ask(lambda: self._engine.health(patience=0)),
            self._ask(self._transitions.stats),
        )
        ledger = list((rows or {}).values())
        running = sorted(
            (row for row in ledger if row["state"] == "running"), key=lambda row: float(row["started"])
        )
        now = time.time()
        policy: dict[str, Any] = next((p for p in policies or () if p["policy"] == self._policy), {})
        engine: dict[str, Any] = health or {}
        return Facts(
            gateway=rows is not None and policies is not None,
            collector=stats is not None,
            engine=health is not None,
            states=Counter(row["state"] for row in ledger),
            begun=sum(row["attempt"] is not None for row in ledger),
            calls=sum(row["calls"] for row in ledger),
            oldest=(running[0]["rollout_id"], now - running[0]["started"], running[0]["calls"])
            if running
            else None,
            overdue=sum(now - row["started"] > self._agent_timeout_s + GRACE for row in running),
            unreported=sum(row["state"] in TERMINAL and row["change"] is None for row in ledger),
            reading=self._collector.reading,
            hold=policy.get("hold_id"),
            generating=int(engine.get("running", 0)) + int(engine.get("waiting", 0)),
            steps=int(engine.get("counters", {}).get("steps", 0)),
            paused=bool(engine.get("paused")),
        )

    async def _ask(self, question: Callable[[], Awaitable[T]]) -> T | None:
        """The answer, or None if there is none in time."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await question()
        except (TimeoutError, ServiceError):
            return None
