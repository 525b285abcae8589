"""The environment of an agent: a short list of harmless variables, those asked for by name, and the contract's.

Nothing else of the controller's environment reaches an agent, so no secret does by accident.
"""

import json
from collections.abc import Iterable, Mapping
from urllib.parse import quote

from agentlightning.controller.rollout import Rollout
from agentlightning.proto import attributes
from agentlightning.proto.errors import ConfigError, DataError

__all__ = ["allowed_environment", "check_program_environment", "rollout_environment"]

ALLOWED = frozenset({"HOME", "LANG", "PATH", "TMPDIR", "TZ", "VIRTUAL_ENV"})
ALLOWED_PREFIXES = ("LC_", "PYTHON", "SSL_CERT_")
CONTRACT_PREFIXES = ("AGENTLIGHTNING_",)
CONTRACT = frozenset(
    {
        "OPENAI_BASE_URL",
        "OPENAI_API_BASE",
        "OPENAI_API_KEY",
        "OPENAI_MODEL",
        "ANTHROPIC_BASE_URL",
        "ANTHROPIC_API_KEY",
        "OTEL_EXPORTER_OTLP_ENDPOINT",
        "OTEL_EXPORTER_OTLP_HEADERS",
        "OTEL_EXPORTER_OTLP_PROTOCOL",
        "OTEL_RESOURCE_ATTRIBUTES",
    }
)
LONGEST = 128 * 1024 - 1
"""Linux passes no longer variable to a program."""


def allowed_environment(source: Mapping[str, str], extra: Iterable[str] = ()) -> dict[str, str]:
    """What of the controller's environment agents may see. Raises ConfigError for a variable that is not there."""
    environ = {
        name: value for name, value in source.items() if name in ALLOWED or name.startswith(ALLOWED_PREFIXES)
    }
    for name in extra:
        if "=" in name:
            raise ConfigError(
                "--env takes a name alone, so that no value stands on a command line: set it, then name it."
            )
        if name in CONTRACT or name.startswith(CONTRACT_PREFIXES):
            raise ConfigError(f"--env {name}: the controller sets {name} itself, for each rollout.")
        if name not in source:
            raise ConfigError(f"--env {name}: there is no such variable in the controller's environment.")
        environ[name] = source[name]
    return environ


def rollout_environment(
    base: Mapping[str, str], rollout: Rollout, gateway: str, collector: str | None
) -> dict[str, str]:
    """The environment of one attempt."""
    identity = {
        attributes.RUN_ID: rollout.run_id,
        attributes.GROUP_ID: rollout.group_id,
        attributes.TASK_ID: rollout.task_id,
        attributes.ROLLOUT_ID: rollout.rollout_id,
        attributes.ATTEMPT: str(rollout.attempt),
        attributes.SPLIT: rollout.split,
    }
    environ = {
        **base,
        "OPENAI_BASE_URL": f"{gateway}/v1",
        "OPENAI_API_BASE": f"{gateway}/v1",
        "OPENAI_API_KEY": rollout.token,
        "OPENAI_MODEL": rollout.policy,
        "ANTHROPIC_BASE_URL": gateway,
        "ANTHROPIC_API_KEY": rollout.token,
        "OTEL_RESOURCE_ATTRIBUTES": ",".join(f"{name}={quote(value)}" for name, value in identity.items()),
        "AGENTLIGHTNING_TASK": json.dumps(rollout.input),
        "AGENTLIGHTNING_ROLLOUT_ID": rollout.rollout_id,
        "AGENTLIGHTNING_ATTEMPT": str(rollout.attempt),
        "AGENTLIGHTNING_GATEWAY": gateway,
    }
    environ["OTEL_EXPORTER_OTLP_PROTOCOL"] = "http/protobuf"
    if collector is not None:
        environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = collector
    else:  # through the gateway, which knows by the token whose spans they are
        environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = gateway
        environ["OTEL_EXPORTER_OTLP_HEADERS"] = f"authorization={quote(f'Bearer {rollout.token}')}"
    return environ


def check_program_environment(environ: Mapping[str, str]) -> None:
    """Raise DataError if a task is too large to be handed to a program (a forked function has no such limit)."""
    size = len("AGENTLIGHTNING_TASK=") + len(environ["AGENTLIGHTNING_TASK"])
    if size > LONGEST:
        raise DataError(
            f"The task's input has {size:,} bytes as JSON, and an environment variable holds {LONGEST:,}: put large "
            "inputs into files, and their paths into the task."
        )
