"""OTLP over gRPC: trace and log export on raw bytes, so that a message is parsed once, by the check.

Metrics are answered UNIMPLEMENTED. Other services may share the server.
"""

from collections.abc import Awaitable, Callable
from typing import Final, NoReturn

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from agentlightning.collector.access import Tls, Tokens
from agentlightning.collector.intake import RETRY_SECONDS, Hold, Intake, Refused
from agentlightning.collector.journal import Kind
from agentlightning.proto.errors import ConfigError

__all__ = ["GrpcServer", "abort_unavailable", "authorize", "handlers"]

Context = grpc.aio.ServicerContext
Export = Callable[[bytes, Context], Awaitable[bytes]]

_CODES: Final = {
    "malformed": grpc.StatusCode.INVALID_ARGUMENT,
    "too_large": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "unauthorized": grpc.StatusCode.UNAUTHENTICATED,
}
_SERVICE: Final = "opentelemetry.proto.collector.{0}.v1.{1}Service"


def handlers(intake: Intake, tokens: Tokens | None = None) -> list[grpc.GenericRpcHandler]:
    """The export services."""

    def export(kind: Kind) -> Export:
        async def answer(body: bytes, context: Context) -> bytes:
            await authorize(context, tokens, intake)
            try:
                with Hold(intake) as hold:
                    hold.add(len(body))
                    checked = await intake.accept(kind, body)
            except Refused as refused:
                intake.refused[refused.reason] += 1
                if refused.retryable:
                    await abort_unavailable(context, str(refused))
                await _abort(context, _CODES[refused.reason], str(refused))
            if checked.rejected:
                response = ExportTraceServiceResponse()
                response.partial_success.rejected_spans = checked.rejected
                response.partial_success.error_message = (
                    "Spans with an invalid trace or span id were refused."
                )
                return response.SerializeToString()
            return b""

        return answer

    async def no_metrics(body: bytes, context: Context) -> bytes:
        await _abort(
            context, grpc.StatusCode.UNIMPLEMENTED, "This collector takes traces and logs, not metrics."
        )

    methods = {
        _SERVICE.format("trace", "Trace"): export(Kind.TRACES),
        _SERVICE.format("logs", "Logs"): export(Kind.LOGS),
        _SERVICE.format("metrics", "Metrics"): no_metrics,
    }
    return [
        grpc.method_handlers_generic_handler(service, {"Export": grpc.unary_unary_rpc_method_handler(method)})
        for service, method in methods.items()
    ]


class GrpcServer:
    """A gRPC server in the running event loop."""

    def __init__(self, host: str, port: int, *, body_bytes: int, tls: Tls | None = None) -> None:
        """Raises ConfigError if the port cannot be had."""
        self.server = grpc.aio.server(
            options=[
                # grpc answers a larger message RESOURCE_EXHAUSTED without RetryInfo, as OTLP wants it.
                ("grpc.max_receive_message_length", body_bytes),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", 0),  # a second collector on one port must fail, not share it
                # Agents may ping as often as they like; no GOAWAY for that.
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.min_ping_interval_without_data_ms", 1000),
                ("grpc.http2.max_ping_strikes", 0),
            ]
        )
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if tls is None:
                self.port = self.server.add_insecure_port(address)
            else:
                self.port = self.server.add_secure_port(address, tls.credentials())
        except RuntimeError:
            self.port = 0
        if self.port == 0:
            raise ConfigError(
                f"The collector's gRPC server cannot listen on {address}: the port is in use, or the address is "
                "not this machine's. Choose another port, or 0."
            )

    async def start(self) -> None:
        await self.server.start()

    async def stop(self) -> None:
        await self.server.stop(grace=5)


async def authorize(context: Context, tokens: Tokens | None, intake: Intake) -> None:
    """Abort the call unless it brings one of the tokens."""
    if tokens is None:
        return
    for key, value in context.invocation_metadata() or ():
        given = value if isinstance(value, bytes) else value.encode()
        if key == "authorization" and tokens.accept(given):
            return
    intake.refused["unauthorized"] += 1
    await _abort(context, grpc.StatusCode.UNAUTHENTICATED, "The bearer token is missing or wrong.")


async def abort_unavailable(context: Context, message: str) -> NoReturn:
    """Abort so that the client tries again."""
    detail = AnyMessage()
    detail.Pack(RetryInfo(retry_delay=Duration(seconds=RETRY_SECONDS)))
    await _abort(context, grpc.StatusCode.UNAVAILABLE, message, detail)


async def _abort(context: Context, code: grpc.StatusCode, message: str, *details: AnyMessage) -> NoReturn:
    status = Status(code=code.value[0], message=message, details=details)
    await context.abort(code, message, (("grpc-status-details-bin", status.SerializeToString()),))
    raise AssertionError("abort raises")
