"""What becomes of each field of a model request: honoured, accepted without effect, or refused by name.

Each API has one table; `check` applies it, and `docs/gateway.md` is generated from it. A field that is not in the
table is refused as unknown, so none is ignored in silence. `null` means absent, always.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from agentlightning.proto.errors import nearest

__all__ = [
    "ANY",
    "BOOLEAN",
    "COUNT",
    "INTEGER",
    "ITEMS",
    "NUMBER",
    "OBJECT",
    "TEXT",
    "BadRequest",
    "Json",
    "Kind",
    "Rule",
    "Table",
    "accepted",
    "check",
    "honoured",
    "only",
    "refused",
]

Json = dict[str, Any]  # Any: JSON that others wrote


class BadRequest(Exception):
    """A request that cannot be served as it is; `param` names the field."""

    def __init__(self, message: str, param: str | None = None, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of JSON value, in words and as a test."""

    words: str
    fits: Callable[[Any], bool]


ANY: Final = Kind("anything", lambda value: True)
TEXT: Final = Kind("a string", lambda value: isinstance(value, str))
BOOLEAN: Final = Kind("a boolean", lambda value: isinstance(value, bool))
INTEGER: Final = Kind("an integer", lambda value: type(value) is int)
COUNT: Final = Kind("a positive integer", lambda value: type(value) is int and value > 0)
NUMBER: Final = Kind("a number", lambda value: type(value) in (int, float) and math.isfinite(value))
ITEMS: Final = Kind("an array", lambda value: isinstance(value, list))
OBJECT: Final = Kind("an object", lambda value: isinstance(value, dict))


@dataclass(frozen=True, slots=True)
class Rule:
    """What becomes of one field."""

    fate: Literal["honoured", "accepted", "only", "refused"]
    says: str
    kind: Kind = ANY
    values: tuple[Any, ...] = ()
    """Of `only`: the values that are honoured."""


Table = Mapping[str, Rule]


def honoured(says: str, kind: Kind = ANY) -> Rule:
    return Rule("honoured", says, kind)


def accepted(says: str, kind: Kind = ANY) -> Rule:
    """It may be given, and says nothing about the answer."""
    return Rule("accepted", says, kind)


def only(*values: Any, why: str) -> Rule:
    return Rule("only", why, values=values)


def refused(why: str) -> Rule:
    return Rule("refused", why)


def check(body: Mapping[str, Any], table: Table, where: str = "") -> None:
    """Raises BadRequest for the first field of `body` that the table does not let pass."""
    for name, value in body.items():
        if value is None:
            continue
        rule, at = table.get(name), where + name
        if rule is None:
            raise BadRequest(
                f"Unknown field {at!r}: this gateway does not know it.{nearest(name, table)}",
                at,
                "unknown_field",
            )
        if rule.fate == "refused":
            raise BadRequest(f"The field {at!r} is not supported: {rule.says}.", at, "unsupported_field")
        if rule.fate == "only" and not any(type(value) is type(v) and value == v for v in rule.values):
            known = " or ".join(json.dumps(v) for v in rule.values)
            raise BadRequest(f"The field {at!r} may only be {known}: {rule.says}.", at, "unsupported_value")
        if not rule.kind.fits(value):
            raise BadRequest(f"'{at}' must be {rule.kind.words}.", at)
