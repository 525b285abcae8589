"""The span processor that joins us to a TracerProvider: stamps identity, queues ended spans.

A provider cannot let go of a processor, so there is one for each provider, for ever; `queue` is
None while the SDK is not instrumented, and then it does nothing.
"""

from typing import TYPE_CHECKING, Any

from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor

from agentlightning.proto import attributes as names
from agentlightning.sdk import lineage
from agentlightning.sdk._identity import Identity, from_context, from_environment
from agentlightning.sdk._losses import guarded

if TYPE_CHECKING:
    from opentelemetry.context import Context

    from agentlightning.sdk._queue import SpanQueue

__all__ = ["RolloutProcessor", "is_llm_span"]

_VITAL_NAMES = frozenset({names.EVALUATION_RESULT, names.ROLLOUT_SPAN_NAME})


class RolloutProcessor(SpanProcessor):
    """Makes every span say which rollout it belongs to, and hands it to the queue when it ends."""

    def __init__(self) -> None:
        self.queue: SpanQueue | None = None

    @guarded("mark a span with its rollout")
    def on_start(self, span: Span, parent_context: "Context | None" = None) -> None:
        if self.queue is None:
            return
        identity = _identity(parent_context)
        if identity and _differs(
            span, identity
        ):  # what the resource says already is not repeated on every span
            span.set_attributes(identity.attributes())
        lineage.note(span, parent_context)
        if is_llm_span(span):
            lineage.stamp(span)

    @guarded("queue a span")
    def on_end(self, span: ReadableSpan) -> None:
        if self.queue is not None and span.context is not None and span.context.trace_flags.sampled:
            self.queue.put(span, vital=span.name in _VITAL_NAMES or is_llm_span(span))

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self.queue is None or self.queue.flush(timeout_millis / 1000)

    def shutdown(self) -> None:
        """The provider ends: what is queued is sent now, and later spans are counted as lost."""
        if self.queue is not None:
            self.queue.close(5.0)


def is_llm_span(span: Any) -> bool:
    """Whether a span stands for one model call, in the current conventions or the common dialects."""
    attributes = getattr(span, "attributes", None)
    if not attributes:
        return False
    return (
        attributes.get(names.OPERATION_NAME) in names.LLM_OPERATIONS
        or attributes.get("openinference.span.kind") == "LLM"
        or attributes.get("llm.request.type") in ("chat", "completion")
    )


def _identity(parent_context: "Context | None") -> Identity | None:
    identity = from_context(parent_context)
    if identity is None and parent_context is not None:
        identity = from_context()  # instrumentations hand over contexts built from nothing but a parent span
    return identity or from_environment()


def _differs(span: Span, identity: Identity) -> bool:
    resource = span.resource.attributes
    return any(resource.get(name) != value for name, value in identity.attributes().items())
