"""Identifiers: random where something new begins, derived where the same thing must get the same name.

Derived identifiers make every write idempotent: the span of a rollout's attempt has one id, however
often it is sent.
"""

import hashlib
import re
import secrets

__all__ = [
    "CHECKED",
    "call_id",
    "check_id",
    "derived_span_id",
    "derived_trace_id",
    "new_id",
    "rollout_span_id",
]

CHECKED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,199}")
"""What a run, group, task, rollout or policy may be called: it becomes file names and attribute values."""


def new_id(prefix: str) -> str:
    """A fresh identifier such as `ro-3f9c2a8e51d04b77`."""
    return f"{prefix}-{secrets.token_hex(8)}"


def check_id(value: str, what: str) -> str:
    """Return `value` if it may name a thing, else raise ValueError with a sentence."""
    if not CHECKED.fullmatch(value):
        raise ValueError(
            f"{what} {value!r} is not a valid identifier: use 1–200 letters, digits and . _ : @ -, "
            "beginning with a letter or digit."
        )
    return value


def call_id(rollout_id: str, attempt: int, nonce: str) -> str:
    """Identity of one model call; `nonce` is the response id or another unique string."""
    return "call-" + _digest("call", rollout_id, str(attempt), nonce)[:24]


def derived_trace_id(rollout_id: str, attempt: int) -> str:
    """The trace of an attempt whose agent brings none: 32 hex digits."""
    return _digest("trace", rollout_id, str(attempt))[:32]


def rollout_span_id(rollout_id: str, attempt: int) -> str:
    """The root span of an attempt's derived trace: 16 hex digits."""
    return derived_span_id("rollout", rollout_id, str(attempt))


def derived_span_id(*parts: str) -> str:
    """A span id that depends on `parts` alone: 16 hex digits, never all zero."""
    return _digest("span", *parts)[:16]


def _digest(*parts: str) -> str:
    # Fields are length-prefixed, so that ("a", "bc") and ("ab", "c") differ.
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(4, "little") + data)
    return digest.hexdigest()
