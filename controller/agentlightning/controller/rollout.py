"""A claimed rollout, as the gateway describes it, and how an attempt at it can end."""

import hashlib
from dataclasses import dataclass
from typing import Any, Literal

from agentlightning.proto.errors import DataError
from agentlightning.proto.ids import check_id

__all__ = ["Cause", "Rollout", "Verdict"]

Cause = Literal["agent_error", "timeout", "infra_error", "cancelled"]


@dataclass(frozen=True)
class Rollout:
    """One attempt's share of a rollout: what to run, and for whom."""

    rollout_id: str
    run_id: str
    group_id: str
    task_id: str
    split: str
    policy: str
    input: dict[str, Any]
    reference: Any
    """What the right answer is compared with; never shown to the agent."""
    attempt: int
    token: str
    boot_id: str
    """The gateway's, when it handed the attempt out."""

    @classmethod
    def read(cls, row: dict[str, Any], boot_id: str) -> "Rollout":
        """Read a row of `POST /api/rollouts/claim`. Raises DataError if it is not one."""
        try:
            names = ("rollout_id", "run_id", "group_id", "task_id", "policy")
            identity = {
                name: check_id(str(row[name]), name) for name in names
            }  # they become names of folders
            return cls(
                **identity,
                split=str(row["split"]),
                input=dict(row["input"]),
                reference=row.get("reference"),
                attempt=int(row["attempt"]),
                token=str(row["token"]),
                boot_id=boot_id,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"The gateway handed out a rollout that cannot be read: {error!r}.") from None

    @property
    def key(self) -> str:
        """Names the attempt."""
        return f"{self.rollout_id}/{self.attempt}"

    @property
    def seed(self) -> int:
        """Random state of the attempt: its own, and the same whenever it is run."""
        return int.from_bytes(hashlib.sha256(self.key.encode()).digest()[:8], "little")

    @property
    def task(self) -> dict[str, Any]:
        """The task as the evaluator sees it."""
        return {
            "task_id": self.task_id,
            "input": self.input,
            "reference": self.reference,
            "rollout_id": self.rollout_id,
            "attempt": self.attempt,
            "split": self.split,
        }


@dataclass(frozen=True)
class Verdict:
    """How an attempt ended, as it is reported to the gateway."""

    state: Literal["succeeded", "failed", "cancelled"]
    cause: Cause | None = None
    error: str | None = None
    output: Any = None
