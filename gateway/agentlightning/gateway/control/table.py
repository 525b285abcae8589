"""The control API as a table of operations. Every request may be repeated: it changes nothing the second time."""

from typing import Final

from starlette.routing import BaseRoute

from agentlightning.gateway.control import models, policies, rewards, rollouts
from agentlightning.gateway.control.operations import Operation
from agentlightning.gateway.gateway import Gateway

__all__ = ["OPERATIONS", "routes"]

OPERATIONS: Final = (
    Operation(
        method="POST",
        path="/api/rollouts",
        handler=rollouts.enqueue,
        asks=models.Enqueue,
        answer=models.Enqueued,
        roles=("trainer",),
    ),
    Operation(
        method="GET",
        path="/api/rollouts",
        handler=rollouts.list_rollouts,
        asks=models.Query,
        answer=models.RolloutRows,
        roles=("trainer",),
    ),
    Operation(
        method="POST",
        path="/api/rollouts/claim",
        handler=rollouts.claim,
        asks=models.Claim,
        answer=models.Claimed,
        roles=("controller",),
    ),
    Operation(
        method="POST",
        path="/api/rollouts/heartbeat",
        handler=rollouts.heartbeat,
        asks=models.Heartbeat,
        answer=models.Heartbeats,
        roles=("controller",),
    ),
    Operation(
        method="POST",
        path="/api/rollouts/finish",
        handler=rollouts.finish_many,
        asks=models.Reports,
        answer=models.Results,
        roles=("controller",),
    ),
    Operation(
        method="POST",
        path="/api/rollouts/cancel",
        handler=rollouts.cancel,
        asks=models.Cancel,
        answer=models.Cancelled,
        roles=("trainer",),
    ),
    Operation(
        method="POST",
        path="/api/rollouts/revoke",
        handler=rollouts.revoke,
        asks=models.Names,
        answer=models.Revoked,
        roles=("trainer",),
    ),
    Operation(
        method="POST",
        path="/api/rollouts/query",
        handler=rollouts.query,
        asks=models.Names,
        answer=models.RolloutRows,
        roles=("trainer",),
    ),
    Operation(
        method="GET",
        path="/api/rollouts/follow",
        handler=rollouts.follow,
        asks=models.Follow,
        answer=models.Changes,
        roles=("trainer",),
    ),
    Operation(
        method="GET",
        path="/api/rollouts/{rollout_id}",
        handler=rollouts.get_rollout,
        answer=models.RolloutRows,
        roles=("trainer",),
    ),
    Operation(
        method="POST",
        path="/api/rollouts/{rollout_id}/finish",
        handler=rollouts.finish,
        asks=models.Finish,
        answer=models.Finished,
        roles=("controller",),
    ),
    Operation(
        method="POST",
        path="/api/rollouts/{rollout_id}/rewards",
        handler=rewards.reward,
        asks=models.Reward,
        answer=models.Rewarded,
        roles=("controller",),
        right="reward",
    ),
    Operation(
        method="POST",
        path="/api/policies",
        handler=policies.put_policy,
        asks=models.Policy,
        answer=models.PolicyRow,
        roles=("trainer",),
    ),
    Operation(
        method="GET",
        path="/api/policies",
        handler=policies.list_policies,
        answer=models.PolicyStates,
        roles=("trainer",),
    ),
    Operation(
        method="POST",
        path="/api/engines",
        handler=policies.put_engine,
        asks=models.Engine,
        answer=models.EngineRow,
    ),
    Operation(
        method="GET",
        path="/api/engines",
        handler=policies.list_engines,
        answer=models.EngineRows,
        roles=("trainer",),
    ),
    Operation(
        method="DELETE",
        path="/api/engines/{engine_id}",
        handler=policies.remove_engine,
        answer=models.Removed,
    ),
    Operation(
        method="POST",
        path="/api/engines/{engine_id}/probe",
        handler=policies.probe_engine,
        answer=models.EngineRow,
        roles=("trainer",),
    ),
    Operation(
        method="POST",
        path="/api/hold",
        handler=policies.hold,
        asks=models.Hold,
        answer=models.Holding,
        roles=("trainer",),
    ),
    Operation(
        method="POST",
        path="/api/release",
        handler=policies.release,
        asks=models.Release,
        answer=models.Released,
        roles=("trainer",),
    ),
    Operation(
        method="GET",
        path="/api/stats",
        handler=policies.stats,
        asks=models.StatsQuery,
        answer=models.Stats,
        roles=("trainer", "controller"),
    ),
)


def routes(gateway: Gateway) -> list[BaseRoute]:
    """All routes of the control API."""
    return [operation.route(gateway) for operation in OPERATIONS]
