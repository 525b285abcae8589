"""The gateway alone is enough: tracing adds who, and changes nothing else."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from running import AGENTS

from agentlightning.examples.calculator.tasks import held_out
from agentlightning.trainer.clients import GatewayClient, TransitionClient
from agentlightning.trainer.config import config_from
from agentlightning.trainer.launch import Layout, Services, launch
from agentlightning.trainer.rollouts import Collector, Group
from agentlightning.trainer.supervisor import Supervisor
from agentlightning.trainer.tasks import Task

AUTOGEN = "agentlightning.examples.calculator.agent:solve"
GREEDY = {"temperature": 0.0, "max_tokens": 48}


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[tuple[Supervisor, Layout, Services]]:
    config = config_from(
        {
            "run": {"root": str(tmp_path)},
            "policy": {"name": "smollm2", "model": "smollm2-135m"},
            "engine": {"dtype": "float32"},  # bfloat16 would make greedy answers depend on the batch
            "controller": {"start": False},
        }
    )
    layout = Layout(config.directory)
    supervisor = Supervisor({"PYTHONPATH": str(AGENTS)})
    try:
        yield supervisor, layout, launch(config, layout, supervisor, say=lambda text: None)
    finally:
        supervisor.stop()


@pytest.mark.slow
def test_autogen_traced_autogen_untraced_and_plain_openai_give_the_same_transitions(
    stage: tuple[Supervisor, Layout, Services],
) -> None:
    supervisor, layout, services = stage
    tasks = [Task(row["task_id"], row["input"], row["reference"]) for row in held_out(seed=0, count=3)]

    async def transitions(name: str, agent: str, *options: str) -> list[dict[str, Any]]:
        """What the data set holds after every task was done once by `agent`."""
        token = layout.token("controller")
        token.write_text(services.gateway_tokens["controller"])
        token.chmod(0o600)
        flags = [
            "--gateway",
            services.gateway,
            "--token-file",
            str(token),
        ]
        flags += ["--agent", agent, "--state", str(layout.state / name), "--concurrency", "1", *options]
        ready = layout.ready(name)
        child = supervisor.start(
            name,
            lambda: ["-m", "agentlightning.cli", "controller", "--ready-file", str(ready), *flags],
            log=layout.log(name),
            ready=ready,
        )
        gateway = GatewayClient(services.gateway, tokens=services.gateway_tokens)
        reader = TransitionClient(services.collector_grpc, token=services.collector_token)
        try:
            await gateway.set_policy("smollm2", "smollm2", {})
            token_file = str(services.engine_token_file)
            await gateway.register_engine("engine", "smollm2", services.engine, "smollm2", token_file)
            collector = Collector(
                gateway,
                reader,
                run_id=name,
                policy="smollm2",
                max_attempts=1,
                deadline_s=200,
                seal_timeout_s=30,
                check=supervisor.check,
            )
            groups = [Group(f"{name}.{task.task_id}", task, 1) for task in tasks]
            collected = await collector.run(groups, split="val", sampling=GREEDY)
            assert not collected.excluded
        finally:
            await gateway.close()
            await reader.close()
            assert child.process is not None
            child.ready.unlink()  # it is meant to end
            child.process.terminate()
            child.process.wait()
        rows = collected.transitions.to_pylist()
        return sorted(rows, key=lambda row: (row["task_id"], row["seq"]))

    async def scenario() -> None:
        untraced = await transitions("untraced", AUTOGEN)
        plain = await transitions("plain", "plain_calculator:solve")
        traced = await transitions("traced", AUTOGEN, "--setup", "agentlightning.sdk:instrument")
        assert len(untraced) > 3  # most tasks take two calls
        same = (
            "task_id",
            "seq",
            "policy",
            "model_version",
            "finish_reason",
            "error",
            "done",
            "source",
            "token_source",
        )
        exact = ("prompt_token_ids", "response_token_ids", "response_logprobs")
        for other in (plain, traced):
            for mine, theirs in zip(untraced, other, strict=True):
                for column in same:
                    assert mine[column] == theirs[column], column
                for column in exact[:2]:
                    assert mine[column] == theirs[column], column
                assert theirs["response_logprobs"] == pytest.approx(mine["response_logprobs"], abs=1e-3)
        assert {row["agent"] for row in untraced + plain} == {None}
        assert {row["agent"] for row in traced} == {"solver"}

    asyncio.run(scenario())
