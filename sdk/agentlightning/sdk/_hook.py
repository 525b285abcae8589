"""The transport hook: every model call that goes through httpx or httpx2 is recorded.

`send` is where all of a client's requests pass, whatever library is above it, and patching the class
reaches clients that exist already. A library that is imported later is patched as it loads.
"""

import functools
from collections.abc import AsyncIterator, Callable, Iterator
from types import ModuleType
from typing import Any

from opentelemetry import context as context_api

from agentlightning.sdk._call import Call, begin
from agentlightning.sdk._losses import count
from agentlightning.sdk.imports import when_imported

__all__ = ["patch", "unpatch"]

_LIBRARIES = ("httpx", "httpx2")
_CALL = "_agentlightning_call"
_active = False
_patched: dict[tuple[type, str], tuple[Callable[..., Any], Callable[..., Any]]] = {}
"""By class and method: what we put in its place, and what was there."""


def patch() -> None:
    """Record model calls from now on."""
    global _active
    _active = True
    for name in _LIBRARIES:
        when_imported(name, "transport hook", _patch_module)


def unpatch() -> None:
    """Leave the libraries as they were. Where another has patched over us, ours stays and does nothing."""
    global _active
    _active = False
    for (owner, method), (ours, original) in list(_patched.items()):
        if vars(owner).get(method) is ours:
            setattr(owner, method, original)
            del _patched[owner, method]


def _patch_module(module: ModuleType) -> None:
    if not _active or not hasattr(module, "AsyncClient"):
        return
    for owner, method, wrap in (
        (module.Client, "send", lambda send: _sync_send(send, _sync_tee(module.SyncByteStream))),
        (module.AsyncClient, "send", lambda send: _async_send(send, _async_tee(module.AsyncByteStream))),
        (module.Response, "json", _json),
    ):
        if (owner, method) not in _patched:
            original = getattr(owner, method)
            setattr(owner, method, wrap(original))
            _patched[owner, method] = getattr(owner, method), original


def _sync_send(send: Callable[..., Any], tee: type) -> Callable[..., Any]:
    @functools.wraps(send)
    def recorded(self: Any, request: Any, **kwargs: Any) -> Any:
        call: Call | None = begin(request) if _active else None
        if call is None:
            return send(self, request, **kwargs)
        token = context_api.attach(call.context)
        try:
            response = send(self, request, **kwargs)
        except BaseException as error:
            call.fail(error)
            raise
        finally:
            context_api.detach(token)
        _follow(call, response, tee)
        return response

    return recorded


def _async_send(send: Callable[..., Any], tee: type) -> Callable[..., Any]:
    @functools.wraps(send)
    async def recorded(self: Any, request: Any, **kwargs: Any) -> Any:
        call: Call | None = begin(request) if _active else None
        if call is None:
            return await send(self, request, **kwargs)
        token = context_api.attach(call.context)
        try:
            response = await send(self, request, **kwargs)
        except BaseException as error:
            call.fail(error)
            raise
        finally:
            context_api.detach(token)
        _follow(call, response, tee)
        return response

    return recorded


def _follow(call: Call, response: Any, tee: type) -> None:
    """Record an answer that has been read already, or as it is read."""
    try:
        call.answered(response.status_code, response.headers)
        content = getattr(response, "_content", None)  # public `content` would raise while unread
        if content is not None:
            call.complete(content)
        else:
            response.stream = tee(response.stream, call)
        response.extensions[_CALL] = call
    except Exception:  # noqa: BLE001 - the boundary: the caller gets its answer whatever we fail at
        count("internal_error")


def _json(original: Callable[..., Any]) -> Callable[..., Any]:
    """An answer is parsed once: the first who asks gets what the record was read from, the next a copy of his own."""

    @functools.wraps(original)
    def json(self: Any, **kwargs: Any) -> Any:
        call: Call | None = self.extensions.pop(_CALL, None)
        if call is not None and call.parsed is not None and not kwargs:
            parsed, call.parsed = call.parsed, None
            return parsed
        return original(self, **kwargs)

    return json


def _sync_tee(base: type) -> type:
    class RecordedStream(base):
        def __init__(self, stream: Any, call: Call) -> None:
            self._stream = stream
            self._call = call

        def __iter__(self) -> Iterator[bytes]:
            try:
                for chunk in self._stream:
                    self._call.feed(chunk)
                    yield chunk
            except BaseException as error:
                self._call.fail(error)
                raise
            self._call.complete()

        def close(self) -> None:
            try:
                self._stream.close()
            finally:
                self._call.abandon()

        def __getattr__(self, name: str) -> Any:  # httpx2 keeps `elapsed` on the stream
            return getattr(self.__dict__["_stream"], name)

    return RecordedStream


def _async_tee(base: type) -> type:
    class RecordedStream(base):
        def __init__(self, stream: Any, call: Call) -> None:
            self._stream = stream
            self._call = call

        async def __aiter__(self) -> AsyncIterator[bytes]:
            stream = self._stream.__aiter__()
            try:
                async for chunk in stream:
                    self._call.feed(chunk)
                    yield chunk
            except BaseException as error:
                self._call.fail(error)
                raise
            finally:
                close = getattr(
                    stream, "aclose", None
                )  # an async generator left early must be closed at once
                if close is not None:
                    await close()
            self._call.complete()

        async def aclose(self) -> None:
            try:
                await self._stream.aclose()
            finally:
                self._call.abandon()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.__dict__["_stream"], name)

    return RecordedStream
