"""Publishing against a real engine and a real gateway."""

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
import torch
from aiohttp import web

from agentlightning.trainer.clients import EngineClient, GatewayClient
from agentlightning.trainer.config import TrainConfig, config_from
from agentlightning.trainer.launch import Layout, Services, launch
from agentlightning.trainer.learner import Learner
from agentlightning.trainer.loop import build_learner
from agentlightning.trainer.publish import Publisher, PublishRefused
from agentlightning.trainer.supervisor import Supervisor

PROBES = [list(range(2, 40)), list(range(250, 200, -1))]


@dataclass
class Stage:
    config: TrainConfig
    layout: Layout
    services: Services
    learner: Learner


@pytest.fixture
def stage(tmp_path: Path, tiny_model: Path) -> Iterator[Stage]:
    config = config_from(
        {
            "run": {"root": str(tmp_path)},
            "policy": {"model": str(tiny_model), "dtype": "float32"},
            "engine": {"dtype": "float32", "threads": 1, "max_model_len": 256},
            "controller": {"start": False},
        }
    )
    layout = Layout(config.directory)
    supervisor = Supervisor({"OMP_NUM_THREADS": "1"})
    try:
        yield Stage(
            config, layout, launch(config, layout, supervisor, say=lambda text: None), build_learner(config)
        )
    finally:
        supervisor.stop()


def nudge(learner: Learner) -> None:
    """A new version, as an update makes it, only larger."""
    torch.manual_seed(learner.version)
    with torch.no_grad():
        for parameter in learner.model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    learner.version += 1


class WrongWeights(Publisher):
    """Writes other weights than the trainer has, as a broken exporter would."""

    def _write(self, folder: Path, state: Mapping[str, torch.Tensor]) -> None:
        super()._write(folder, {name: value + 0.05 for name, value in state.items()})


def test_a_version_that_engine_and_trainer_disagree_about_is_refused_and_rolled_back(
    stage: Stage, tiny_model: Path
) -> None:
    async def scenario() -> None:
        services = stage.services
        gateway = GatewayClient(services.gateway, tokens=services.gateway_tokens)
        engine = EngineClient(services.engine, token=services.engine_token)
        await gateway.set_policy("policy", "tiny", {})
        options = {
            "policy": "policy",
            "base": tiny_model,
            "dtype": torch.float32,
            "probes": PROBES,
            "drain_s": 1.0,
        }
        good = Publisher(stage.layout, gateway, engine, **options)  # type: ignore[arg-type]
        bad = WrongWeights(stage.layout, gateway, engine, **options)  # type: ignore[arg-type]
        try:
            assert (await good.begin(stage.learner)).mean < 1e-4
            probe = [[5, 6, 7, 8, 9]]
            base = await engine.score(probe)

            nudge(stage.learner)
            with pytest.raises(
                PublishRefused, match=r"Version 1 was refused: .* disagree .* serves version 0 again"
            ):
                await bad.publish(stage.learner)
            assert await engine.score(probe) == base

            published = await good.publish(stage.learner)
            assert published.version == 1
            version, scored = await engine.score(probe)
            assert version == 1
            assert scored != base[1]
            hold = await gateway.hold("policy", ttl_s=5, drain_s=1)  # nothing was left held
            await gateway.release("policy", hold["hold_id"], 1)
        finally:
            await gateway.close()
            await engine.close()

    asyncio.run(scenario())


@contextlib.asynccontextmanager
async def lying_engine(behind: str, token: str | None) -> AsyncIterator[str]:
    """An engine that says that it has taken new weights, and goes on with the old ones."""
    said = [0]
    headers = {"authorization": f"Bearer {token}"}
    async with aiohttp.ClientSession(behind, headers=headers) as session:

        async def weights(request: web.Request) -> web.Response:
            said[0] = (await request.json())["version"]
            return web.json_response({"version": said[0]})

        async def score(request: web.Request) -> web.Response:
            async with session.post("/score", data=await request.read()) as response:
                return web.json_response({**await response.json(), "version": said[0]})

        async def forward(request: web.Request) -> web.Response:
            async with session.request(request.method, request.path, data=await request.read()) as response:
                return web.Response(body=await response.read(), status=response.status)

        app = web.Application()
        app.add_routes(
            [web.post("/weights", weights), web.post("/score", score), web.route("*", "/{rest}", forward)]
        )
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


def test_an_engine_that_lies_about_its_weights_is_found_out_in_both_loops(
    stage: Stage, tiny_model: Path
) -> None:
    async def scenario() -> None:
        services = stage.services
        gateway = GatewayClient(services.gateway, tokens=services.gateway_tokens)
        await gateway.set_policy("policy", "tiny", {})
        async with lying_engine(services.engine, services.engine_token) as url:
            engine = EngineClient(url, token=None)
            publisher = Publisher(
                stage.layout,
                gateway,
                engine,
                policy="policy",
                base=tiny_model,
                dtype=torch.float32,
                probes=PROBES,
                drain_s=1.0,
            )
            await publisher.begin(stage.learner)
            nudge(stage.learner)
            with pytest.raises(PublishRefused, match="Version 1 was refused"):
                await publisher.publish(stage.learner)  # as the synchronous loop does
            with pytest.raises(PublishRefused, match="Version 1 was refused"):
                async with publisher.standstill():  # as the asynchronous loop does
                    await publisher.swap(stage.learner, await publisher.prepare(stage.learner))
            assert publisher.served == 0
            assert not stage.layout.current_weights.exists()
            assert not (await engine.health())["paused"]
            (policy,) = await gateway.policies()
            assert policy["hold_id"] is None  # agents go on, on the version before
            await engine.close()
        await gateway.close()

    asyncio.run(scenario())


def test_an_engine_that_is_killed_serves_the_published_version_again(stage: Stage, tiny_model: Path) -> None:
    async def scenario() -> None:
        services = stage.services
        gateway = GatewayClient(services.gateway, tokens=services.gateway_tokens)
        engine = EngineClient(services.engine, token=services.engine_token)
        await gateway.set_policy("policy", "tiny", {})
        publisher = Publisher(
            stage.layout,
            gateway,
            engine,
            policy="policy",
            base=tiny_model,
            dtype=torch.float32,
            probes=PROBES,
            drain_s=1.0,
        )
        try:
            nudge(stage.learner)
            await publisher.publish(stage.learner)
            before = await engine.score([[5, 6, 7]])

            pid = json.loads(stage.layout.ready("engine").read_text())["pid"]
            os.kill(pid, signal.SIGKILL)
            assert await engine.score([[5, 6, 7]]) == before  # the client waits for the new process
        finally:
            await gateway.close()
            await engine.close()

    asyncio.run(scenario())
