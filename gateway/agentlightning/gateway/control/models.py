"""What the control API takes and gives, as types: they check requests, and make the OpenAPI document.

A field that is null is as one that is absent. Unknown fields are refused, and nothing is converted: `"1"` is no number.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from agentlightning.proto.attributes import DEFAULT_REWARD
from agentlightning.proto.ids import CHECKED, check_id

__all__ = [
    "Cancel",
    "Cancelled",
    "Changes",
    "Claim",
    "Claimed",
    "Engine",
    "EngineRow",
    "EngineRows",
    "Enqueue",
    "Enqueued",
    "Finish",
    "Finished",
    "Follow",
    "Heartbeat",
    "Heartbeats",
    "Hold",
    "Holding",
    "Names",
    "Policy",
    "PolicyRow",
    "Query",
    "Release",
    "Released",
    "Removed",
    "Reports",
    "Results",
    "Revoked",
    "Reward",
    "Rewarded",
    "Rollout",
    "RolloutRow",
    "RolloutRows",
    "Sampling",
    "Splits",
    "Stats",
    "StatsQuery",
]

MAX_ITEMS = 100_000
MAX_LEASE = 3600.0
MAX_WAIT = 30.0
PAGE = 1000

Split = Literal["train", "val"]
State = Literal["queued", "running", "succeeded", "failed", "cancelled"]
Cause = Literal["agent_error", "timeout", "context_overflow", "lost", "infra_error", "cancelled"]
Right = Literal["reward"]


def _identifier(value: str) -> str:
    return check_id(value, "")


Identifier = Annotated[
    str,
    AfterValidator(_identifier),
    Field(max_length=200, json_schema_extra={"pattern": f"^{CHECKED.pattern}$"}),
]
Name = Annotated[str, Field(max_length=200)]
Json = dict[str, Any]  # Any: an agent's task and answer are the user's


class Request(BaseModel):
    """A request's body."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        return {k: v for k, v in data.items() if v is not None} if isinstance(data, dict) else data


class Parameters(BaseModel):
    """A request's query parameters: texts, converted."""

    model_config = ConfigDict(extra="forbid")


class Answer(BaseModel):
    """An answer's body. Answers are built as dictionaries: these types document them, and the tests hold them to it."""

    model_config = ConfigDict(extra="forbid")


# -------------------------------------------------------------------- rollouts


class Sampling(Request):
    """How to sample, whatever the agent asks."""

    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = Field(
        None, description="each call gets a seed of its own, from this one, its rollout and its place in it"
    )


class Rollout(Request):
    """One execution of an agent on one task."""

    rollout_id: Identifier
    run_id: Identifier
    group_id: Identifier | None = Field(None, description="by default the rollout's id")
    task_id: Identifier | None = Field(None, description="by default the rollout's id")
    split: Split = "train"
    policy: Identifier
    input: Json = Field(description="the task, as the agent gets it")
    reference: Json | None = Field(None, description="what only the evaluator gets to see")
    sampling: Sampling | None = None
    rights: list[Right] = Field([], description="what the agent's token allows beyond its model calls")
    max_attempts: Annotated[int, Field(ge=1, le=100)] = 3
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = Field(0, description="the highest goes first")


class Enqueue(Request):
    rollouts: Annotated[list[Rollout], Field(max_length=MAX_ITEMS)]


class Enqueued(Answer):
    created: int
    existing: int


class Claim(Request):
    controller_id: Identifier
    limit: Annotated[int, Field(ge=1, le=10_000)]
    lease_s: Annotated[float, Field(ge=1, le=MAX_LEASE)]
    wait_s: Annotated[float, Field(ge=0, le=MAX_WAIT)] = Field(0.0, description="how long to wait for work")


class ClaimedRollout(Answer):
    rollout_id: str
    run_id: str
    group_id: str
    task_id: str
    split: Split
    policy: str
    input: Json
    reference: Json | None
    sampling: Sampling | None
    max_attempts: int
    priority: int
    attempt: int
    lease_expires: float
    token: str = Field(description="the API key of the agent: this attempt, and what it may do")


class Claimed(Answer):
    boot_id: str = Field(description="changes when a gateway restarts: calls may have failed for that")
    rollouts: list[ClaimedRollout]


class AttemptKey(Request):
    rollout_id: Name
    attempt: Annotated[int, Field(ge=0, lt=2**31)]


class Heartbeat(Request):
    controller_id: Identifier
    lease_s: Annotated[float, Field(ge=1, le=MAX_LEASE)]
    attempts: Annotated[list[AttemptKey], Field(max_length=MAX_ITEMS)]


class Heartbeats(Answer):
    boot_id: str
    lost: list[AttemptKey] = Field(description="not this controller's any more: stop their agents")
    cancelled: list[AttemptKey]


class Finish(Request):
    attempt: Annotated[int, Field(ge=0, lt=2**31)]
    controller_id: Identifier
    state: Literal["succeeded", "failed", "cancelled"]
    cause: Cause | None = Field(None, description="needed for failed, and for it alone")
    error: Annotated[str, Field(max_length=1 << 20)] | None = None
    output: Any = None

    @model_validator(mode="after")
    def _cause_fits(self) -> "Finish":
        if self.state == "failed" and self.cause is None:
            raise ValueError("cause is missing: a failed attempt has one")
        if self.state == "succeeded" and self.cause is not None:
            raise ValueError("cause must be null where the state is succeeded")
        return self


