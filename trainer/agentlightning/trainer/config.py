"""Configuration: typed, from YAML, with `key=value` overrides.

Every section is a pydantic model that refuses unknown keys; the error names the key's place and the
nearest valid one. A setting that cannot be honoured is refused here, before anything starts.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Self, get_args

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator

from agentlightning.proto.errors import ConfigError, nearest
from agentlightning.proto.ids import check_id
from agentlightning.trainer.advantage import BASELINED
from agentlightning.trainer.algorithm import AlgorithmConfig
from agentlightning.trainer.section import Section

__all__ = ["TrainConfig", "config_from", "load_config"]


class RunConfig(Section):
    name: str = "run"
    """The run's id and folder name; rollouts of one name belong together."""
    root: Path = Path("runs")
    """State, data, logs and results go under `root/name/`."""
    seed: int = Field(default=0, ge=0)
    """Of everything random in a run: task order, adapters, evaluation tasks, and each answer. With it a synchronous
    run in float32 samples the same tokens again, if its agents do the same; log-probabilities differ in their last bits."""

    @model_validator(mode="after")
    def _valid_name(self) -> Self:
        check_id(self.name, "The run's name")
        return self


class AgentConfig(Section):
    target: str = ""
    """What to run: a command line (`python agent.py {question}`), or `module:function`."""
    evaluator: str | None = None
    """`module:function(task, output) -> float | dict`: the reward, computed where the agent cannot reach."""
    concurrency: int = Field(default=8, ge=1)
    """Agents that run at once, a process each."""
    timeout_s: float = Field(default=120.0, gt=0)
    """Seconds an attempt may take; then it is ended with cause `timeout`."""
    env: tuple[str, ...] = ()
    """Names of environment variables that are passed on to the agent."""
    cwd: Path | None = None
    """Working directory of the agent; null: that of `agl train`."""
    setup: str | None = None
    """`module:function` called in the agent's process before it starts, e.g. `agentlightning.sdk:instrument`."""
    may_reward: bool | None = None
    """Whether the agent may reward itself (`agl.reward`); null: only if there is no evaluator."""
    max_attempts: int = Field(default=3, ge=1)
    """Tries at a rollout when the infrastructure fails; failures of the agent itself are not repeated."""


class TasksConfig(Section):
    train: str = ""
    """A JSON-lines file of tasks, or `module:function` that takes `seed` and `count` and returns them."""
    val: str | None = None
    """The same for held-out tasks."""


class SamplingConfig(Section):
    temperature: float = Field(default=1.0, ge=0)
    """0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = 0
    """0: all tokens."""
    max_tokens: int = Field(default=256, ge=1)
    """Upper bound of one answer; an agent may ask for less."""


class LoraConfig(Section):
    rank: int = Field(default=16, ge=1)
    """Rank of the adapters (LoRA, Hu et al. 2021)."""
    alpha: float = 32
    """Their scale is alpha / rank."""
    target_modules: str | tuple[str, ...] = "all-linear"
    """Which layers get adapters, as peft names them."""


class PolicyConfig(Section):
    name: str = "policy"
    """What agents call the model."""
    model: str = ""
    """A folder that transformers loads, a GGUF file, or the alias `smollm2-135m`."""
    lora: LoraConfig | None = None
    """None trains all parameters."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the forward pass; master weights are always float32."""
    sampling: SamplingConfig = SamplingConfig()
    val_sampling: SamplingConfig | None = None
    """None: as in training."""


class EngineConfig(Section):
    kind: Literal["embedded"] = "embedded"
    """The embedded engine: transformers on this machine."""
    url: str | None = None
    """Address of a running engine; None starts one."""
    token_file: Path | None = None
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    max_batch: int = Field(default=64, ge=1)
    """Answers that are sampled at once."""
    max_model_len: int = Field(default=2048, ge=16)
    """Tokens of prompt and answer together."""
    threads: int | None = None
    """CPU threads; null: all cores."""


class CollectorConfig(Section):
    grpc: str | None = None
    """`host:port` of a running collector's gRPC; None starts one. Needs `http` too."""
    http: str | None = None
    token_file: Path | None = None

    @model_validator(mode="after")
    def _both(self) -> Self:
        if (self.grpc is None) != (self.http is None):
            raise ValueError("give both addresses of a running collector, grpc and http, or none")
        return self


class GatewayConfig(Section):
    url: str | None = None
    """Address of a running gateway; None starts one."""
    token_file: Path | None = None
    """JSON with the tokens of the roles `admin` and `trainer`."""


class ControllerConfig(Section):
    start: bool = True
    """False: a controller elsewhere claims the rollouts."""


