"""Nothing secret leaves the process: keys and cookies are taken out of whatever is recorded.

Three nets, from fine to coarse. Headers are never recorded at all. In bodies, the value of a field
that by its name holds a credential is replaced (an MCP tool's `authorization`, say), and so is the
call's own key wherever it occurs (servers echo it in errors). Before export, every text of every
span, whoever wrote it, is searched for the keys that this process was seen to use.

The text is edited in place, never parsed and rendered again: what is not secret stays exact.
"""

import functools
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

__all__ = ["REDACTED", "redact_body", "redact_text", "remember", "remember_environment", "scrubbed"]

REDACTED = "[redacted]"

_HEADERS = ("authorization", "proxy-authorization", "x-api-key", "api-key", "x-goog-api-key", "cookie")
_SHORTEST = 8
"""Shorter keys are place-holders such as `EMPTY`; replacing them would damage texts."""
_REMEMBERED = 64

_FIELDS = (
    "authorization",
    "proxy[-_]authorization",
    "(?:x[-_])?api[-_]?key",
    "(?:openai|anthropic|azure)[-_]api[-_]key",
    "(?:set[-_])?cookie",
    "(?:access|refresh|auth|bearer|id)[-_]token",
    "(?:client[-_])?secret",
    "password",
)
_FIELD = re.compile(rf'(?i)"({"|".join(_FIELDS)})"(\s*:\s*)("(?:[^"\\]|\\.)*"|\[[^\[\]{{}}]*\])')
# Case-folded fragments, one of which any match of _FIELD contains: the search that usually finds nothing is cheap.
_HINTS = (
    "authorization",
    'api_key"',
    'api-key"',
    'apikey"',
    "cookie",
    '_token"',
    '-token"',
    'secret"',
    'password"',
)

_NUMBERS = frozenset({"logprobs", "token_ids", "prompt_token_ids"})
"""Where an answer holds something for each token: a thousand entries, none with fields but the engine's own."""

_seen: dict[str, None] = {}  # in the order of appearance; each operation on it is atomic, so it needs no lock


def remember(headers: Mapping[str, str]) -> list[str]:
    """The credentials in a request's headers; they are looked for in everything exported from now on."""
    found: list[str] = []
    for name in _HEADERS:
        value = headers.get(name)
        if value is None:
            continue
        scheme, _, rest = value.partition(" ")
        secret = rest.strip() if rest and scheme.isalpha() else value  # "Bearer …", "Basic …"
        if len(secret) >= _SHORTEST:
            found.append(secret)
    _remember(found)
    return found


def remember_environment() -> None:
    """The keys that the process was started with: an exception may show one before the first call does."""
    _remember(
        value
        for name, value in os.environ.items()
        if name.endswith(("_API_KEY", "_API_TOKEN")) and len(value) >= _SHORTEST
    )


def _remember(secrets: Iterable[str]) -> None:
    for secret in secrets:
        if secret not in _seen:
            _seen[secret] = None
            if len(_seen) > _REMEMBERED:
                _seen.pop(next(iter(_seen)), None)


def redact_body(text: str, secrets: list[str], parsed: Any = None) -> str:
    """A JSON body without credentials. `parsed`, where it is at hand, is searched sooner than a long text."""
    for secret in secrets:
        if secret in text:
            text = text.replace(secret, REDACTED)
    suspicious = any(map(_is_credential, _fields(parsed))) if parsed else _has_hint(text.lower())
    return _FIELD.sub(rf'"\1"\2"{REDACTED}"', text) if suspicious else text


def _has_hint(folded: str) -> bool:
    return any(hint in folded for hint in _HINTS)


@functools.lru_cache(1024)
def _is_credential(field: str) -> bool:
    return _has_hint(f'{field.lower()}"')


def _fields(value: Any) -> Iterator[str]:
    """The names of all fields in a parsed body, but for those of each token."""
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            yield from value
            left += [item for name, item in value.items() if name not in _NUMBERS]
        elif isinstance(value, list):
            left += value


def redact_text(text: str) -> str:
    """Any text without the credentials that this process has used."""
    for secret in list(_seen):
        if secret in text:
            text = text.replace(secret, REDACTED)
    return text


def scrubbed(span: "ReadableSpan") -> "ReadableSpan":
    """The span itself if it is clean, as almost always, else a copy without the credentials."""
    if not _seen or not _dirty(span):
        return span
    from opentelemetry.sdk.trace import Event, ReadableSpan
    from opentelemetry.trace import Status

    status = span.status
    return ReadableSpan(
        name=redact_text(span.name),
        context=span.context,
        parent=span.parent,
        resource=span.resource,
        attributes=_clean(span.attributes or {}),
        events=[Event(redact_text(e.name), _clean(e.attributes or {}), e.timestamp) for e in span.events],
        links=span.links,
        kind=span.kind,
        status=Status(status.status_code, redact_text(status.description)) if status.description else status,
        start_time=span.start_time,
        end_time=span.end_time,
        instrumentation_scope=span.instrumentation_scope,
    )


def _dirty(span: "ReadableSpan") -> bool:
    secrets = list(_seen)
    parts = [
        span.name,
        span.status.description,
        span.attributes,
        *(event.attributes for event in span.events),
    ]
    return any(_holds(part, secrets) for part in parts)


def _holds(value: Any, secrets: list[str]) -> bool:  # an attribute value: nested sequences and mappings occur
    if isinstance(value, str):
        return any(secret in value for secret in secrets)
    if isinstance(value, Mapping):
        return any(_holds(item, secrets) for item in value.values())
    if isinstance(value, list | tuple):
        return any(_holds(item, secrets) for item in value if not isinstance(item, int | float))
    return False


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return redact_text(value)
    if isinstance(value, Mapping):
        return {key: _clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    return value
