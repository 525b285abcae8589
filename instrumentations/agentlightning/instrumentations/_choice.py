"""Which frameworks, and which instrumentation of the openai client: from arguments, else from the environment."""

import os
from collections.abc import Iterable
from dataclasses import dataclass

from agentlightning.instrumentations._others import OPENAI_CLASSES
from agentlightning.proto.errors import ConfigError, nearest

__all__ = ["FRAMEWORKS", "Plan", "choose"]

FRAMEWORKS = ("langchain", "openai-agents", "autogen")
OPENAI = ("genai", "openllmetry", "openinference", "none")
_ALIASES = {"langgraph": "langchain", "openai_agents": "openai-agents", "agents": "openai-agents"}


@dataclass(frozen=True)
class Plan:
    """What `activate` shall prepare for."""

    frameworks: tuple[str, ...] = FRAMEWORKS
    openai: str | None = None
    """Who makes the spans of the openai client; None: whatever fits."""


def choose(frameworks: Iterable[str] | None = None, openai: str | None = None) -> Plan:
    """The plan that arguments, else `AGENTLIGHTNING_FRAMEWORKS` and `AGENTLIGHTNING_OPENAI`, ask for."""
    client = _openai(openai)
    if client in OPENAI_CLASSES and not OPENAI_CLASSES[client].is_installed():
        package = OPENAI_CLASSES[client].package
        raise ConfigError(f"openai={client!r} needs the package {package}. Run: pip install {package}")
    return Plan(_frameworks(frameworks), client)


def _frameworks(given: Iterable[str] | None) -> tuple[str, ...]:
    """The frameworks to prepare for; all of them unless some are named."""
    if isinstance(given, str):
        raise ConfigError(f"frameworks={given!r} must be a list of names, such as [{given!r}].")
    if given is None:
        text = os.environ.get("AGENTLIGHTNING_FRAMEWORKS", "").strip()
        if not text:
            return FRAMEWORKS
        given = () if text == "none" else [name.strip() for name in text.split(",") if name.strip()]
    chosen = []
    for name in given:
        known = _ALIASES.get(name, name)
        if known not in FRAMEWORKS:
            hint = nearest(name, (*FRAMEWORKS, *_ALIASES))
            raise ConfigError(f"There is no framework {name!r}.{hint} Known: {', '.join(FRAMEWORKS)}.")
        chosen.append(known)
    return tuple(dict.fromkeys(chosen))


def _openai(given: str | None) -> str | None:
    """The instrumentation of the openai client that was asked for; None: whatever fits."""
    name = given or os.environ.get("AGENTLIGHTNING_OPENAI", "").strip() or None
    if name is not None and name not in OPENAI:
        raise ConfigError(
            f"There is no instrumentation {name!r} of openai.{nearest(name, OPENAI)} Known: {', '.join(OPENAI)}."
        )
    return name