class TrainSection(Section):
    steps: int = Field(default=10, ge=0)
    """Optimiser steps; each is followed by a publish."""
    groups_per_step: int = Field(default=8, ge=1)
    """Tasks in a step."""
    group_size: int = Field(default=8, ge=1)
    """Rollouts of each task, compared with each other."""
    learning_rate: float = Field(default=1e-5, gt=0)
    """Of AdamW. LoRA wants some 5e-4."""
    weight_decay: float = 0.0
    """Of AdamW."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises to its value."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """The gradient is scaled down to this norm."""
    minibatches: int = Field(default=1, ge=1)
    """Optimiser updates that a step is split into."""
    epochs: int = Field(default=1, ge=1)
    """Passes over a step."""
    max_tokens: int = Field(default=2048, ge=64)
    """Tokens in one forward pass; shared prefixes count once. Bounds the memory of a step."""
    gradient_checkpointing: bool = False
    """Recompute activations: less memory, more time."""
    refill_rounds: int = Field(default=1, ge=0)
    """How often groups without variance, or lost to infrastructure, are replaced within a step."""
    rollout_deadline_s: float = Field(default=1800.0, gt=0)
    """A step whose rollouts are not finished by then ends the run with an error that says which."""
    seal_timeout_s: float = Field(default=30.0, gt=0)
    """Seconds to wait for a missing call before its rollout is left out."""


class LoopConfig(Section):
    kind: Literal["sync", "async"] = "sync"
    """sync: each step waits for its own rollouts. async: agents go on while weights change, and a step takes the
    groups that are done."""
    staleness: int = Field(default=4, ge=0)
    """With kind=async: how many versions old the weights may be that sampled any trained token. Rollouts that would
    get older are not started."""
    drain_s: float = Field(default=1.0, ge=0)
    """Seconds that answers in flight may take to end before weights change; then they are kept, and go on with the
    new weights."""


class WatchdogConfig(Section):
    stall_s: float = Field(default=50.0, gt=0)
    """Seconds without anything getting done, after which it is said who waits on whom; then the component is started
    again, or the run ends."""


class EvaluateConfig(Section):
    tasks: int = Field(default=64, ge=0)
    """Held-out tasks, one rollout each; 0 switches evaluation off."""
    every: int = Field(default=0, ge=0)
    """Also after every so many steps; before and after always."""


class CheckpointConfig(Section):
    every: int = Field(default=1, ge=1)
    """Steps; what was trained since is done again on resume, from the same rollouts."""
    keep: int = Field(default=2, ge=1)
    """The newest so many stay on disk."""


class TelemetryConfig(Section):
    tensorboard: bool = False
    """Also write TensorBoard events to `RUN/tensorboard`; needs `agentlightning[tensorboard]`."""
    wandb: str | None = None
    """Also log to this project of Weights & Biases; needs `wandb`, whose own variables say where (WANDB_MODE=offline keeps all here)."""
    mlflow: str | None = None
    """Also log to the MLflow server or folder at this address; needs `mlflow-skinny`."""
    otlp: str | None = None
    """Also send the trainer's steps as spans and metrics to this OTLP/HTTP endpoint, such as `http://localhost:4318`."""


class ReportConfig(Section):
    samples: bool = True
    """Write the samples table: what the optimiser saw, token by token. Without it `report.html` and `agl inspect` show rollouts as they are on record."""
    rollouts: int = Field(default=8, ge=0)
    """How many rollouts `report.html` shows token by token: best, worst, failed, with broken chains, at random."""


class OfflineConfig(Section):
    method: Literal["policy-gradient", "sft", "rft"] = "policy-gradient"
    """With --offline: `policy-gradient` learns from rewards, token ids and log-probabilities, as online; `sft` imitates every answer; `rft` imitates those of good rollouts only (rejection sampling). The latter two work on text too."""
    passes: int = Field(default=1, ge=1)
    """Over the data; `train.steps` bounds the steps all the same. The first in the order of the record, later ones shuffled."""
    batches: Literal["groups", "recorded"] = "groups"
    """What a step is made of: `train.groups_per_step` groups, or the very groups of each recorded step."""
    runs: tuple[str, ...] | None = None
    """Only rollouts of these runs; null: of all."""
    splits: tuple[str, ...] = ("train",)
    """Only rollouts of these splits; one of which nobody said the split counts as `train`."""
    min_reward: float | None = None
    """With method=rft: imitate rollouts of at least this reward."""
    best_of_group: int | None = Field(default=None, ge=1)
    """With method=rft: imitate at most so many rollouts of a group, the best."""

    @model_validator(mode="after")
    def _sensible(self) -> Self:
        chosen = self.min_reward is not None or self.best_of_group is not None
        if self.method == "rft" and not chosen:
            raise ValueError("method=rft needs min_reward or best_of_group: which rollouts are good?")
        if self.method == "policy-gradient" and chosen:
            raise ValueError(
                "min_reward and best_of_group would bias the groups' statistics: use them with method=rft"
            )
        if self.method == "sft" and chosen:
            raise ValueError("method=sft imitates everything: choose rollouts with method=rft")
        return self


