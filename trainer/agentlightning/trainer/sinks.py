"""Where a run's events go beside `metrics.jsonl`: TensorBoard, Weights & Biases, MLflow, OpenTelemetry.

A sink is a function of one event. One that fails is said once and left out from then on: telemetry never ends a run. One
that was asked for and is not installed, or cannot be reached, is an error at the start.
"""

import contextlib
import importlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from agentlightning.proto.errors import ConfigError
from agentlightning.trainer.config import TrainConfig
from agentlightning.trainer.telemetry import open_otel

__all__ = ["Sink", "open_sinks", "scalars"]

log = logging.getLogger(__name__)

Event = Mapping[str, Any]
Sink = Callable[[Event], None]

SECTIONS = {"step": "train", "evaluate": "held_out"}


@contextlib.contextmanager
def open_sinks(config: TrainConfig, root: Path) -> Iterator[list[Sink]]:
    """The sinks that the configuration asks for; closed, and what they hold sent, at the end. Raises ConfigError."""
    telemetry, run = config.telemetry, config.run.name
    with contextlib.ExitStack() as stack:
        sinks: list[Sink] = []
        if telemetry.tensorboard:
            sinks.append(stack.enter_context(_tensorboard(root / "tensorboard")))
        if telemetry.wandb is not None:
            sinks.append(
                stack.enter_context(_wandb(telemetry.wandb, run, root, config.model_dump(mode="json")))
            )
        if telemetry.mlflow is not None:
            sinks.append(stack.enter_context(_mlflow(telemetry.mlflow, run, config.model_dump(mode="json"))))
        if telemetry.otlp is not None:
            sinks.append(stack.enter_context(open_otel(telemetry.otlp, run, scalars)))
        yield [_guarded(sink) for sink in sinks]


def scalars(event: Event) -> dict[str, float]:
    """The numbers of an event under names like `train/update/entropy`; lists, texts and what is not finite are left out."""
    section = SECTIONS.get(event["event"])
    if section is None:
        return {}
    flat: dict[str, float] = {}
    _flatten(section, {k: v for k, v in event.items() if k not in ("event", "step")}, flat)
    return flat


def _flatten(prefix: str, value: Any, flat: dict[str, float]) -> None:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            _flatten(f"{prefix}/{name}", inner, flat)
    elif isinstance(value, int | float) and math.isfinite(value):
        flat[prefix] = float(value)


def _guarded(sink: Sink) -> Sink:
    failed = False

    def guarded(event: Event) -> None:
        nonlocal failed
        if failed:
            return
        try:
            sink(event)
        except Exception as error:  # noqa: BLE001 – whatever a tracking service does, training goes on
            failed = True
            log.warning("Telemetry is left out from now on: %s: %s", type(error).__name__, error)

    return guarded


def _needed(module: str, setting: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"{setting} needs the package {package}. Run: pip install '{package}'") from error


@contextlib.contextmanager
def _tensorboard(folder: Path) -> Iterator[Sink]:
    writer = _needed("tensorboardX", "telemetry.tensorboard", "agentlightning[tensorboard]").SummaryWriter(
        str(folder)
    )

    def sink(event: Event) -> None:
        for name, value in scalars(event).items():
            writer.add_scalar(name, value, event["step"])
        if event["event"] == "alarm":
            writer.add_text(f"alarm/{event['alarm']}", event["text"], event["step"])
        writer.flush()

    try:
        yield sink
    finally:
        writer.close()


@contextlib.contextmanager
def _wandb(project: str, run: str, root: Path, config: dict[str, Any]) -> Iterator[Sink]:
    wandb = _needed("wandb", "telemetry.wandb", "wandb")
    try:
        # Mode, address and key are wandb's own settings: WANDB_MODE=offline, WANDB_BASE_URL, WANDB_API_KEY.
        tracked = wandb.init(project=project, name=run, id=run, resume="allow", dir=str(root), config=config)
    except wandb.errors.Error as error:
        raise ConfigError(
            f"Weights & Biases cannot be used (WANDB_MODE=offline keeps all here): {error}"
        ) from error

    def sink(event: Event) -> None:
        if values := scalars(event):
            tracked.log({**values, "step": event["step"]})
        if event["event"] == "alarm":
            tracked.alert(title=event["alarm"], text=event["text"])

    try:
        yield sink
    finally:
        tracked.finish()


@contextlib.contextmanager
def _mlflow(address: str, run: str, config: dict[str, Any]) -> Iterator[Sink]:
    _needed("mlflow", "telemetry.mlflow", "mlflow-skinny")
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    try:
        client = MlflowClient(tracking_uri=address)
        experiment = client.get_experiment_by_name("agentlightning")
        number = experiment.experiment_id if experiment else client.create_experiment("agentlightning")
        tracked = client.create_run(number, run_name=run).info.run_id
        for name, value in _flat_settings(config).items():
            client.log_param(tracked, name, value)
    except MlflowException as error:
        raise ConfigError(f"MLflow at {address} cannot be used: {error}") from error

    def sink(event: Event) -> None:
        for name, value in scalars(event).items():
            client.log_metric(tracked, name, value, step=event["step"])
        if event["event"] == "alarm":
            client.set_tag(tracked, f"alarm.{event['alarm']}", event["text"])

    try:
        yield sink
    finally:
        client.set_terminated(tracked)


def _flat_settings(value: Any, prefix: str = "") -> dict[str, str]:
    if not isinstance(value, Mapping):
        return {prefix: str(value)[:500]}
    return {
        key: text
        for name, inner in value.items()
        for key, text in _flat_settings(inner, f"{prefix}.{name}" if prefix else str(name)).items()
    }
