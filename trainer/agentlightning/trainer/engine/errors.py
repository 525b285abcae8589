"""A request that cannot be served, in the form that OpenAI's clients understand."""

from dataclasses import dataclass
from typing import Any

__all__ = ["RequestError", "too_long"]


@dataclass
class RequestError(Exception):
    """Ends one request with an HTTP status and a sentence; the server lives on."""

    message: str
    status: int = 400
    code: str | None = None
    param: str | None = None

    def __str__(self) -> str:
        return self.message

    def body(self) -> dict[str, Any]:
        kind = {401: "authentication_error", 404: "not_found_error", 503: "overloaded_error"}.get(
            self.status, "invalid_request_error" if self.status < 500 else "server_error"
        )
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def too_long(limit: int, prompt: int, completion: int | None) -> RequestError:
    """OpenAI's answer to a prompt (and completion, if one was asked for) beyond the context."""
    asked = (
        f"you requested {prompt + completion} tokens ({prompt} in the messages, {completion} in the completion)"
        if completion is not None
        else f"your messages resulted in {prompt} tokens"
    )
    return RequestError(
        f"This model's maximum context length is {limit} tokens. However, {asked}. "
        "Please reduce the length of the messages or completion.",
        code="context_length_exceeded",
        param="messages",
    )
