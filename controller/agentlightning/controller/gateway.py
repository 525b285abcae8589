"""The gateway's control API, as far as the controller needs it."""

import asyncio
import json
import logging
import random
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, ParamSpec, TypeVar
from urllib.parse import quote

import aiohttp

from agentlightning.controller.rollout import Rollout, Verdict
from agentlightning.proto.errors import ConfigError, Conflict, ServiceError, Unavailable

__all__ = ["Gateway", "patiently"]

log = logging.getLogger(__name__)

FIRST_DELAY, LONGEST_DELAY = 0.1, 5.0
"""Seconds between two tries while the gateway cannot be reached."""
REQUEST_TIME = 30.0
"""Seconds for an answer, beyond what a long poll may wait."""

Asked = ParamSpec("Asked")
Answer = TypeVar("Answer")


class Gateway:
    """One request per method. Raises Unavailable if asking again may help, Conflict for a stale attempt."""

    def __init__(self, url: str, controller_id: str, token: str | None) -> None:
        self.url = url
        self.controller_id = controller_id
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    async def __aenter__(self) -> "Gateway":
        self._session = aiohttp.ClientSession(headers=self._headers, connector=aiohttp.TCPConnector(limit=0))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def claim(self, limit: int, lease_s: float, wait_s: float) -> tuple[str, list[dict[str, Any]]]:
        """Up to `limit` rollouts to run, waiting for the first; with the gateway's boot id."""
        body = {"controller_id": self.controller_id, "limit": limit, "lease_s": lease_s, "wait_s": wait_s}
        answer = await self._post("claim", body, wait=wait_s)
        return str(answer["boot_id"]), list(answer["rollouts"])

    async def heartbeat(
        self, attempts: list[Rollout], lease_s: float
    ) -> tuple[str, set[tuple[str, int]], set[tuple[str, int]]]:
        """Extend leases; returns the boot id, and which attempts are lost and which cancelled."""
        keys = [{"rollout_id": attempt.rollout_id, "attempt": attempt.attempt} for attempt in attempts]
        body = {"controller_id": self.controller_id, "lease_s": lease_s, "attempts": keys}
        answer = await self._post("heartbeat", body)
        lost, cancelled = ({_key(entry) for entry in answer[name]} for name in ("lost", "cancelled"))
        return str(answer["boot_id"]), lost, cancelled

    async def reward(self, rollout: Rollout, name: str, value: float) -> None:
        """Give an attempt a reward. Raises ServiceError if the gateway refuses it."""
        body = {"attempt": rollout.attempt, "name": name, "value": value}
        await self._post(f"{quote(rollout.rollout_id, safe='')}/rewards", body)

    async def finish(self, rollout_id: str, attempt: int, verdict: Verdict) -> dict[str, Any]:
        """Say how an attempt ended; repeating it is harmless."""
        body = {
            "controller_id": self.controller_id,
            "attempt": attempt,
            "state": verdict.state,
            "cause": verdict.cause,
            "error": verdict.error,
            "output": verdict.output,
        }
        return await self._post(f"{quote(rollout_id, safe='')}/finish", body)

    async def _post(self, path: str, body: dict[str, Any], wait: float = 0.0) -> dict[str, Any]:
        url = f"{self.url}/api/rollouts/{path}"
        timeout = aiohttp.ClientTimeout(total=wait + REQUEST_TIME)
        try:
            # A reward that is not finite goes out as NaN: the gateway is where it is refused and counted.
            async with self._session.post(url, json=body, timeout=timeout) as response:
                text = await response.text()
        except (aiohttp.ClientError, TimeoutError) as error:
            reason = str(error) or type(error).__name__
            raise Unavailable(f"The gateway at {self.url} cannot be reached: {reason}.") from None
        if response.status == 200:
            try:
                return dict(json.loads(text))
            except (TypeError, ValueError):
                raise ServiceError(
                    f"{url} answered with something that is not a JSON object: {text:.100}"
                ) from None
        message = f"The gateway answered {response.status} to {path}: {_message(text)}"
        if response.status in (401, 403):
            raise ConfigError(f"{message} (--token-file must name the gateway's controller token.)")
        if response.status == 409:
            raise Conflict(message, status=409)
        if response.status == 429 or response.status >= 500:
            raise Unavailable(message, status=response.status)
        raise ServiceError(message, status=response.status)


async def patiently(
    ask: Callable[Asked, Awaitable[Answer]], *args: Asked.args, **options: Asked.kwargs
) -> Answer:
    """Ask until the gateway can be reached."""
    delay = FIRST_DELAY
    while True:
        try:
            return await ask(*args, **options)
        except Unavailable as error:
            if delay == FIRST_DELAY:
                log.warning("%s Trying again until it answers.", error)
            await asyncio.sleep(delay * random.uniform(0.75, 1.25))
            delay = min(delay * 2, LONGEST_DELAY)


def _key(entry: Any) -> tuple[str, int]:
    return str(entry["rollout_id"]), int(entry["attempt"])


def _message(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["message"])
    except (KeyError, TypeError, ValueError):
        return text[:200] or "(no text)"
