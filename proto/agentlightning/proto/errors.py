"""The errors that users see: each message is a full sentence that says what was wrong and what to do.

* LightningError
  x ConfigError        a setting, a path or a command line that cannot be honoured; found at start
  x DataError          input data that cannot be read: names the file and the place
  x ServiceError       another component answered with an error, or not at all
    - Unavailable      … and asking again later may help
    - Conflict         … because something newer is true (a stale attempt, a lost lease)
"""

__all__ = ["Conflict", "ConfigError", "DataError", "LightningError", "ServiceError", "Unavailable", "nearest"]

import difflib
from collections.abc import Iterable


class LightningError(Exception):
    """Base of every error whose message is meant for the user."""


class ConfigError(LightningError):
    """A setting, a path or a command line that cannot be honoured."""


class DataError(LightningError):
    """Input data that cannot be read."""


class ServiceError(LightningError):
    """Another component refused a request."""

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class Unavailable(ServiceError):
    """Another component could not be reached, or is overloaded; asking again later may help."""


class Conflict(ServiceError):
    """The request was about something that has moved on: a stale attempt, a lost lease."""


def nearest(name: str, valid: Iterable[str]) -> str:
    """`" Did you mean 'x'?"` for a misspelt name, else the list of valid names."""
    options = sorted(valid)
    close = difflib.get_close_matches(name, options, n=1, cutoff=0.6)
    return f" Did you mean {close[0]!r}?" if close else f" Valid names: {', '.join(options)}."