class TrainConfig(Section):
    """Everything a run needs."""

    run: RunConfig = RunConfig()
    agent: AgentConfig = AgentConfig()
    tasks: TasksConfig = TasksConfig()
    policy: PolicyConfig = PolicyConfig()
    engine: EngineConfig = EngineConfig()
    collector: CollectorConfig = CollectorConfig()
    gateway: GatewayConfig = GatewayConfig()
    controller: ControllerConfig = ControllerConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    train: TrainSection = TrainSection()
    loop: LoopConfig = LoopConfig()
    watchdog: WatchdogConfig = WatchdogConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    offline: OfflineConfig = OfflineConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    report: ReportConfig = ReportConfig()

    @model_validator(mode="after")
    def _exact_sampling(self) -> Self:
        sampling = self.policy.sampling
        if sampling.top_p != 1.0 or sampling.top_k:
            raise ValueError(
                "policy.sampling.top_p and top_k cannot be used in training: the trainer's log-probabilities are those "
                "of the whole distribution; set them in policy.val_sampling, or leave them out"
            )
        if sampling.temperature == 0 and self.train.steps:
            raise ValueError("policy.sampling.temperature=0 samples no alternatives to learn from")
        return self

    @model_validator(mode="after")
    def _enough_to_compare(self) -> Self:
        algorithm, train = self.algorithm, self.train
        if train.group_size < 2 and algorithm.advantage in BASELINED:
            raise ValueError(
                f"algorithm.advantage={algorithm.advantage} compares the rollouts of a task: train.group_size must be "
                "at least 2"
            )
        if train.minibatches * train.epochs > 1 and algorithm.loss.kind == "reinforce":
            raise ValueError(
                "algorithm.loss.kind=reinforce does not correct for a policy that has moved: with train.minibatches or "
                "train.epochs above 1 use ppo, gspo or cispo"
            )
        return self

    @property
    def directory(self) -> Path:
        """The run's folder."""
        return self.run.root / self.run.name

    def require(self, *keys: str) -> None:
        """Raise ConfigError for the first dotted key that is empty."""
        for key in keys:
            value: Any = self
            for part in key.split("."):
                value = getattr(value, part)
            if value in ("", None):
                raise ConfigError(f"The configuration needs `{key}`.")


def load_config(path: Path, overrides: Iterable[str] = ()) -> TrainConfig:
    """Read a YAML file and apply `section.key=value` overrides. Raises ConfigError."""
    try:
        document = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"The configuration {path} cannot be read: {error.strerror}.") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"The configuration {path} is not YAML: {' '.join(str(error).split())}.") from None
    if document is None:
        document = {}
    if not isinstance(document, dict):
        raise ConfigError(f"The configuration {path} must be a mapping of sections.")
    return config_from(document, overrides, where=str(path))


def config_from(
    document: Mapping[str, Any], overrides: Iterable[str] = (), *, where: str = ""
) -> TrainConfig:
    """Validate a document after applying overrides. Raises ConfigError that names the first bad key."""
    merged = _copy(document)
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator or not key:
            raise ConfigError(f"{override!r} is not an override: write section.key=value.")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            value = text
        _set(merged, key.split("."), value, key)
    try:
        return TrainConfig.model_validate(merged)
    except ValidationError as error:
        raise ConfigError(_sentence(error, where)) from None


def _copy(document: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copy(value) if isinstance(value, Mapping) else value for key, value in document.items()}


def _set(document: dict[str, Any], path: list[str], value: Any, key: str) -> None:
    for part in path[:-1]:
        inner = document.setdefault(part, {})
        if inner is None:  # `lora: null` in the file, `policy.lora.rank=8` on the command line
            inner = document[part] = {}
        if not isinstance(inner, dict):
            raise ConfigError(f"{key}: {part} is a value, not a section.")
        document = inner
    document[path[-1]] = value


def _sentence(error: ValidationError, where: str) -> str:
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    prefix = f"{where}: " if where else ""
    if first["type"] == "extra_forbidden":
        model = _section(first["loc"][:-1])
        names = model.model_fields if model else ()
        return f"{prefix}there is no setting `{place}`.{nearest(str(first['loc'][-1]), names)}"
    message = first["msg"].removeprefix("Value error, ")
    more = f" ({error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f"{prefix}`{place}`: {message[0].lower()}{message[1:]}, got {_short(first['input'])}.{more}"


def _section(location: tuple[int | str, ...]) -> type[BaseModel] | None:
    """The model that stands at a place of the configuration."""
    model: type[BaseModel] = TrainConfig
    for part in location:
        field = model.model_fields.get(str(part))
        if field is None:
            return None
        candidates = [field.annotation, *get_args(field.annotation)]
        inner = next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)
        if inner is None:
            return None
        model = inner
    return model


def _short(value: object) -> str:
    text = repr(value.model_dump() if isinstance(value, BaseModel) else value)
    return text if len(text) <= 80 else text[:77] + "…"
