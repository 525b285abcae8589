"""The control API as an OpenAPI 3.1 document, made of the operations and types that serve it."""

import importlib.metadata
import inspect
import re
from typing import Any, Final

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from agentlightning.gateway.control import models
from agentlightning.gateway.control.operations import Operation
from agentlightning.gateway.control.table import OPERATIONS

__all__ = ["PATH", "document", "serve", "summary"]

PATH: Final = "/api/openapi.json"
_REFUSALS: Final = {
    "400": "the request is wrong; the message says where",
    "401": "no valid token",
    "403": "a token that may not do this",
    "404": "what it names is not there",
    "409": "something newer has won; nothing was changed",
    "413": "the body is too large",
    "503": "try again",
}


def document() -> dict[str, Any]:
    """The whole document."""
    types: dict[type[BaseModel], JsonSchemaMode] = {}
    for operation in OPERATIONS:
        if operation.asks is not None and _has_body(operation):
            types[operation.asks] = "validation"
        if operation.answer is not models.Changes:  # a stream
            types[operation.answer] = "validation"
    _, schemas = models_json_schema(list(types.items()), ref_template="#/components/schemas/{model}")
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation)
    error = {
        "type": "object",
        "properties": {
            "error": {
                "type": "object",
                "properties": {"message": {"type": "string"}, "code": {"type": "string"}},
                "required": ["message", "code"],
            }
        },
        "required": ["error"],
    }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "agentlightning gateway: control API",
            "version": importlib.metadata.version("agentlightning"),
            "description": "Every request may be repeated: it changes nothing the second time.",
        },
        "paths": paths,
        "components": {
            "schemas": {**schemas["$defs"], "Error": error},
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"bearer": []}],
    }


async def serve(_request: Request) -> Response:
    """`GET /api/openapi.json`: open to all, for it tells nothing of this gateway."""
    return JSONResponse(document())


def summary(operation: Operation) -> str:
    """What an operation does: its handler's docstring."""
    return " ".join((inspect.getdoc(operation.handler) or "").split())


def _has_body(operation: Operation) -> bool:
    return operation.method != "GET"


def _operation(operation: Operation) -> dict[str, Any]:
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", operation.path)
    ]
    made: dict[str, Any] = {
        "operationId": getattr(operation.handler, "__name__", ""),
        "summary": summary(operation),
        "x-roles": ["admin", *operation.roles],
        "responses": {"200": _answer(operation)}
        | {status: {"description": text, "content": _content("Error")} for status, text in _REFUSALS.items()},
    }
    if operation.right is not None:
        made["x-right"] = operation.right
    if operation.asks is not None:
        if _has_body(operation):
            made["requestBody"] = {"required": True, "content": _content(operation.asks.__name__)}
        else:
            schema = operation.asks.model_json_schema()
            parameters += [
                {"name": name, "in": "query", "required": False, "schema": field}
                for name, field in schema["properties"].items()
            ]
    if parameters:
        made["parameters"] = parameters
    return made


def _answer(operation: Operation) -> dict[str, Any]:
    if operation.answer is models.Changes:
        events = {"text/event-stream": {"schema": {"type": "string"}}}
        return {"description": inspect.getdoc(models.Changes) or "", "content": events}
    return {"description": "done", "content": _content(operation.answer.__name__)}


def _content(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
