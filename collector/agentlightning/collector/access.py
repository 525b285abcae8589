"""Who may use the collector: bearer tokens, and TLS with or without certificates of clients."""

import hmac
import os
import ssl
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc

from agentlightning.proto.errors import ConfigError

__all__ = ["TOKENS_VARIABLE", "Tls", "Tokens", "read_tokens"]

TOKENS_VARIABLE: Final = "AGENTLIGHTNING_COLLECTOR_TOKENS"
"""Tokens, separated by spaces, where no file can be mounted."""
_PREFIX: Final = b"bearer "


class Tokens:
    """Bearer tokens, any of which opens the collector."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = [token.encode() for token in tokens]

    def accept(self, authorization: bytes) -> bool:
        """Whether the value of an `authorization` header holds one of them; the time says nothing of which."""
        if authorization[:7].lower() != _PREFIX:  # RFC 9110 §11.1: the scheme's case does not matter
            return False
        given = authorization[7:].strip()
        found = False
        for token in self._tokens:
            found |= hmac.compare_digest(given, token)
        return found


def read_tokens(path: Path | str | None, environment: Mapping[str, str] = os.environ) -> Tokens | None:
    """Tokens of a file, one a line, else of the environment; None if neither has any.

    Raises:
        ConfigError: the file cannot be read, holds none, or can be read by others.
    """
    if path is None:
        tokens = environment.get(TOKENS_VARIABLE, "").split()
        return Tokens(tokens) if tokens else None
    _private(Path(path), "token file")
    tokens = [line.strip() for line in _text(Path(path), "token file").splitlines() if line.strip()]
    if not tokens or any(" " in token for token in tokens):
        raise ConfigError(f"The token file {path} must hold one token a line, and at least one.")
    return Tokens(tokens)


@dataclass(frozen=True)
class Tls:
    """A server's certificate and key; and the authority that must have signed its clients' certificates."""

    certificate: Path
    key: Path
    client_authority: Path | None = None

    def context(self) -> ssl.SSLContext:
        """For HTTP. Raises ConfigError with what is wrong."""
        _private(self.key, "TLS key")
        for path in (self.certificate, self.client_authority):
            if path is not None:
                _text(path, "TLS certificate")
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        try:
            # A key with a pass phrase would ask at a terminal; nobody sits there.
            context.load_cert_chain(self.certificate, self.key, password=lambda: "")
            if self.client_authority is not None:
                context.load_verify_locations(self.client_authority)
                context.verify_mode = ssl.CERT_REQUIRED
        except (ssl.SSLError, OSError, ValueError) as error:
            raise ConfigError(
                f"The TLS files {self.certificate} and {self.key} cannot be used: {error}. "
                "Give a certificate chain and its key without a pass phrase, both as PEM."
            ) from None
        return context

    def credentials(self) -> grpc.ServerCredentials:
        """For gRPC."""
        authority = self.client_authority.read_bytes() if self.client_authority is not None else None
        return grpc.ssl_server_credentials(
            [(self.key.read_bytes(), self.certificate.read_bytes())],
            root_certificates=authority,
            require_client_auth=authority is not None,
        )


def _private(path: Path, what: str) -> None:
    _text(path, what)
    if stat.S_IMODE(os.stat(path).st_mode) & 0o077:
        raise ConfigError(f"The {what} {path} can be read by others: run `chmod 600 {path}`.")


def _text(path: Path, what: str) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise ConfigError(f"The {what} {path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"The {what} {path} is not text.") from None
