"""The gateway as an ASGI application: routes, and the pages for machines that watch it."""

import logging

import orjson
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from sqlalchemy.exc import SQLAlchemyError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from agentlightning.gateway import http, listing
from agentlightning.gateway.control import openapi
from agentlightning.gateway.control import table as control
from agentlightning.gateway.embeddings import Embeddings
from agentlightning.gateway.errors import ApiError
from agentlightning.gateway.gateway import Gateway
from agentlightning.gateway.proxy import (
    APIS,
    MESSAGES,
    CountTokens,
    ModelEndpoint,
    ModelsEndpoint,
    NotServed,
    PassThrough,
)
from agentlightning.gateway.traces import TracesEndpoint

__all__ = ["create_app"]

logger = logging.getLogger(__name__)


def create_app(gateway: Gateway) -> Starlette:
    """The application of a gateway that is open."""
    models, not_served = ModelsEndpoint(gateway), NotServed(gateway)
    count, embeddings = CountTokens(gateway, MESSAGES), PassThrough(gateway, Embeddings())
    endpoints = {api.path: ModelEndpoint(gateway, api) for api in APIS}
    traces, watch = TracesEndpoint(gateway), _Watch(gateway)
    table: list[BaseRoute] = []
    for prefix in ("", "/r/{token}"):  # the token as a path, for clients that cannot set a key
        table += [
            *(_route(f"{prefix}/v1/{path}", endpoint, "POST") for path, endpoint in endpoints.items()),
            _route(f"{prefix}/v1/messages/count_tokens", count, "POST"),
            _route(f"{prefix}/v1/embeddings", embeddings, "POST"),
            Route(f"{prefix}/", watch.root),
            Route(f"{prefix}/api/hello", watch.root),  # where Claude Code looks whether anybody is there
            _route(f"{prefix}/v1/traces", traces, "POST"),
            _route(f"{prefix}/v1/models", models, "GET"),
            _route(f"{prefix}/v1/models/{{model:path}}", models, "GET"),
            _route(f"{prefix}/v1/{{rest:path}}", not_served, "GET", "POST", "PUT", "DELETE", "PATCH"),
        ]
    table += control.routes(gateway)
    table += [
        Route(openapi.PATH, openapi.serve),
        Route("/healthz", watch.healthz),
        Route("/readyz", watch.readyz),
        Route("/metrics", watch.metrics),
    ]
    return Starlette(routes=table, exception_handlers={404: _not_found, 405: _not_found, Exception: _failed})


def _route(path: str, endpoint: ASGIApp, *methods: str) -> Route:
    return Route(path, endpoint, methods=methods)


async def _not_found(request: Request, reason: Exception) -> Response:
    status = reason.status_code if isinstance(reason, HTTPException) else 404
    path = request.url.path
    if path.startswith("/r/"):  # what follows is a token
        path = "/r/…"
    error = ApiError(status, "unknown_path", f"{request.method} {path} is not served here.")
    return Response(error.body(), status, media_type=http.JSON)


async def _failed(request: Request, _error: Exception) -> Response:
    # The traceback is logged where it was caught; the caller gets no inside of ours.
    error = ApiError(500, "internal_error", "The gateway failed: its log says why.")
    return Response(error.body(), 500, media_type=http.JSON)


class _Watch:
    """Health, readiness and metrics: open to all, and telling nothing about rollouts but numbers."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def root(self, request: Request) -> Response:
        body = orjson.dumps({"service": "agentlightning gateway", "models": "/v1/models"})
        return Response(body, media_type=http.JSON)

    async def healthz(self, request: Request) -> Response:
        return Response(
            orjson.dumps({"status": "ok", "boot_id": self._gateway.boot_id}), media_type=http.JSON
        )

    async def readyz(self, request: Request) -> Response:
        """Whether calls can be served: the database answers, an engine is well, the collector acknowledges."""
        gateway = self._gateway
        problems = []
        try:
            await gateway.database.read(listing.count_open)
        except SQLAlchemyError as error:
            problems.append(f"the database: {error}")
        if not any(engine.reason is None for engine in gateway.engines):
            problems.append("no engine is well")
        if gateway.exporter.answered is False:
            problems.append("the collector did not acknowledge the last spans")
        status = 503 if problems or gateway.stopping.is_set() else 200
        return Response(
            orjson.dumps({"ready": status == 200, "problems": problems}), status, media_type=http.JSON
        )

    async def metrics(self, request: Request) -> Response:
        states = await self._gateway.database.read(listing.count_open)
        registry = CollectorRegistry()
        registry.register(_Snapshot(self._gateway, states))
        return Response(generate_latest(registry), media_type="text/plain; version=0.0.4; charset=utf-8")


class _Snapshot:
    """The gateway's numbers in Prometheus' form."""

    def __init__(self, gateway: Gateway, states: dict[str, int]) -> None:
        self._gateway = gateway
        self._states = states

    def collect(self) -> list[Metric]:
        events = CounterMetricFamily(
            "agentlightning_gateway_events", "What happened, by name.", labels=["name"]
        )
        for name, value in sorted(self._gateway.counters.total.items()):
            events.add_metric([name], value)
        rows = GaugeMetricFamily(
            "agentlightning_gateway_rollouts", "Rollouts that have not ended, by state.", labels=["state"]
        )
        for state, count in sorted(self._states.items()):
            rows.add_metric([state], count)
        flight = GaugeMetricFamily("agentlightning_gateway_calls_in_flight", "At engines.", labels=["policy"])
        held = GaugeMetricFamily("agentlightning_gateway_held", "1 while calls are held.", labels=["policy"])
        for policy in self._gateway.policies:
            flight.add_metric([policy.name], policy.in_flight)
            held.add_metric([policy.name], int(policy.held))
        well = GaugeMetricFamily(
            "agentlightning_gateway_engine_up", "1 for an engine that is well.", labels=["engine"]
        )
        breakers = GaugeMetricFamily(
            "agentlightning_gateway_engine_breaker", "1 for the state it is in.", labels=["engine", "state"]
        )
        for engine in self._gateway.engines:
            well.add_metric([engine.engine_id], int(engine.reason is None))
            breakers.add_metric([engine.engine_id, engine.breaker.state], 1)
        return [events, rows, flight, held, well, breakers]
