"""The versions of other packages that this release was tried with."""

import re
from importlib import metadata

__all__ = ["TESTED", "installed", "is_tested", "tested_range"]

Version = tuple[int, ...]
TESTED: dict[str, tuple[Version, Version]] = {
    "opentelemetry-sdk": ((1, 45), (2,)),
    "openai": ((1, 93), (4,)),
    "httpx2": ((2, 12), (3,)),
    "httpx": ((0, 27), (0, 29)),
    "protobuf": ((5, 29, 6), (6,)),
    "grpcio": ((1, 71), (2,)),
    "pyarrow": ((19,), (27,)),
    "aiohttp": ((3, 12), (4,)),
    "starlette": ((0, 46), (2,)),
    "sqlalchemy": ((2, 0, 40), (2, 2)),
    "torch": ((2, 9), (2, 14)),
    "transformers": ((5, 0), (6,)),
    "peft": ((0, 18), (0, 22)),
    "autogen-agentchat": ((0, 7, 5), (0, 8)),
    "langchain": ((1, 5), (1, 6)),
    "langchain-core": ((1, 8), (1, 9)),
    "langgraph": ((1, 2), (1, 3)),
    "openai-agents": ((0, 24), (0, 25)),
    "opentelemetry-instrumentation-genai-openai": ((1, 3), (1, 4)),
    "opentelemetry-instrumentation-genai-langchain": ((1, 3), (1, 4)),
    "opentelemetry-instrumentation-genai-openai-agents": ((1, 3), (1, 4)),
    "opentelemetry-instrumentation-openai": ((0, 62), (0, 63)),
    "openinference-instrumentation-openai": ((0, 1, 66), (0, 2)),
}
"""From (inclusive) and to (exclusive). Others may work."""


def installed(name: str) -> str | None:
    """A distribution's version; None if it is not here."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def is_tested(version: str, between: tuple[Version, Version]) -> bool:
    """Whether a version lies in a range of the table."""
    low, high = between
    return low <= tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3]) < high


def tested_range(name: str, between: tuple[Version, Version]) -> str:
    """As a requirement: `openai>=1.93,<4`."""
    low, high = between
    return f"{name}>={'.'.join(map(str, low))},<{'.'.join(map(str, high))}"
