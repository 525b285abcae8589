"""Who may do what: signed rollout tokens for agents, role tokens for the components.

A rollout token says which attempt of which rollout its bearer is, so a harness that knows nothing of us still does.
`alr_<base64url(payload)>.<base64url(hmac-sha256)>`; the key lives in the database, so tokens outlive the process.
"""

import base64
import binascii
import hashlib
import hmac
import secrets
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import orjson
from sqlalchemy import Connection, select

from agentlightning.gateway.database import insert_ignore
from agentlightning.gateway.tables import meta
from agentlightning.proto.errors import ConfigError

__all__ = ["PREFIX", "RIGHTS", "Claims", "Denied", "Role", "Roles", "Signer", "signing_key"]

PREFIX: Final = "alr_"
RIGHTS: Final = frozenset({"reward"})
"""What a rollout token may allow beyond the rollout's own model calls."""
Role = Literal["admin", "trainer", "controller"]


class Denied(Exception):
    """A token that gives no access; `code` names why."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Claims:
    """What a rollout token says of its bearer."""

    rollout_id: str
    attempt: int
    run_id: str
    group_id: str
    task_id: str
    split: str
    policy: str
    expires: float
    rights: tuple[str, ...] = ()


class Signer:
    """Makes and checks rollout tokens."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def sign(self, claims: Claims) -> str:
        payload = orjson.dumps(
            {
                "rollout": claims.rollout_id,
                "attempt": claims.attempt,
                "run": claims.run_id,
                "group": claims.group_id,
                "task": claims.task_id,
                "split": claims.split,
                "policy": claims.policy,
                "exp": claims.expires,
                "rights": list(claims.rights),
            }
        )
        body = _encode(payload)
        return f"{PREFIX}{body}.{_encode(self._mac(body))}"

    def verify(self, token: str) -> Claims:
        """The claims of a token of ours. Raises Denied for any other, and for one that has expired."""
        body, _, signature = token.removeprefix(PREFIX).partition(".")
        # Compared as text: base64 has several spellings of one value, and only ours is accepted.
        if not token.startswith(PREFIX) or not hmac.compare_digest(
            signature.encode(), _encode(self._mac(body)).encode()
        ):
            raise Denied("invalid_api_key", "This rollout token is not one of ours: its signature is wrong.")
        try:
            payload = orjson.loads(_decode(body))
            claims = Claims(
                payload["rollout"],
                payload["attempt"],
                payload["run"],
                payload["group"],
                payload["task"],
                payload["split"],
                payload["policy"],
                payload["exp"],
                tuple(payload["rights"]),
            )
        except (
            ValueError,
            KeyError,
            TypeError,
            binascii.Error,
        ) as error:  # signed by us, but by another version
            raise Denied("invalid_api_key", "This rollout token cannot be read by this gateway.") from error
        if claims.expires < time.time():
            raise Denied("token_expired", f"The token of rollout {claims.rollout_id} has expired.")
        return claims

    def _mac(self, body: str) -> bytes:
        return hmac.new(self._key, body.encode(), hashlib.sha256).digest()


class Roles:
    """The bearer tokens of admin, trainer and controller. With none, everybody may do everything."""

    def __init__(self, tokens: dict[str, Role]) -> None:
        self._tokens = tokens

    @classmethod
    def read(cls, path: Path | None) -> "Roles":
        """From `{"admin": "…", "trainer": "…", "controller": "…"}`. Raises ConfigError with what is wrong."""
        if path is None:
            return cls({})
        try:
            mode = stat.S_IMODE(path.stat().st_mode)
            content = orjson.loads(path.read_bytes())
        except OSError as error:
            raise ConfigError(f"The token file {path} cannot be read: {error.strerror}.") from None
        except ValueError:
            raise ConfigError(f"The token file {path} is not JSON.") from None
        if mode & 0o077:
            raise ConfigError(f"The token file {path} can be read by others: run `chmod 600 {path}`.")
        names: tuple[Role, ...] = ("admin", "trainer", "controller")
        if not isinstance(content, dict) or set(content) != set(names):
            raise ConfigError(f"The token file {path} must hold exactly the keys {', '.join(names)}.")
        tokens: dict[str, Role] = {}
        for name in names:
            token = content[name]
            if (
                not isinstance(token, str)
                or len(token) < 16
                or not token.isascii()
                or token.startswith(PREFIX)
            ):
                raise ConfigError(f"The {name} token in {path} must be ASCII text of 16 characters or more.")
            tokens[token] = name
        if len(tokens) != len(names):
            raise ConfigError(f"The tokens in {path} must differ from each other.")
        return cls(tokens)

    @property
    def open(self) -> bool:
        return not self._tokens

    def of(self, token: str | None) -> Role | None:
        """The role that a bearer token has; None if it has none."""
        found: Role | None = None
        for known, role in self._tokens.items():  # all of them, so that time tells nothing
            if token is not None and hmac.compare_digest(known.encode(), token.encode()):
                found = role
        return found


def signing_key(connection: Connection) -> bytes:
    """The key of this database, made on first use."""
    insert_ignore(connection, meta, [{"key": "signing_key", "value": secrets.token_hex(32)}])
    return bytes.fromhex(
        connection.execute(select(meta.c.value).where(meta.c.key == "signing_key")).scalar_one()
    )


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _decode(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
