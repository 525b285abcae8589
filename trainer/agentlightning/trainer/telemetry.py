"""The trainer's own steps as OpenTelemetry spans and metrics, to any OTLP/HTTP endpoint.

A step is a span, its phases are spans below it, in the order in which they follow each other; a held-out evaluation is a span
too. Every number of a step is a gauge. The spans are made when a step has ended, from the seconds that it measured, so nothing
is in the way of the step itself.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, StatusCode, set_span_in_context

__all__ = ["PHASES", "open_otel"]

Event = Mapping[str, Any]

PHASES = ("rollouts", "read", "merge", "drain", "update", "checkpoint", "publish")
"""Of a step, in the order in which they follow each other."""

SCOPE = "agentlightning.trainer"
TIMEOUT_S = 3
"""For one export, retries included: so long may a backend that is gone hold up the end of a run, twice."""


@contextlib.contextmanager
def open_otel(
    endpoint: str, run: str, scalars: Callable[[Event], Mapping[str, float]]
) -> Iterator[Callable[[Event], None]]:
    """A function that sends events. Headers come from OTEL_EXPORTER_OTLP_HEADERS, and OTEL_METRICS_EXPORTER=none sends spans
    alone, as OpenTelemetry has it.

    Args:
        endpoint: such as `http://localhost:4318`; `/v1/traces` and `/v1/metrics` are added.
        scalars: the numbers of an event, by name.
    """
    resource = Resource.create({"service.name": "agentlightning-trainer", "agentlightning.run.id": run})
    base = endpoint.rstrip("/")
    tracers = TracerProvider(resource=resource)
    tracers.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(f"{base}/v1/traces", timeout=TIMEOUT_S)))
    readers: list[MetricReader] = []
    if os.environ.get("OTEL_METRICS_EXPORTER") != "none":
        exporter = OTLPMetricExporter(f"{base}/v1/metrics", timeout=TIMEOUT_S)
        readers.append(PeriodicExportingMetricReader(exporter))
    meters = MeterProvider(resource=resource, metric_readers=readers)
    tracer, meter = tracers.get_tracer(SCOPE), meters.get_meter(SCOPE)
    gauges: dict[str, Any] = {}  # OpenTelemetry's gauge has no public type

    def sink(event: Event) -> None:
        end = time.time_ns()
        for name, value in scalars(event).items():
            gauge = gauges.get(name)
            if gauge is None:
                unit = "s" if "/seconds/" in name else "1"
                gauge = gauges[name] = meter.create_gauge(
                    f"agentlightning.{name.replace('/', '.')}", unit=unit
                )
            gauge.set(value)
        match event["event"]:
            case "step":
                start = end - _ns(event["seconds"]["total"])
                span = tracer.start_span("train step", start_time=start, attributes=_attributes(event))
                _phases(tracer, span, event["seconds"], start)
                span.end(end)
            case "evaluate":
                start = end - _ns(event["seconds"])
                tracer.start_span("evaluate", start_time=start, attributes=_attributes(event)).end(end)
            case "alarm":
                span = tracer.start_span(f"alarm {event['alarm']}", attributes={"step": event["step"]})
                span.set_status(StatusCode.ERROR, event["text"])
                span.end()

    try:
        yield sink
    finally:
        tracers.shutdown()  # sends what is left
        meters.shutdown()


def _phases(tracer: Any, step: Span, seconds: Mapping[str, float], start: int) -> None:
    context = set_span_in_context(step)
    for name in PHASES:
        if seconds.get(name):
            end = start + _ns(seconds[name])
            tracer.start_span(name, context=context, start_time=start).end(end)
            start = end


def _attributes(event: Event) -> dict[str, Any]:
    """The numbers and texts of an event's first level."""
    return {name: value for name, value in event.items() if isinstance(value, int | float | str)}


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
