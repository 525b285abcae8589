"""OTLP/gRPC: what the transport adds. `docs/conformance.md` lists the cases."""

import os
import socket
import struct
import threading
from typing import Any

import grpc
import pytest
from otlp_clients import METHODS, channel, export, spans

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def test_g01_a_service_that_is_not_there_is_unimplemented(shared: Any) -> None:
    with channel(shared) as opened:
        method: Any = opened.unary_unary("/opentelemetry.proto.collector.profiles.v1.ProfilesService/Export")
        with pytest.raises(grpc.RpcError) as caught:
            method(b"", timeout=10)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED  # type: ignore[attr-defined]


def test_g02_many_calls_share_a_channel(shared: Any) -> None:
    """ "Clients … MAY send requests concurrently": unary calls in flight on one connection."""
    with channel(shared) as opened:
        method: Any = opened.unary_unary(METHODS["traces"])
        calls = [method.future(spans().SerializeToString(), timeout=30) for _ in range(200)]
        assert [call.result() for call in calls] == [b""] * 200
    assert len(shared.journal()) == 200


def test_g03_a_call_that_is_cancelled_harms_no_other(shared: Any) -> None:
    with channel(shared) as opened:
        method: Any = opened.unary_unary(METHODS["traces"])
        calls = [method.future(spans(size=200_000).SerializeToString(), timeout=30) for _ in range(20)]
        for call in calls[::2]:
            call.cancel()
        assert [call.result() for call in calls[1::2]] == [b""] * 10
    assert export(shared, "grpc", spans()).ok
    assert 11 <= len(shared.journal()) <= 21  # each whole, or not there at all


def test_g04_a_deadline_that_passes_harms_no_other(shared: Any) -> None:
    with channel(shared) as opened:
        method: Any = opened.unary_unary(METHODS["traces"])
        with pytest.raises(grpc.RpcError) as caught:
            method(spans(size=30 << 20).SerializeToString(), timeout=0.005)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED  # type: ignore[attr-defined]
        assert method(spans().SerializeToString(), timeout=30) == b""


def test_g05_pings_without_calls_are_answered_and_bring_no_goaway(shared: Any) -> None:
    """Agents keep connections alive; a server that answers ENHANCE_YOUR_CALM makes them reconnect."""
    host, port = shared.grpc.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(PREFACE + frame(4, 0, 0))
        for n in range(30):
            connection.sendall(frame(6, 0, 0, n.to_bytes(8, "big")))
        answered: list[int] = []
        data = b""
        while len(answered) < 30:
            data += connection.recv(65536)
            while len(data) >= 9 and len(data) >= 9 + (size := int.from_bytes(data[:3], "big")):
                kind, flags, payload = data[3], data[4], data[9 : 9 + size]
                assert kind != 7, "GOAWAY"
                if kind == 6 and flags & 1:
                    answered.append(int.from_bytes(payload, "big"))
                data = data[9 + size :]
        assert answered == list(range(30))


def test_g06_a_client_that_dies_inside_a_message_leaves_nothing(shared: Any) -> None:
    host, port = shared.grpc.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        # Literal headers without indexing: name and value with their lengths.
        fields = {
            ":method": "POST",
            ":scheme": "http",
            ":path": METHODS["traces"],
            ":authority": "x",
            "content-type": "application/grpc",
            "te": "trailers",
        }
        block = b"".join(
            b"\x00" + bytes([len(k)]) + k.encode() + bytes([len(v)]) + v.encode() for k, v in fields.items()
        )
        body = spans(size=1000).SerializeToString()
        message = b"\x00" + len(body).to_bytes(4, "big") + body
        connection.sendall(PREFACE + frame(4, 0, 0) + frame(1, 4, 1, block) + frame(0, 0, 1, message[:500]))
    assert export(shared, "grpc", spans()).ok
    assert len(shared.journal()) == 1


def test_g07_what_is_no_http2_is_dropped_and_the_rest_goes_on(shared: Any) -> None:
    host, port = shared.grpc.rsplit(":", 1)
    for junk in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(2000), PREFACE + os.urandom(2000)):
        with socket.create_connection((host, int(port)), timeout=20) as connection:
            connection.sendall(junk)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65536):
                pass
    assert export(shared, "grpc", spans()).ok


def test_g08_more_than_memory_allows_is_unavailable_and_not_resource_exhausted(collectors: Any) -> None:
    """The latter without RetryInfo would make clients drop what a moment later could be stored."""
    collector = collectors().start()
    body = spans(size=50 << 20).SerializeToString()
    codes: list[str] = []

    def work() -> None:
        codes.append(export(collector, "grpc", body).code)

    threads = [threading.Thread(target=work) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(codes) <= {"OK", "UNAVAILABLE"}
    assert "OK" in codes
    assert len(collector.journal()) == codes.count("OK")


def test_g09_the_end_of_the_collector_is_unavailable(collectors: Any) -> None:
    collector = collectors().start()
    with channel(collector) as opened:
        method: Any = opened.unary_unary(METHODS["traces"])
        assert method(spans().SerializeToString(), timeout=30) == b""
        assert collector.stop() == 0
        with pytest.raises(grpc.RpcError) as caught:
            method(spans().SerializeToString(), timeout=10)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]