class Finished(Answer):
    state: State
    attempt: int
    will_retry: bool


class Report(Finish):
    rollout_id: Name


class Reports(Request):
    reports: Annotated[list[Report], Field(max_length=MAX_ITEMS)]


class Refused(Answer):
    message: str
    code: str
    attempt: int | None = None
    state: State | None = None


class Result(Answer):
    rollout_id: str
    finished: Finished | None = None
    error: Refused | None = Field(
        None, description="as the single request's error; the others are not touched"
    )


class Results(Answer):
    results: list[Result] = Field(description="one for each report, in their order")


class Reward(Request):
    attempt: Annotated[int, Field(ge=0, lt=2**31)] | None = Field(
        None, description="needed but for the rollout's own token, which says it"
    )
    name: Name = DEFAULT_REWARD
    value: float = Field(allow_inf_nan=False)
    label: Name | None = None
    explanation: Annotated[str, Field(max_length=100_000)] | None = None
    call_id: Name | None = Field(None, description="the call that is judged; null: the rollout")


class Rewarded(Answer):
    rollout_id: str
    attempt: int
    name: str
    value: float


class Names(Request):
    rollout_ids: Annotated[list[str], Field(max_length=MAX_ITEMS)]


class Cancel(Request):
    rollout_ids: Annotated[list[str], Field(max_length=MAX_ITEMS)] | None = None
    run_id: Name | None = Field(None, description="instead of ids: all of the run that have not ended")

    @model_validator(mode="after")
    def _one_of_two(self) -> "Cancel":
        if (self.rollout_ids is None) == (self.run_id is None):
            raise ValueError("give either rollout_ids or run_id")
        return self


class Cancelled(Answer):
    cancelled: int


class Revoked(Answer):
    revoked: int


class Query(Parameters):
    run_id: str | None = None
    state: State | None = None
    split: Split | None = None
    cursor: Annotated[int, Field(ge=0, lt=2**60)] = Field(0, description="`next_cursor` of the page before")
    limit: Annotated[int, Field(ge=1, le=PAGE)] = PAGE


class RolloutRow(Answer):
    rollout_id: str
    run_id: str
    group_id: str
    task_id: str
    split: Split
    policy: str
    input: Json
    reference: Json | None
    state: State
    attempt: int | None = Field(description="the newest; null before the first")
    cause: Cause | None
    error: str | None
    output: Any
    calls: int = Field(description="answered model calls of the newest attempt, by the ledger")
    calls_failed: int
    created: float
    started: float | None
    ended: float | None
    change: int | None = Field(description="number of the final state, once the collector has its span")


class RolloutRows(Answer):
    rollouts: list[RolloutRow]
    next_cursor: int | None


class Follow(Parameters):
    run_id: str | None = None
    cursor: Annotated[int, Field(ge=0, lt=2**60)] = Field(0, description="the last `change` that was seen")


class Changes(Answer):
    """A stream of `id: CHANGE` and `data: ROLLOUT` (as in lists), with comments while nothing happens."""


# -------------------------------------------------------------------- policies and engines


class Splits(Request):
    train: Sampling | None = None
    val: Sampling | None = None


class Policy(Request):
    policy: Identifier
    base_model: Annotated[str, Field(max_length=1000)] | None = None
    sampling: Splits | None = None


class PolicyRow(Answer):
    policy: str
    base_model: str | None
    sampling: dict[Split, Sampling]
    version: int | None


class PolicyState(Answer):
    policy: str
    version: int | None
    hold_id: str | None = Field(description="whose hold makes calls wait; null: they go through")
    hold_expires: float | None
    in_flight: int


class PolicyStates(Answer):
    policies: list[PolicyState]


class Engine(Request):
    engine_id: Identifier
    policy: Identifier
    url: Annotated[str, Field(max_length=2000)]
    model: Annotated[str, Field(max_length=1000)] | None = Field(
        None, description="the engine's own name of its model; learnt from it if null"
    )
    token_file: Annotated[str, Field(max_length=4000)] | None = Field(
        None, description="file on the gateway's machine with the engine's bearer token"
    )


class BreakerState(Answer):
    state: Literal["closed", "open", "half_open"]
    failures: int = Field(description="in a row, until now")
    reason: str | None


class EngineRow(Answer):
    engine_id: str
    policy: str
    url: str
    model: str | None
    healthy: bool
    reason: str | None = Field(description="why no call is sent to it")
    model_version: int | None
    in_flight: int
    probed: float | None
    breaker: BreakerState


class EngineRows(Answer):
    engines: list[EngineRow]


class Removed(Answer):
    removed: str


class Hold(Request):
    policy: Identifier
    ttl_s: Annotated[float, Field(ge=0, le=3600)] = Field(
        120.0, description="the hold ends by itself after that long"
    )
    drain_s: Annotated[float, Field(ge=0, le=3600)] = Field(
        30.0, description="how long to wait for calls in flight"
    )


class Holding(Answer):
    hold_id: str
    drained: bool
    in_flight: int


class Release(Request):
    policy: Identifier
    hold_id: Identifier
    version: Annotated[int, Field(ge=0, le=2**62)] | None = None


class Released(Answer):
    policy: str
    version: int | None
    expired: bool


class StatsQuery(Parameters):
    run_id: str | None = None


class Stats(Answer):
    counters: dict[str, int]
