"""A circuit breaker: an engine whose calls keep failing gets none for a while, then one that decides.

closed → (so many failures in a row) → open → (after a pause) → half open, one trial → closed, or open for twice as long.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

__all__ = ["Breaker", "State"]

FIRST_PAUSE: Final = 1.0
LONGEST_PAUSE: Final = 30.0
State = Literal["closed", "open", "half_open"]


@dataclass(slots=True)
class Breaker:
    """Of one engine. Say `begin` before each call, and afterwards one of `succeeded`, `failed` and `left`."""

    limit: int
    """Failures in a row that open it."""
    clock: Callable[[], float] = time.monotonic
    failures: int = 0
    """In a row, until now."""
    reason: str | None = None
    """What the last failure was; None while there is none."""
    _until: float = 0.0
    _pause: float = 0.0
    """Seconds of the last pause; 0 while closed."""
    _trial: bool = False

    @property
    def state(self) -> State:
        if not self._pause:
            return "closed"
        return "half_open" if self._trial or self.clock() >= self._until else "open"

    @property
    def allows(self) -> bool:
        """Whether a call may begin."""
        return not self._pause or (not self._trial and self.clock() >= self._until)

    def begin(self) -> None:
        self._trial = bool(self._pause)

    def succeeded(self) -> None:
        self.failures, self.reason, self._pause, self._trial = 0, None, 0.0, False

    def failed(self, reason: str) -> bool:
        """Returns whether this opened it."""
        self.failures += 1
        self.reason = reason
        opens = self._trial or (not self._pause and self.failures >= self.limit)
        if opens:
            self._pause = min(max(FIRST_PAUSE, 2 * self._pause), LONGEST_PAUSE)
            self._until = self.clock() + self._pause
        self._trial = False
        return opens

    def left(self) -> None:
        """The call ended without telling anything of the engine."""
        self._trial = False

    def describe(self) -> dict[str, Any]:
        return {"state": self.state, "failures": self.failures, "reason": self.reason}

    @property
    def why(self) -> str | None:
        """Why no call may begin, as a sentence's part; None if one may."""
        if self.allows:
            return None
        return f"set aside after {self.failures} failures in a row, the last: {self.reason}"
