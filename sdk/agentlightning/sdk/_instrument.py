"""Switches tracing on and off for the process.

`instrument` joins the TracerProvider that is there, or sets one up; starts the exporter; and patches
the HTTP clients. All of it can be repeated and undone, and none of it touches what it did not make.
"""

import atexit
import importlib
import os
import sys
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from opentelemetry import trace

from agentlightning.proto.errors import ConfigError
from agentlightning.sdk._identity import from_environment
from agentlightning.sdk._losses import counters, warn_once
from agentlightning.sdk._secrets import remember_environment

if TYPE_CHECKING:
    from agentlightning.sdk._processor import RolloutProcessor
    from agentlightning.sdk._queue import SpanQueue

__all__ = ["SCOPE", "flush", "instrument", "is_instrumented", "tracer", "uninstrument"]

SCOPE = "agentlightning.sdk"
"""Instrumentation scope of our own spans."""
DEFAULT_ENDPOINT = "http://127.0.0.1:4318"
EXIT_TIMEOUT = 5.0
"""Seconds that the end of the process may wait for the collector."""
_TRACES = "/v1/traces"
_MOST_ATTRIBUTES = 4096
"""Per span; OpenTelemetry's default of 128 evicts the first messages of a long conversation in some dialects."""


@dataclass
class _State:
    queue: "SpanQueue | None" = None
    processor: "RolloutProcessor | None" = None
    settings: tuple[str, dict[str, str]] | None = None
    exit_registered: bool = False


_state = _State()
_lock = threading.RLock()
_tracers: dict[int, tuple[Any, trace.Tracer]] = {}  # by provider: asking a provider anew is slow


def instrument(
    *,
    frameworks: Iterable[str] | None = None,
    openai: str | None = None,
    endpoint: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> None:
    """Trace this process: its model calls, agents, tools and rewards go to the collector.

    Works before or after clients are made, beside a TracerProvider that exists already, and twice.

    Args:
        frameworks: Those to prepare for: `langchain` (with LangGraph), `openai-agents`, `autogen`; an empty list for
            none. Default: `AGENTLIGHTNING_FRAMEWORKS`, else all that are installed.
        openai: Who makes the spans of the openai client: `genai` (OpenTelemetry's own), `openllmetry`,
            `openinference`, or `none` (the transport hook alone). Default: `AGENTLIGHTNING_OPENAI`, else what runs
            already, else `genai` if it is installed.
        endpoint: Base address of the collector's OTLP/HTTP receiver. Default: `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`,
            else `OTEL_EXPORTER_OTLP_ENDPOINT`, else http://127.0.0.1:4318.
        headers: Sent to the collector with each request, such as `{"authorization": "Bearer …"}`. Default:
            `OTEL_EXPORTER_OTLP_HEADERS`.
    """
    url = _traces_url(endpoint)
    others = _instrumentations()
    plan = others.choose(frameworks, openai)
    with _lock:
        settings = (url, dict(headers or {}))
        if _state.queue is None or _state.settings != settings:
            from agentlightning.sdk._queue import SpanQueue
            from agentlightning.sdk._sink import OtlpSink

            if _state.queue is not None:
                _state.queue.close(EXIT_TIMEOUT)
            _state.queue = SpanQueue(OtlpSink(url, headers), at_start=_finish_with_multiprocessing)
            _state.settings = settings
        _state.processor = _joined_processor()
        _state.processor.queue = _state.queue
        if not _state.exit_registered:
            _state.exit_registered = True
            atexit.register(_at_exit)
        from agentlightning.sdk import _hook

        _hook.patch()
        remember_environment()
        others.activate(plan)


def uninstrument() -> None:
    """Undo `instrument`: what is queued is sent, the HTTP clients are as before, a provider of ours falls silent."""
    with _lock:
        from agentlightning.sdk import _hook
        from agentlightning.sdk.imports import forget_imports

        _instrumentations().deactivate()
        _hook.unpatch()
        forget_imports()
        if _state.processor is not None:
            _state.processor.queue = None
        if _state.queue is not None:
            _state.queue.close(EXIT_TIMEOUT)
            _report()
        _state.queue = _state.processor = _state.settings = None


def is_instrumented() -> bool:
    """Whether spans are being recorded."""
    return _state.queue is not None


def flush(timeout: float = 10.0) -> bool:
    """Wait up to `timeout` seconds for the collector. True if all that ended before the call, and since the last
    flush, has been acknowledged."""
    queue = _state.queue
    return queue is None or queue.flush(timeout)


def tracer() -> trace.Tracer:
    """The tracer of our own spans, from the provider that is current."""
    provider = trace.get_tracer_provider()
    cached = _tracers.get(id(provider))
    if cached is None or cached[0] is not provider:
        cached = _tracers[id(provider)] = provider, provider.get_tracer(SCOPE)
    return cached[1]


def _instrumentations() -> Any:
    """The sister component, found by its name: it builds on this one, so this one cannot import it as its own."""
    return importlib.import_module("agentlightning.instrumentations")


def _traces_url(endpoint: str | None) -> str:
    complete = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    if endpoint is None and complete:
        base = complete
    else:
        base = endpoint or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or DEFAULT_ENDPOINT
        base = base if base.endswith(_TRACES) else base.rstrip("/") + _TRACES
    parts = urlsplit(base)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"{base!r} is no address of an OTLP/HTTP collector: give one such as {DEFAULT_ENDPOINT}, "
            "with http:// or https://."
        )
    return base


