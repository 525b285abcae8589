"""Publishing: the engine serves new weights, and proves that it does.

Hold the gateway, drain, swap the weights, compare the engine's log-probabilities of fixed probe tokens
with the trainer's own, release. If they disagree the version is refused: the engine gets back what it
served before, the gateway is released, and the run ends with the measured difference.
"""

import asyncio
import json
import logging
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from agentlightning.proto.errors import LightningError
from agentlightning.proto.process import write_private
from agentlightning.trainer.clients import EngineClient, GatewayClient
from agentlightning.trainer.launch import Layout
from agentlightning.trainer.learner import Learner
from agentlightning.trainer.model import save_weights
from agentlightning.trainer.probe import Expectation, Verdict, compare, expect

__all__ = ["Published", "Publisher", "PublishRefused"]

logger = logging.getLogger(__name__)

HOLD_TTL = 300.0
"""Seconds after which a hold ends by itself: a trainer that died must not stop the agents for ever."""
DRAIN = 60.0
KEPT = 2
"""Published versions that stay on disk: the one served, and the one to go back to."""


class PublishRefused(LightningError):
    """Engine and trainer disagree about the published weights."""


@dataclass(frozen=True)
class Published:
    version: int
    seconds: float
    held_seconds: float
    """How long agents waited."""
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
    ) -> None:
        self._layout = layout
        self._gateway = gateway
        self._engine = engine
        self._policy = policy
        self._dtype = dtype
        self._probes = probes
        self._previous = (base, 0)  # what to go back to
        self._expected: Expectation | None = None  # of the version that is served

    async def verify(self, learner: Learner) -> Verdict:
        """Check that the engine serves what the trainer has, without publishing."""
        expected = await asyncio.to_thread(self._prepare, learner, None)
        verdict = await self._probe(expected, learner)
        if not verdict.ok:
            raise PublishRefused(f"Before the first step, {verdict.sentence}")
        self._expected = expected
        return verdict

    async def publish(self, learner: Learner) -> Published:
        """Serve the learner's weights as its current version.

        Raises:
            PublishRefused: the engine's log-probabilities are not the trainer's; the old weights serve on.
        """
        began = time.monotonic()
        version = learner.version
        folder = self._layout.weights / f"v{version:06d}"
        expected = await asyncio.to_thread(self._prepare, learner, folder)
        held = time.monotonic()
        hold = await self._gateway.hold(self._policy, ttl_s=HOLD_TTL, drain_s=DRAIN)
        served = version
        try:
            await self._engine.load_weights(str(folder.resolve()), version)
            verdict = await self._probe(expected, learner)
            if not verdict.ok:
                served = await self._roll_back()
                raise PublishRefused(
                    f"Version {version} was refused: {verdict.sentence} The engine serves version {served} again."
                )
        finally:
            await self._gateway.release(self._policy, hold["hold_id"], served)
        released = time.monotonic()
        current = {"path": str(folder.resolve()), "version": version}
        write_private(self._layout.current_weights, json.dumps(current) + "\n")
        self._previous = (folder, version)
        self._expected = expected
        self._forget_old()
        return Published(version, time.monotonic() - began, released - held, verdict)

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

    def _forget_old(self) -> None:
        versions = sorted(self._layout.weights.glob("v[0-9]*"))
        for folder in versions[:-KEPT]:
            shutil.rmtree(folder, ignore_errors=True)
