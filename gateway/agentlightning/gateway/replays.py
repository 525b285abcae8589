"""Answers that a client's retry gets again instead of a new sample; the oldest are forgotten."""

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

__all__ = ["Given", "Replays"]

MAX_REPLAYS: Final = 2_000
MAX_REPLAY_BYTES: Final = 64 << 20

ReplayKey = tuple[str, int, str]
"""Rollout, attempt, the request's digest."""


@dataclass(frozen=True, slots=True)
class Given:
    """What a client was given: enough to give it again."""

    call_id: str
    body: bytes
    delivered: bool
    """Whether the client was still there: if not, it asks again without saying that it does."""


class Replays:
    """The answers of all running attempts, by `ReplayKey`."""

    def __init__(self) -> None:
        self._entries: OrderedDict[ReplayKey, asyncio.Future[Given | None]] = OrderedDict()
        self._bytes = 0

    async def find(self, key: ReplayKey, *, retry: bool) -> Given | None:
        """What an earlier request of these very bytes got. `retry`: the client says that it tries again, so one that is
        still in flight is waited for; else only an answer counts that never reached the client."""
        while (earlier := self._entries.get(key)) is not None:
            if not retry and not (earlier.done() and (early := earlier.result()) and not early.delivered):
                return None
            # Shielded: this client may leave, others may wait for the same answer.
            if (given := await asyncio.shield(earlier)) is not None:
                return given
        return None

    def begin(self, key: ReplayKey) -> "asyncio.Future[Given | None]":
        """A place for the answer that a call is about to get: None if it gets none."""
        place: asyncio.Future[Given | None] = asyncio.get_running_loop().create_future()
        self._forget(key)
        self._entries[key] = place
        return place

    def end(self, key: ReplayKey, place: "asyncio.Future[Given | None]", given: Given | None) -> None:
        if not place.done():
            place.set_result(given)
        if self._entries.get(key) is not place:
            return
        if given is None:
            del self._entries[key]
            return
        self._bytes += len(given.body)
        while self._entries and (len(self._entries) > MAX_REPLAYS or self._bytes > MAX_REPLAY_BYTES):
            self._forget(next(iter(self._entries)))

    def _forget(self, key: ReplayKey) -> None:
        place = self._entries.pop(key, None)
        if place is not None and place.done() and (given := place.result()) is not None:
            self._bytes -= len(given.body)