def _joined_processor() -> "RolloutProcessor":
    """The processor of the current provider, added if it is not there yet."""
    from agentlightning.sdk._processor import RolloutProcessor

    provider = trace.get_tracer_provider()
    if isinstance(provider, trace.ProxyTracerProvider):
        provider = _new_provider()
        trace.set_tracer_provider(provider)
    processor = getattr(provider, "_agentlightning_processor", None)
    if isinstance(processor, RolloutProcessor):
        return processor
    add = getattr(provider, "add_span_processor", None)
    if add is None:
        raise ConfigError(
            f"The TracerProvider of this process, {type(provider).__name__}, takes no span processors: use "
            "opentelemetry.sdk.trace.TracerProvider, or call instrument() before one is set."
        )
    _warn_of_limits(provider)
    processor = RolloutProcessor()
    add(processor)
    provider._agentlightning_processor = processor  # type: ignore[attr-defined]
    return processor


def _new_provider() -> trace.TracerProvider:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import SpanLimits, TracerProvider

    identity = from_environment()
    # Given here too because the variable alone makes every value a string, and an attempt is a number.
    resource = Resource.create(dict(identity.attributes()) if identity else {})
    limits = SpanLimits(
        max_span_attributes=_MOST_ATTRIBUTES,
        max_events=_MOST_ATTRIBUTES,
        max_span_attribute_length=SpanLimits.UNSET,  # a JSON text cut in the middle is no JSON
    )
    return TracerProvider(resource=resource, span_limits=limits, shutdown_on_exit=False)


def _warn_of_limits(provider: object) -> None:
    limits = getattr(provider, "_span_limits", None)
    if limits is None:
        return
    length = getattr(limits, "max_span_attribute_length", None)
    number = getattr(limits, "max_span_attributes", None)
    if length is not None:
        warn_once(
            "limits.length",
            "The TracerProvider cuts span attributes to %d characters, so recorded requests and answers will be "
            "unreadable: unset OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT and OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT.",
            length,
        )
    if number is not None and number < 128:
        warn_once(
            "limits.number",
            "The TracerProvider keeps only %d attributes per span, so parts of model calls may be lost: set "
            "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT=%d.",
            number,
            _MOST_ATTRIBUTES,
        )


def _finish_with_multiprocessing() -> None:
    """A worker of multiprocessing ends without running atexit; its own finalizers do run."""
    util = sys.modules.get("multiprocessing.util")
    process = sys.modules.get("multiprocessing.process")
    if util is not None and process is not None and process.parent_process() is not None:
        util.Finalize(None, _at_exit, exitpriority=100)


def _at_exit() -> None:
    """Send what is left, and say once what was lost."""
    queue = _state.queue
    if queue is None:
        return
    if _state.processor is not None:
        _state.processor.queue = None
    _state.queue = None
    queue.close(EXIT_TIMEOUT if queue.pending else 0.0)
    _report()


def _report() -> None:
    found = counters()
    lost = [f"{found[name]} {what}" for name, what in _LOSSES.items() if found.get(name)]
    if lost:
        where = _state.settings[0] if _state.settings else "the collector"
        warn_once("losses", "Not all that was traced reached %s: %s.", where, "; ".join(lost))


_LOSSES = {
    "spans_not_delivered": "spans were left when the time to deliver them was over",
    "spans_queue_full": "spans came faster than they could be delivered",
    "spans_refused": "spans were refused by the collector",
    "spans_rejected_by_collector": "spans were rejected by the collector",
    "spans_after_shutdown": "spans ended after the TracerProvider had been shut down",
    "internal_error": "times agentlightning itself failed",
}
