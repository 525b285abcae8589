"""What a run needs around the trainer: collector, gateway, engine and controller.

Whatever the configuration gives by address is used as it is; the rest is started here, on loopback,
on free ports, with state under the run's directory and tokens that only this user can read.
"""

import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentlightning.proto.errors import ConfigError
from agentlightning.proto.process import read_token, write_private
from agentlightning.trainer.config import TrainConfig
from agentlightning.trainer.supervisor import Child, Supervisor, free_port

__all__ = ["READY_TIMEOUT", "Layout", "Services", "launch", "start_agents"]

READY_TIMEOUT = 120.0
"""Seconds; an engine may have to convert and load its model."""


@dataclass(frozen=True)
class Layout:
    """Where things are in a run's directory."""

    root: Path

    @property
    def state(self) -> Path:
        return self.root / "state"

    @property
    def data(self) -> Path:
        return self.root / "data"

    @property
    def weights(self) -> Path:
        return self.root / "weights"

    @property
    def current_weights(self) -> Path:
        """JSON: path and version of what the engine serves; absent before the first publish."""
        return self.root / "weights" / "current.json"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def plans(self) -> Path:
        """Which groups the steps since the last checkpoint are made of (asynchronous loop)."""
        return self.state / "plans"

    @property
    def final(self) -> Path:
        return self.root / "checkpoint"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    def log(self, component: str) -> Path:
        return self.root / "logs" / f"{component}.log"

    def ready(self, component: str) -> Path:
        return self.state / "ready" / f"{component}.json"

    def token(self, name: str) -> Path:
        return self.state / "tokens" / f"{name}.json"


@dataclass(frozen=True)
class Services:
    """Addresses and tokens of everything that the trainer talks to."""

    gateway: str
    gateway_tokens: dict[str, str]
    collector_grpc: str
    collector_token: str | None
    engine: str
    engine_token: str | None
    engine_token_file: Path | None


def launch(
    config: TrainConfig, layout: Layout, supervisor: Supervisor, *, say: Callable[[str], None]
) -> Services:
    """Start what is not given by address, and wait until all of it serves. Raises LightningError."""
    layout.state.mkdir(parents=True, exist_ok=True)
    collector_token_file = config.collector.token_file
    engine_token_file = config.engine.token_file

    # The engine takes longest to load: it starts first.
    engine_url = config.engine.url
    if engine_url is None:
        engine_token_file = _token_file(layout.token("engine"))
        engine = _engine(config, layout, supervisor, engine_token_file)

    grpc_address, http_address = config.collector.grpc, config.collector.http
    if grpc_address is None or http_address is None:
        collector_token_file = _token_file(layout.token("collector"))
        collector = _collector(layout, supervisor, collector_token_file)
        addresses = supervisor.wait_ready(collector, timeout=READY_TIMEOUT)
        grpc_address, http_address = addresses["grpc"], addresses["http"]
        say(f"collector  {http_address} (OTLP/HTTP), {grpc_address} (OTLP/gRPC)")

    gateway_url, tokens_file = config.gateway.url, config.gateway.token_file
    if gateway_url is None:
        tokens_file = _gateway_tokens(layout.token("gateway"))
        gateway = _gateway(layout, supervisor, http_address, collector_token_file, tokens_file)
        gateway_url = supervisor.wait_ready(gateway, timeout=READY_TIMEOUT)["http"]
        say(f"gateway    {gateway_url}")
    tokens = _read_tokens(tokens_file)

    if engine_url is None:
        engine_url = supervisor.wait_ready(engine, timeout=READY_TIMEOUT)["http"]
        say(f"engine     {engine_url} ({config.policy.model})")

    return Services(
        gateway=gateway_url,
        gateway_tokens=tokens,
        collector_grpc=grpc_address,
        collector_token=read_token(collector_token_file) if collector_token_file else None,
        engine=engine_url,
        engine_token=read_token(engine_token_file) if engine_token_file else None,
        engine_token_file=engine_token_file,
    )


