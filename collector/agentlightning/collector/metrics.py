"""What `/metrics` and `/status` show: one snapshot of the collector, as Prometheus text and as JSON."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from agentlightning.collector.intake import ACK_SECONDS, Latency

__all__ = ["Snapshot", "exposition", "status"]

PREFIX = "agentlightning_collector_"


@dataclass
class Snapshot:
    """The collector at one moment."""

    ready: bool
    message: str
    """Why it is not ready."""
    started: float
    """Unix time."""
    accepted: Mapping[str, int]
    """requests, spans, log_records, bytes: acknowledged since the start."""
    refused: Mapping[str, int]
    """Requests by reason, and `invalid_id`: spans."""
    fidelity: Mapping[str, int]
    """What the data set counts: duplicate, late, orphan, unparsed, truncated, …"""
    converter: Mapping[str, int]
    """What the converter has counted since it began, in manifests or not yet."""
    sealed_attempts: int
    open_attempts: int
    pending_seals: int
    journal_end_bytes: int
    journal_stored_bytes: int
    """On disk: not converted yet, or not forwarded yet, or in a segment with such."""
    journal_unconverted_bytes: int
    journal_unread_bytes: int
    journal_commits: int
    converter_up: bool
    converter_restarts: int
    converter_silent_seconds: float
    """Since the converter last said something; it does every second."""
    connections: int
    forward: Mapping[str, Any] | None = None
    """Of forwarding: `url`, `up`, `restarts`, `lag_bytes`, `error`, `counters`; None without."""


def status(snapshot: Snapshot, latency: Latency) -> dict[str, Any]:
    """The snapshot as a JSON document, with quantiles of the time to an acknowledgement."""
    buckets = _buckets(latency)
    document = asdict(snapshot)
    document["ack_seconds"] = {f"p{q}": _quantile(buckets, q / 100) for q in (50, 99)}
    return document


def exposition(snapshot: Snapshot, latency: Latency) -> bytes:
    """The snapshot as Prometheus text."""
    registry = CollectorRegistry()
    registry.register(_Families(snapshot, latency))
    return generate_latest(registry)


class _Families:
    def __init__(self, snapshot: Snapshot, latency: Latency) -> None:
        self._snapshot = snapshot
        self._latency = latency

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        s = self._snapshot
        buckets = [
            ("+Inf" if bound == float("inf") else str(bound), n) for bound, n in _buckets(self._latency)
        ]
        yield HistogramMetricFamily(
            PREFIX + "ack_seconds",
            "From a whole body to its acknowledgement, sync included.",
            buckets=buckets,
            sum_value=self._latency.sum,
        )
        yield _counters("accepted", "Acknowledged since the start.", "unit", s.accepted)
        yield _counters("refused", "Requests refused, by reason; invalid_id: spans.", "reason", s.refused)
        yield _counters("fidelity", "What the data set counts, by name.", "name", s.fidelity)
        yield _counters("converter_counted", "What the running converter counted.", "name", s.converter)
        for name, help_text, value in (
            ("ready", "Whether a body would be accepted now.", s.ready),
            ("start_time_seconds", "Unix time of the start.", s.started),
            ("sealed_attempts", "Attempts in the data set.", s.sealed_attempts),
            ("open_attempts", "Attempts that are not whole yet.", s.open_attempts),
            ("pending_seals", "Seals that wait for calls.", s.pending_seals),
            ("connections", "Open HTTP connections.", s.connections),
            ("journal_stored_bytes", "Size of the journal's segments.", s.journal_stored_bytes),
            ("journal_unconverted_bytes", "Not in the data set yet.", s.journal_unconverted_bytes),
            ("journal_unread_bytes", "Not read by the converter yet.", s.journal_unread_bytes),
            ("converter_up", "Whether the converter runs.", s.converter_up),
            ("converter_silent_seconds", "Since the converter last spoke.", s.converter_silent_seconds),
        ):
            yield GaugeMetricFamily(PREFIX + name, help_text, float(value))
        for name, help_text, number in (
            ("journal_end_bytes", "End of the endless journal.", s.journal_end_bytes),
            ("journal_commits", "Syncs of the journal.", s.journal_commits),
            ("converter_restarts", "Restarts of the converter.", s.converter_restarts),
        ):
            yield CounterMetricFamily(PREFIX + name, help_text, float(number))
        if s.forward is not None:
            yield _counters("forward", "Forwarded, and not, by name.", "name", s.forward["counters"])
            for name, help_text, value in (
                ("forward_up", "Whether the last request to the other backend succeeded.", s.forward["up"]),
                ("forward_lag_bytes", "Of the journal, not forwarded yet.", s.forward["lag_bytes"]),
            ):
                yield GaugeMetricFamily(PREFIX + name, help_text, float(value))
            yield CounterMetricFamily(
                PREFIX + "forward_restarts", "Restarts of the forwarder.", float(s.forward["restarts"])
            )


def _counters(name: str, help_text: str, label: str, values: Mapping[str, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(PREFIX + name, help_text, labels=[label])
    for key, value in sorted(values.items()):
        family.add_metric([key], value)
    return family


def _buckets(latency: Latency) -> list[tuple[float, int]]:
    """Upper bound and cumulative count."""
    return list(zip((*ACK_SECONDS, float("inf")), accumulate(latency.counts), strict=True))


def _quantile(buckets: list[tuple[float, int]], q: float) -> float | None:
    """The upper bound of the bucket that holds it; None without samples, and beyond the last bound."""
    total = buckets[-1][1]
    bound = next((bound for bound, count in buckets if total and count >= q * total), None)
    return None if bound == float("inf") else bound
