"""Publishing: the engine serves new weights, and proves that it does.

Hold the gateway, drain, pause the engine, swap the weights, compare the engine's log-probabilities of fixed probe tokens
with the trainer's own, go on. If they disagree the version is refused: the engine gets back what it served before, the
gateway is released, and the run ends with the measured difference. Answers that the drain left in flight go on with
the new weights, each of their tokens under the version that sampled it.
"""

import asyncio
import contextlib
import json
import logging
import shutil
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from agentlightning.proto.errors import LightningError, ServiceError
from agentlightning.proto.process import write_private
from agentlightning.trainer.clients import EngineClient, GatewayClient
from agentlightning.trainer.launch import Layout
from agentlightning.trainer.learner import Learner
from agentlightning.trainer.model import save_weights
from agentlightning.trainer.probe import Expectation, Verdict, compare, expect

__all__ = ["Published", "Publisher", "PublishRefused"]

logger = logging.getLogger(__name__)

HOLD_TTL = 60.0
"""Seconds after which a hold, or a pause, ends by itself: a trainer that died must not stop the agents for ever."""
RENEW_EVERY = 15.0
"""Seconds between two renewals while this trainer is alive."""


class PublishRefused(LightningError):
    """Engine and trainer disagree about the published weights."""


@dataclass(frozen=True)
class Published:
    version: int
    seconds: float
    """Of the swap: load and probe."""
    verdict: Verdict


class Publisher:
    """Knows what the engine serves."""

    def __init__(
        self,
        layout: Layout,
        gateway: GatewayClient,
        engine: EngineClient,
        *,
        policy: str,
        base: Path,
        dtype: torch.dtype,
        probes: list[list[int]],
        drain_s: float,
    ) -> None:
        """`drain_s`: how long answers in flight may take to end, before a pause keeps them where they are."""
        self._layout = layout
        self._gateway = gateway
        self._engine = engine
        self._policy = policy
        self._dtype = dtype
        self._probes = probes
        self._drain_s = drain_s
        self.held_seconds = 0.0
        """How long agents' calls waited in the last standstill."""
        self._previous = self._last_served() or (base, 0)  # what to go back to
        self._expected: Expectation | None = None  # of the version that is served

    async def begin(self, learner: Learner) -> Verdict:
        """Make sure that the engine serves what the learner has: at the start, and after an interruption."""
        serves = (await self._engine.health()).get("model_version")
        if not learner.version == self.served == serves:
            return (await self.publish(learner)).verdict
        expected = await asyncio.to_thread(self._prepare, learner, None)
        verdict = await self._probe(expected, learner)
        if not verdict.ok:
            raise PublishRefused(f"Before the first step, {verdict.sentence}")
        self._expected = expected
        return verdict

    @contextlib.asynccontextmanager
    async def standstill(self) -> AsyncIterator[None]:
        """Within, no call begins and nothing is sampled: the hardware is the trainer's. Calls wait; none fails."""
        began = time.monotonic()
        hold = await self._gateway.hold(self._policy, ttl_s=HOLD_TTL, drain_s=self._drain_s)
        held = [hold["hold_id"]]
        renewal = asyncio.create_task(self._renew(held))
        try:
            await self._engine.pause(HOLD_TTL)
            yield
        finally:
            renewal.cancel()
            with contextlib.suppress(asyncio.CancelledError, ServiceError):
                await renewal
            try:
                await self._engine.resume()
            finally:
                await self._gateway.release(self._policy, held[-1], self.served)
            self.held_seconds = time.monotonic() - began

    async def free(self) -> None:
        """End a hold or a pause that somebody has forgotten."""
        hold = await self._gateway.hold(self._policy, ttl_s=HOLD_TTL, drain_s=0)
        await self._engine.resume()
        await self._gateway.release(self._policy, hold["hold_id"], self.served)

    async def publish(self, learner: Learner) -> Published:
        """Serve the learner's weights as its current version; agents wait only for the swap. Raises as `swap`."""
        prepared = await self.prepare(learner)
        async with self.standstill():
            return await self.swap(learner, prepared)

    async def prepare(self, learner: Learner) -> Expectation:
        """Write the learner's weights where the engine will find them."""
        return await asyncio.to_thread(self._prepare, learner, self._folder(learner.version))

    async def swap(self, learner: Learner, prepared: Expectation) -> Published:
        """Put prepared weights in place; within a standstill.

        Raises:
            PublishRefused: the engine's log-probabilities are not the trainer's; the old weights serve on.
        """
        began = time.monotonic()
        version = learner.version
        folder = self._folder(version)
        await self._engine.load_weights(str(folder.resolve()), version)
        verdict = await self._probe(prepared, learner)
        if not verdict.ok:
            back = await self._roll_back()
            raise PublishRefused(
                f"Version {version} was refused: {verdict.sentence} The engine serves version {back} again."
            )
        current = {"path": str(folder.resolve()), "version": version}
        write_private(self._layout.current_weights, json.dumps(current) + "\n")
        self._forget_all_but(folder, self._previous[0])
        self._previous = (folder, version)
        self._expected = prepared
        return Published(version, time.monotonic() - began, verdict)

    @property
    def served(self) -> int:
        """Version of the weights that the engine is known to serve."""
        return self._previous[1]

    async def _renew(self, held: list[str]) -> None:
        """Keep hold and pause alive for as long as they are needed."""
        while True:
            await asyncio.sleep(RENEW_EVERY)
            hold = await self._gateway.hold(self._policy, ttl_s=HOLD_TTL, drain_s=0)
            held.append(hold["hold_id"])
            await self._engine.pause(HOLD_TTL)

    def _last_served(self) -> tuple[Path, int] | None:
        """What an engine of this run served when the run was interrupted."""
        if not self._layout.current_weights.exists():
            return None
        current = json.loads(self._layout.current_weights.read_text())
        return Path(current["path"]), int(current["version"])

    def _folder(self, version: int) -> Path:
        return self._layout.weights / f"v{version:06d}"

    def _prepare(self, learner: Learner, folder: Path | None) -> Expectation:
        """Write the weights to `folder`, and compute what an engine that serves them will answer."""
        state = learner.merged_state_dict(self._dtype)
        if folder is not None:
            self._write(folder, state)
        return expect(learner, self._probes, state, self._dtype)

    def _write(self, folder: Path, state: Mapping[str, torch.Tensor]) -> None:
        save_weights(folder, state)

    async def _probe(self, expected: Expectation, learner: Learner) -> Verdict:
        version, scored = await self._engine.score(self._probes)
        if version != learner.version:
            raise PublishRefused(f"The engine says it serves version {version}, not {learner.version}.")
        return compare(expected, scored, previous=self._expected)

    async def _roll_back(self) -> int:
        folder, version = self._previous
        await self._engine.load_weights(str(folder.resolve()), version)
        return version

    def _forget_all_but(self, *kept: Path) -> None:
        """Keep what is served and what to go back to; after a restart neither need be the highest number."""
        names = {path.name for path in kept}
        for folder in self._layout.weights.glob("v[0-9]*"):
            if folder.name not in names:
                shutil.rmtree(folder, ignore_errors=True)