def start_agents(
    config: TrainConfig,
    layout: Layout,
    supervisor: Supervisor,
    services: Services,
    *,
    say: Callable[[str], None],
) -> None:
    """Start the controller, unless one elsewhere claims the rollouts. Not before the engine serves the right weights:
    rollouts may be waiting in the queue."""
    if not config.controller.start:
        return
    token_file = None
    if services.gateway_tokens:
        token_file = layout.token("controller")
        write_private(token_file, services.gateway_tokens.get("controller", "") + "\n")
    controller = _controller(config, layout, supervisor, services.gateway, token_file)
    supervisor.wait_ready(controller, timeout=READY_TIMEOUT)
    say(f"controller {config.agent.concurrency} agents at once: {config.agent.target}")


def _engine(config: TrainConfig, layout: Layout, supervisor: Supervisor, token_file: Path) -> Child:
    port = free_port()

    def command() -> list[str]:
        options: dict[str, Any] = {
            "--model": config.policy.model,
            "--name": config.policy.name,
            "--dtype": config.engine.dtype,
            "--max-batch": config.engine.max_batch,
            "--max-model-len": config.engine.max_model_len,
            "--threads": config.engine.threads,
            "--port": port,
            "--token-file": token_file,
            "--ready-file": layout.ready("engine"),
        }
        if layout.current_weights.exists():  # an engine that died serves again what it served
            current = json.loads(layout.current_weights.read_text())
            options |= {"--load-weights": current["path"], "--version": current["version"]}
        return ["-m", "agentlightning.cli", "engine", *_flags(options)]

    return supervisor.start("engine", command, log=layout.log("engine"), ready=layout.ready("engine"))


def _collector(layout: Layout, supervisor: Supervisor, token_file: Path) -> Child:
    options = {
        "--data": layout.data,
        "--state": layout.state / "collector",
        "--grpc-port": free_port(),
        "--http-port": free_port(),
        "--token-file": token_file,
        "--ready-file": layout.ready("collector"),
    }
    command = ["-m", "agentlightning.cli", "collector", *_flags(options)]
    return supervisor.start(
        "collector", lambda: command, log=layout.log("collector"), ready=layout.ready("collector")
    )


def _gateway(
    layout: Layout, supervisor: Supervisor, collector: str, collector_token: Path | None, tokens: Path
) -> Child:
    options = {
        "--state": layout.state / "gateway",
        "--collector": collector,
        "--collector-token-file": collector_token,
        "--port": free_port(),
        "--token-file": tokens,
        "--ready-file": layout.ready("gateway"),
    }
    command = ["-m", "agentlightning.cli", "gateway", *_flags(options)]
    return supervisor.start(
        "gateway", lambda: command, log=layout.log("gateway"), ready=layout.ready("gateway")
    )


def _controller(
    config: TrainConfig,
    layout: Layout,
    supervisor: Supervisor,
    gateway: str,
    token_file: Path | None,
) -> Child:
    agent = config.agent
    options = {
        "--gateway": gateway,
        "--agent": agent.target,
        "--evaluator": agent.evaluator,
        "--concurrency": agent.concurrency,
        "--timeout": agent.timeout_s,
        "--setup": agent.setup,
        "--cwd": agent.cwd,
        "--state": layout.state / "controller",
        "--agents-dir": layout.root / "agents",
        "--token-file": token_file,
        "--ready-file": layout.ready("controller"),
    }
    command = ["-m", "agentlightning.cli", "controller", *_flags(options)]
    for name in agent.env:
        command += ["--env", name]
    return supervisor.start(
        "controller", lambda: command, log=layout.log("controller"), ready=layout.ready("controller")
    )


def _flags(options: dict[str, Any]) -> list[str]:
    return [text for name, value in options.items() if value is not None for text in (name, str(value))]


def _token_file(path: Path) -> Path:
    if not path.exists():
        write_private(path, secrets.token_urlsafe(32) + "\n")
    return path


def _gateway_tokens(path: Path) -> Path:
    if not path.exists():
        tokens = {role: secrets.token_urlsafe(32) for role in ("admin", "trainer", "controller")}
        write_private(path, json.dumps(tokens) + "\n")
    return path


def _read_tokens(path: Path | None) -> dict[str, str]:
    if path is None:
        return {}
    try:
        tokens = json.loads(path.read_text())
        return {str(role): str(token) for role, token in tokens.items()}
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"The gateway's token file {path} cannot be read: {error}.") from None
