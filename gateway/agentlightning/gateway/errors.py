"""Refusals, in the two shapes that callers understand.

* ApiError     control API: `{"error": {"message", "code"}}`
* ModelError   model proxy: as OpenAI's, `{"error": {"message", "type", "param", "code"}}`

The status decides what client SDKs do: they try again on 408, 409, 429 and 5xx.
"""

from typing import Any

import orjson

__all__ = ["ApiError", "ModelError"]


class ApiError(Exception):
    """A refusal of the control API. `details` are added to the error object."""

    def __init__(self, status: int, code: str, message: str, **details: Any) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.details = details

    def content(self) -> dict[str, Any]:
        return {"message": str(self), "code": self.code, **self.details}

    def body(self) -> bytes:
        return orjson.dumps({"error": self.content()})


class ModelError(Exception):
    """A refusal of the model proxy.

    Args:
        status: HTTP status, if nothing of the answer has been sent.
        fault: the engine or the gateway is to blame, not the agent.
        retry_after: seconds after which trying again may help.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        fault: bool = False,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.fault = fault
        self.retry_after = retry_after

    def body(self) -> bytes:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return orjson.dumps({"error": error})
