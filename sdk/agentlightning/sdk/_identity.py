"""Which rollout a span belongs to.

Two sources, the nearer wins: the OpenTelemetry context (many rollouts in one process; `agl.rollout`
puts it there, as baggage too, so that it crosses processes and reaches every framework's spans), and
`OTEL_RESOURCE_ATTRIBUTES` (a process per rollout; the controller sets it).
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any
from urllib.parse import quote, unquote

from opentelemetry import baggage
from opentelemetry.context import Context, create_key, get_value, set_value

from agentlightning.proto import attributes as names

__all__ = ["Identity", "baggage_header", "from_context", "from_environment", "into_context"]

_KEY = create_key("agentlightning-identity")
_RESOURCE = "OTEL_RESOURCE_ATTRIBUTES"
_cached: tuple[str | None, "Identity | None"] = (None, None)


@dataclass(frozen=True, slots=True)
class Identity:
    """Names of one attempt at a rollout."""

    rollout_id: str
    run_id: str | None = None
    group_id: str | None = None
    task_id: str | None = None
    attempt: int | None = None
    split: str | None = None

    def attributes(self) -> dict[str, str | int]:
        """As span attributes; what is unknown is left out."""
        pairs = ((_NAMES[field.name], getattr(self, field.name)) for field in fields(self))
        return {name: value for name, value in pairs if value is not None}

    @classmethod
    def from_attributes(cls, values: Mapping[str, Any]) -> "Identity | None":
        """From attributes or baggage entries; None if they name no rollout."""
        if not values.get(names.ROLLOUT_ID):
            return None
        found = {field: values[name] for field, name in _NAMES.items() if values.get(name) is not None}
        texts: dict[str, Any] = {field: str(value) for field, value in found.items()}
        attempt = texts.pop("attempt", None)
        # A foreign value that is no number leaves the attempt unknown rather than wrong.
        return cls(**texts, attempt=int(attempt) if attempt is not None and attempt.isdecimal() else None)


_NAMES = {
    "rollout_id": names.ROLLOUT_ID,
    "run_id": names.RUN_ID,
    "group_id": names.GROUP_ID,
    "task_id": names.TASK_ID,
    "attempt": names.ATTEMPT,
    "split": names.SPLIT,
}


def into_context(identity: Identity, context: Context | None = None) -> Context:
    """The context in which every span belongs to this attempt."""
    context = set_value(_KEY, identity, context)
    for name in _NAMES.values():  # nothing of an outer rollout may shine through
        context = baggage.remove_baggage(name, context)
    for name, value in identity.attributes().items():
        context = baggage.set_baggage(name, str(value), context)
    return context


def from_context(context: Context | None = None) -> Identity | None:
    """The attempt that the context names, set here or received as baggage."""
    identity = get_value(_KEY, context)
    if isinstance(identity, Identity):
        return identity
    entries = baggage.get_all(context)
    return Identity.from_attributes(entries) if entries else None


def from_environment() -> Identity | None:
    """The attempt that the process was started for. Read anew when the variable changes, as after a fork."""
    global _cached
    text = os.environ.get(_RESOURCE)
    if text != _cached[0]:
        pairs = (entry.partition("=") for entry in (text or "").split(","))
        _cached = (
            text,
            Identity.from_attributes({key.strip(): unquote(value.strip()) for key, _, value in pairs}),
        )
    return _cached[1]


def baggage_header(identity: Identity) -> str:
    """W3C baggage with our entries alone: the user's own baggage is not for the model's server."""
    return ",".join(f"{name}={quote(str(value), safe='')}" for name, value in identity.attributes().items())
