"""Asking a policy's engines: the gate before them, which of them to ask, and what their refusals mean.

Another engine is asked only while nothing can have been sampled.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, TypeVar

import aiohttp
import orjson

from agentlightning.gateway import http
from agentlightning.gateway.engines import Declined, Engine
from agentlightning.gateway.errors import ModelError
from agentlightning.gateway.policies import Policy
from agentlightning.gateway.rules import Json

if TYPE_CHECKING:
    from agentlightning.gateway.gateway import Gateway

__all__ = ["ask_engines", "counted", "pass_gate"]

ENGINE_PAUSE: Final = 0.2
"""Seconds between two looks for an engine that is well."""
_REFUSALS: Final = frozenset({400, 413, 422})
"""An engine's statuses that are the request's fault: passed on as they are."""
_TRY_ANOTHER: Final = frozenset({429, 503})

T = TypeVar("T")


async def pass_gate(
    gateway: "Gateway", policy: Policy, run_id: str, keep_alive: Callable[[], Awaitable[None]] | None = None
) -> None:
    """Wait while the policy is held; `keep_alive` is called now and then meanwhile. Raises ModelError when stopping."""
    if policy.held:
        gateway.counters.add("calls_held", run_id)
        if keep_alive is not None:  # at once: a client that waits for its headers must not give up
            await keep_alive()
    while policy.held and not gateway.stopping.is_set():
        await policy.wait(min(gateway.settings.keep_alive_s, max(0.01, policy.hold_expires - time.time())))
        if policy.held and keep_alive is not None:
            await keep_alive()
    if gateway.stopping.is_set():
        raise ModelError(503, "stopping", "The gateway is stopping.", fault=True, retry_after=1)


@contextlib.contextmanager
def counted(policy: Policy) -> Iterator[None]:
    """One more in flight for the policy, of which a hold waits for the end."""
    policy.in_flight += 1
    try:
        yield
    finally:
        policy.in_flight -= 1
        if policy.held:
            policy.notify()


async def ask_engines(
    gateway: "Gateway",
    policy: Policy,
    rollout_id: str,
    run_id: str,
    path: str,
    body_for: Callable[[Engine], Json],
    take: Callable[[aiohttp.ClientResponse], Awaitable[T]],
) -> T:
    """Post to the policy's engines until one answers.

    Args:
        path: of the engine's API.
        body_for: the request's body, for an engine.
        take: reads an answer of status 200.
    """
    asked: dict[str, str] = {}
    deadline = time.monotonic() + gateway.settings.engine_wait_s
    while True:
        engine = gateway.engines.choose(policy.name, rollout_id, without=set(asked))
        if engine is None:
            registered = gateway.engines.of(policy.name)
            if registered and time.monotonic() < deadline and not gateway.stopping.is_set():
                # An engine that is restarted comes back within seconds: to wait costs the agent less than to fail.
                asked.clear()
                await asyncio.sleep(ENGINE_PAUSE)
                continue
            ill = {e.engine_id: e.trouble for e in registered if e.trouble}
            reasons = "; ".join(f"{name}: {reason}" for name, reason in {**ill, **asked}.items())
            raise ModelError(
                503,
                "no_engine",
                f"No engine can serve policy {policy.name} now ({reasons or 'none is registered'}).",
                fault=True,
                retry_after=1,
            )
        try:
            with gateway.engines.use(engine):
                return await _ask(gateway, engine, path, body_for(engine), take)
        except Declined as declined:
            gateway.counters.add("engine_declined", run_id)
            asked[engine.engine_id] = str(declined)


async def _ask(
    gateway: "Gateway",
    engine: Engine,
    path: str,
    body: Json,
    take: Callable[[aiohttp.ClientResponse], Awaitable[T]],
) -> T:
    try:
        async with gateway.session.post(
            engine.url + path,
            data=orjson.dumps(body),
            headers={"content-type": http.JSON, **engine.headers},
            allow_redirects=False,  # nobody but the admin says where calls go
            timeout=gateway.engine_timeout,
        ) as response:
            if response.status != 200:
                raise _refusal(response.status, await response.read())
            return await take(response)
    except aiohttp.SocketTimeoutError:
        raise ModelError(504, "engine_timeout", "The engine did not answer in time.", fault=True) from None
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        gateway.engines.set_aside(engine, f"{type(error).__name__}: {error}")
        raise Declined("cannot be reached") from None
    except (aiohttp.ClientError, OSError) as error:
        raise ModelError(
            502,
            "engine_failed",
            f"The engine broke off ({type(error).__name__}).",
            fault=True,
            retry_after=1,
        ) from None


def _refusal(status: int, content: bytes) -> Exception:
    """What an engine's error status means to the client."""
    message: Any
    try:
        error = orjson.loads(content)
        error = error.get("error", error)
        message, code, param = error.get("message"), error.get("code"), error.get("param")
    except (ValueError, AttributeError):
        message, code, param = content[:500].decode(errors="replace"), None, None
    if status in _REFUSALS:
        return ModelError(
            status,
            code if isinstance(code, str) else "invalid_request",
            str(message),
            param=param if isinstance(param, str) else None,
        )
    if status in _TRY_ANOTHER:
        return Declined(f"answered {status}: {message}")
    return ModelError(
        502, "engine_failed", f"The engine answered {status}: {message}", fault=True, retry_after=1
    )
