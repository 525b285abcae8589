"""Policies, engines and holds over HTTP."""

from typing import Any

from agentlightning.gateway.control import models
from agentlightning.gateway.control.operations import Call
from agentlightning.gateway.gateway import Gateway

__all__ = [
    "hold",
    "list_engines",
    "list_policies",
    "probe_engine",
    "put_engine",
    "put_policy",
    "release",
    "remove_engine",
    "stats",
]


async def put_policy(gateway: Gateway, call: Call[models.Policy]) -> dict[str, Any]:
    """Create a policy, or change what is given of it."""
    asked, sampling = call.asked, None
    if asked.sampling is not None:
        settings = asked.sampling.model_dump(exclude_none=True)
        sampling = {split: chosen for split, chosen in settings.items() if chosen}
    policy = await gateway.policies.put(asked.policy, base_model=asked.base_model, sampling=sampling)
    return {
        "policy": policy.name,
        "base_model": policy.base_model,
        "sampling": policy.sampling,
        "version": policy.version,
    }


async def list_policies(gateway: Gateway, call: Call[None]) -> dict[str, Any]:
    """All policies, and whether their calls are held."""
    return {
        "policies": [
            {
                "policy": policy.name,
                "version": policy.version,
                "hold_id": policy.hold_id if policy.held else None,
                "hold_expires": policy.hold_expires if policy.held else None,
                "in_flight": policy.in_flight,
            }
            for policy in gateway.policies
        ]
    }


async def put_engine(gateway: Gateway, call: Call[models.Engine]) -> dict[str, Any]:
    """Register an engine of a policy, or change where it is, and probe it."""
    if gateway.policies.get(call.asked.policy) is None:
        await gateway.policies.put(call.asked.policy)
    engine = await gateway.engines.put(**call.asked.model_dump())
    return engine.describe()


async def list_engines(gateway: Gateway, call: Call[None]) -> dict[str, Any]:
    """All engines, and how each is."""
    return {"engines": [engine.describe() for engine in gateway.engines]}


async def remove_engine(gateway: Gateway, call: Call[None]) -> dict[str, Any]:
    """Send an engine no further call; those that are on it end."""
    await gateway.engines.remove(call.path["engine_id"])
    return {"removed": call.path["engine_id"]}


async def probe_engine(gateway: Gateway, call: Call[None]) -> dict[str, Any]:
    """Ask an engine how it is, now."""
    engine = gateway.engines.get(call.path["engine_id"])
    await gateway.engines.probe(engine)
    return engine.describe()


async def hold(gateway: Gateway, call: Call[models.Hold]) -> dict[str, Any]:
    """Let no further call of a policy begin, and wait for those in flight: they wait, none fails."""
    return await gateway.policies.hold(call.asked.policy, call.asked.ttl_s, call.asked.drain_s)


async def release(gateway: Gateway, call: Call[models.Release]) -> dict[str, Any]:
    """End a hold; calls go on, on the version that is given."""
    return await gateway.policies.release(call.asked.policy, call.asked.hold_id, call.asked.version)


async def stats(gateway: Gateway, call: Call[models.StatsQuery]) -> dict[str, Any]:
    """What happened, counted under names; of one run, or of all."""
    return {"counters": await gateway.counters.of(call.asked.run_id)}
