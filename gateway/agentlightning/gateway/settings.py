"""What a gateway is told when it starts."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from agentlightning.gateway.database import Durability

__all__ = ["Capture", "Settings"]

Capture = Literal["required", "best_effort"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The options of `agl gateway`, see its help."""

    state: Path
    collector: str
    database: str | None = None
    collector_token_file: Path | None = None
    token_file: Path | None = None
    capture: Capture = "required"
    engines: list[tuple[str, str]] = field(default_factory=list)
    """(policy, url)"""
    engine_token_file: Path | None = None
    max_body_bytes: int = 16 << 20
    max_header_bytes: int = 64 << 10
    client_timeout_s: float = 60.0
    """How long a client may take to send its headers, to begin its body, and to read what it is sent."""
    tls_cert: Path | None = None
    tls_key: Path | None = None
    durability: Durability = "process"
    collector_timeout_s: float = 10.0
    """How long a call's span may wait for its acknowledgement."""
    engine_timeout_s: float = 600.0
    """How long an engine may be silent in the middle of a call."""
    engine_failures: int = 5
    """Failed calls in a row after which an engine gets none for a while."""
    engine_wait_s: float = 30.0
    """How long a call waits for an engine when all of its policy's are away."""
    token_ttl_s: float = 86_400.0
    """How long a rollout token is valid, at most; it ends with its attempt anyhow."""
    keep_alive_s: float = 5.0
    """Between comments to a stream that waits."""
    keep_days: float = 30.0
    """How long ended rollouts of idle runs are kept; 0: for ever."""
    keep_rollouts: int = 0
    """How many ended rollouts of idle runs are kept; 0: all."""
    lease_grace_s: float = 30.0
    """What running leases get at least after a restart."""
