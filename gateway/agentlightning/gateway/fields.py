"""Reads a JSON request of the control API field by field; what is wrong is said with the field's name."""

import math
from typing import Any

from agentlightning.gateway.errors import ApiError
from agentlightning.proto.errors import nearest
from agentlightning.proto.ids import check_id

__all__ = ["Fields"]


class Fields:
    """A JSON object being read. Take each field, then call `done`: what is left over is unknown, and refused."""

    def __init__(self, data: Any, where: str = "") -> None:
        self._where = where
        if not isinstance(data, dict):
            raise ApiError(400, "bad_request", f"{where or 'The request body'} must be a JSON object.")
        self._data = data
        self._taken: set[str] = set()

    def raw(self, name: str) -> Any:
        """Any JSON value; null if absent."""
        self._taken.add(name)
        return self._data.get(name)

    def text(self, name: str, default: str | None = None, *, limit: int = 200) -> str:
        value = self.optional_text(name, limit=limit)
        return self._needed(name, value if value is not None else default)

    def optional_text(self, name: str, *, limit: int = 200) -> str | None:
        value = self.raw(name)
        if value is None:
            return None
        if not isinstance(value, str) or len(value) > limit:
            raise self._wrong(name, f"must be text of at most {limit} characters")
        return value

    def identifier(self, name: str, default: str | None = None) -> str:
        value = self.text(name, default)
        try:
            return check_id(value, f"{self._where}{name}")
        except ValueError as error:
            raise ApiError(400, "bad_request", str(error)) from None

    def integer(self, name: str, default: int | None = None, *, low: int = 0, high: int = 2**31 - 1) -> int:
        value: Any = self.raw(name)
        value = self._needed(name, default if value is None else value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self._wrong(name, f"must be an integer from {low} to {high}")
        return int(value)

    def number(self, name: str, default: float | None = None, *, low: float, high: float) -> float:
        value: Any = self.raw(name)
        value = self._needed(name, default if value is None else value)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise self._wrong(name, f"must be a number from {low:g} to {high:g}")
        return float(value)

    def finite(self, name: str) -> float:
        """A number that may be anything but NaN and infinity; those have their own error code."""
        value = self.raw(name)
        if isinstance(value, bool) or not isinstance(self._needed(name, value), int | float):
            raise self._wrong(name, "must be a number")
        try:
            value = float(value)
        except OverflowError:
            value = math.inf
        if not math.isfinite(value):
            raise ApiError(
                400, "reward_not_finite", f"{self._where}{name} is {value}: a reward must be a finite number."
            )
        return value

    def choice(self, name: str, valid: tuple[str, ...], default: str | None = None) -> str:
        value = self.text(name, default)
        if value not in valid:
            raise self._wrong(
                name, f"is {value!r}, which is not one of its values.{nearest(value, valid)}".rstrip(".")
            )
        return value

    def items(self, name: str, *, limit: int = 100_000) -> list[Any]:
        value = self._needed(name, self.raw(name))
        if not isinstance(value, list) or len(value) > limit:
            raise self._wrong(name, f"must be an array of at most {limit} items")
        return value

    def identifiers(self, name: str) -> list[str]:
        values = self.items(name)
        if not all(isinstance(value, str) for value in values):
            raise self._wrong(name, "must be an array of texts")
        return values

    def done(self) -> None:
        """Raises ApiError if there are fields that nobody took."""
        for name in self._data:
            if name not in self._taken:
                raise ApiError(
                    400,
                    "bad_request",
                    f"{self._where}{name} is not a known field.{nearest(name, self._taken)}",
                )

    def _needed(self, name: str, value: Any) -> Any:
        if value is None:
            raise self._wrong(name, "is missing")
        return value

    def _wrong(self, name: str, what: str) -> ApiError:
        return ApiError(400, "bad_request", f"{self._where}{name} {what}.")
